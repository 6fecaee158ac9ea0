// Numbers of bytes as people read them.
#pragma once

#include <cstdint>
#include <string>

namespace hybridopt {

// "13.6 KiB"; below 1024 plain "17 B".
std::string SizeText(uint64_t bytes);

// For errors, which also have the exact number: "13926 bytes (13.6 KiB)"; below 1024 "17 bytes".
std::string BytesText(uint64_t bytes);

}  // namespace hybridopt
