// Model: the number of parameters of the model that the command line names.
#pragma once

#include <cstdint>
#include <string>

#include "commands.h"

namespace tool {

struct Model {
  uint64_t elements = 0;
  std::string source;  // the source of the number; empty: the command line gave the number
};

// `text` is a number (7e9, 7B), a well-known name, a config.json, a safetensors file or its index,
// or a directory that has these.
Result<Model> FindModel(const std::string& text);

// Reads the JSON of a small file. INVALID_ARGUMENT, which says what is `expected`, if the file is
// not JSON.
Result<Json> ReadJson(const std::string& path, uint64_t bytes_max, const char* expected);

}  // namespace tool
