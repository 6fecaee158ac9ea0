// CheckpointStream: the stream on which a running save or load copies state, and the waits for it.
// There is no stream if the device shares the host's memory.
#pragma once

#include <utility>

#include "machine/context.h"

namespace hybridopt {

class CheckpointStream {
 public:
  CheckpointStream() = default;
  // `work` is "a save" or "a load", for error texts.
  static Result<CheckpointStream> Create(Context& context, const char* work) {
    CheckpointStream made;
    made.context_ = &context;
    made.work_ = work;
    if (context.device().unified()) return made;
    HYBRIDOPT_ASSIGN(made.stream_, context.device().CreateStream("checkpoint"));
    HYBRIDOPT_ASSIGN(made.copied_, context.device().CreateEvent("state of a checkpoint copied"));
    return made;
  }
  // If a copy has not ended, the device keeps the memory that it may still touch.
  ~CheckpointStream() {
    if (stream_ != nullptr) context_->device().AbandonStream(stream_);
    if (copied_ != nullptr) context_->device().DestroyEvent(copied_);
  }
  CheckpointStream(CheckpointStream&& other) noexcept { *this = std::move(other); }
  CheckpointStream& operator=(CheckpointStream&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(work_, other.work_);
    std::swap(stream_, other.stream_);
    std::swap(copied_, other.copied_);
    return *this;
  }

  StreamHandle handle() const { return stream_; }

  // Waits for an event; errors call it `what`.
  Status Await(EventHandle event, const char* what) {
    return context_->AwaitEvent(event, work_, what);
  }
  // Waits for the copies that have been queued.
  Status AwaitCopies(const char* what) {
    HYBRIDOPT_TRY(context_->device().Record(copied_, stream_));
    return Await(copied_, what);
  }

 private:
  Context* context_ = nullptr;
  const char* work_ = nullptr;
  StreamHandle stream_ = nullptr;
  EventHandle copied_ = nullptr;
};

}  // namespace hybridopt
