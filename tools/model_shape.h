// ModelShape: computes how many parameters a language model has from the numbers of its
// config.json, and knows the shapes of well-known models by name.
#pragma once

#include <cstdint>
#include <string>

#include "commands.h"

namespace tool {

// The numbers of a config.json. Numbers that a family does not have are 0.
struct ModelShape {
  const char* family;  // model_type
  uint64_t hidden_size;
  uint64_t layers;
  uint64_t heads;
  uint64_t key_value_heads;
  uint64_t head_dim;
  uint64_t intermediate_size;  // of an expert, if there are experts
  uint64_t vocab_size;
  bool ties_embeddings;
  uint64_t experts = 0;
  uint64_t positions = 0;  // number of learned positions
  bool has_attention_bias = false;
  bool has_mlp_bias = false;
};

// INVALID_ARGUMENT if there are more than 1e15 params.
Result<uint64_t> CountParams(const ModelShape& shape);

// The shape that a config.json describes. INVALID_ARGUMENT names the key that is missing or wrong.
Result<ModelShape> ShapeOfConfig(const Json& config);

// The shape of a well-known model: "qwen3-8b", "meta-llama/Llama-3.1-8B-Instruct". NULL: the name
// is not in the table.
const ModelShape* FindShape(const std::string& name);

// The name in the table that is most like this one; empty if none is.
std::string NearestName(const std::string& name);

// All names of the table, as in "gpt2, gpt2-medium".
std::string ShapeNames();

}  // namespace tool
