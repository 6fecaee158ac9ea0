//! The library's optimizer as a handle, and points on its timeline.

use hybridopt_sys as sys;

use crate::error::{check, Result};
use crate::report::{Plan, Stats, StepResult};

/// A point on an optimizer's timeline. Tickets complete in the order in which calls returned them,
/// except that later tickets do not wait for a save's. A ticket owns nothing: dropping it does not
/// affect the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(crate) u64);

/// The handle of the library's optimizer. Drop destroys the optimizer.
pub(crate) struct Handle(pub(crate) sys::offload_optimizer_t);

// SAFETY: the handle is a number, valid on every thread. `&self` and `&mut self` of the owners decide
// which calls may run at the same time.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Handle {
    pub(crate) fn plan(&mut self) -> Result<Plan> {
        let mut plan = sys::offload_plan_t::default();
        // SAFETY: the handle is alive and the struct whole.
        check(unsafe { sys::offload_optimizer_plan(self.0, &mut plan) })?;
        Ok(Plan::from(&plan))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is this object's own. After fork it is refused, and nothing runs.
        unsafe { sys::offload_optimizer_destroy(self.0) };
    }
}

pub(crate) fn step_result(handle: sys::offload_optimizer_t, ticket: Ticket) -> Result<StepResult> {
    let mut result = sys::offload_step_result_t::default();
    // SAFETY: the handle is alive and the struct whole. Any thread may ask.
    check(unsafe { sys::offload_optimizer_step_result(handle, ticket.0, &mut result) })?;
    Ok(StepResult::from(&result))
}

pub(crate) fn stats(handle: sys::offload_optimizer_t) -> Result<Stats> {
    let mut stats = sys::offload_stats_t::default();
    // SAFETY: as above.
    check(unsafe { sys::offload_optimizer_get_stats(handle, &mut stats) })?;
    Ok(Stats::from(&stats))
}
