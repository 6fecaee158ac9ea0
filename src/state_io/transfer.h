// Transfer: what one reader or writer of state copies with while it works: a stream, waits with a
// bound, and a little host memory for what is converted on its way. Where the device shares the
// host's memory there is neither stream nor memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "machine/context.h"
#include "machine/pinned_room.h"

namespace hybridopt {

class Transfer {
 public:
  // The memory that it takes. With it a save or load takes less than 1 MiB beside its blocks.
  static constexpr uint64_t kStagingBytes = uint64_t{512} << 10;

  Transfer() = default;
  // `work` is what copies, such as "a save", for error texts.
  static Result<Transfer> Create(Context& context, const char* work);
  // If a copy has not ended, the device keeps the memory that it may still touch. So memory that is
  // copied to or from must live until then; the caller's memory may not.
  ~Transfer();
  Transfer(Transfer&& other) noexcept { *this = std::move(other); }
  Transfer& operator=(Transfer&& other) noexcept;

  Context& context() const { return *context_; }
  StreamHandle stream() const { return stream_; }

  // Waits for an event; errors call it `what`.
  Status Await(EventHandle event, const char* what) const {
    return context_->AwaitEvent(event, work_, what);
  }
  // Copies to host memory and waits for that.
  Status CopyDown(void* host, const void* device, uint64_t bytes);
  // Queues a copy to the device.
  Status CopyUp(void* device, const void* host, uint64_t bytes);
  // Queues a Fill of device memory.
  Status Fill(void* device, uint64_t count, const Pattern& pattern);
  // Waits for what has been queued. The memory that it read may then be written again.
  Status AwaitUp();

  // A part of the memory, aligned for any type, for values that CopyUp takes from there. Waits for
  // earlier copies if there is no other room. `bytes` are at most kStagingBytes.
  Result<std::byte*> Stage(uint64_t bytes);
  // All of the memory, to copy down to; not while something is staged.
  std::byte* staging() const { return staging_.data(); }

 private:
  Status AwaitCopies(const char* what);

  Context* context_ = nullptr;
  const char* work_ = nullptr;
  PinnedRoom staging_;
  StreamHandle stream_ = nullptr;
  EventHandle copied_ = nullptr;
  uint64_t staged_bytes_ = 0;
  bool copying_ = false;  // copies up are queued
};

}  // namespace hybridopt
