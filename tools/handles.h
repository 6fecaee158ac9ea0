// The library's handles as C++ objects, for commands that call the library instead of reading
// files.
#pragma once

#include "base/status.h"
#include "offload_simple.h"

namespace tool {

// The status that a call of the ABI returned, with its text in the words of this tool.
hybridopt::Status StatusOf(int32_t status);

class Context {
 public:
  Context() = default;
  ~Context() {
    if (handle_ != nullptr) (void)offload_context_destroy(handle_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  hybridopt::Status Create(const offload_context_options_t& options) {
    return StatusOf(offload_context_create(&options, &handle_));
  }
  offload_context_t get() const { return handle_; }

 private:
  offload_context_t handle_ = nullptr;
};

class Optimizer {
 public:
  Optimizer() = default;
  ~Optimizer() {
    if (handle_ != nullptr) (void)offload_optimizer_destroy(handle_);
  }
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  hybridopt::Status Create(const Context& context, const offload_optimizer_options_t& options) {
    return StatusOf(offload_optimizer_create(context.get(), &options, &handle_));
  }
  offload_optimizer_t get() const { return handle_; }

 private:
  offload_optimizer_t handle_ = nullptr;
};

class Stash {
 public:
  Stash() = default;
  ~Stash() { Destroy(); }
  Stash(const Stash&) = delete;
  Stash& operator=(const Stash&) = delete;

  hybridopt::Status Create(const Context& context, const offload_stash_options_t& options) {
    return StatusOf(offload_stash_create(context.get(), &options, &handle_));
  }
  void Destroy() {
    if (handle_ != nullptr) (void)offload_stash_destroy(handle_);
    handle_ = nullptr;
  }
  offload_stash_t get() const { return handle_; }

 private:
  offload_stash_t handle_ = nullptr;
};

}  // namespace tool
