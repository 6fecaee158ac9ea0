// Shape, residence and chunks are pure, so they can be checked element by element and byte by byte
// on random tables.
#include "state/residence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../../random.h"
#include "base/system.h"
#include "optimizer/plan.h"
#include "state/chunk_table.h"
#include "state/shape.h"
#include "step/step_plan.h"

namespace hybridopt {
namespace {

struct Case {
  std::unique_ptr<Device> device = CreateHostDevice();  // takes any address
  std::unique_ptr<ParamTable> table;
  ShapeOptions options{};
  double device_fraction = 0;
};

Case RandomCase(Random& random) {
  Case one;
  int32_t algorithm = kAlgorithms[random.Below(std::size(kAlgorithms))].value;
  if (IsOfMatrices(algorithm)) algorithm = OFFLOAD_SIGNUM;  // these params are no matrices
  one.table = std::make_unique<ParamTable>(algorithm, *one.device);
  for (const double momentum : {0.0, 0.9}) {
    offload_group_t group{};
    for (const GroupField& field : kGroupFields) {
      if (field.ReadersOf(algorithm) == nullptr) continue;
      if (field.number == &offload_group_t::momentum) group.momentum = momentum;
      if (field.number == &offload_group_t::eps) group.eps = 1e-8;
    }
    EXPECT_TRUE(one.table->AddGroup(group).ok());
  }
  const uint64_t counts[] = {0, 1, 31, 32, 33, 1023, 1024, 1025, 4096, 5003, 20000};
  const uint64_t params = 1 + random.Below(12);
  for (uint32_t id = 0; id < params; ++id) {
    ParamInput input{};
    const std::string name = "p" + std::to_string(id);
    input.param.name = name.c_str();
    input.param.group = static_cast<uint32_t>(random.Below(2));
    input.param.dtype = 1 + static_cast<int32_t>(random.Below(3));
    input.param.grad_dtype = 1 + static_cast<int32_t>(random.Below(3));
    input.param.placement = static_cast<int32_t>(random.Below(3));
    input.param.count = counts[random.Below(std::size(counts))];
    input.param.data = reinterpret_cast<void*>((uint64_t{id} + 1) << 32);
    EXPECT_TRUE(one.table->AddParams({&input, 1}).ok());
  }
  const double fractions[] = {0, 1, 0.25, 0.5, 1.0 / 3, 0.9999999};
  one.options.unified = random.Below(5) == 0;
  one.device_fraction = fractions[random.Below(std::size(fractions))];
  one.options.chunk_elements = uint64_t{1024} << random.Below(4);
  one.options.staging_slots = 2 + static_cast<uint32_t>(random.Below(4));
  one.options.cpu_updates = one.options.unified || random.Below(3) > 0;
  one.options.streams_state =
      !one.options.unified && (!one.options.cpu_updates || random.Below(2) == 0);
  one.options.formats.master = FindMasterFormat(static_cast<int32_t>(random.Below(3)))->format;
  one.options.formats.moment0 = one.options.formats.moment1 =
      random.Below(2) == 0 ? Format::kFp32 : Format::kBf16;
  one.options.stochastic = random.Below(2) == 0;
  const uint64_t pieces[] = {4096, 8192, 64 << 10, UINT64_MAX};
  one.options.pin_piece_bytes = pieces[random.Below(std::size(pieces))];
  return one;
}

// The objects that follow from a table, options and a fraction.
struct Arranged {
  double device_fraction;
  StateShape shape;
  Residence residence;
  ChunkTable chunks;
  LaneSizes lanes;
};

Arranged Arrange(const ParamTable& table, const ShapeOptions& options, double device_fraction,
                 const std::vector<Unit>& units = {}) {
  Arranged arranged{device_fraction, MakeStateShape(table, options), {}, {}, {}};
  for (uint32_t id = 0; id < units.size(); ++id) {
    arranged.shape.params[id].unit = units[id];
    arranged.shape.largest_unit =
        std::max(arranged.shape.largest_unit, std::min(units[id].elements, table.param(id).count));
  }
  arranged.residence = Residence(table, arranged.shape, {{device_fraction}});
  arranged.chunks = CutChunks(table, arranged.shape, arranged.residence);
  arranged.lanes = LaneSizesOf(arranged.shape, arranged.residence, arranged.chunks);
  return arranged;
}

class ResidenceTest : public testing::Test {
 protected:
  // Calls check(table, options, placement) on many random cases.
  template <typename Check>
  void ForRandomCases(Check&& check) {
    Random random(11);
    for (int round = 0; round < 2000 && !HasFailure(); ++round) {
      SCOPED_TRACE("round " + std::to_string(round));
      const Case one = RandomCase(random);
      check(*one.table, one.options, Arrange(*one.table, one.options, one.device_fraction));
    }
  }
};

// A second implementation, for comparison, of whether a tier keeps an array of a param.
bool Keeps(const Param& param, const ParamShape& shaped, const ShapeOptions& options, uint32_t slot,
           bool staged_host) {
  const bool split = options.formats.master != Format::kFp32 && param.dtype == OFFLOAD_BF16;
  if (slot == kMasterLow) return split;
  if (slot == kMaster) return !split && (param.dtype != OFFLOAD_FP32 || staged_host);
  switch (shaped.rule) {
    case Rule::kAdam:
      return true;
    case Rule::kSgdPlain:
      return false;
    default:
      return slot == kMoment0;
  }
}

// At every point of the order of updates, the kept part of the host share differs from the part
// that will stream by at most one param.
TEST_F(ResidenceTest, GradsToKeepAreTheDevicesAndAnEvenPartOfTheOthers) {
  for (double share : {0.0, 0.3, 0.75, 1.0})
    ForRandomCases([share](const ParamTable& table, const ShapeOptions&, const Arranged& arranged) {
      std::vector<uint8_t> keep(table.size(), 2);
      ChooseGradsToKeep(table, arranged.shape, arranged.residence, share, 0, keep);
      double owed = 0, largest = 0;
      for (uint32_t id : arranged.shape.update_order) {
        const uint64_t count = table.param(id).count;
        const uint64_t device = arranged.residence.range(id, Tier::kDevice).count;
        if (2 * device > count) {
          EXPECT_EQ(keep[id], 1);
          continue;
        }
        const auto host = static_cast<double>(count - device);
        if (share == 0 || share == 1) {
          EXPECT_EQ(keep[id], count > 0 ? share : 0);
        }
        largest = std::max(largest, host);
        owed += (share - keep[id]) * host;
        EXPECT_LE(std::abs(owed), largest);
      }
    });
}

// Gradients for early updates are copied to the host: those of the last elements in the order of
// updates. The part that will stream is a part of the others.
TEST_F(ResidenceTest, GradsOfTheLastElementsAreNotKeptForWhatStreams) {
  for (uint64_t early : {uint64_t{1}, uint64_t{500}, UINT64_MAX})
    ForRandomCases([early](const ParamTable& table, const ShapeOptions&, const Arranged& arranged) {
      std::vector<uint8_t> keep(table.size(), 2);
      ChooseGradsToKeep(table, arranged.shape, arranged.residence, 1, early, keep);
      uint64_t behind = 0;  // elements of the host share
      for (auto id = arranged.shape.update_order.rbegin(); id != arranged.shape.update_order.rend();
           ++id) {
        const uint64_t count = table.param(*id).count;
        const uint64_t device = arranged.residence.range(*id, Tier::kDevice).count;
        const bool is_devices = 2 * device > count;
        EXPECT_EQ(keep[*id], is_devices || (behind >= early && count > 0) ? 1 : 0);
        behind += count - device;
      }
    });
}

TEST_F(ResidenceTest, DeviceSharesAreTheFirstElementsOfExactlyTheFraction) {
  ForRandomCases(
      [](const ParamTable& table, const ShapeOptions& options, const Arranged& arranged) {
        uint64_t automatic = 0, automatic_on_device = 0, host = 0, device = 0;
        bool host_share_seen = false;
        for (uint32_t id = 0; id < table.size(); ++id) {
          const Param& param = table.param(id);
          const uint64_t device_count = arranged.residence.range(id, Tier::kDevice).count;
          ASSERT_LE(device_count, param.count);
          device += device_count;
          host += param.count - device_count;
          if (options.unified) {
            EXPECT_EQ(device_count, 0u);
          } else if (param.placement == OFFLOAD_PLACE_HOST) {
            EXPECT_EQ(device_count, 0u);
          } else if (param.placement == OFFLOAD_PLACE_DEVICE) {
            EXPECT_EQ(device_count, param.count);
          } else {
            automatic += param.count;
            automatic_on_device += device_count;
            if (host_share_seen) {
              EXPECT_EQ(device_count, 0u) << "device elements come first";
            }
            host_share_seen |= device_count < param.count;
          }
        }
        if (!options.unified) {
          EXPECT_EQ(automatic_on_device,
                    static_cast<uint64_t>(
                        std::floor(arranged.device_fraction * static_cast<double>(automatic))));
        }
        EXPECT_EQ(arranged.residence.elements(Tier::kHost), host);
        EXPECT_EQ(arranged.residence.elements(Tier::kDevice), device);
      });
}

TEST_F(ResidenceTest, EveryHostElementIsInExactlyOneFragmentInOrder) {
  ForRandomCases([](const ParamTable& table, const ShapeOptions& options,
                    const Arranged& arranged) {
    std::vector<uint64_t> next(table.size());
    for (uint32_t id = 0; id < table.size(); ++id)
      next[id] = arranged.residence.range(id, Tier::kDevice).count;
    uint32_t param = 0, fragment_index = 0;
    uint64_t rest = arranged.residence.elements(Tier::kHost);
    for (uint32_t c = 0; c < arranged.chunks.chunks.size(); ++c) {
      const Chunk& chunk = arranged.chunks.chunks[c];
      EXPECT_EQ(chunk.first_fragment, fragment_index);
      EXPECT_GT(chunk.element_count, 0u);
      uint64_t elements = 0;
      for (uint32_t f = 0; f < chunk.fragment_count; ++f, ++fragment_index) {
        const Fragment& fragment = arranged.chunks.fragments[fragment_index];
        ASSERT_GE(fragment.param, param) << "registration order";
        param = fragment.param;
        EXPECT_GT(fragment.count, 0u);
        EXPECT_EQ(fragment.begin, next[param]);
        EXPECT_EQ(fragment.first_element, elements);
        EXPECT_LE(c, arranged.chunks.last_chunk_end[param]);
        next[param] += fragment.count;
        elements += fragment.count;
        if (next[param] == table.param(param).count) {
          EXPECT_EQ(arranged.chunks.last_chunk_end[param], c + 1);
        }
      }
      EXPECT_EQ(chunk.element_count, elements);
      if (!options.unified) {
        EXPECT_LE(elements, options.chunk_elements);
        const bool last = c + 1 == arranged.chunks.chunks.size();
        const bool both = options.cpu_updates && options.streams_state;
        const uint64_t smallest = std::max<uint64_t>(options.chunk_elements / 16, 1024);
        const uint64_t expected =
            !both ? options.chunk_elements
                  : std::clamp((rest / 24 + 1023) / 1024 * 1024, smallest, options.chunk_elements);
        EXPECT_TRUE(last ? elements <= expected : elements == expected)
            << elements << " of " << rest << ", expected " << expected;
      }
      rest -= elements;
    }
    EXPECT_LE(arranged.chunks.chunks.size(), ChunksMost(arranged.shape));
    EXPECT_EQ(fragment_index, arranged.chunks.fragments.size());
    if (options.unified) {
      EXPECT_LE(arranged.chunks.chunks.size(), 1u);
    }
    for (uint32_t id = 0; id < table.size(); ++id) {
      EXPECT_EQ(next[id], table.param(id).count);
      if (arranged.residence.range(id, Tier::kDevice).count == table.param(id).count) {
        EXPECT_EQ(arranged.chunks.last_chunk_end[id], 0u) << "waits for no chunk";
      }
    }
  });
}

// Whether a param may be cut before this element.
bool MayBeCut(const Unit& unit, uint64_t count, uint64_t element) {
  return element == 0 || element == count || (element + unit.phase) % unit.elements == 0;
}

// One element, blocks of 128 and other blocks from anywhere in the tensor on, or the whole param.
std::vector<Unit> RandomUnits(Random& random, const ParamTable& table) {
  std::vector<Unit> units(table.size());
  for (uint32_t id = 0; id < table.size(); ++id) {
    const uint64_t sizes[] = {1, 128, 2 + random.Below(5000), table.param(id).count};
    units[id].elements = std::max<uint64_t>(sizes[random.Below(std::size(sizes))], 1);
    units[id].phase = random.Below(units[id].elements);
    if (units[id].elements == table.param(id).count) units[id].phase = 0;
  }
  return units;
}

void ExpectWholeUnitsOnTiers(const ParamTable& table, const std::vector<Unit>& units,
                             const ShapeOptions& options, const Arranged& arranged) {
  uint64_t automatic = 0, automatic_on_device = 0, next_unit = 0;
  bool host_share_seen = false;
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    uint64_t end = 0;
    for (Tier tier : kTiers) {
      const ElementRange range = arranged.residence.range(id, tier);
      ASSERT_EQ(range.begin, end);
      end = range.end();
      ASSERT_TRUE(MayBeCut(units[id], param.count, end)) << id << ": " << end;
    }
    ASSERT_EQ(end, param.count);
    if (param.placement != OFFLOAD_PLACE_AUTO || options.unified) continue;
    const uint64_t on_device = arranged.residence.range(id, Tier::kDevice).count;
    automatic += param.count;
    automatic_on_device += on_device;
    if (host_share_seen) {
      EXPECT_EQ(on_device, 0u) << "what a tier holds is contiguous";
    }
    if (!host_share_seen && on_device < param.count) next_unit = units[id].elements;
    host_share_seen |= on_device < param.count;
  }
  const auto wanted =
      static_cast<uint64_t>(std::floor(arranged.device_fraction * static_cast<double>(automatic)));
  EXPECT_LE(automatic_on_device, wanted);
  if (host_share_seen && !options.unified) {
    EXPECT_GT(automatic_on_device + next_unit, wanted) << "one more unit fits";
  }
}

void ExpectWholeUnitsInChunks(const ParamTable& table, const std::vector<Unit>& units,
                              const ShapeOptions& options, const Arranged& arranged) {
  std::vector<uint64_t> next(table.size());
  for (uint32_t id = 0; id < table.size(); ++id)
    next[id] = arranged.residence.range(id, Tier::kHost).begin;
  for (const Chunk& chunk : arranged.chunks.chunks) {
    uint64_t elements = 0;
    for (const Fragment& fragment : arranged.chunks.FragmentsOf(chunk)) {
      const uint32_t id = fragment.param;
      ASSERT_GT(fragment.count, 0u);
      ASSERT_EQ(fragment.begin, next[id]);
      ASSERT_TRUE(MayBeCut(units[id], table.param(id).count, fragment.begin));
      next[id] += fragment.count;
      elements += fragment.count;
      if (!options.unified && fragment.count > options.chunk_elements) {
        EXPECT_EQ(chunk.fragment_count, 1u) << "a chunk grows for one unit alone";
        EXPECT_LE(fragment.count, units[id].elements);
      }
    }
    ASSERT_EQ(elements, chunk.element_count);
    EXPECT_TRUE(options.unified || chunk.fragment_count == 1 || elements <= options.chunk_elements);
  }
  for (uint32_t id = 0; id < table.size(); ++id) ASSERT_EQ(next[id], table.param(id).count);
  EXPECT_LE(arranged.chunks.chunks.size(), ChunksMost(arranged.shape));
}

// The elements of a chunk are divided among workers in any way, in pieces of any size.
void ExpectWholeUnitsOfWork(const ParamTable& table, const std::vector<Unit>& units, uint64_t piece,
                            const Arranged& arranged) {
  for (const Chunk& chunk : arranged.chunks.chunks) {
    std::vector<uint64_t> next(chunk.fragment_count);
    const std::span<const Fragment> fragments = arranged.chunks.FragmentsOf(chunk);
    for (uint64_t begin = 0; begin < chunk.element_count; begin += piece)
      ForEachRange(
          fragments, chunk.element_count, [](const Fragment& each) { return each.first_element; },
          WorkRange{begin, std::min(begin + piece, chunk.element_count)},
          [&](const Fragment& fragment, uint64_t first, uint64_t count) {
            const auto index = static_cast<size_t>(&fragment - fragments.data());
            ASSERT_EQ(first, next[index]);
            next[index] += count;
            ASSERT_GT(count, 0u);
            ASSERT_TRUE(MayBeCut(units[fragment.param], table.param(fragment.param).count,
                                 fragment.begin + first));
          });
    for (size_t i = 0; i < fragments.size(); ++i) ASSERT_EQ(next[i], fragments[i].count);
  }
}

TEST(Units, NothingIsCutInsideOne) {
  Random random(23);
  for (int round = 0; round < 2000 && !testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const Case one = RandomCase(random);
    const std::vector<Unit> units = RandomUnits(random, *one.table);
    const Arranged arranged = Arrange(*one.table, one.options, one.device_fraction, units);
    ExpectWholeUnitsOnTiers(*one.table, units, one.options, arranged);
    ExpectWholeUnitsInChunks(*one.table, units, one.options, arranged);
    ExpectWholeUnitsOfWork(*one.table, units, 1 + random.Below(700), arranged);
    // The buffer for a gradient that is copied up in pieces has room for a unit.
    for (uint32_t id = 0; id < units.size() && arranged.lanes.device_grad_elements > 0; ++id) {
      const uint64_t count = arranged.residence.range(id, Tier::kDevice).count;
      for (uint64_t begin = 0, end = 0; begin < count; begin = end) {
        end = units[id].CutOf(begin, count, arranged.lanes.device_grad_elements);
        ASSERT_GT(end, begin);
        ASSERT_LE(end - begin, arranged.lanes.device_grad_elements);
        ASSERT_TRUE(MayBeCut(units[id], one.table->param(id).count, end));
      }
    }
  }
}

// A format with blocks of 32 elements and a scale. For a shard that begins anywhere, every cut is
// at the beginning of a block, and the array has room for all blocks between two cuts.
TEST(Units, ArraysHaveRoomForEachBlock) {
  FormatRow row = RowOf(Format::kFp32);
  row.unit_elements = 32;
  row.unit_bytes = 34;
  for (uint64_t phase = 0; phase < 128; ++phase) {
    const Unit unit{128, phase};
    const uint64_t count = 1000 + phase;
    for (uint64_t begin = 0, end = 0; begin < count; begin = end) {
      end = unit.CutOf(begin, count, 300);
      std::set<uint64_t> blocks;  // of the whole tensor
      for (uint64_t element = begin; element < end; ++element)
        blocks.insert((element + phase) / 32);
      ASSERT_EQ(BytesBefore(row, unit, end) - BytesBefore(row, unit, begin), blocks.size() * 34);
    }
  }
}

// A matrix of 100 rows of 10 elements, of which a shard has some.
TEST(Units, StartWhereTheWholeTensorsStart) {
  Shard shard{};
  shard.dimensions = 2;
  shard.global_shape = {100, 10};
  const auto rows = [&](int64_t row, int64_t column, int64_t count, int64_t columns) {
    Box box{};
    box.offset = {row, column};
    box.size = {count, columns};
    shard.boxes = {box};
    shard.range_begin = 0;
    shard.range_count = static_cast<uint64_t>(count * columns);
    return shard;
  };
  const auto expect = [](const Unit& unit, uint64_t elements, uint64_t phase) {
    EXPECT_EQ(unit.elements, elements);
    EXPECT_EQ(unit.phase, phase);
  };
  expect(UnitOf(rows(0, 0, 100, 10), 1000, 128), 128, 0);
  expect(UnitOf(rows(13, 0, 20, 10), 200, 128), 128, 2);
  expect(UnitOf(rows(13, 0, 20, 10), 200, 1), 1, 0);
  // Columns 4 to 7 of each row: in step with units of 2, but not with those of 4.
  expect(UnitOf(rows(1, 4, 20, 4), 80, 2), 2, 0);
  expect(UnitOf(rows(1, 4, 20, 4), 80, 4), 80, 0);
  // A part of the rows, as ZeRO cuts them.
  rows(0, 0, 100, 10);
  shard.range_begin = 300;
  shard.range_count = 500;
  expect(UnitOf(shard, 500, 128), 128, 300 % 128);
  // The first cut is where the tensor's third unit ends.
  EXPECT_EQ(UnitOf(shard, 500, 128).RoundUp(1), 3 * 128u - 300);
}

// The number of chunks for which memory and marks are reserved is enough for long params too.
TEST(Chunks, TheLastOnesAreSmallAndNotTooMany) {
  auto device = CreateHostDevice();
  Random random(5);
  for (int round = 0; round < 500; ++round) {
    ParamTable table(OFFLOAD_ADAMW, *device);
    offload_group_t group{};
    group.eps = 1e-8;
    ASSERT_TRUE(table.AddGroup(group).ok());
    ParamInput input{};
    input.param.name = "p";
    input.param.dtype = input.param.grad_dtype = OFFLOAD_BF16;
    input.param.count = 1 + random.Below(uint64_t{1} << (10 + random.Below(20)));
    input.param.data = reinterpret_cast<void*>(uint64_t{1} << 32);
    ASSERT_TRUE(table.AddParams({&input, 1}).ok());
    ShapeOptions options{};
    options.chunk_elements = 1024 + random.Below(uint64_t{1} << (8 + random.Below(15)));
    options.staging_slots = 8;
    options.streams_state = true;
    const Arranged arranged = Arrange(table, options, 0);
    const std::vector<Chunk>& chunks = arranged.chunks.chunks;
    EXPECT_LE(chunks.size(), ChunksMost(arranged.shape)) << input.param.count;
    const uint64_t full = input.param.count / options.chunk_elements;
    EXPECT_LE(chunks.size(), full + 97);
    for (size_t c = 1; c < chunks.size(); ++c)
      EXPECT_LE(chunks[c].element_count, chunks[c - 1].element_count);
    // What both have taken when none is left, by default 12 chunks, is little.
    if (full >= 24 && options.chunk_elements >= 16 * 1024) {
      EXPECT_LE(chunks.back().element_count, options.chunk_elements / 16);
    }
  }
}

struct Range {
  uint64_t begin, end;
};

void ExpectDisjoint(std::vector<Range> ranges, uint64_t limit) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  uint64_t end = 0;
  for (const Range& range : ranges) {
    EXPECT_GE(range.begin, end);
    end = range.end;
  }
  EXPECT_LE(end, limit);
}

TEST_F(ResidenceTest, StagingOffsetsAreDisjointAlignedAndInsideTheirSlot) {
  ForRandomCases(
      [](const ParamTable& table, const ShapeOptions& options, const Arranged& arranged) {
        if (options.unified) {
          EXPECT_EQ(arranged.lanes.staging_slots, 0u);
          EXPECT_EQ(arranged.lanes.slot_grad_bytes + arranged.lanes.slot_param_bytes, 0u);
          EXPECT_EQ(arranged.chunks.grads_down_bytes + arranged.chunks.params_up_bytes, 0u);
          return;
        }
        EXPECT_EQ(arranged.lanes.staging_slots,
                  std::min<uint64_t>(options.staging_slots, arranged.chunks.chunks.size()));
        uint64_t down = 0, up = 0;
        for (const Chunk& chunk : arranged.chunks.chunks) {
          std::vector<Range> grads, params;
          for (uint32_t f = 0; f < chunk.fragment_count; ++f) {
            const Fragment& fragment = arranged.chunks.fragments[chunk.first_fragment + f];
            const Param& param = table.param(fragment.param);
            const uint64_t grad_bytes = fragment.count * DtypeBytes(param.grad_dtype);
            const uint64_t param_bytes = fragment.count * DtypeBytes(param.dtype);
            EXPECT_EQ(fragment.grad_offset % 64, 0u);
            EXPECT_EQ(fragment.param_offset % 64, 0u);
            grads.push_back({fragment.grad_offset, fragment.grad_offset + grad_bytes});
            params.push_back({fragment.param_offset, fragment.param_offset + param_bytes});
            down += grad_bytes;
            up += param_bytes;
          }
          ExpectDisjoint(grads, arranged.lanes.slot_grad_bytes);
          ExpectDisjoint(params, arranged.lanes.slot_param_bytes);
        }
        EXPECT_EQ(arranged.chunks.grads_down_bytes, down);
        EXPECT_EQ(arranged.chunks.params_up_bytes, up);
      });
}

// Each tier's range of a region holds exactly the elements of that tier, and nothing else.
TEST_F(ResidenceTest, StateArraysAreThereWhereTheyBelongDisjointAndCounted) {
  ForRandomCases(
      [](const ParamTable& table, const ShapeOptions& options, const Arranged& arranged) {
        for (uint32_t index = 0; index < kStateSlots; ++index) {
          const StateSlot slot{index};
          const bool moment = slot == kMoment0 || slot == kMoment1;
          std::vector<Range> arrays[kTierCount];
          const Residence::Bytes& device = arranged.residence.bytes(Tier::kDevice, slot);
          const Residence::Bytes& host = arranged.residence.bytes(Tier::kHost, slot);
          uint64_t device_end = 0, host_begin = UINT64_MAX, host_end = 0;
          for (uint32_t id = 0; id < table.size(); ++id) {
            const Param& param = table.param(id);
            const ParamShape& shaped = arranged.shape.params[id];
            const bool beside = RowOf(options.formats.master).beside_param;
            const bool low = slot == kMasterLow && beside && param.dtype == OFFLOAD_BF16;
            ASSERT_EQ(shaped.format[slot], moment ? options.formats.moment0
                                           : low  ? options.formats.master
                                                  : Format::kFp32);
            const bool on_device = !options.unified && Keeps(param, shaped, options, slot, false);
            const bool on_host = Keeps(param, shaped, options, slot, !options.unified);
            ASSERT_EQ(shaped.Keeps(Tier::kDevice, slot), on_device) << id << " slot " << slot;
            ASSERT_EQ(shaped.Keeps(Tier::kHost, slot), on_host) << id << " slot " << slot;
            const uint64_t cut = arranged.residence.range(id, Tier::kDevice).count;
            for (Tier tier : {Tier::kDevice, Tier::kHost}) {
              if (!shaped.Keeps(tier, slot) || param.count == 0) continue;
              EXPECT_EQ(shaped.ByteAt(tier, slot, 0) % 256, 0u);
              arrays[static_cast<int>(tier)].push_back(
                  {shaped.ByteAt(tier, slot, 0), shaped.ByteAt(tier, slot, param.count)});
            }
            if (on_device && cut > 0)
              device_end = std::max(device_end, shaped.ByteAt(Tier::kDevice, slot, cut));
            if (on_device && cut < param.count) {
              EXPECT_GE(shaped.ByteAt(Tier::kDevice, slot, cut), device.end);
            }
            if (!on_host || cut == param.count) continue;
            host_begin = std::min(host_begin, shaped.ByteAt(Tier::kHost, slot, cut));
            host_end = std::max(host_end, shaped.ByteAt(Tier::kHost, slot, param.count));
          }
          for (Tier tier : {Tier::kDevice, Tier::kHost})
            ExpectDisjoint(arrays[static_cast<int>(tier)], arranged.shape.RegionBytes(tier, slot));
          EXPECT_EQ(device.begin, 0u);
          EXPECT_EQ(device.end, device_end);
          EXPECT_EQ(host.end, host_end);
          EXPECT_EQ(host.begin, host_end > 0 ? host_begin : 0);
        }
      });
}

// One copy moves arrays that only padding separates, and kernels find each array aligned as on the
// host.
TEST_F(ResidenceTest, StateInTheRingKeepsItsAlignmentAndItsDistanceToTheNext) {
  ForRandomCases([](const ParamTable&, const ShapeOptions&, const Arranged& arranged) {
    for (const Chunk& chunk : arranged.chunks.chunks) {
      for (uint32_t index = 0; index < kStateSlots; ++index) {
        const StateSlot slot{index};
        uint64_t end = 0, host_end = 0;
        for (const Fragment& fragment : arranged.chunks.FragmentsOf(chunk)) {
          const ParamShape& shaped = arranged.shape.params[fragment.param];
          if (!shaped.Keeps(Tier::kHost, slot)) continue;
          const uint64_t host = shaped.ByteAt(Tier::kHost, slot, fragment.begin);
          const uint64_t offset = fragment.state_offset[slot];
          EXPECT_EQ(offset % 256, host % 256);
          EXPECT_GE(offset, end);
          if (end > 0 && host >= host_end && host - host_end < 256) {
            EXPECT_EQ(offset - end, host - host_end);
          }
          const uint64_t bytes = shaped.Bytes(slot, fragment.begin, fragment.count);
          end = offset + bytes;
          host_end = host + bytes;
        }
        EXPECT_LE(end, chunk.state_area_bytes[slot]);
      }
    }
  });
}

// At every fraction an element has the same address on a tier.
TEST_F(ResidenceTest, TheShapeDoesNotDependOnTheFraction) {
  Random random(12);
  for (int round = 0; round < 200; ++round) {
    const Case one = RandomCase(random);
    const Arranged none = Arrange(*one.table, one.options, 0);
    const Arranged all = Arrange(*one.table, one.options, 1);
    for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
      const Residence::Bytes& low = none.residence.bytes(Tier::kDevice, StateSlot{slot});
      const Residence::Bytes& high = all.residence.bytes(Tier::kDevice, StateSlot{slot});
      EXPECT_LE(low.end, high.end);
      const Residence::Bytes& host = none.residence.bytes(Tier::kHost, StateSlot{slot});
      const Residence::Bytes& rest = all.residence.bytes(Tier::kHost, StateSlot{slot});
      if (rest.size() > 0) {
        EXPECT_EQ(host.end, rest.end) << "both tiers give and take at the cut";
      }
    }
  }
}

TEST_F(ResidenceTest, NormBlocksFollowEachOther) {
  ForRandomCases([](const ParamTable& table, const ShapeOptions&, const Arranged& arranged) {
    uint64_t block = 0;
    for (uint32_t id = 0; id < table.size(); ++id) {
      EXPECT_EQ(arranged.shape.params[id].first_norm_block, block);
      block += (table.param(id).count + kNormBlockElements - 1) / kNormBlockElements;
    }
    EXPECT_EQ(arranged.shape.norm_blocks, block);
  });
}

// Each array of the host lies in one piece of pinned memory, with pages that no other piece has. A
// piece has as many arrays as it may.
TEST_F(ResidenceTest, PinCutsLieBetweenArrays) {
  uint64_t cuts = 0;
  ForRandomCases([&cuts](const ParamTable& table, const ShapeOptions& options,
                         const Arranged& arranged) {
    const StateShape& shape = arranged.shape;
    std::vector<uint64_t> expected_cuts;
    uint64_t pages_end = 0;  // where the pages of the arrays so far end
    for (const StateSlot slot : {kMaster, kMoment0, kMoment1, kMasterLow}) {
      uint64_t end = 0, piece_bytes = 0;  // of the arrays so far: of the region, of the piece
      for (uint32_t id : shape.region_order) {
        const ParamShape& shaped = shape.params[id];
        if (!shaped.Keeps(Tier::kHost, slot) || table.param(id).count == 0) continue;
        const uint64_t begin = shape.host_region_begin[slot] + shaped.ByteAt(Tier::kHost, slot, 0);
        const uint64_t bytes =
            system::RoundUp(shaped.Bytes(slot, 0, table.param(id).count), kArrayAlignmentBytes);
        const bool begins_region = end == 0;
        const bool begins_piece = begins_region || piece_bytes + bytes > options.pin_piece_bytes;
        if (begins_piece) {
          const uint64_t page = begin / system::PageBytes() * system::PageBytes();
          EXPECT_GE(page, pages_end);
          if (!begins_region) {
            expected_cuts.push_back(page);
            EXPECT_GE(begin - end, kArrayAlignmentBytes) << "one copy would move both arrays";
          }
        } else {
          EXPECT_EQ(begin, end);
        }
        piece_bytes = begins_piece ? bytes : piece_bytes + bytes;
        end = begin + bytes;
        pages_end = system::RoundUp(end, system::PageBytes());
      }
      EXPECT_LE(end, shape.host_arena_bytes);
    }
    EXPECT_EQ(shape.pin_cuts, expected_cuts);
    cuts += expected_cuts.size();
  });
  EXPECT_GT(cuts, 1000u);
}

// Also behind a pin cut, which changes no distance between arrays of the same format.
TEST_F(ResidenceTest, EqualElementsOfTwoSlotsNeverLieAtTheSameOffsetInAPage) {
  ForRandomCases([](const ParamTable& table, const ShapeOptions&, const Arranged& arranged) {
    const StateShape& shape = arranged.shape;
    for (uint32_t id = 0; id < table.size(); ++id) {
      const ParamShape& shaped = shape.params[id];
      const bool has_both =
          shaped.Keeps(Tier::kHost, kMoment0) && shaped.Keeps(Tier::kHost, kMoment1);
      if (!has_both || table.param(id).count == 0) continue;
      EXPECT_EQ(shaped.offset[Tier::kHost][kMoment0], shaped.offset[Tier::kHost][kMoment1]);
      EXPECT_NE(shape.host_region_begin[kMoment0] % 4096, shape.host_region_begin[kMoment1] % 4096);
    }
  });
}

// Any range of a param is cut where its stripes end, and the place of every element is right.
TEST_F(ResidenceTest, StripesSayWhereEveryElementLies) {
  ForRandomCases([](const ParamTable& table, const ShapeOptions& options,
                    const Arranged& arranged) {
    for (uint32_t id = 0; id < table.size(); ++id) {
      const ParamShape& shaped = arranged.shape.params[id];
      const uint64_t count = table.param(id).count;
      const bool random =
          options.stochastic &&
          ((options.formats.moment0 == Format::kBf16 && shaped.rule != Rule::kSgdPlain) ||
           (options.formats.master == Format::kSplit24 && table.param(id).dtype == OFFLOAD_BF16));
      ASSERT_EQ(shaped.stripe_count > 0, random && count > 0);
      if (count == 0) continue;
      uint64_t next = 0;
      ForEachStripe(arranged.shape, shaped, count / 3, count - count / 3,
                    [&](uint64_t offset, uint64_t part, const ElementOrder& order) {
                      ASSERT_EQ(offset, next);
                      ASSERT_GT(part, 0u);
                      next += part;
                      if (random) {
                        ASSERT_EQ(order.first + order.column, count / 3 + offset);
                      }
                    });
      ASSERT_EQ(next, count - count / 3);
    }
  });
}

void AddOneParam(ParamTable& table, int32_t dtype, uint64_t count) {
  offload_group_t group{};
  group.eps = 1e-8;
  EXPECT_TRUE(table.AddGroup(group).ok());
  ParamInput input{};
  input.param.name = "p";
  input.param.dtype = input.param.grad_dtype = dtype;
  input.param.count = count;
  input.param.data = reinterpret_cast<void*>(0x1000);
  EXPECT_TRUE(table.AddParams({&input, 1}).ok());
}

// 28 bytes a parameter: nothing more is kept than a bf16 model with AdamW needs.
TEST(Shape, AdamwKeepsTwelveBytesForABf16ParamAndEightForAnFp32OneInHostMemory) {
  const std::unique_ptr<Device> device = CreateHostDevice();
  for (const int32_t dtype : {OFFLOAD_BF16, OFFLOAD_FP32}) {
    ParamTable table(OFFLOAD_ADAMW, *device);
    constexpr uint64_t kCount = 1 << 20;
    AddOneParam(table, dtype, kCount);
    for (const Format master : {Format::kFp32, Format::kSplit}) {
      for (const Format moments : {Format::kFp32, Format::kBf16}) {
        const StateShape shape =
            MakeStateShape(table, {true, 1024, 2, 0, {master, moments, moments}});
        const Residence residence(table, shape, {});
        const uint64_t master_bytes = dtype == OFFLOAD_FP32 ? 0 : master == Format::kSplit ? 2 : 4;
        const uint64_t moment_bytes = moments == Format::kBf16 ? 4 : 8;
        const uint64_t bytes = (master_bytes + moment_bytes) * kCount;
        uint64_t kept_bytes = 0;
        for (uint32_t slot = 0; slot < kStateSlots; ++slot)
          kept_bytes += residence.bytes(Tier::kHost, StateSlot{slot}).size();
        EXPECT_EQ(kept_bytes, bytes);
        EXPECT_LE(shape.host_arena_bytes, bytes + (3 << 13));
      }
    }
  }
}

// If arrays of 2^26 elements followed each other without a gap, equal elements would be in the same
// bank of the memory.
TEST(Shape, LargeStateArraysStartInDifferentBanks) {
  const std::unique_ptr<Device> device = CreateHostDevice();
  ParamTable table(OFFLOAD_ADAMW, *device);
  AddOneParam(table, OFFLOAD_BF16, uint64_t{1} << 26);
  const StateShape shape = MakeStateShape(table, {true, 1 << 20, 2, 0});
  std::vector<uint64_t> begins = {0};  // where a caller's array would begin, in a page of 2 MiB
  for (const StateSlot slot : {kMaster, kMoment0, kMoment1}) {
    const uint64_t begin = shape.host_region_begin[slot] % (2 << 20);
    for (const uint64_t other : begins) {
      EXPECT_GE(begin > other ? begin - other : other - begin, uint64_t{64} << 10) << slot;
      EXPECT_NE(begin % 4096, other % 4096) << slot;
    }
    begins.push_back(begin);
  }
}

TEST(Shape, StateKindsAreNamedByTheAlgorithm) {
  const struct {
    int32_t algorithm, moment0, moment1;
  } rows[] = {{OFFLOAD_ADAMW, OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ},
              {OFFLOAD_ADAM, OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ},
              {OFFLOAD_SGD, OFFLOAD_STATE_MOMENTUM_BUFFER, -1},
              {OFFLOAD_LION, OFFLOAD_STATE_EXP_AVG, -1},
              {OFFLOAD_ADAGRAD, OFFLOAD_STATE_SUM, -1},
              {OFFLOAD_SIGNUM, OFFLOAD_STATE_EXP_AVG, -1}};
  for (const auto& row : rows) {
    EXPECT_EQ(StateKindOf(row.algorithm, kMaster), OFFLOAD_STATE_MASTER);
    EXPECT_EQ(StateKindOf(row.algorithm, kMasterLow), OFFLOAD_STATE_MASTER_LOW);
    EXPECT_EQ(StateKindOf(row.algorithm, kMoment0), row.moment0);
    EXPECT_EQ(StateKindOf(row.algorithm, kMoment1), row.moment1);
  }
}

}  // namespace
}  // namespace hybridopt
