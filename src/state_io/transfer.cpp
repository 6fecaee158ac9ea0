#include "state_io/transfer.h"

#include <utility>

#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint64_t kStagedAlignment = 64;

}  // namespace

Result<Transfer> Transfer::Create(Context& context, const char* work) {
  Transfer made;
  made.context_ = &context;
  made.work_ = work;
  if (context.device().unified()) return made;
  HYBRIDOPT_ASSIGN(made.staging_, PinnedRoom::TakeAnyway(context, kStagingBytes));
  HYBRIDOPT_ASSIGN(made.stream_, context.device().CreateStream("checkpoint"));
  HYBRIDOPT_ASSIGN(made.copied_, context.device().CreateEvent("state of a checkpoint copied"));
  return made;
}

Transfer::~Transfer() {
  if (stream_ != nullptr) context_->device().AbandonStream(stream_);
  if (copied_ != nullptr) context_->device().DestroyEvent(copied_);
}

Transfer& Transfer::operator=(Transfer&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(work_, other.work_);
  std::swap(staging_, other.staging_);
  std::swap(stream_, other.stream_);
  std::swap(copied_, other.copied_);
  std::swap(staged_bytes_, other.staged_bytes_);
  std::swap(copying_, other.copying_);
  return *this;
}

Status Transfer::CopyDown(void* host, const void* device, uint64_t bytes) {
  HYBRIDOPT_TRY(context_->device().CopyToHost(stream_, host, device, bytes));
  return AwaitCopies("state coming down");
}

Status Transfer::CopyUp(void* device, const void* host, uint64_t bytes) {
  copying_ = true;
  return context_->device().CopyToDevice(stream_, device, host, bytes);
}

Status Transfer::Fill(void* device, uint64_t count, const Pattern& pattern) {
  copying_ = true;
  return context_->device().Fill(stream_, device, count, pattern);
}

Status Transfer::AwaitUp() {
  staged_bytes_ = 0;
  if (!copying_) return {};
  copying_ = false;
  return AwaitCopies("state going up");
}

Status Transfer::AwaitCopies(const char* what) {
  HYBRIDOPT_TRY(context_->device().Record(copied_, stream_));
  return Await(copied_, what);
}

Result<std::byte*> Transfer::Stage(uint64_t bytes) {
  if (staged_bytes_ + bytes > kStagingBytes) HYBRIDOPT_TRY(AwaitUp());
  std::byte* const room = staging_.data() + staged_bytes_;
  staged_bytes_ += system::RoundUp(bytes, kStagedAlignment);
  return room;
}

}  // namespace hybridopt
