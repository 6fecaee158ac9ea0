// The content of the golden checkpoints: one small checkpoint for each algorithm, world size and
// way of sharding. make_golden.cpp wrote them once, each with the first release of its format
// version; every later release must load them.
#pragma once

#include <string>
#include <vector>

#include "../sample_checkpoint.h"

namespace hybridopt::checkpoint {

struct Golden {
  std::string name;  // of its directory beside this file
  HandMade made;
};

inline offload_group_t GoldenGroup(int32_t algorithm, double momentum = 0) {
  const bool adam = algorithm == OFFLOAD_ADAMW || algorithm == OFFLOAD_ADAM;
  offload_group_t group{};
  group.struct_size = sizeof(group);
  group.lr = 0.001;
  group.weight_decay = 0.1;
  if (adam || algorithm == OFFLOAD_LION) group.beta1 = 0.9;
  if (adam || algorithm == OFFLOAD_LION) group.beta2 = 0.99;
  if (adam || algorithm == OFFLOAD_ADAGRAD) group.eps = 1e-8;
  group.momentum = momentum;
  return group;
}

// All params whole, on one rank.
inline Golden GoldenWhole(const std::string& name, const offload_group_t& group, int32_t algorithm,
                          const std::vector<int32_t>& kinds) {
  Golden golden{name, HandMade(algorithm, 1)};
  HandMade& made = golden.made;
  made.kinds = kinds;
  made.manifest.groups = {group};
  made.AddParam("matrix", OFFLOAD_BF16, {5, 4});
  made.AddShard(0, 0, {{{0, 0}, {5, 4}}});
  made.AddParam("bias", OFFLOAD_FP32, {3});
  made.AddShard(0, 0, {{{0}, {3}}});
  made.AddParam("half", OFFLOAD_FP16, {2, 1, 3});
  made.AddShard(0, 0, {{{0, 0, 0}, {2, 1, 3}}});
  return golden;
}

// Columns and interleaved boxes on two ranks, with a range inside the boxes.
inline Golden GoldenBoxes(const std::string& name, int32_t algorithm,
                          const std::vector<int32_t>& kinds) {
  Golden golden{name, HandMade(algorithm, 2)};
  HandMade& made = golden.made;
  made.kinds = kinds;
  made.manifest.groups = {GoldenGroup(algorithm)};
  made.AddParam("columns", OFFLOAD_BF16, {4, 6});
  made.AddShard(0, 0, {{{0, 0}, {4, 1}}, {{0, 3}, {4, 2}}});
  made.AddShard(1, 0, {{{0, 1}, {4, 2}}, {{0, 5}, {4, 1}}});
  made.AddParam("rows", OFFLOAD_FP32, {6, 3});
  made.AddShard(0, 0, {{{4, 0}, {2, 3}}, {{0, 0}, {2, 3}}}, 0, 5);
  made.AddShard(1, 0, {{{4, 0}, {2, 3}}, {{0, 0}, {2, 3}}, {{2, 0}, {2, 3}}}, 5, 13);
  made.AddParam("alone", OFFLOAD_FP16, {7});
  made.AddShard(1, 0, {{{0}, {7}}});
  return golden;
}

// Uneven ranges over three ranks; one of them has nothing of a param.
inline Golden GoldenRanges() {
  Golden golden{"sgd-world3", HandMade(OFFLOAD_SGD, 3)};
  HandMade& made = golden.made;
  made.kinds = {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_MOMENTUM_BUFFER};
  made.manifest.groups = {GoldenGroup(OFFLOAD_SGD, 0.9)};
  made.AddParam("flat", OFFLOAD_BF16, {11, 2});
  made.AddShard(0, 0, {{{0, 0}, {11, 2}}}, 0, 9);
  made.AddShard(1, 0, {{{0, 0}, {11, 2}}}, 9, 1);
  made.AddShard(2, 0, {{{0, 0}, {11, 2}}}, 10, 12);
  made.AddParam("two", OFFLOAD_FP32, {2});
  made.AddShard(0, 0, {{{0}, {2}}}, 0, 1);
  made.AddShard(2, 0, {{{0}, {2}}}, 1, 1);
  made.AddParam("nothing", OFFLOAD_FP16, {0, 4});
  return golden;
}

// Format version 2: params without elements, of which there are step counts.
inline Golden GoldenCounts() {
  Golden golden{"counts-world2", HandMade(OFFLOAD_ADAMW, 2)};
  HandMade& made = golden.made;
  made.manifest.groups = {GoldenGroup(OFFLOAD_ADAMW)};
  made.AddParam("flat", OFFLOAD_BF16, {6});
  made.AddShard(0, 0, {{{0}, {6}}}, 0, 4);
  made.AddShard(1, 0, {{{0}, {6}}}, 4, 2);
  made.AddParam("nothing", OFFLOAD_FP16, {0, 4});
  made.AddShard(0, 0, {{{0, 0}, {0, 4}}});
  made.AddShard(1, 0, {{{0, 0}, {0, 4}}});
  made.AddParam("no shard", OFFLOAD_FP32, {3, 0});
  return golden;
}

inline std::vector<Golden> Goldens() {
  std::vector<Golden> goldens;
  goldens.push_back(
      GoldenWhole("adamw-world1", GoldenGroup(OFFLOAD_ADAMW), OFFLOAD_ADAMW,
                  {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ}));
  goldens.push_back(GoldenWhole("adagrad-world1", GoldenGroup(OFFLOAD_ADAGRAD), OFFLOAD_ADAGRAD,
                                {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_SUM}));
  goldens.push_back(GoldenWhole("signum-world1", GoldenGroup(OFFLOAD_SIGNUM, 0.9), OFFLOAD_SIGNUM,
                                {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG}));
  goldens.push_back(GoldenWhole("masters-world1", GoldenGroup(OFFLOAD_ADAM), OFFLOAD_ADAM,
                                {OFFLOAD_STATE_MASTER}));
  goldens.back().made.manifest.masters_only = true;
  goldens.push_back(
      GoldenBoxes("adam-world2", OFFLOAD_ADAM,
                  {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ}));
  goldens.push_back(
      GoldenBoxes("lion-world2", OFFLOAD_LION, {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG}));
  goldens.push_back(GoldenRanges());
  goldens.push_back(GoldenCounts());
  for (Golden& golden : goldens) {
    golden.made.manifest.writer = "hybridopt 0.1.0, tests/golden/make_golden.cpp";
    golden.made.Fill();
  }
  return goldens;
}

}  // namespace hybridopt::checkpoint
