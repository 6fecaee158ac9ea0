// Writes a checkpoint made by hand, for tests of the command-line tool. Usage: make_sample WHICH
// DIR
#include <cstdio>
#include <string>

#include "../sample_checkpoint.h"

namespace hybridopt::checkpoint {
namespace {

// About 100 MB: columns of two ranks, and a range of each; blocks of 1 MiB.
HandMade Large() {
  HandMade made(OFFLOAD_ADAMW, 2);
  made.manifest.block_bytes = 1 << 20;
  made.manifest.groups = {AdamGroup(0.001, 0)};
  made.AddParam("columns", OFFLOAD_BF16, {40'000, 100});
  made.AddShard(0, 0, {{{0, 0}, {40'000, 30}}});
  made.AddShard(1, 0, {{{0, 30}, {40'000, 70}}});
  made.AddParam("ranges", OFFLOAD_BF16, {4'000'001});
  made.AddShard(0, 0, {{{0}, {4'000'001}}}, 0, 1'000'003);
  made.AddShard(1, 0, {{{0}, {4'000'001}}}, 1'000'003, 2'999'998);
  return made;
}

// Moments in 16 bits, and lower halves of masters.
HandMade Halves() {
  HandMade made(OFFLOAD_ADAMW, 1);
  made.manifest.groups = {AdamGroup(0.001, 0)};
  made.AddParam("w", OFFLOAD_BF16, {7, 3});
  made.AddShard(0, 0, {{{0, 0}, {7, 3}}});
  made.Store(OFFLOAD_STATE_MASTER, OFFLOAD_U16);
  made.Store(OFFLOAD_STATE_EXP_AVG, OFFLOAD_BF16);
  made.Store(OFFLOAD_STATE_EXP_AVG_SQ, OFFLOAD_FP16);
  return made;
}

// Two ranks that stored a kind differently.
HandMade Mixed() {
  HandMade made(OFFLOAD_ADAMW, 2);
  made.manifest.groups = {AdamGroup(0.001, 0)};
  made.AddParam("w", OFFLOAD_BF16, {8});
  made.AddShard(0, 0, {{{0}, {8}}}, 0, 4);
  made.AddShard(1, 0, {{{0}, {8}}}, 4, 4);
  made.Store(OFFLOAD_STATE_EXP_AVG, OFFLOAD_BF16);
  return made;
}

}  // namespace
}  // namespace hybridopt::checkpoint

int main(int argc, char** argv) {
  using namespace hybridopt::checkpoint;  // NOLINT: this program writes checkpoints
  const std::string which = argc == 3 ? argv[1] : "";
  HandMade made = which == "large"    ? Large()
                  : which == "halves" ? Halves()
                  : which == "mixed"  ? Mixed()
                                      : static_cast<HandMade>(Sample());
  if (argc != 3 ||
      (which != "sample" && which != "large" && which != "halves" && which != "mixed")) {
    std::fprintf(stderr, "usage: make_sample sample|large|halves|mixed DIR\n");
    return 2;
  }
  made.Fill();
  made.Write(argv[2]);
  return 0;
}
