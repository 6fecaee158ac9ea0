// Agreement: what the ranks of an optimizer do together apart from its steps. Each call here is
// made by all of them, on the timeline's thread.
#pragma once

#include <cstdint>

#include "base/function_ref.h"
#include "comm/comm.h"

namespace hybridopt {

class Agreement {
 public:
  explicit Agreement(const Comm& comm) : comm_(comm) {}

  // How often a rank that cannot go on takes part in the others' rounds; -1 where there are none.
  int64_t RoundNs() const;

  // All ranks learn whether one has failed, and which and how: of several the last. What comes back
  // is a failure to ask.
  Status OnFailure(Status* status) const;

  // Does this rank's part of something that may take one rank longer than the others would wait:
  // until all have done theirs they meet in rounds, so that only a rank that is gone is missed. The
  // part runs on another thread if there are other ranks. Then as OnFailure.
  Status DoTogether(FunctionRef<Status()> part, Status* outcome) const;

 private:
  const Comm& comm_;
};

}  // namespace hybridopt
