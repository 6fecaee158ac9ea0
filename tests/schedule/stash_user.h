// StashUser: a thread that puts arrays aside in a stash, beside trainers of the same context and
// other users of the same stash, and checks that their bytes come back. It overwrites a pushed
// array as soon as that is allowed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "array.h"
#include "offload.h"
#include "problem.h"
#include "program.h"

namespace hybridopt::schedule {

// One stash, and the number of its users. The last user destroys it.
struct SharedStash {
  SharedStash(offload_context_t owner, uint32_t users);
  const offload_context_t context;
  offload_stash_t stash = nullptr;
  std::atomic<uint32_t> users_left;
  std::atomic<bool> destroyed = false;
};

class StashUser {
 public:
  // Uses the lane that is the script's number.
  StashUser(SharedStash& shared, const Script& script, bool may_fail);
  ~StashUser();
  StashUser(const StashUser&) = delete;
  StashUser& operator=(const StashUser&) = delete;

  void Run();

 private:
  // A live ticket and its memory.
  struct Item {
    offload_stash_ticket_t ticket;
    Bytes bytes;
    std::unique_ptr<Array> source;       // until the copy to the host is known to have ended
    std::unique_ptr<Array> destination;  // of a prefetch that has not been popped
    bool released = false;
  };

  void Do(const Call& call);
  void Push(uint64_t number);
  void Release(Item& item);
  void Prefetch(Item& item);
  void Pop(Item& item, bool keep);
  void Drop(Item& item);
  void Rollback();
  void Wait(Item& item, uint64_t number);
  void Synchronize();
  void End(Item& item);
  void Overwrite(const std::unique_ptr<Array>& array);
  void CompareOnStream(const Array& array, const Bytes& bytes);
  bool Done(const char* call, int32_t status);
  void Destroy();

  SharedStash& shared_;
  const Script& script_;
  const bool may_fail_;
  offload_stream_t stream_ = nullptr;
  offload_stash_mark_t mark_ = 0;
  std::vector<Item> items_;
  std::vector<std::unique_ptr<Array>> behind_stream_;  // the caller's when the stream is done
  uint64_t pushes_ = 0;
  bool failed_ = false;
};

}  // namespace hybridopt::schedule
