// Model: how many parameters the model has that somebody names on the command line.
#pragma once

#include <cstdint>
#include <string>

#include "commands.h"

namespace tool {

struct Model {
  uint64_t elements = 0;
  std::string source;  // where the number is from; empty: it was given
};

// `text` is a number (7e9, 7B), a well-known name, a config.json, a safetensors file or its index,
// or a directory that has these.
Result<Model> FindModel(const std::string& text);

// The JSON text of a small file. INVALID_ARGUMENT if it is none.
Result<Json> ReadJson(const std::string& path, uint64_t bytes_max);

}  // namespace tool
