#include "exchange/cut_matrix.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "base/box_overlap.h"
#include "base/check.h"
#include "checkpoint/format/hash.h"

namespace hybridopt {
namespace {

constexpr size_t kMaxNameBytes = 1023;
constexpr uint64_t kMaxElements = uint64_t{1} << 56;  // bytes and offsets then fit 64 bits

__extension__ typedef unsigned __int128 Work;

Status OfMatrix(const Status& status, size_t index, const char* name) {
  return Status::Error(status.code(), "matrices[%zu] (%s): %s", index, name,
                       status.message().c_str());
}

Status CheckMatrix(const MatrixInput& input) {
  const offload_exchange_matrix_t& matrix = input.matrix;
  if (matrix.name == nullptr || matrix.name[0] == '\0')
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "name is %s, expected a text",
                         matrix.name == nullptr ? "NULL" : "empty");
  if (strnlen(matrix.name, kMaxNameBytes + 1) > kMaxNameBytes)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "name is longer than %zu bytes", kMaxNameBytes);
  for (const int32_t dtype : {matrix.dtype, matrix.grad_dtype})
    if (!IsParamDtype(dtype))
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "dtype is %d and grad_dtype is %d, expected OFFLOAD_FP32, OFFLOAD_BF16 "
                           "or OFFLOAD_FP16",
                           matrix.dtype, matrix.grad_dtype);
  if (matrix.reserved != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "reserved is %u, expected 0", matrix.reserved);
  if (!input.shard.has_value())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "shard is NULL, expected the elements of this rank; a rank without any "
                         "has a box with an extent of 0");
  return {};
}

// The elements of this rank, without a range.
Result<Shard> PartOf(const offload_shard_t& source) {
  HYBRIDOPT_ASSIGN(Shard shard, ValidateShard(source));
  if (shard.dimensions != 2 && shard.dimensions != 3)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "shard.dimensions is %u, expected 2 (rows, cols) or 3 (a stack)",
                         shard.dimensions);
  if (shard.global_count() > kMaxElements)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "shard.global_shape has %llu elements, expected at most 2^56",
                         static_cast<unsigned long long>(shard.global_count()));
  std::vector<Box> boxes;
  AppendBoxes(shard, boxes);
  shard.boxes = std::move(boxes);
  shard.range_begin = 0;
  return shard;
}

// In proportion to the operations of an update: elements times the shorter side.
Work WorkOf(const Shard& part) {
  const int64_t* const sides = part.global_shape.data() + part.dimensions - 2;
  return Work{part.global_count()} * static_cast<uint64_t>(std::min(sides[0], sides[1]));
}

void ChooseHomes(std::span<CutMatrix> matrices, int32_t rank, int32_t world) {
  std::vector<size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto work = [&](size_t index) { return WorkOf(matrices[index].of(rank)); };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return work(a) > work(b); });
  std::vector<Work> of_rank(static_cast<size_t>(world));
  for (const size_t index : order) {
    const auto least = std::min_element(of_rank.begin(), of_rank.end());
    matrices[index].home = static_cast<int32_t>(least - of_rank.begin());
    *least += work(index);
  }
}

// Of what must be the same on all ranks.
uint64_t HashOf(const CutMatrix& matrix, const Shard& part) {
  std::string text =
      matrix.name + '\0' + std::to_string(matrix.dtype) + ' ' + std::to_string(matrix.grad_dtype);
  for (uint32_t d = 0; d < part.dimensions; ++d) text += ' ' + std::to_string(part.global_shape[d]);
  return checkpoint::Xxh3(text);
}

void AddNumber(std::vector<int32_t>& words, uint64_t number) {
  words.push_back(std::bit_cast<int32_t>(static_cast<uint32_t>(number)));
  words.push_back(std::bit_cast<int32_t>(static_cast<uint32_t>(number >> 32)));
}

class WordReader {
 public:
  explicit WordReader(std::span<const int32_t> words) : words_(words) {}

  uint64_t Number() {
    HYBRIDOPT_CHECK(next_ + 2 <= words_.size());
    const uint64_t low = std::bit_cast<uint32_t>(words_[next_]);
    const uint64_t high = std::bit_cast<uint32_t>(words_[next_ + 1]);
    next_ += 2;
    return high << 32 | low;
  }

 private:
  const std::span<const int32_t> words_;
  size_t next_ = 0;
};

bool SameElements(const Shard& a, const Shard& b) {
  return std::equal(
      a.boxes.begin(), a.boxes.end(), b.boxes.begin(), b.boxes.end(),
      [](const Box& x, const Box& y) { return x.offset == y.offset && x.size == y.size; });
}

// Of ranks with the same elements the home sends, if it is one of them; else the first.
void ChooseSendersOf(CutMatrix& matrix) {
  const auto world = static_cast<int32_t>(matrix.parts.size());
  matrix.senders.assign(matrix.parts.size(), -1);
  for (int32_t rank = 0; rank < world; ++rank) {
    if (!matrix.has_part(rank)) continue;
    int32_t sender = SameElements(matrix.of(matrix.home), matrix.of(rank)) ? matrix.home : 0;
    while (!SameElements(matrix.of(sender), matrix.of(rank))) ++sender;
    matrix.senders[static_cast<size_t>(rank)] = sender;
  }
}

Status CheckSendersOf(const CutMatrix& matrix) {
  const auto world = static_cast<int32_t>(matrix.parts.size());
  std::vector<Box> boxes;
  std::vector<int32_t> owners;
  uint64_t sent = 0;
  for (int32_t rank = 0; rank < world; ++rank) {
    if (matrix.sender_for(rank) != rank) continue;
    const Shard& part = matrix.of(rank);
    boxes.insert(boxes.end(), part.boxes.begin(), part.boxes.end());
    owners.insert(owners.end(), part.boxes.size(), rank);
    sent += part.range_count;
  }
  const Shard& any = matrix.parts[0];
  if (const auto overlap = FindOverlap(boxes, any.dimensions).found)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "the parts of ranks %d and %d overlap, but are not the same; give them "
                         "the same shard, or shards without common elements",
                         owners[overlap->first], owners[overlap->second]);
  if (sent != any.global_count())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "the parts of all ranks have %llu of its %llu elements; give each element "
                         "to a rank",
                         static_cast<unsigned long long>(sent),
                         static_cast<unsigned long long>(any.global_count()));
  return {};
}

}  // namespace

Result<std::vector<CutMatrix>> ReadMatrices(std::span<const MatrixInput> inputs, int32_t rank,
                                            int32_t world) {
  std::vector<CutMatrix> matrices;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const offload_exchange_matrix_t& source = inputs[i].matrix;
    const bool named =
        source.name != nullptr && strnlen(source.name, kMaxNameBytes + 1) <= kMaxNameBytes;
    const Status status = CheckMatrix(inputs[i]);
    if (!status.ok()) return OfMatrix(status, i, named ? source.name : "no name");
    Result<Shard> part = PartOf(*inputs[i].shard);
    if (!part.ok()) return OfMatrix(part.status(), i, source.name);
    CutMatrix matrix{source.name, source.dtype, source.grad_dtype, {}, -1, {}, {}};
    matrix.parts.resize(static_cast<size_t>(world));
    matrix.parts[static_cast<size_t>(rank)] = std::move(part.value());
    matrices.push_back(std::move(matrix));
  }
  ChooseHomes(matrices, rank, world);
  return matrices;
}

std::vector<int32_t> PartsAsWords(std::span<const CutMatrix> matrices, int32_t rank) {
  std::vector<int32_t> words;
  AddNumber(words, matrices.size());
  for (const CutMatrix& matrix : matrices) {
    const Shard& part = matrix.of(rank);
    AddNumber(words, HashOf(matrix, part));
    AddNumber(words, part.boxes.size());
    for (const Box& box : part.boxes) {
      for (uint32_t d = 0; d < part.dimensions; ++d) {
        AddNumber(words, static_cast<uint64_t>(box.offset[d]));
        AddNumber(words, static_cast<uint64_t>(box.size[d]));
      }
    }
  }
  return words;
}

Status ReadParts(std::span<CutMatrix> matrices, int32_t own, int32_t rank,
                 std::span<const int32_t> words) {
  WordReader reader(words);
  if (const uint64_t count = reader.Number(); count != matrices.size())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.matrix_count is %zu, but %llu on rank %d; give the same matrices "
                         "in the same order on all ranks",
                         matrices.size(), static_cast<unsigned long long>(count), rank);
  for (size_t i = 0; i < matrices.size(); ++i) {
    CutMatrix& matrix = matrices[i];
    Shard part = matrix.of(own);
    if (reader.Number() != HashOf(matrix, part))
      return OfMatrix(Status::Error(OFFLOAD_INVALID_ARGUMENT,
                                    "rank %d has another name, shape, dtype or grad_dtype in its "
                                    "place; give the same matrices in the same order on all ranks",
                                    rank),
                      i, matrix.name.c_str());
    part.boxes.assign(reader.Number(), Box{});
    part.range_count = 0;
    for (Box& box : part.boxes) {
      uint64_t elements = 1;
      for (uint32_t d = 0; d < part.dimensions; ++d) {
        box.offset[d] = static_cast<int64_t>(reader.Number());
        box.size[d] = static_cast<int64_t>(reader.Number());
        elements *= static_cast<uint64_t>(box.size[d]);
      }
      part.range_count += elements;
    }
    matrix.parts[static_cast<size_t>(rank)] = std::move(part);
  }
  return {};
}

Status ChooseSenders(std::span<CutMatrix> matrices, int32_t rank) {
  for (size_t i = 0; i < matrices.size(); ++i) {
    ChooseSendersOf(matrices[i]);
    const Status status = CheckSendersOf(matrices[i]);
    if (!status.ok()) return OfMatrix(status, i, matrices[i].name.c_str());
    if (matrices[i].home != rank) continue;
    matrices[i].stripes.resize(matrices[i].parts.size());
    for (size_t of = 0; of < matrices[i].parts.size(); ++of)
      AddStripes(matrices[i].parts[of], matrices[i].stripes[of]);
  }
  return {};
}

}  // namespace hybridopt
