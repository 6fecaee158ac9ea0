// The registry: all or none, names and addresses, compared with a model that checks every byte. The
// addresses are never dereferenced, so they are invented.
#include "state/param_table.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../../random.h"

namespace hybridopt {
namespace {

void* Address(uint64_t value) { return reinterpret_cast<void*>(value); }

class ParamTableTest : public testing::Test {
 protected:
  ParamTableTest() : device_(CreateHostDevice()), table_(OFFLOAD_SGD, *device_) {
    offload_group_t group{};
    group.struct_size = sizeof(group);
    EXPECT_EQ(table_.AddGroup(group).value(), 0u);
  }

  static ParamInput Input(const char* name, uint64_t data, uint64_t count,
                          int32_t dtype = OFFLOAD_FP32) {
    ParamInput input{};
    input.param.struct_size = sizeof(input.param);
    input.param.dtype = input.param.grad_dtype = dtype;
    input.param.name = name;
    input.param.data = Address(data);
    input.param.count = count;
    return input;
  }
  Status Add(const char* name, uint64_t data, uint64_t count) {
    const ParamInput input = Input(name, data, count);
    return table_.AddParams({&input, 1}).status();
  }
  Status Bind(std::vector<std::pair<uint32_t, uint64_t>> places) {
    std::vector<offload_binding_t> bindings;
    for (const auto& [param, data] : places) {
      offload_binding_t binding{};
      binding.struct_size = sizeof(binding);
      binding.param = param;
      binding.data = Address(data);
      binding.grad = Address(data + 0x100000);
      bindings.push_back(binding);
    }
    return table_.Bind(bindings);
  }
  uint64_t DataOf(uint32_t id) const {
    return reinterpret_cast<uint64_t>(table_.addresses()[id].data);
  }
  uint64_t GradOf(uint32_t id) const {
    return reinterpret_cast<uint64_t>(table_.addresses()[id].grad);
  }

  std::unique_ptr<Device> device_;
  ParamTable table_;
};

TEST_F(ParamTableTest, KeepsWhatItWasTold) {
  const ParamInput inputs[] = {Input("a", 0x1000, 4), Input("b", 0x2000, 3, OFFLOAD_BF16)};
  EXPECT_EQ(table_.AddParams(inputs).value(), 0u);
  EXPECT_EQ(table_.AddParams({}).value(), 2u) << "nothing added: the next id";
  ASSERT_EQ(table_.size(), 2u);
  EXPECT_EQ(table_.param(1).name, "b");
  EXPECT_EQ(table_.param(1).dtype, OFFLOAD_BF16);
  EXPECT_EQ(table_.param(1).count, 3u);
  EXPECT_EQ(table_.param(1).shard.range_count, 3u);
  EXPECT_EQ(DataOf(1), 0x2000u);
  EXPECT_EQ(GradOf(1), 0u);
}

TEST_F(ParamTableTest, ABadParamTakesTheWholeCallBack) {
  EXPECT_TRUE(Add("a", 0x1000, 4).ok());
  const ParamInput inputs[] = {Input("b", 0x2000, 4), Input("c", 0x3000, 4), Input("d", 0x2008, 4)};
  const Status status = table_.AddParams(inputs).status();
  EXPECT_EQ(status.code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_EQ(status.message().find("params[2] 'd': data 0x2008 overlaps the data of param 1 'b'"),
            0u)
      << status.message();
  EXPECT_EQ(table_.size(), 1u);
  EXPECT_EQ(table_.addresses().size(), 1u);
  // Names and places are free again.
  EXPECT_TRUE(Add("c", 0x2000, 4).ok());
  EXPECT_TRUE(Add("b", 0x3000, 4).ok());
  EXPECT_EQ(table_.param(1).name, "c");
}

TEST_F(ParamTableTest, NeighboursDoNotOverlapAndEmptyParamsOverlapNothing) {
  EXPECT_TRUE(Add("a", 0x1000, 4).ok());
  EXPECT_TRUE(Add("after", 0x1010, 4).ok());
  EXPECT_TRUE(Add("before", 0xff0, 4).ok());
  EXPECT_TRUE(Add("empty", 0x1004, 0).ok());
  EXPECT_TRUE(Add("null", 0, 0).ok());
  EXPECT_FALSE(Add("over all", 0xfec, 100).ok());
  EXPECT_FALSE(Add("last byte", 0x101c, 1).ok());
  EXPECT_FALSE(Add("first byte", 0xfec, 2).ok());
  EXPECT_FALSE(Add("name", 0x1002, 1).ok()) << "misaligned";
  EXPECT_EQ(table_.size(), 5u);
}

TEST_F(ParamTableTest, BindMayTradePlaces) {
  EXPECT_TRUE(Add("a", 0x1000, 4).ok());
  EXPECT_TRUE(Add("b", 0x2000, 4).ok());
  EXPECT_TRUE(Add("c", 0x3000, 4).ok());
  EXPECT_TRUE(Bind({{0, 0x2000}, {1, 0x3000}, {2, 0x1000}}).ok());
  EXPECT_EQ(DataOf(0), 0x2000u);
  EXPECT_EQ(DataOf(1), 0x3000u);
  EXPECT_EQ(DataOf(2), 0x1000u);
  EXPECT_EQ(GradOf(2), 0x101000u);
  // The occupied ranges have moved with them.
  EXPECT_NE(Add("d", 0x2000, 1).message().find("param 0 'a'"), std::string::npos);
  EXPECT_TRUE(Bind({{0, 0x1008}, {2, 0x5000}}).ok()) << "into the room that c leaves";
}

TEST_F(ParamTableTest, BindWithoutDataMovesOnlyTheGradient) {
  EXPECT_TRUE(Add("a", 0x1000, 4).ok());
  offload_binding_t binding{};
  binding.grad = Address(0x9000);
  EXPECT_TRUE(table_.Bind({&binding, 1}).ok());
  EXPECT_EQ(DataOf(0), 0x1000u);
  EXPECT_EQ(GradOf(0), 0x9000u);
  binding.grad = nullptr;
  EXPECT_TRUE(table_.Bind({&binding, 1}).ok());
  EXPECT_EQ(GradOf(0), 0u);
}

TEST_F(ParamTableTest, ARefusedBindLeavesEverythingInItsPlace) {
  EXPECT_TRUE(Add("a", 0x1000, 4).ok());
  EXPECT_TRUE(Add("b", 0x2000, 4).ok());
  EXPECT_TRUE(Add("c", 0x3000, 4).ok());
  EXPECT_TRUE(Bind({{0, 0x1000}, {1, 0x2000}, {2, 0x3000}}).ok());
  const Status status = Bind({{0, 0x2000}, {1, 0x1000}, {0, 0x3008}});
  EXPECT_EQ(status.message().find("bindings[2] 'a': data 0x3008 overlaps the data of param 2 'c'"),
            0u)
      << status.message();
  for (uint32_t id = 0; id < 3; ++id) {
    EXPECT_EQ(DataOf(id), 0x1000u * (id + 1));
    EXPECT_EQ(GradOf(id), 0x1000u * (id + 1) + 0x100000);
  }
  for (uint64_t taken : {0x1000, 0x2000, 0x3000})
    EXPECT_FALSE(Add("d", taken, 1).ok()) << std::hex << taken;
}

// Random registrations and moves, against a set of occupied elements.
TEST_F(ParamTableTest, AgreesWithAModelOfEveryElement) {
  Random random(3);
  std::vector<std::pair<uint64_t, uint64_t>> model;  // place and count, in elements
  const auto fits = [](const std::vector<std::pair<uint64_t, uint64_t>>& places) {
    std::set<uint64_t> taken;
    for (const auto& [place, count] : places)
      for (uint64_t element = place; element < place + count; ++element)
        if (!taken.insert(element).second) return false;
    return true;
  };
  const auto address = [](uint64_t place) { return 0x10000 + 4 * place; };
  uint64_t refused = 0, done = 0;
  for (int round = 0; round < 20'000; ++round) {
    auto wanted = model;
    bool ok = false;
    if (model.size() < 12 && random.Below(4) == 0) {
      wanted.emplace_back(random.Below(100), random.Below(8));
      const std::string name = "p" + std::to_string(model.size());
      ok = Add(name.c_str(), address(wanted.back().first), wanted.back().second).ok();
    } else if (!model.empty()) {
      std::vector<std::pair<uint32_t, uint64_t>> places;
      for (uint64_t i = random.Below(4); i-- > 0;) {
        const uint32_t id = static_cast<uint32_t>(random.Below(model.size()));
        // Often the address of another param: params exchange their addresses.
        const uint64_t place =
            random.Below(2) == 0 ? model[random.Below(model.size())].first : random.Below(100);
        places.emplace_back(id, address(place));
        wanted[id].first = place;
      }
      // A param named twice passes through its first new place, which must be free as well.
      std::set<uint32_t> named;
      bool twice = false;
      for (const auto& [id, place] : places) twice |= !named.insert(id).second;
      if (twice) continue;
      ok = Bind(places).ok();
    }
    ASSERT_EQ(ok, fits(wanted) && wanted.size() > 0) << "round " << round;
    (ok ? done : refused) += 1;
    if (ok) model = wanted;
    ASSERT_EQ(table_.size(), model.size());
    for (uint32_t id = 0; id < model.size(); ++id)
      ASSERT_EQ(DataOf(id), address(model[id].first)) << "round " << round;
  }
  EXPECT_GT(done, 1000u);
  EXPECT_GT(refused, 1000u);
}

TEST_F(ParamTableTest, SetGroupChangesTheGroupOrNothing) {
  offload_group_t group{};
  group.lr = 0.5;
  EXPECT_TRUE(table_.SetGroup(0, group, false).ok());
  EXPECT_EQ(table_.groups()[0].lr, 0.5);
  group.lr = -1;
  EXPECT_FALSE(table_.SetGroup(0, group, false).ok());
  EXPECT_EQ(table_.groups()[0].lr, 0.5);
  EXPECT_EQ(table_.SetGroup(1, group, false).code(), OFFLOAD_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace hybridopt
