// Transfer: the means with which a reader or writer of state copies: a stream, waits with a bound,
// and a little host memory for values that are converted on their way. If the device shares the
// host's memory, there is neither a stream nor such memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "machine/context.h"
#include "machine/pinned_room.h"

namespace hybridopt {

class Transfer {
 public:
  // The bytes of that host memory. With it a save or load takes less than 1 MiB in addition to its
  // blocks.
  static constexpr uint64_t kStagingBytes = uint64_t{512} << 10;

  Transfer() = default;
  // `work` names the user, such as "a save", in error texts.
  static Result<Transfer> Create(Context& context, const char* work);
  // If a copy does not end in time, the device keeps the memory that the copy may still touch. So
  // other memory that is copied to or from must live until the copy ends; the caller's memory need
  // not.
  ~Transfer();
  Transfer(Transfer&& other) noexcept { *this = std::move(other); }
  Transfer& operator=(Transfer&& other) noexcept;

  Context& context() const { return *context_; }
  StreamHandle stream() const { return stream_; }

  // Waits for an event, which errors call `what`.
  Status Await(EventHandle event, const char* what) const {
    return context_->AwaitEvent(event, work_, what);
  }
  // Copies to host memory and waits for the copy.
  Status CopyDown(void* host, const void* device, uint64_t bytes);
  // Queues a copy to the device.
  Status CopyUp(void* device, const void* host, uint64_t bytes);
  // Queues a Fill of device memory.
  Status Fill(void* device, uint64_t count, const Pattern& pattern);
  // Waits for the queued work. Then the memory that it read may be written again.
  Status AwaitUp();

  // Returns a part of the host memory, aligned for any type, for values that CopyUp will copy from
  // there. If there is no other room, waits for earlier copies. `bytes` is at most kStagingBytes.
  Result<std::byte*> Stage(uint64_t bytes);
  // All of the host memory, as the destination of CopyDown. Not to be used while values are staged.
  std::byte* staging() const { return staging_.data(); }

 private:
  Status AwaitCopies(const char* what);

  Context* context_ = nullptr;
  const char* work_ = nullptr;
  PinnedRoom staging_;
  StreamHandle stream_ = nullptr;
  EventHandle copied_ = nullptr;
  uint64_t staged_bytes_ = 0;
  bool copying_ = false;  // copies to the device are queued
};

}  // namespace hybridopt
