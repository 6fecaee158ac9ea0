// shape.h: what the model is made of, wherever it runs: its text, its tensors and their names.
#ifndef HYBRIDOPT_EXAMPLES_TRAIN_LM_SHAPE_H
#define HYBRIDOPT_EXAMPLES_TRAIN_LM_SHAPE_H

#include <math.h>
#include <stdint.h>

#include <string>

inline constexpr int kVocabulary = 256, kWidth = 256, kBlocks = 2, kHeads = 4, kHidden = 4 * kWidth;
inline constexpr int kHeadWidth = kWidth / kHeads;
inline constexpr int kContext = 64, kBatch = 16, kTokens = kBatch * kContext;
// Besides its byte a token looks up the hash of its last n bytes. The tables hold most of the
// parameters but cost no products, so a few minutes on two cores are enough to learn from.
inline constexpr int kNgrams[] = {2, 3, 4, 6}, kNgramTables = 4, kNgramRows = 4096;
inline constexpr int kHistory = 8;  // bytes before a window, for the n-grams of its first tokens

// kBatch windows of text, each with its history in front and the last target behind.
struct Batch {
  static constexpr int kStride = kHistory + kContext + 1;
  uint8_t bytes[kBatch][kStride];
  constexpr uint8_t token(int t, int ahead = 0) const {
    return bytes[t / kContext][kHistory + t % kContext + ahead];
  }
  constexpr int ngram_row(int t, int n) const {
    uint64_t key = 0;  // the last n bytes, the newest on top
    for (int i = 0; i < n; ++i) key |= uint64_t{token(t, -i)} << (8 * (n - 1 - i));
    return static_cast<int>(((key * 0x9e3779b97f4a7c15u) >> 32) % kNgramRows);
  }
};

// Every tensor of the model, once for the values and once for the gradients.
template <typename Number>
struct WeightsOf {
  Number *embedding, *position, *ngram[kNgramTables], *head;
  struct Block {
    Number *query, *key, *value, *output, *up, *down;
  } block[kBlocks];

  // visit(name, count, standard deviation at the start, is a lookup table, pointer)
  template <typename Visit>
  void for_each(Visit visit) {
    visit("embedding.weight", kVocabulary * kWidth, 0.5, true, embedding);
    visit("position.weight", kContext * kWidth, 0.1, true, position);
    for (int i = 0; i < kNgramTables; ++i) {
      const std::string name = "ngram" + std::to_string(kNgrams[i]) + ".weight";
      visit(name, kNgramRows * kWidth, 0.0, true, ngram[i]);
    }
    const int square = kWidth * kWidth;
    const double scale = 1 / sqrt(kWidth);
    for (int i = 0; i < kBlocks; ++i) {
      const std::string name = "block" + std::to_string(i);
      visit(name + ".attention.query.weight", square, scale, false, block[i].query);
      visit(name + ".attention.key.weight", square, scale, false, block[i].key);
      visit(name + ".attention.value.weight", square, scale, false, block[i].value);
      visit(name + ".attention.output.weight", square, 0.0, false, block[i].output);
      visit(name + ".mlp.up.weight", kHidden * kWidth, scale, false, block[i].up);
      visit(name + ".mlp.down.weight", kWidth * kHidden, 0.0, false, block[i].down);
    }
    visit("head.weight", kVocabulary * kWidth, 0.0, false, head);  // starts at 8 bits per byte
  }
};
using Weights = WeightsOf<float>;

// How many tensors a layer has, in the order of for_each: the tables, then each block, then the
// head.
constexpr int tensors_of_layer(int layer) {
  if (layer == 0) return 2 + kNgramTables;
  return layer <= kBlocks ? int{sizeof(Weights::Block) / sizeof(float*)} : 1;
}

inline uint64_t parameter_count() {
  uint64_t sum = 0;
  Weights{}.for_each([&](const std::string&, int count, double, bool, float*) { sum += count; });
  return sum;
}

#endif  // HYBRIDOPT_EXAMPLES_TRAIN_LM_SHAPE_H
