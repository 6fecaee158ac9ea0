// The commands of the hybridopt tool. Each prints its result to standard output, as text or as one
// JSON object, and returns a status that main turns into an exit code.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/status.h"

namespace tool {

// Begin an object with Json::object(): where [] makes an object of null and memory is out, the
// destructor crashes (nlohmann 3.11.2).
using Json = nlohmann::ordered_json;
using hybridopt::Result;
using hybridopt::Status;

struct ListOptions {
  std::string directory;
};
struct NewestOptions {
  std::string directory;
  bool verify = false;  // also read the data
};
struct InspectOptions {
  std::string directory;
};
struct VerifyOptions {
  std::string directory;
};
struct ReshardOptions {
  std::string directory;
  std::string out;
  uint32_t world = 1;
};
struct ExportOptions {
  std::string directory;
  std::string out;
  std::string what = "master";
  std::string dtype = "fp32";
};

// The version of the JSON that doctor prints and plan reads.
inline constexpr uint32_t kDoctorVersion = 1;

struct DoctorOptions {
  std::string device;         // cuda, sim or none; empty: cuda where there is one
  std::string directory;      // the disk of this directory is measured; empty: no disk is
  uint64_t memory_bytes = 0;  // the memory limit; 0: an eighth of what is available
};

struct BenchOptions {
  std::string device;         // as for doctor
  uint64_t memory_bytes = 0;  // as for doctor
  double seconds = 30;        // the time limit, about; each row has at least three rounds
};

struct TraceOptions {
  std::string path;             // of the trace
  bool read = false;            // the file is there; nothing is recorded
  std::string params = "64M";   // a number or a model, as for plan
  uint32_t steps = 3;           // are recorded
  std::string device;           // as for doctor
  double offload_fraction = 1;  // of the state, on the host
  bool small_state = false;     // as for plan
};

struct PlanOptions {
  std::string model;    // a number, a name or a path
  uint32_t gpus = 1;    // the GPUs that share the model
  std::string machine;  // a file with doctor's output; empty: the machine's speed is unknown
  std::string algorithm = "adamw";
  std::string dtype = "bf16";  // of params and gradients
  // At most one of these is given.
  std::optional<double> offload_fraction;
  std::optional<double> device_fraction;
  bool small_state = false;   // split masters and bf16 moments
  std::string master_layout;  // of bf16 params; empty: "fp32", or "split" with small_state
  // The training around the optimizer.
  bool hook_gradients = false;     // gradients leave during the backward pass, into host memory
  uint64_t early_bytes = 0;        // on the host, for early updates
  uint64_t stash_bytes = 0;        // the budget of an activation stash
  uint64_t activations_bytes = 0;  // kept until the backward pass
  // The memory of another machine; 0: what is free on this one.
  uint64_t host_memory_bytes = 0;
  uint64_t device_memory_bytes = 0;
};

// The output of a command as text and as JSON. A command whose answer is no, such as that there is
// damage, has an output and also a status that is not OK.
struct Report {
  std::string text;
  Json json;
  Status status;
};

Result<Report> Info();
Result<Report> Doctor(const DoctorOptions& options);
Result<Report> Bench(const BenchOptions& options);
Result<Report> Trace(const TraceOptions& options);
Result<Report> Plan(const PlanOptions& options);
Result<Report> List(const ListOptions& options);
Result<Report> Newest(const NewestOptions& options);
Result<Report> Inspect(const InspectOptions& options);
Result<Report> Verify(const VerifyOptions& options);
Result<Report> Reshard(const ReshardOptions& options);
Result<Report> Export(const ExportOptions& options);

}  // namespace tool
