// Planner: computes the bytes of a training: of its state, and of the training around the
// optimizer.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "commands.h"
#include "handles.h"
#include "kernels/algorithms.h"
#include "kernels/dtypes.h"

namespace tool {

// How much state is on the host, and how it is stored.
struct StateChoice {
  double offload_fraction = 1;
  std::string masters;  // as --master-layout names it
  bool bf16_moments = false;
};

struct StateBytes {
  double host = 0;
  double pinned = 0;
  double device = 0;
  double ring = 0;   // part of the device's bytes
  double early = 0;  // part of the host's bytes
  double down = 0;   // a step
  double up = 0;
};

// The bytes of one rank outside of the optimizer. Gradients take as much as params.
struct TrainingBytes {
  uint64_t params = 0;
  uint64_t activations = 0;  // that stay on the device
  uint64_t early = 0;
  uint64_t stash = 0;
  uint64_t host = 0;  // all of it
  uint64_t device = 0;
};

// The values of --algorithm and --master-layout.
std::vector<std::string> AlgorithmNames();
std::vector<std::string> MasterLayoutNames();

uint64_t Rounded(double bytes);

class Planner {
 public:
  // INVALID_ARGUMENT names an option that is wrong.
  static Result<std::unique_ptr<Planner>> Make(const PlanOptions& options);

  // The bytes of the state of `elements` params. The rest after the fraction is on the device.
  Result<StateBytes> State(uint64_t elements, const StateChoice& choice);
  TrainingBytes Training(uint64_t elements, const StateBytes& state) const;

  const hybridopt::Algorithm& algorithm() const { return *algorithm_; }

 private:
  explicit Planner(const PlanOptions& options) : options_(options) {}
  Status TakeData(uint64_t bytes);
  Result<offload_plan_t> Plan(uint64_t elements, double device_fraction, const StateChoice& choice);
  Status AddShare(uint64_t elements, double device_fraction, const StateChoice& choice,
                  StateBytes& sum);

  const PlanOptions& options_;
  const hybridopt::Algorithm* algorithm_ = nullptr;
  const hybridopt::DtypeRow* dtype_ = nullptr;
  uint64_t stash_bytes_ = 0;
  Context context_;       // simulated
  void* data_ = nullptr;  // the address of every param that is planned
  uint64_t data_bytes_ = 0;
  std::map<std::tuple<uint64_t, double, std::string, bool>, offload_plan_t> plans_;
};

}  // namespace tool
