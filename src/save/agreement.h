// Agreement: how the ranks of an optimizer act together outside of steps. All ranks must make each
// of these calls, in a turn of their timeline.
#pragma once

#include <cstdint>

#include "base/function_ref.h"
#include "comm/comm.h"

namespace hybridopt {

class Agreement {
 public:
  explicit Agreement(const Comm& comm) : comm_(comm) {}

  // While a rank waits, it takes part in the rounds of the ranks at this interval; -1 if there are
  // no other ranks.
  int64_t RoundNs() const;

  // Tells all ranks whether a rank has failed. A rank that has failed keeps its own *status. On the
  // other ranks *status becomes the failure of the failed rank with the highest number. Returns an
  // error if the ranks could not communicate.
  Status OnFailure(Status* status) const;

  // Runs `part`, which may take longer on one rank than the timeout of a comm function. Until all
  // ranks have done their parts they meet in rounds, so that only a rank that has died causes a
  // timeout. If there are other ranks, `part` runs on another thread. *outcome becomes what
  // OnFailure makes of the status of `part`; the returned status is that of OnFailure.
  Status DoTogether(FunctionRef<Status()> part, Status* outcome) const;

 private:
  const Comm& comm_;
};

}  // namespace hybridopt
