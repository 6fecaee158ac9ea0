// ModelWork stands for a model's forward and backward pass: products of large bf16 matrices, and
// passes over memory as activations and norms make them. The products need cuBLAS, which is loaded
// when the program runs.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "library.h"
#include "rounds.h"

namespace bench {

class ModelWork {
 public:
  ModelWork();
  ~ModelWork();

  bool products() const;
  const std::string& why_no_products() const;

  // Runs the work once. Returns three times in seconds by the device's clock: of all the work, of
  // the products (0: cuBLAS was not found), and of the passes over memory.
  std::array<double, 3> Run();

 private:
  struct Parts;
  const std::unique_ptr<Parts> parts_;
};

// While a model works and an optimizer whose state streams makes steps: the speed of each, as a
// fraction of its speed alone, with one entry for every round.
struct BesideStreams {
  Times all, products, passes, streams;
};
BesideStreams RunBesideStreams(ModelWork& work, Optimizer& streamed, uint32_t rounds);

}  // namespace bench
