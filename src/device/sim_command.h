// The commands of the simulated device's streams: plain data, the functions that execute them, and
// the sticky failure after which no command has an effect.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <variant>

#include "base/status.h"
#include "device/device.h"
#include "device/sim_memory.h"
#include "kernels/kernels.h"

namespace hybridopt {

class SimStream;

// The memory of an event. It is used again for other events, and freed only with the device,
// because records of destroyed events may still be queued.
struct SimEvent {
  std::mutex mutex;
  std::string label;
  uint64_t number = 0;  // of the latest record; a destruction counts as one too
  // The position of the latest record; no stream: never recorded. A later record does not affect
  // waits that have begun: they keep the position that they have read.
  const SimStream* stream = nullptr;
  uint64_t sequence = 0;
  int64_t time_ns = 0;  // when the stream reached the latest record
};

// The commands. A command owns no memory, so that queueing one allocates nothing.
namespace sim {

struct CopyToHost {
  static constexpr char kName[] = "CopyToHost";
  void* host;
  const void* device;
  uint64_t bytes;
};
struct CopyToDevice {
  static constexpr char kName[] = "CopyToDevice";
  void* device;
  const void* host;
  uint64_t bytes;
};
struct CopyRows {
  static constexpr char kName[] = "CopyRows";
  RowsCopy copy;
};
struct Fill {
  static constexpr char kName[] = "Fill";
  void* device;
  uint64_t count;
  Pattern pattern;
};
struct FollowParams {
  static constexpr char kName[] = "FollowParams";
  const void* params;
  int32_t dtype;
  uint64_t count;
  float* masters;
};
struct Norm {
  static constexpr char kName[] = "Norm";
  NormLaunch launch;
};
struct SetVerdict {
  static constexpr char kName[] = "SetVerdict";
  Verdict value;
  Verdict* device;
};
struct Update {
  static constexpr char kName[] = "Update";
  UpdateLaunch launch;
};
struct UpdateMatrices {
  static constexpr char kName[] = "UpdateMatrices";
  UpdateLaunch launch;
};
struct SurveyChanges {
  static constexpr char kName[] = "SurveyChanges";
  ChangeSurvey launch;
};
struct CollectChanges {
  static constexpr char kName[] = "CollectChanges";
  ChangeCollection launch;
};
struct Run {
  static constexpr char kName[] = "Run";
  offload_stream_function_t function;
  void* user;
};
struct Record {
  static constexpr char kName[] = "Record";
  SimEvent* event;
  uint64_t number;  // which record of that event
};
struct WaitStream {
  static constexpr char kName[] = "StreamWait";
  const SimStream* stream;
  uint64_t sequence;  // of the command on that stream to wait for
};
struct WaitFlag {
  static constexpr char kName[] = "StreamWaitFlag";
  const std::atomic<uint64_t>* flag;
  uint64_t value;
};

using Command =
    std::variant<CopyToHost, CopyToDevice, CopyRows, Fill, FollowParams, Norm, SetVerdict, Update,
                 UpdateMatrices, SurveyChanges, CollectChanges, Run, Record, WaitStream, WaitFlag>;

const char* NameOf(const Command& command);

}  // namespace sim

// The sticky state of one device. Once stopped, queued commands complete without effect, so that no
// thread waits for ever.
class SimFault {
 public:
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }
  // Records that a command on a stream has failed. The first cause is kept.
  void Fail(const char* command, const char* stream, const Status& cause);
  // To be called before the device is destroyed.
  void Stop() { stopped_.store(true, std::memory_order_release); }
  Status status() const;  // OK, or DEVICE_FAILED with the cause

 private:
  std::atomic<bool> stopped_ = false;
  mutable std::mutex mutex_;
  Status cause_;
};

// Executes commands. Addresses are checked when a command runs: with a bad one the command has no
// effect and the device fails.
class SimExecutor {
 public:
  SimExecutor(const SimMemory& memory, const KernelTable& kernels, const SimFault& fault)
      : memory_(memory), kernels_(kernels), fault_(fault) {}

  // Where a command waits for another stream, that wait ends when `abandoned` becomes true.
  Status Execute(const sim::Command& command, const std::atomic<bool>& abandoned) const;

 private:
  Status Apply(const sim::CopyToHost& copy) const;
  Status Apply(const sim::CopyToDevice& copy) const;
  Status Apply(const sim::CopyRows& rows) const;
  Status Apply(const sim::Fill& fill) const;
  Status Apply(const sim::FollowParams& follow) const;
  Status Apply(const sim::Norm& norm) const;
  Status Apply(const sim::SetVerdict& set) const;
  Status Apply(const sim::Update& update) const;
  Status Apply(const sim::UpdateMatrices& update) const;
  Status Apply(const sim::SurveyChanges& survey) const;
  Status Apply(const sim::CollectChanges& collect) const;
  Status Apply(const sim::Run& run) const;
  Status Apply(const sim::Record& record) const;
  Status Apply(const sim::WaitStream& wait, const std::atomic<bool>& abandoned) const;
  Status Apply(const sim::WaitFlag& wait, const std::atomic<bool>& abandoned) const;

  Result<void*> Locate(const char* what, const void* device, uint64_t count, uint64_t element_bytes,
                       uint64_t alignment) const;
  template <typename T>
  Result<T*> Locate(const char* what, T* device, uint64_t count) const;
  Result<void*> LocateArray(const char* what, const void* device, int32_t dtype,
                            uint64_t count) const;
  Result<UpdateSpan> LocateSpan(const DeviceUpdate& update) const;
  Result<NotedBits> LocateNoted(const DeviceUpdate& update) const;
  Result<void*> LocateWorkspace(const UpdateLaunch& launch, const MatrixShape& shape) const;
  Result<ChangePart> LocatePart(const ChangePart& part) const;
  Status WriteOutput(const ChangePart& part, uint64_t tile, uint64_t count, uint64_t first) const;

  // One input of a norm, at addresses that host code can access.
  struct NormBlocks {
    const void* grad;
    double* sums;
    uint64_t count;
  };
  Result<NormBlocks> LocateBlocks(const NormLaunch& launch, const NormInput& input) const;

  const SimMemory& memory_;
  const KernelTable& kernels_;
  const SimFault& fault_;
};

}  // namespace hybridopt
