// Stashes: pushed bytes must come back, and the test knows beforehand what each call must return.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "calls.h"

namespace hybridopt::fault::random_calls {
namespace {

using Ticket = StashModel::Ticket;

constexpr uint64_t kStashesMax = 3;

// ----------------------------------------------------------------------------- judging, drawing --

// The statuses with which a call on a stash may be refused; none: the call must succeed.
struct Reasons {
  std::set<int32_t> statuses;
  bool certain = true;

  void Add(bool holds, int32_t status) {
    if (holds) statuses.insert(status);
  }
  void AddInvalid(bool holds) { Add(holds, OFFLOAD_INVALID_ARGUMENT); }
};

// Whether the call was done. A device that has failed may refuse it.
bool Judge(World& world, int32_t status, offload_context_t context, const Reasons& reasons) {
  const bool done = world.Judge(status, context);
  if (world.IsDoomed(context) || !reasons.certain) return done;
  if (reasons.statuses.empty()) {
    EXPECT_TRUE(done) << world.call_name() << ": " << offload_last_error();
  } else {
    EXPECT_EQ(reasons.statuses.count(status), 1u)
        << world.call_name() << " gave " << offload_status_name(status);
  }
  return done;
}

offload_stream_t DrawStream(World& world, offload_context_t context, Reasons& reasons) {
  const offload_stream_t stream = world.PickStream(context);
  const auto& own = world.contexts.at(context).streams;
  if (stream == nullptr || std::count(own.begin(), own.end(), stream) > 0) return stream;
  reasons.AddInvalid(true);
  // A new stream, perhaps one of the library's, may have the place of a destroyed one.
  const auto& dead = world.dead_streams;
  if (std::count(dead.begin(), dead.end(), stream) > 0) reasons.certain = false;
  return stream;
}

// Usually a live ticket, otherwise one that has ended, one of another stash, none, or noise.
offload_stash_ticket_t DrawTicket(World& world, StashModel& model, Reasons& reasons) {
  Random& random = world.random;
  offload_stash_ticket_t ticket = random.OneOf<uint64_t>({0, 1, random.Next(), UINT64_MAX});
  const auto& other =
      std::next(world.stashes.begin(), static_cast<int64_t>(random.Below(world.stashes.size())))
          ->second;
  if (!other.live.empty() && random.Chance(30)) ticket = other.live[0].ticket;
  if (!model.ended.empty() && random.Chance(50))
    ticket = model.ended[random.Below(model.ended.size())];
  if (!model.live.empty() && random.Chance(85))
    ticket = model.live[random.Below(model.live.size())].ticket;
  reasons.AddInvalid(model.Find(ticket) == model.live.end());
  return ticket;
}

// Room for `bytes` bytes in one of `arrays`, or a bad address.
void* DrawMemory(World& world, const StashModel& model, const std::vector<void*>& arrays,
                 uint64_t bytes, Reasons& reasons) {
  void* const data = world.Pointer(arrays, bytes, world.contexts.at(model.context).kind);
  const bool inside = std::any_of(arrays.begin(), arrays.end(), [&](void* array) {
    const auto* begin = static_cast<const char*>(array);
    return data >= begin && data < begin + kArrayBytes;
  });
  reasons.AddInvalid(!inside);
  return data;
}

void CompareStats(World& world, offload_stash_t stash) {
  const StashModel& model = world.stashes.at(stash);
  auto stats = Make<offload_stash_stats_t>();
  ASSERT_OFFLOAD_OK(offload_stash_get_stats(stash, &stats));
  if (world.IsDoomed(model.context)) return;
  const offload_stash_stats_t& counts = model.counts;
  EXPECT_EQ(stats.tickets, model.live.size());
  EXPECT_EQ(stats.slabs_bytes, model.slab_count * model.slab_bytes);
  EXPECT_EQ(stats.used_bytes, model.used_slabs() * model.slab_bytes);
  EXPECT_EQ(stats.used_bytes_max, counts.used_bytes_max);
  EXPECT_EQ(stats.held_bytes, model.held_bytes());
  EXPECT_EQ(stats.pushes, counts.pushes);
  EXPECT_EQ(stats.pushed_bytes, counts.pushed_bytes);
  EXPECT_EQ(stats.refused_pushes, counts.refused_pushes);
  EXPECT_EQ(stats.refused_bytes, counts.refused_bytes);
  EXPECT_EQ(stats.small_pushes, counts.small_pushes);
  EXPECT_EQ(stats.prefetches, counts.prefetches);
  EXPECT_EQ(stats.prefetched_bytes, counts.prefetched_bytes);
  EXPECT_EQ(stats.pops, counts.pops);
  EXPECT_EQ(stats.drops, counts.drops);
}

// Each call begins with this: a stash, and its model if it lives.
struct Picked {
  offload_stash_t stash;
  StashModel* model;
};

// `refuse` is called with a handle that is none.
template <typename Refuse>
Picked Pick(World& world, Refuse&& refuse) {
  const offload_stash_t stash = world.PickStash();
  const auto found = world.stashes.find(stash);
  if (found != world.stashes.end()) return {stash, &found->second};
  const int32_t status = refuse(stash);
  // Noise can look like a handle of another process.
  EXPECT_TRUE(status == OFFLOAD_INVALID_ARGUMENT || status == OFFLOAD_INVALID_STATE);
  world.Judge(status);
  return {stash, nullptr};
}

// ---------------------------------------------------------------------------- making and ending --

offload_stash_options_t DrawOptions(World& world, Reasons& reasons) {
  Random& random = world.random;
  auto options = Make<offload_stash_options_t>();
  options.struct_size = world.StructSize(sizeof(options));
  reasons.AddInvalid(options.struct_size != sizeof(options));
  options.lanes = random.OneOf<uint32_t>({0, 1, 2, 3});
  options.slab_bytes = random.OneOf<uint64_t>({4096, 4096, 8192});
  options.budget_bytes = 1 + random.Below(1 << 16);
  options.min_bytes = random.OneOf<uint64_t>({1, 1, 100, 0});
  options.tickets_max = random.OneOf<uint32_t>({0, 0, 1, 3, 40});
  if (random.Chance(4)) options.lanes = random.OneOf<uint32_t>({4097, UINT32_MAX});
  if (random.Chance(4)) options.slab_bytes = random.OneOf<uint64_t>({1, 5000, UINT64_MAX});
  if (random.Chance(4)) options.budget_bytes = random.OneOf<uint64_t>({0, UINT64_MAX});
  if (random.Chance(4)) options.tickets_max = random.OneOf<uint32_t>({65537, UINT32_MAX});
  if (random.Chance(2) || world.stashes.size() >= kStashesMax) options.reserved = 1;
  reasons.AddInvalid(options.lanes > 4096 || options.slab_bytes % 4096 != 0 ||
                     options.budget_bytes - 1 >= 1 << 16 || options.tickets_max > 65536);
  reasons.Add(options.reserved != 0, OFFLOAD_UNSUPPORTED);
  return options;
}

StashModel ModelOf(World& world, offload_context_t context,
                   const offload_stash_options_t& options) {
  StashModel model{};
  model.context = context;
  model.slab_bytes = options.slab_bytes;
  model.slab_count = (options.budget_bytes + options.slab_bytes - 1) / options.slab_bytes;
  model.min_bytes = options.min_bytes != 0 ? options.min_bytes : 1 << 20;
  model.tickets_max = options.tickets_max != 0 ? options.tickets_max : model.slab_count;
  model.lane_pushes.resize(std::max(1u, options.lanes));
  if (world.IsDoomed(context)) return model;
  for (auto* arrays : {&model.sources, &model.destinations})
    for (int i = 0; i < 2; ++i) {
      void* data = nullptr;
      if (world.Judge(offload_device_alloc(context, kArrayBytes, &data), context))
        arrays->push_back(data);
    }
  for (void* source : model.sources) {
    std::vector<unsigned char>& bytes = model.contents[source];
    bytes.resize(kArrayBytes);
    FillPattern(bytes, OFFLOAD_BF16, world.random.Next());
    EXPECT_OFFLOAD_OK(offload_device_upload(context, source, bytes.data(), kArrayBytes, nullptr));
  }
  return model;
}

void Plan(World& world) {
  const offload_context_t context = world.PickContext();
  Reasons reasons;
  const offload_stash_options_t options = DrawOptions(world, reasons);
  auto plan = Make<offload_stash_plan_t>();
  plan.struct_size = world.StructSize(sizeof(plan));
  reasons.AddInvalid(plan.struct_size != sizeof(plan));
  const int32_t status = offload_stash_plan(context, &options, &plan);
  if (world.Find(context) == nullptr) {
    world.Judge(status, context);
  } else if (Judge(world, status, context, reasons)) {
    EXPECT_EQ(plan.slab_count * plan.slab_bytes, plan.slabs_bytes);
    EXPECT_GE(plan.slabs_bytes, options.budget_bytes);
    EXPECT_LT(plan.slabs_bytes, options.budget_bytes + options.slab_bytes);
  }
}

void Create(World& world) {
  const offload_context_t context = world.PickContext();
  if (world.IsDoomed(context)) return;
  Reasons reasons;
  const offload_stash_options_t options = DrawOptions(world, reasons);
  offload_stash_t stash = nullptr;
  auto plan = Make<offload_stash_plan_t>();
  // A stash may not pin more than the context's limit.
  reasons.AddInvalid(offload_stash_plan(context, &options, &plan) == OFFLOAD_OK && plan.fits == 0);
  const bool taken = world.random.Chance(98);
  reasons.AddInvalid(!taken);
  const int32_t status = offload_stash_create(context, &options, taken ? &stash : nullptr);
  if (world.Find(context) == nullptr) {
    world.Judge(status, context);
    return;
  }
  if (!Judge(world, status, context, reasons)) return;
  world.contexts.at(context).stashes += 1;
  world.stashes.emplace(stash, ModelOf(world, context, options));
}

void Destroy(World& world) {
  const auto [stash, model] = Pick(world, offload_stash_destroy);
  if (model == nullptr) return;
  EXPECT_OFFLOAD_OK(offload_stash_destroy(stash));
  world.Judge(OFFLOAD_OK);
  for (auto* arrays : {&model->sources, &model->destinations})
    for (void* data : *arrays) {
      const int32_t status = offload_device_free(model->context, data);
      EXPECT_TRUE(status == OFFLOAD_OK || world.IsDoomed(model->context)) << offload_last_error();
    }
  world.contexts.at(model->context).stashes -= 1;
  world.stashes.erase(stash);
  world.dead_stashes.push_back(stash);
}

// ---------------------------------------------------------------------------- forward, backward --

void Push(World& world) {
  Random& random = world.random;
  const auto [stash, model] = Pick(world, [](offload_stash_t none) {
    return offload_stash_push(none, 0, nullptr, 1, nullptr, nullptr);
  });
  if (model == nullptr) return;
  Reasons reasons;
  const offload_stream_t stream = DrawStream(world, model->context, reasons);
  const auto lane =
      static_cast<uint32_t>(random.Below(model->lane_pushes.size() + random.OneIn(20)));
  reasons.AddInvalid(lane >= model->lane_pushes.size());
  const uint64_t bytes = random.Below(random.Chance(70) ? 200 : kArrayBytes + 1);
  const bool is_small = bytes < model->min_bytes, taken = random.Chance(98);
  reasons.AddInvalid(!taken);
  Reasons unread;  // the memory of a push that is too small is not looked at
  void* const data = DrawMemory(world, *model, model->sources, bytes, is_small ? unread : reasons);
  offload_stash_ticket_t ticket = 77;
  const int32_t status =
      offload_stash_push(stash, lane, data, bytes, stream, taken ? &ticket : nullptr);
  if (!Judge(world, status, model->context, reasons)) return;
  const uint64_t slabs = (bytes + model->slab_bytes - 1) / model->slab_bytes;
  const bool has_room =
      model->used_slabs() + slabs <= model->slab_count && model->live.size() < model->tickets_max;
  EXPECT_EQ(ticket != 0, !is_small && has_room);
  offload_stash_stats_t& counts = model->counts;
  counts.small_pushes += is_small;
  counts.refused_pushes += !is_small && ticket == 0;
  counts.refused_bytes += !is_small && ticket == 0 ? bytes : 0;
  if (ticket == 0 || testing::Test::HasFailure()) return;
  EXPECT_TRUE(model->Find(ticket) == model->live.end());
  EXPECT_EQ(std::count(model->ended.begin(), model->ended.end(), ticket), 0);
  model->live.push_back({ticket, lane, ++model->lane_pushes[lane], model->ContentAt(data, bytes)});
  counts.pushes += 1;
  counts.pushed_bytes += bytes;
  counts.used_bytes_max = std::max(counts.used_bytes_max, model->used_slabs() * model->slab_bytes);
}

void Release(World& world) {
  const auto [stash, model] =
      Pick(world, [](offload_stash_t none) { return offload_stash_release(none, 1, nullptr); });
  if (model == nullptr) return;
  Reasons reasons;
  const offload_stream_t stream = DrawStream(world, model->context, reasons);
  const offload_stash_ticket_t ticket = DrawTicket(world, *model, reasons);
  Judge(world, offload_stash_release(stash, ticket, stream), model->context, reasons);
}

void Prefetch(World& world) {
  Random& random = world.random;
  const auto [stash, model] = Pick(world, [](offload_stash_t none) {
    return offload_stash_prefetch(none, 1, nullptr, 1, nullptr);
  });
  if (model == nullptr) return;
  Reasons reasons;
  const offload_stream_t stream = DrawStream(world, model->context, reasons);
  const offload_stash_ticket_t ticket = DrawTicket(world, *model, reasons);
  const auto found = model->Find(ticket);
  const bool lives = found != model->live.end();
  const uint64_t bytes = lives ? found->bytes.size() : 100;
  const uint64_t room = random.Chance(95) ? bytes : bytes - 1;
  reasons.AddInvalid(room < bytes);
  reasons.Add(lives && found->destination != nullptr, OFFLOAD_INVALID_STATE);
  void* const data = DrawMemory(world, *model, model->destinations, bytes, reasons);
  const int32_t status = offload_stash_prefetch(stash, ticket, data, room, stream);
  if (!Judge(world, status, model->context, reasons) || testing::Test::HasFailure()) return;
  found->destination = data;
  model->prefetched_last = ticket;
  model->counts.prefetches += 1;
  model->counts.prefetched_bytes += bytes;
}

void Pop(World& world) {
  Random& random = world.random;
  const auto [stash, model] =
      Pick(world, [](offload_stash_t none) { return offload_stash_pop(none, 1, nullptr, 0); });
  if (model == nullptr) return;
  Reasons reasons;
  const offload_stream_t stream = DrawStream(world, model->context, reasons);
  const offload_stash_ticket_t ticket = DrawTicket(world, *model, reasons);
  const auto found = model->Find(ticket);
  const bool lives = found != model->live.end();
  reasons.Add(lives && found->destination == nullptr, OFFLOAD_INVALID_STATE);
  const uint32_t flags = random.Chance(97) ? static_cast<uint32_t>(random.Below(2))
                                           : random.OneOf<uint32_t>({2, UINT32_MAX});
  reasons.Add((flags & ~uint32_t{OFFLOAD_STASH_KEEP}) != 0, OFFLOAD_UNSUPPORTED);
  const int32_t status = offload_stash_pop(stash, ticket, stream, flags);
  if (!Judge(world, status, model->context, reasons) || testing::Test::HasFailure()) return;
  void* const destination = std::exchange(found->destination, nullptr);
  model->counts.pops += 1;
  const std::vector<unsigned char> expected = found->bytes;
  if (flags == 0) model->End(found);
  // The bytes of a later prefetch may lie there.
  if (ticket != model->prefetched_last || world.IsDoomed(model->context)) return;
  std::vector<unsigned char> got(expected.size());
  EXPECT_OFFLOAD_OK(
      offload_device_download(model->context, got.data(), destination, got.size(), stream));
  EXPECT_TRUE(got == expected) << got.size() << " bytes came back as others";
  world.popped += 1;
}

// ---------------------------------------------------------------------------- what nobody needs --

void Drop(World& world) {
  const auto [stash, model] =
      Pick(world, [](offload_stash_t none) { return offload_stash_drop(none, 1, nullptr); });
  if (model == nullptr) return;
  Reasons reasons;
  const offload_stream_t stream = DrawStream(world, model->context, reasons);
  const offload_stash_ticket_t ticket = DrawTicket(world, *model, reasons);
  const int32_t status = offload_stash_drop(stash, ticket, stream);
  if (!Judge(world, status, model->context, reasons) || testing::Test::HasFailure()) return;
  model->End(model->Find(ticket));
  model->counts.drops += 1;
}

void TakeMark(World& world) {
  const auto [stash, model] =
      Pick(world, [](offload_stash_t none) { return offload_stash_mark(none, 0, nullptr); });
  if (model == nullptr) return;
  Reasons reasons;
  const size_t lanes = model->lane_pushes.size();
  const auto lane = static_cast<uint32_t>(world.random.Below(lanes + world.random.OneIn(10)));
  const bool taken = world.random.Chance(95);
  reasons.AddInvalid(lane >= lanes || !taken);
  offload_stash_mark_t mark = 0;
  const int32_t status = offload_stash_mark(stash, lane, taken ? &mark : nullptr);
  if (Judge(world, status, model->context, reasons) && !testing::Test::HasFailure())
    model->marks.push_back({mark, lane, model->lane_pushes[lane]});
}

void Rollback(World& world) {
  Random& random = world.random;
  const auto [stash, model] =
      Pick(world, [](offload_stash_t none) { return offload_stash_rollback(none, 1, nullptr); });
  if (model == nullptr) return;
  Reasons reasons;
  const offload_stream_t stream = DrawStream(world, model->context, reasons);
  const bool good = !model->marks.empty() && random.Chance(90);
  const auto drawn = good ? model->marks[random.Below(model->marks.size())]
                          : StashModel::Mark{random.OneOf<uint64_t>({0, 1, UINT64_MAX}), 0, 0};
  reasons.AddInvalid(!good);
  const int32_t status = offload_stash_rollback(stash, drawn.mark, stream);
  if (!Judge(world, status, model->context, reasons) || testing::Test::HasFailure()) return;
  for (size_t i = model->live.size(); i-- > 0;) {
    const Ticket& ticket = model->live[i];
    if (ticket.lane != drawn.lane || ticket.order <= drawn.pushes) continue;
    model->End(model->live.begin() + static_cast<ptrdiff_t>(i));
    model->counts.drops += 1;
  }
}

// -------------------------------------------------------------------------------------- looking --

void Wait(World& world) {
  const auto [stash, model] =
      Pick(world, [](offload_stash_t none) { return offload_stash_wait(none, 0, 0); });
  if (model == nullptr) return;
  Reasons reasons;
  const auto timeout_ns = world.random.OneOf<int64_t>({0, 1000, -1, INT64_MAX});
  offload_stash_ticket_t ticket = 0;
  if (world.random.Chance(60)) ticket = DrawTicket(world, *model, reasons);
  if (ticket == 0) reasons = {};
  const int32_t status = offload_stash_wait(stash, ticket, timeout_ns);
  if (status == OFFLOAD_TIMED_OUT) reasons.Add(timeout_ns >= 0 && timeout_ns <= 1000, status);
  Judge(world, status, model->context, reasons);
}

void Stats(World& world) {
  const auto [stash, model] =
      Pick(world, [](offload_stash_t none) { return offload_stash_get_stats(none, nullptr); });
  if (model == nullptr) return;
  Reasons reasons;
  auto stats = Make<offload_stash_stats_t>();
  stats.struct_size = world.StructSize(sizeof(stats));
  reasons.AddInvalid(stats.struct_size != sizeof(stats));
  Judge(world, offload_stash_get_stats(stash, &stats), model->context, reasons);
  CompareStats(world, stash);
}

constexpr Call kCalls[] = {
    {"stash_plan", Plan, 1},         {"stash_create", Create, 2},   {"stash_destroy", Destroy, 1},
    {"stash_push", Push, 12},        {"stash_release", Release, 4}, {"stash_prefetch", Prefetch, 8},
    {"stash_pop", Pop, 10},          {"stash_drop", Drop, 3},       {"stash_mark", TakeMark, 2},
    {"stash_rollback", Rollback, 1}, {"stash_wait", Wait, 5},       {"stash_get_stats", Stats, 5},
};

}  // namespace

std::span<const Call> StashCalls() { return kCalls; }

}  // namespace hybridopt::fault::random_calls
