// ModelWork: what stands for a model's forward and backward pass: products of large bf16 matrices,
// and passes over memory as activations and norms make them. Products need cuBLAS, which is looked
// for when the program runs.
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

  // Runs once and gives the seconds by the device's clock: of all, of the products (0: none), of
  // the passes over memory.
  std::array<double, 3> Run();

 private:
  struct Parts;
  const std::unique_ptr<Parts> parts_;
};

// Speeds of a model's work beside steps whose state streams, and of these steps beside it, each as
// a part of its speed alone; one a round.
struct BesideStreams {
  Times all, products, passes, streams;
};
BesideStreams RunBesideStreams(ModelWork& work, Optimizer& streamed, uint32_t rounds);

}  // namespace bench
