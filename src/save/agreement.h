// Agreement: what the ranks of an optimizer do together, apart from steps. All ranks must make each
// of these calls, in a turn of their timeline.
#pragma once

#include <cstdint>

#include "base/function_ref.h"
#include "comm/comm.h"

namespace hybridopt {

class Agreement {
 public:
  explicit Agreement(const Comm& comm) : comm_(comm) {}

  // The interval at which a waiting rank takes part in the rounds of the others; -1 if there are no
  // other ranks.
  int64_t RoundNs() const;

  // Tells all ranks whether a rank has failed: a rank that has failed keeps its own *status; on the
  // others it becomes the failure of the last rank that failed. Returns an error if the ranks could
  // not communicate.
  Status OnFailure(Status* status) const;

  // Runs `part`, which may take longer on one rank than the timeout of a comm function. Until all
  // ranks have done their parts they meet in rounds, so that only a rank that has ended causes a
  // timeout. If there are other ranks `part` runs on another thread. `outcome` and the returned
  // status are those of OnFailure.
  Status DoTogether(FunctionRef<Status()> part, Status* outcome) const;

 private:
  const Comm& comm_;
};

}  // namespace hybridopt
