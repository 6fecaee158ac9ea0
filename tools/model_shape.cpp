#include "model_shape.h"

#include <algorithm>
#include <cinttypes>
#include <iterator>
#include <vector>

#include "text.h"

namespace tool {
namespace {

// The parts that the layers of a family have in addition to attention and MLP, and the defaults of
// its config.json.
struct Family {
  const char* name;
  bool query_bias;       // biases of queries, keys and values
  bool query_norm;       // norms of queries and keys
  uint64_t norms;        // of a layer, each of hidden_size
  bool ties_embeddings;  // the default of config.json
  const char* experts;   // the key for the number of experts; NULL: the family has none
  const char* expert_size;
};
constexpr Family kFamilies[] = {
    {"llama", false, false, 2, false, nullptr, nullptr},
    {"mistral", false, false, 2, false, nullptr, nullptr},
    {"phi3", false, false, 2, false, nullptr, nullptr},
    {"qwen2", true, false, 2, false, nullptr, nullptr},
    {"qwen3", false, true, 2, false, nullptr, nullptr},
    {"gemma", false, false, 2, true, nullptr, nullptr},
    {"gemma2", false, false, 4, true, nullptr, nullptr},
    {"gemma3_text", false, true, 4, true, nullptr, nullptr},
    {"mixtral", false, false, 2, false, "num_local_experts", "intermediate_size"},
    {"qwen3_moe", false, true, 2, false, "num_experts", "moe_intermediate_size"},
    {"gpt2", true, false, 2, true, nullptr, nullptr},
};
constexpr char kGpt2[] = "gpt2";

const Family* FindFamily(const std::string& name) {
  for (const Family& family : kFamilies)
    if (name == family.name) return &family;
  return nullptr;
}

struct NamedShape {
  const char* name;
  ModelShape shape;
};
// family, hidden, layers, heads, key-value heads, head dim, intermediate, vocabulary, tied,
// experts, positions
constexpr NamedShape kShapes[] = {
    {"gpt2", {kGpt2, 768, 12, 12, 12, 64, 3072, 50257, true, 0, 1024}},
    {"gpt2-medium", {kGpt2, 1024, 24, 16, 16, 64, 4096, 50257, true, 0, 1024}},
    {"gpt2-large", {kGpt2, 1280, 36, 20, 20, 64, 5120, 50257, true, 0, 1024}},
    {"gpt2-xl", {kGpt2, 1600, 48, 25, 25, 64, 6400, 50257, true, 0, 1024}},
    {"llama-2-7b", {"llama", 4096, 32, 32, 32, 128, 11008, 32000, false}},
    {"llama-2-13b", {"llama", 5120, 40, 40, 40, 128, 13824, 32000, false}},
    {"llama-2-70b", {"llama", 8192, 80, 64, 8, 128, 28672, 32000, false}},
    {"llama-3-8b", {"llama", 4096, 32, 32, 8, 128, 14336, 128256, false}},
    {"llama-3-70b", {"llama", 8192, 80, 64, 8, 128, 28672, 128256, false}},
    {"llama-3.1-8b", {"llama", 4096, 32, 32, 8, 128, 14336, 128256, false}},
    {"llama-3.1-70b", {"llama", 8192, 80, 64, 8, 128, 28672, 128256, false}},
    {"llama-3.1-405b", {"llama", 16384, 126, 128, 8, 128, 53248, 128256, false}},
    {"llama-3.2-1b", {"llama", 2048, 16, 32, 8, 64, 8192, 128256, true}},
    {"llama-3.2-3b", {"llama", 3072, 28, 24, 8, 128, 8192, 128256, true}},
    {"llama-3.3-70b", {"llama", 8192, 80, 64, 8, 128, 28672, 128256, false}},
    {"mistral-7b", {"mistral", 4096, 32, 32, 8, 128, 14336, 32000, false}},
    {"mixtral-8x7b", {"mixtral", 4096, 32, 32, 8, 128, 14336, 32000, false, 8}},
    {"phi-3-mini", {"phi3", 3072, 32, 32, 32, 96, 8192, 32064, false}},
    {"gemma-2-9b", {"gemma2", 3584, 42, 16, 8, 256, 14336, 256000, true}},
    {"gemma-3-1b", {"gemma3_text", 1152, 26, 4, 1, 256, 6912, 262144, true}},
    {"qwen2.5-0.5b", {"qwen2", 896, 24, 14, 2, 64, 4864, 151936, true}},
    {"qwen2.5-1.5b", {"qwen2", 1536, 28, 12, 2, 128, 8960, 151936, true}},
    {"qwen2.5-3b", {"qwen2", 2048, 36, 16, 2, 128, 11008, 151936, true}},
    {"qwen2.5-7b", {"qwen2", 3584, 28, 28, 4, 128, 18944, 152064, false}},
    {"qwen2.5-14b", {"qwen2", 5120, 48, 40, 8, 128, 13824, 152064, false}},
    {"qwen2.5-32b", {"qwen2", 5120, 64, 40, 8, 128, 27648, 152064, false}},
    {"qwen2.5-72b", {"qwen2", 8192, 80, 64, 8, 128, 29568, 152064, false}},
    {"qwen3-0.6b", {"qwen3", 1024, 28, 16, 8, 128, 3072, 151936, true}},
    {"qwen3-1.7b", {"qwen3", 2048, 28, 16, 8, 128, 6144, 151936, true}},
    {"qwen3-4b", {"qwen3", 2560, 36, 32, 8, 128, 9728, 151936, true}},
    {"qwen3-8b", {"qwen3", 4096, 36, 32, 8, 128, 12288, 151936, false}},
    {"qwen3-14b", {"qwen3", 5120, 40, 40, 8, 128, 17408, 151936, false}},
    {"qwen3-32b", {"qwen3", 5120, 64, 64, 8, 128, 25600, 151936, false}},
    {"qwen3-30b-a3b", {"qwen3_moe", 2048, 48, 32, 4, 128, 768, 151936, false, 128}},
    {"qwen3-235b-a22b", {"qwen3_moe", 4096, 94, 64, 4, 128, 1536, 151936, false, 128}},
};

// The name without an owner ("meta-llama/") and without endings that do not change the shape
// ("-Instruct").
std::string PlainName(const std::string& name) {
  std::string plain = LowerCase(name.substr(name.find_last_of('/') + 1));
  if (plain.starts_with("meta-")) plain.erase(0, 5);
  for (const char* const ending : {"-instruct", "-base", "-hf", "-it"})
    if (plain.ends_with(ending)) plain.resize(plain.size() - std::string(ending).size());
  return plain;
}

// GPT-2 has biases everywhere, learned positions, norms with a bias, and an MLP of two matrices.
double CountGpt2(const ModelShape& shape) {
  const auto hidden = static_cast<double>(shape.hidden_size);
  const auto inner = static_cast<double>(shape.intermediate_size);
  const double attention = 4 * hidden * hidden + 4 * hidden;
  const double mlp = 2 * hidden * inner + inner + hidden;
  const double norms = 2 * 2 * hidden;
  return static_cast<double>(shape.vocab_size + shape.positions) * hidden +
         static_cast<double>(shape.layers) * (attention + mlp + norms) + 2 * hidden;
}

double CountOthers(const ModelShape& shape, const Family& family) {
  const auto hidden = static_cast<double>(shape.hidden_size);
  const auto inner = static_cast<double>(shape.intermediate_size);
  const auto dim = static_cast<double>(shape.head_dim);
  const double queries = static_cast<double>(shape.heads) * dim;
  const double keys = static_cast<double>(shape.key_value_heads) * dim;
  double layer = 2 * hidden * queries + 2 * hidden * keys;
  if (family.query_bias || shape.has_attention_bias) layer += queries + 2 * keys;
  if (shape.has_attention_bias) layer += hidden;
  if (family.query_norm) layer += 2 * dim;
  double mlp = 3 * hidden * inner;
  if (shape.has_mlp_bias) mlp += 2 * inner + hidden;
  const auto experts = static_cast<double>(shape.experts);
  layer += shape.experts == 0 ? mlp : experts * mlp + experts * hidden;  // including the router
  layer += static_cast<double>(family.norms) * hidden;
  const double embeddings = static_cast<double>(shape.vocab_size) * hidden;
  return (shape.ties_embeddings ? 1 : 2) * embeddings + static_cast<double>(shape.layers) * layer +
         hidden;
}

// Reads members of config.json, and keeps the first failure.
class ConfigReader {
 public:
  explicit ConfigReader(const Json& config) : config_(config) {}

  uint64_t Number(const char* key) {
    const auto found = config_.find(key);
    if (found == config_.end() || found->is_null()) return Fail(key, "nothing");
    return Read(key, *found);
  }
  uint64_t Number(const char* key, uint64_t otherwise) {
    const auto found = config_.find(key);
    return found == config_.end() || found->is_null() ? otherwise : Read(key, *found);
  }
  bool Flag(const char* key, bool otherwise) {
    const auto found = config_.find(key);
    return found != config_.end() && found->is_boolean() ? found->get<bool>() : otherwise;
  }
  // Refuses any other value of `key`, because the count for it is not known here.
  void Expect(const char* key, uint64_t expected) {
    const uint64_t number = Number(key, expected);
    if (number == expected || !status_.ok()) return;
    status_ = Status::Error(OFFLOAD_INVALID_ARGUMENT,
                            "%s is %" PRIu64 ", expected %" PRIu64
                            "; give the safetensors files or the number of parameters instead",
                            key, number, expected);
  }
  const Status& status() const { return status_; }

 private:
  static constexpr uint64_t kMost = uint64_t{1} << 32;

  uint64_t Read(const char* key, const Json& value) {
    if (!value.is_number_unsigned()) return Fail(key, value.dump(-1, ' ', true, kReplace).c_str());
    const auto number = value.get<uint64_t>();
    if (number > kMost) return Fail(key, std::to_string(number).c_str());
    return number;
  }
  uint64_t Fail(const char* key, const char* got) {
    if (status_.ok())
      status_ = Status::Error(OFFLOAD_INVALID_ARGUMENT,
                              "%s is %.100s, expected a number from 0 to 2^32", key, got);
    return 0;
  }

  static constexpr auto kReplace = Json::error_handler_t::replace;
  const Json& config_;
  Status status_;
};

Status CheckFamily(const Json& config, const Family** family) {
  const auto type = config.find("model_type");
  const std::string name =
      type != config.end() && type->is_string() ? type->get<std::string>() : std::string();
  *family = FindFamily(name);
  if (*family != nullptr) return {};
  std::string names;
  for (const Family& known : kFamilies)
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "model_type is '%.100s', expected one of %s; of another model give the "
                       "safetensors files or the number of parameters",
                       name.c_str(), names.c_str());
}

ModelShape ReadGpt2(ConfigReader& config) {
  ModelShape shape{kGpt2,
                   config.Number("n_embd"),
                   config.Number("n_layer"),
                   0,
                   0,
                   0,
                   0,
                   config.Number("vocab_size"),
                   true};
  shape.positions = config.Number("n_positions");
  shape.intermediate_size = config.Number("n_inner", 4 * shape.hidden_size);
  return shape;
}

ModelShape ReadOthers(ConfigReader& config, const Family& family) {
  ModelShape shape{};
  shape.family = family.name;
  shape.hidden_size = config.Number("hidden_size");
  shape.layers = config.Number("num_hidden_layers");
  shape.heads = config.Number("num_attention_heads");
  shape.key_value_heads = config.Number("num_key_value_heads", shape.heads);
  shape.head_dim =
      config.Number("head_dim", shape.hidden_size / std::max<uint64_t>(shape.heads, 1));
  const bool has_experts = family.experts != nullptr;
  shape.intermediate_size = config.Number(has_experts ? family.expert_size : "intermediate_size");
  if (has_experts) {
    shape.experts = config.Number(family.experts);
    config.Expect("decoder_sparse_step", 1);
  }
  shape.vocab_size = config.Number("vocab_size");
  shape.ties_embeddings = config.Flag("tie_word_embeddings", family.ties_embeddings);
  shape.has_attention_bias = config.Flag("attention_bias", false);
  shape.has_mlp_bias = config.Flag("mlp_bias", false);
  return shape;
}

}  // namespace

Result<uint64_t> CountParams(const ModelShape& shape) {
  const Family& family = *FindFamily(shape.family);
  const double count =
      shape.family == std::string(kGpt2) ? CountGpt2(shape) : CountOthers(shape, family);
  if (count >= 1 && count <= 1e15) return static_cast<uint64_t>(count);
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "the numbers make %g parameters, expected 1 to 1e15", count);
}

Result<ModelShape> ShapeOfConfig(const Json& config) {
  if (!config.is_object())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "it is no JSON object, expected a config.json");
  const Family* family = nullptr;
  HYBRIDOPT_TRY(CheckFamily(config, &family));
  ConfigReader reader(config);
  const ModelShape shape =
      family->name == std::string(kGpt2) ? ReadGpt2(reader) : ReadOthers(reader, *family);
  HYBRIDOPT_TRY(reader.status());
  return shape;
}

const ModelShape* FindShape(const std::string& name) {
  const std::string plain = PlainName(name);
  for (const NamedShape& named : kShapes)
    if (plain == named.name) return &named.shape;
  return nullptr;
}

std::string NearestName(const std::string& name) {
  std::vector<std::string> names;
  for (const NamedShape& named : kShapes) names.push_back(named.name);
  return NearestWord(PlainName(name), names);
}

std::string ShapeNames() {
  std::string names;
  for (const NamedShape& named : kShapes)
    names += (names.empty() ? "" : ", ") + std::string(named.name);
  return names;
}

}  // namespace tool
