// Params, shards and addresses that are refused, when they are added and when they are bound.
#include <gtest/gtest.h>

#include "bad_input.h"

namespace hybridopt::fault {
namespace {

// --------------------------------------------------------------------------------------- params --

// Adds a good param, a bad one and a good one in one call, which adds none of them.
template <typename Edit>
Row ParamRow(const char* name, int32_t status, std::vector<std::string> words, Edit&& edit) {
  words.push_back("params[1]");
  return {name, status, std::move(words), [edit](Trainer& t) {
            std::vector<offload_param_t> params(3, t.Param(2));
            for (offload_param_t& param : params) param.count = 1;
            params[0].data = Behind(t.data[2], 400);
            params[2].data = Behind(t.data[2], 800);
            params[0].name = "first";
            params[1].name = "bad";
            params[2].name = "last";
            edit(t, params[1]);
            uint32_t id = 99;
            const int32_t status = offload_optimizer_add_params(t.optimizer, params.data(), 3, &id);
            EXPECT_EQ(id, 99u);
            return status;
          }};
}

const std::string kLongName(1024, 'n');

// A shard that fits a param of count 1; rows spoil one field each.
struct ShardArrays {
  int64_t shape[2] = {4, 4};
  int64_t offsets[4] = {0, 0, 2, 2};
  int64_t extents[4] = {1, 1, 1, 1};
  offload_shard_t shard = Make<offload_shard_t>();
};

template <typename Edit>
Row ShardRow(const char* name, int32_t status, std::vector<std::string> words, Edit&& edit) {
  return ParamRow(name, status, std::move(words), [edit](Trainer&, offload_param_t& param) {
    static ShardArrays arrays;  // read before the call returns
    arrays = ShardArrays();
    arrays.shard.dimensions = 2;
    arrays.shard.box_count = 1;
    arrays.shard.global_shape = arrays.shape;
    arrays.shard.box_offsets = arrays.offsets;
    arrays.shard.box_extents = arrays.extents;
    edit(arrays);
    param.shard = &arrays.shard;
  });
}

INSTANTIATE_TEST_SUITE_P(
    Param, Registering,
    testing::Values(Row{"ParamsNull",
                        OFFLOAD_INVALID_ARGUMENT,
                        {"params is NULL"},
                        [](Trainer& t) {
                          return offload_optimizer_add_params(t.optimizer, nullptr, 1, nullptr);
                        }},
                    ParamRow("ParamStructSize", OFFLOAD_INVALID_ARGUMENT,
                             {"struct_size is 8", "first element"},
                             [](Trainer&, offload_param_t& p) { p.struct_size = 8; }),
                    ParamRow("GroupUnknown", OFFLOAD_INVALID_ARGUMENT,
                             {"group is 1", "1 groups have been added", "'bad'"},
                             [](Trainer&, offload_param_t& p) { p.group = 1; }),
                    ParamRow("DtypeMissing", OFFLOAD_INVALID_ARGUMENT,
                             {"dtype is 0", "OFFLOAD_FP32"},
                             [](Trainer&, offload_param_t& p) { p.dtype = 0; }),
                    ParamRow("GradDtypeUnknown", OFFLOAD_INVALID_ARGUMENT, {"grad_dtype is 4"},
                             [](Trainer&, offload_param_t& p) { p.grad_dtype = 4; }),
                    ParamRow("DtypeNegative", OFFLOAD_INVALID_ARGUMENT, {"dtype is -1"},
                             [](Trainer&, offload_param_t& p) { p.dtype = -1; }),
                    ParamRow("PlacementUnknown", OFFLOAD_INVALID_ARGUMENT,
                             {"placement is 4", "expected"},
                             [](Trainer&, offload_param_t& p) { p.placement = 4; }),
                    ParamRow("SplitOfNoMatrix", OFFLOAD_INVALID_ARGUMENT,
                             {"split_count is 1", "updates no matrices; leave it 0"},
                             [](Trainer&, offload_param_t& p) { p.split_count = 1; }),
                    ParamRow("NameNull", OFFLOAD_INVALID_ARGUMENT, {"name is NULL", "unique"},
                             [](Trainer&, offload_param_t& p) { p.name = nullptr; }),
                    ParamRow("NameEmpty", OFFLOAD_INVALID_ARGUMENT, {"name is empty"},
                             [](Trainer&, offload_param_t& p) { p.name = ""; }),
                    ParamRow("NameTooLong", OFFLOAD_INVALID_ARGUMENT, {"name is longer than 1023"},
                             [](Trainer&, offload_param_t& p) { p.name = kLongName.c_str(); }),
                    ParamRow("NameTaken", OFFLOAD_INVALID_ARGUMENT,
                             {"name is taken by param 1", "'p1'"},
                             [](Trainer&, offload_param_t& p) { p.name = "p1"; }),
                    ParamRow("NameTwiceInOneCall", OFFLOAD_INVALID_ARGUMENT,
                             {"name is taken by param 2"},
                             [](Trainer&, offload_param_t& p) { p.name = "first"; }),
                    ParamRow("DataNull", OFFLOAD_INVALID_ARGUMENT, {"data is NULL", "1 elements"},
                             [](Trainer&, offload_param_t& p) { p.data = nullptr; }),
                    ParamRow("CountHuge", OFFLOAD_INVALID_ARGUMENT,
                             {"count is 18446744073709551615", "expected at most 2^44"},
                             [](Trainer&, offload_param_t& p) { p.count = UINT64_MAX; }),
                    ParamRow("DataMisaligned", OFFLOAD_INVALID_ARGUMENT,
                             {"data: address", "not aligned", "2-byte", "bf16"},
                             [](Trainer& t, offload_param_t& p) { p.data = Behind(t.data[2], 1); }),
                    ParamRow("GradMisaligned", OFFLOAD_INVALID_ARGUMENT,
                             {"grad: address", "4-byte", "fp32"},
                             [](Trainer& t, offload_param_t& p) {
                               p.grad = Behind(t.grads[2], 2);
                             }),
                    ParamRow("DataSame", OFFLOAD_INVALID_ARGUMENT,
                             {"overlaps the data of param 0 'p0'", "tied weights"},
                             [](Trainer& t, offload_param_t& p) {
                               p.data = t.data[0];
                               p.grad = nullptr;
                               p.count = 3000;
                             }),
                    ParamRow(
                        "DataInside", OFFLOAD_INVALID_ARGUMENT, {"overlaps the data of param 0"},
                        [](Trainer& t, offload_param_t& p) { p.data = Behind(t.data[0], 100); }),
                    ParamRow("DataLastElement", OFFLOAD_INVALID_ARGUMENT,
                             {"overlaps the data of param 0"},
                             [](Trainer& t, offload_param_t& p) {
                               p.data = Behind(t.data[0], 5998);
                             }),
                    ParamRow("DataReachesNext", OFFLOAD_INVALID_ARGUMENT,
                             {"overlaps the data of param 2"},
                             [](Trainer&, offload_param_t& p) { p.count = 201; }),
                    ShardRow("ShardStructSize", OFFLOAD_INVALID_ARGUMENT,
                             {"params[1].shard.struct_size is 1"},
                             [](ShardArrays& a) { a.shard.struct_size = 1; }),
                    ShardRow("DimensionsZero", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.dimensions is 0", "expected 1 to 8"},
                             [](ShardArrays& a) { a.shard.dimensions = 0; }),
                    ShardRow("DimensionsNine", OFFLOAD_INVALID_ARGUMENT, {"shard.dimensions is 9"},
                             [](ShardArrays& a) { a.shard.dimensions = 9; }),
                    ShardRow("NoBox", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.box_count is 0", "expected 1"},
                             [](ShardArrays& a) { a.shard.box_count = 0; }),
                    ShardRow("BoxesHuge", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.box_count is 4294967295"},
                             [](ShardArrays& a) { a.shard.box_count = UINT32_MAX; }),
                    ShardRow("ShardFlags", OFFLOAD_UNSUPPORTED,
                             {"shard.flags is 0x2", "known is 0x1"},
                             [](ShardArrays& a) { a.shard.flags = 2; }),
                    ShardRow("ShapeNull", OFFLOAD_INVALID_ARGUMENT, {"shard.global_shape", "NULL"},
                             [](ShardArrays& a) { a.shard.global_shape = nullptr; }),
                    ShardRow("OffsetsNull", OFFLOAD_INVALID_ARGUMENT, {"box_offsets", "NULL"},
                             [](ShardArrays& a) { a.shard.box_offsets = nullptr; }),
                    ShardRow("ExtentsNull", OFFLOAD_INVALID_ARGUMENT, {"box_extents", "NULL"},
                             [](ShardArrays& a) { a.shard.box_extents = nullptr; }),
                    ShardRow("ShapeNegative", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.global_shape[1] is -4", "at least 0"},
                             [](ShardArrays& a) { a.shape[1] = -4; }),
                    ShardRow("ShapeOverflows", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.global_shape", "63 bits"},
                             [](ShardArrays& a) { a.shape[0] = a.shape[1] = INT64_MAX; }),
                    ShardRow("BoxOutside", OFFLOAD_INVALID_ARGUMENT,
                             {"box 0", "from 4 over 1", "dimension 0", "outside global_shape 4"},
                             [](ShardArrays& a) { a.offsets[0] = 4; }),
                    ShardRow("BoxOffsetNegative", OFFLOAD_INVALID_ARGUMENT, {"box 0", "from -1"},
                             [](ShardArrays& a) { a.offsets[1] = -1; }),
                    ShardRow("BoxExtentNegative", OFFLOAD_INVALID_ARGUMENT, {"box 0", "over -1"},
                             [](ShardArrays& a) { a.extents[0] = -1; }),
                    ShardRow("BoxEndOverflows", OFFLOAD_INVALID_ARGUMENT, {"box 0", "from 1 over"},
                             [](ShardArrays& a) {
                               a.offsets[0] = 1;
                               a.extents[0] = INT64_MAX;
                             }),
                    ShardRow("BoxesOverlap", OFFLOAD_INVALID_ARGUMENT, {"boxes 0 and 1 overlap"},
                             [](ShardArrays& a) {
                               a.shard.box_count = 2;
                               a.extents[0] = a.extents[1] = 3;
                             }),
                    ShardRow("CountMismatch", OFFLOAD_INVALID_ARGUMENT,
                             {"count is 1", "shard holds 4", "must be equal"},
                             [](ShardArrays& a) { a.extents[1] = 4; }),
                    ShardRow("CountMismatchOfBoxes", OFFLOAD_INVALID_ARGUMENT,
                             {"count is 1", "holds 2"},
                             [](ShardArrays& a) { a.shard.box_count = 2; }),
                    ShardRow("RangeWithoutFlag", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.range_begin/range_count", "OFFLOAD_SHARD_RANGE"},
                             [](ShardArrays& a) { a.shard.range_count = 1; }),
                    ShardRow("RangeOutside", OFFLOAD_INVALID_ARGUMENT,
                             {"shard.range_begin 1 + range_count 1", "1 elements"},
                             [](ShardArrays& a) {
                               a.shard.flags = OFFLOAD_SHARD_RANGE;
                               a.shard.range_begin = a.shard.range_count = 1;
                             }),
                    ShardRow("RangeOverflows", OFFLOAD_INVALID_ARGUMENT, {"shard.range_begin 1"},
                             [](ShardArrays& a) {
                               a.shard.flags = OFFLOAD_SHARD_RANGE;
                               a.shard.range_begin = 1;
                               a.shard.range_count = UINT64_MAX;
                             }),
                    ShardRow("RangeCountMismatch", OFFLOAD_INVALID_ARGUMENT,
                             {"count is 1", "holds 0"},
                             [](ShardArrays& a) { a.shard.flags = OFFLOAD_SHARD_RANGE; })),
    RowName);

INSTANTIATE_TEST_SUITE_P(
    Address, OnSim,
    testing::Values(
        ParamRow("DataInHostMemory", OFFLOAD_INVALID_ARGUMENT,
                 {"data:", "not in this device's memory"},
                 [](Trainer&, offload_param_t& p) { p.data = host_array; }),
        ParamRow("GradInHostMemory", OFFLOAD_INVALID_ARGUMENT,
                 {"grad:", "not in this device's memory"},
                 [](Trainer&, offload_param_t& p) { p.grad = host_array; }),
        ParamRow("DataPastItsAllocation", OFFLOAD_INVALID_ARGUMENT, {"data:", "runs past the end"},
                 [](Trainer&, offload_param_t& p) { p.count = 2501; }),
        ParamRow("GradPastItsAllocation", OFFLOAD_INVALID_ARGUMENT, {"grad:", "runs past the end"},
                 [](Trainer& t, offload_param_t& p) {
                   p.grad = Behind(t.grads[1], 0);
                   p.count = 2;
                 }),
        ParamRow("DataFreed", OFFLOAD_INVALID_ARGUMENT, {"data:", "freed or never allocated"},
                 [](Trainer& t, offload_param_t& p) {
                   void* freed = nullptr;
                   EXPECT_OFFLOAD_OK(offload_device_alloc(t.context, 256, &freed));
                   EXPECT_OFFLOAD_OK(offload_device_free(t.context, freed));
                   p.data = freed;
                 }),
        ParamRow("GradAtTheEndOfTheAddressSpace", OFFLOAD_INVALID_ARGUMENT, {"grad:"},
                 [](Trainer&, offload_param_t& p) { p.grad = Address(UINT64_MAX - 3); })),
    RowName);

// ----------------------------------------------------------------------------------------- bind --

// Binds param 0 well, then badly, then param 1 well: all or none.
template <typename Edit>
Row BindRow(const char* name, int32_t status, std::vector<std::string> words, Edit&& edit) {
  return {name, status, std::move(words), [edit](Trainer& t) {
            std::vector<offload_binding_t> bindings(3, Make<offload_binding_t>());
            bindings[0].param = 0;  // its gradient taken away, its data moved
            bindings[0].data = t.grads[0];
            bindings[1].param = 0;
            bindings[1].data = t.data[0];
            bindings[1].grad = t.grads[0];
            bindings[2].param = 1;
            edit(t, bindings[1]);
            return offload_optimizer_bind(t.optimizer, bindings.data(), 3);
          }};
}

INSTANTIATE_TEST_SUITE_P(
    Bind, Anytime,
    testing::Values(
        Row{"BindingsNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"bindings is NULL"},
            [](Trainer& t) { return offload_optimizer_bind(t.optimizer, nullptr, 1); }},
        BindRow("BindUnknownParam", OFFLOAD_INVALID_ARGUMENT,
                {"bindings[1].param is 3", "params have been added"},
                [](Trainer&, offload_binding_t& b) { b.param = 3; }),
        BindRow("BindMisaligned", OFFLOAD_INVALID_ARGUMENT,
                {"bindings.data[1]", "'p0'", "not aligned"},
                [](Trainer& t, offload_binding_t& b) { b.data = Behind(t.data[0], 1); }),
        BindRow("BindGradMisaligned", OFFLOAD_INVALID_ARGUMENT,
                {"bindings.grad[1]", "'p0'", "not aligned"},
                [](Trainer& t, offload_binding_t& b) { b.grad = Behind(t.grads[0], 2); }),
        BindRow("BindOverlaps", OFFLOAD_INVALID_ARGUMENT,
                {"bindings[1]", "overlaps the data of param 0 'p0'"},
                [](Trainer& t, offload_binding_t& b) {
                  b.param = 1;
                  b.data = t.grads[0];  // where the first binding has just put param 0
                  b.grad = nullptr;
                }),
        BindRow("BindStructSize", OFFLOAD_INVALID_ARGUMENT, {"bindings[1].struct_size is 0"},
                [](Trainer&, offload_binding_t& b) { b.struct_size = 0; }),
        BindRow("BindStructSizesDiffer", OFFLOAD_INVALID_ARGUMENT,
                {"bindings[1].struct_size is 16", "must be equal"},
                [](Trainer&, offload_binding_t& b) { b.struct_size = 16; })),
    RowName);

}  // namespace
}  // namespace hybridopt::fault
