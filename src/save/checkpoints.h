// Checkpoints: an optimizer's saves and loads, over all its ranks. All functions run in turns of
// the timeline. A load ends in its own turn; a save goes on in the background (background_save.h).
#pragma once

#include <optional>
#include <vector>

#include "comm/comm.h"
#include "machine/timeline.h"
#include "save/agreement.h"
#include "save/background_save.h"
#include "save/load/loader.h"
#include "save/saver.h"

namespace hybridopt {

class Checkpoints {
 public:
  Checkpoints(Context& context, const Saver::Saved& saved, StepCounts& step_counts,
              const Comm& comm)
      : context_(context),
        saved_(saved),
        step_counts_(step_counts),
        comm_(comm),
        agreement_(comm),
        save_(context, comm_, agreement_) {}

  // Takes the buffer into which steps put aside what a save has still to read. Unless this has been
  // called, the first save takes it, if there is memory for it then.
  Status TakeBuffer() { return TakeBuffer(BufferBytes(saved_.table, saved_.shape)); }
  // The bytes of that buffer: pinned where the device has memory of its own.
  static uint64_t BufferBytes(const ParamTable& table, const StateShape& shape);
  // The most that a buffer of the library's own choice takes of free host memory: a quarter, which
  // the ranks of this machine share.
  static uint64_t AutoBufferBytes(const Context& context, uint64_t free_bytes) {
    return free_bytes / 4 / context.local_world();
  }
  void AddNodeBytes(NodeBytes* sum) const { buffer_.AddNodeBytes(sum); }

  // UNSUPPORTED if the names and shapes of the params do not fit into the head of a file.
  Status CheckRoom() const;

  // Begins a save, which completes in the background. A failure that concerns only the files is
  // reported to the timeline; a returned error poisons it.
  Status Save(SaveRequest request, EventHandle ready, Timeline& timeline, uint64_t sequence);

  // Loads, or changes nothing. A failure that concerns only the files is reported to the timeline;
  // a returned error poisons it.
  Status Load(const LoadRequest& request, EventHandle ready, Timeline& timeline, uint64_t sequence);

  // The running save, for which other work waits.
  BackgroundSave& save() { return save_; }

 private:
  Status Prepare(const LoadRequest& request, std::optional<Loader>* loader, Status* refusal);
  Status AgreeOnCheckpoint(const Loader& loader, std::vector<int32_t>* known,
                           Status* refusal) const;
  SavePoint PointOf(EventHandle ready) const;

  Status TakeBuffer(uint64_t bytes);
  void TakeBufferAtSave();
  std::span<std::byte> buffer() const { return {buffer_.data(), buffer_bytes_}; }

  Context& context_;
  const Saver::Saved saved_;
  StepCounts& step_counts_;
  const Comm& comm_;
  const Agreement agreement_;
  uint64_t buffer_bytes_ = 0;
  PinnedRoom buffer_;
  BackgroundSave save_;
};

}  // namespace hybridopt
