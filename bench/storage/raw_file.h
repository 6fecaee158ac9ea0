// What the plain readers and writers have in common with which the library's files are compared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace bench {

// Prints what failed and the system's reason, and ends the program.
[[noreturn]] void Fail(const std::string& what);

// Reads or writes all of a block that begins at byte `at` of the file.
void ReadBlock(int file, std::byte* block, uint64_t bytes, uint64_t at);
void WriteBlock(int file, std::byte* block, uint64_t bytes, uint64_t at);

// Calls work(0) to work(threads - 1), each on a thread of its own, and waits for them.
void OnThreads(uint32_t threads, const std::function<void(uint32_t)>& work);

}  // namespace bench
