#include "stash_user.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "scheduler.h"

namespace hybridopt::schedule {
namespace {

constexpr uint64_t kSlabBytes = 4096;
constexpr uint64_t kSlabs = 6;
constexpr uint64_t kItemsMax = 6;
constexpr uint64_t kElementsMax = 2500;  // of 4 bytes: up to three slabs

// A function on a stream that compares an array there.
struct Comparison {
  const void* mapped;
  Bytes expected;

  static void Run(void* comparison) {
    const std::unique_ptr<Comparison> self(static_cast<Comparison*>(comparison));
    if (std::memcmp(self->mapped, self->expected.data(), self->expected.size()) != 0)
      Fail("a stash gives " + std::to_string(self->expected.size()) + " bytes back as others");
  }
};

}  // namespace

SharedStash::SharedStash(offload_context_t owner, uint32_t users)
    : context(owner), users_left(users) {
  auto options = Make<offload_stash_options_t>();
  options.lanes = users;
  options.budget_bytes = kSlabs * kSlabBytes;
  options.slab_bytes = kSlabBytes;
  options.min_bytes = 1;
  if (offload_stash_create(owner, &options, &stash) != OFFLOAD_OK)
    Fail(std::string("stash_create: ") + offload_last_error());
}

StashUser::StashUser(SharedStash& shared, const Script& script, bool may_fail)
    : shared_(shared), script_(script), may_fail_(may_fail) {}

StashUser::~StashUser() = default;

// Whether a call was done. Only a device that fails may refuse one.
bool StashUser::Done(const char* call, int32_t status) {
  if (status == OFFLOAD_OK) return true;
  const bool is_failure = status == OFFLOAD_DEVICE_FAILED || status == OFFLOAD_POISONED;
  if (!may_fail_ || !is_failure)
    Fail("a user of the stash: " + std::string(call) + " returns " + offload_status_name(status) +
         " (" + offload_last_error() + ")");
  failed_ = true;
  return false;
}

void StashUser::Run() {
  try {
    Done("stream_create", offload_stream_create(shared_.context, &stream_));
    Done("stash_mark", offload_stash_mark(shared_.stash, script_.trainer, &mark_));
    for (const Call& call : script_.calls)
      if (!failed_) Do(call);
  } catch (const DeviceFailed&) {
    if (!may_fail_) Fail("a user of the stash: the device has failed");
  }
  Destroy();
}

void StashUser::Do(const Call& call) {
  if (call.kind == Kind::kPush) return Push(call.number);
  if (call.kind == Kind::kRollback) return Rollback();
  if (call.kind == Kind::kSynchronize) return Synchronize();
  if (items_.empty()) return;
  Item& item = items_[call.number / 2 % items_.size()];
  switch (call.kind) {
    case Kind::kRelease:
      return Release(item);
    case Kind::kPrefetch:
      return Prefetch(item);
    case Kind::kPop:
      return Pop(item, call.number % 4 == 1);
    case Kind::kDrop:
      return Drop(item);
    case Kind::kWaitForStash:
      return Wait(item, call.number);
    default:
      return;
  }
}

// ------------------------------------------------------------------------------------ the calls --

// The stream writes the array, and the copy follows.
void StashUser::Push(uint64_t number) {
  if (items_.size() == kItemsMax) return;
  const uint64_t bytes = 4 * (1 + number * 37 % kElementsMax);
  Item item{0, Pattern(bytes / 4, OFFLOAD_FP32, 5000 + 100 * script_.trainer + pushes_++),
            std::make_unique<Array>(shared_.context, true, bytes), nullptr};
  item.source->Write(item.bytes, stream_);
  if (!Done("stash_push", offload_stash_push(shared_.stash, script_.trainer, item.source->data(),
                                             bytes, stream_, &item.ticket)))
    return behind_stream_.push_back(std::move(item.source));
  if (item.ticket == 0)  // no room because of other users' pushes
    behind_stream_.push_back(std::move(item.source));
  else
    items_.push_back(std::move(item));
}

// Only the stream may write to it.
void StashUser::Overwrite(const std::unique_ptr<Array>& array) {
  if (array != nullptr) array->Write(Bytes(4, 0x5a), stream_);
}

void StashUser::Release(Item& item) {
  if (item.source == nullptr) return;
  if (!Done("stash_release", offload_stash_release(shared_.stash, item.ticket, stream_))) return;
  Overwrite(item.source);
  behind_stream_.push_back(std::move(item.source));
}

void StashUser::Prefetch(Item& item) {
  if (item.destination != nullptr) return;
  auto array = std::make_unique<Array>(shared_.context, true, item.bytes.size());
  array->Write(Bytes(item.bytes.size(), 0x77), stream_);  // the copy follows
  item.destination = std::move(array);
  Done("stash_prefetch",
       offload_stash_prefetch(shared_.stash, item.ticket, item.destination->data(),
                              item.bytes.size(), stream_));
}

void StashUser::CompareOnStream(const Array& array, const Bytes& bytes) {
  void* mapped = nullptr;
  if (!Done("device_map", offload_device_map(shared_.context, array.data(), bytes.size(), &mapped)))
    return;
  Done("stream_run", offload_stream_run(shared_.context, stream_, Comparison::Run,
                                        new Comparison{mapped, bytes}));
}

void StashUser::Pop(Item& item, bool keep) {
  if (item.destination == nullptr) return;
  const uint32_t flags = keep ? OFFLOAD_STASH_KEEP : 0;
  if (!Done("stash_pop", offload_stash_pop(shared_.stash, item.ticket, stream_, flags))) return;
  CompareOnStream(*item.destination, item.bytes);
  Overwrite(item.source);
  if (!keep) return End(item);
  Overwrite(item.destination);
  // A wait for the ticket does not wait for what the stream still writes.
  for (auto* array : {&item.source, &item.destination})
    if (*array != nullptr) behind_stream_.push_back(std::move(*array));
}

void StashUser::Drop(Item& item) {
  if (!Done("stash_drop", offload_stash_drop(shared_.stash, item.ticket, stream_))) return;
  Overwrite(item.source);
  Overwrite(item.destination);
  End(item);
}

void StashUser::Rollback() {
  if (!Done("stash_rollback", offload_stash_rollback(shared_.stash, mark_, stream_))) return;
  while (!items_.empty()) {
    Overwrite(items_.back().source);
    Overwrite(items_.back().destination);
    End(items_.back());
  }
}

void StashUser::End(Item& item) {
  for (auto* array : {&item.source, &item.destination})
    if (*array != nullptr) behind_stream_.push_back(std::move(*array));
  items_.erase(items_.begin() + (&item - items_.data()));
}

// Waits for the push. Afterwards its source may be freed without a release.
void StashUser::Wait(Item& item, uint64_t number) {
  const int64_t timeout_ns = number % 2 == 0 ? -1 : int64_t{1000} << number % 16;
  const int32_t status = offload_stash_wait(shared_.stash, item.ticket, timeout_ns);
  if (status == OFFLOAD_TIMED_OUT && timeout_ns >= 0) return;
  if (Done("stash_wait", status)) item.source.reset();
}

void StashUser::Synchronize() {
  if (Done("stream_synchronize", offload_stream_synchronize(shared_.context, stream_, -1)))
    behind_stream_.clear();
}

// ------------------------------------------------------------------------------------- the end --

// The last user destroys the stash, while copies may be under way and another user may wait. Then
// the caller may use all memory that was given to the stash.
void StashUser::Destroy() {
  if (stream_ != nullptr) (void)offload_stream_synchronize(shared_.context, stream_, -1);
  if (shared_.users_left.fetch_sub(1) > 1) {
    const int32_t status = offload_stash_wait(shared_.stash, 0, -1);
    if (status != OFFLOAD_INVALID_STATE && status != OFFLOAD_INVALID_ARGUMENT)
      Done("stash_wait for all", status);
    shared_.destroyed.wait(false);
  } else {
    const int32_t status = offload_stash_destroy(shared_.stash);
    if (status != OFFLOAD_OK) Fail(std::string("stash_destroy: ") + offload_last_error());
    shared_.destroyed = true;
    shared_.destroyed.notify_all();
  }
  items_.clear();
  behind_stream_.clear();
  if (stream_ != nullptr) (void)offload_stream_destroy(shared_.context, stream_);
}

}  // namespace hybridopt::schedule
