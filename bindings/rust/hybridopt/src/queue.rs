//! Calls that only queue work, and tickets to wait for.

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hybridopt_sys as sys;

use crate::contain::Payload;
use crate::context::timeout_ns;
use crate::device::Stream;
use crate::error::{check, Result};
use crate::memory::Memory;
use crate::optimizer::{stats, step_result, Handle, Optimizer, StepOptions};
use crate::param::ParamId;
use crate::report::{Stats, StepResult};

/// A point on an optimizer's timeline; tickets complete in the order they were given out, but for a
/// save's, which later ones do not wait for. It holds nothing: to forget it forgets no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(crate) u64);

/// What queued work needs until it is done.
pub(crate) enum Keep<'a> {
    /// An address that the library gives up.
    #[allow(dead_code)] // kept alive, not looked at
    Memory(Memory<'a>),
    /// A progress closure that the library calls.
    Progress(Arc<Progress>, PhantomData<ProgressFunction<'a>>),
}

// SAFETY: the closure is behind a mutex; the marker holds nothing.
unsafe impl Sync for Keep<'_> {}

impl Keep<'_> {
    pub(crate) fn progress(progress: Arc<Progress>) -> Self {
        Keep::Progress(progress, PhantomData)
    }

    pub(crate) fn take_panic(&self) -> Option<Payload> {
        match self {
            Keep::Memory(_) => None,
            Keep::Progress(progress, _) => progress.take_panic(),
        }
    }
}

/// A closure that is told bytes done and bytes in total.
pub(crate) type ProgressFunction<'p> = Box<dyn FnMut(u64, u64) + Send + 'p>;

/// One that the library calls, from whatever thread.
pub(crate) struct Progress(Mutex<ProgressState>);

struct ProgressState {
    function: ProgressFunction<'static>,
    panic: Option<Payload>,
    silent: bool,
}

impl Progress {
    /// # Safety
    /// The result ends before what the closure borrows.
    pub(crate) unsafe fn new(function: ProgressFunction<'_>) -> Arc<Self> {
        // SAFETY: only the lifetime changes; the rest is the caller's promise.
        let function = unsafe {
            std::mem::transmute::<ProgressFunction<'_>, ProgressFunction<'static>>(function)
        };
        Arc::new(Progress(Mutex::new(ProgressState { function, panic: None, silent: false })))
    }

    /// What the closure panicked with, once.
    pub(crate) fn take_panic(&self) -> Option<Payload> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).panic.take()
    }

    /// Calls the closure; after a panic never again.
    pub(crate) fn call(&self, done: u64, total: u64) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.silent {
            return;
        }
        let state = &mut *state;
        if let Err(payload) = crate::contain::contain(|| (state.function)(done, total)) {
            state.silent = true;
            state.panic = Some(payload);
        }
    }
}

/// An optimizer inside [`Optimizer::queue`]: calls return at once, and the work is done in their
/// order.
pub struct Queue<'q, 'a> {
    pub(crate) optimizer: &'q mut Optimizer<'a>,
}

impl<'q, 'a> Queue<'q, 'a> {
    pub(crate) fn handle(&self) -> sys::offload_optimizer_t {
        self.optimizer.handle.0
    }

    /// One update of every param that has a gradient. Up to 8 steps may be queued.
    pub fn step(&mut self, options: &StepOptions<'_>) -> Result<Ticket> {
        let mut ticket = 0;
        // SAFETY: the handle is alive, the struct whole; params and gradients are out of reach
        // until the end of the scope.
        check(unsafe { sys::offload_optimizer_step(self.handle(), &options.raw(), &mut ticket) })?;
        Ok(Ticket(ticket))
    }

    /// Waits until the ticket's work is done. `TimedOut` says that it goes on; None is no limit.
    pub fn wait(&self, ticket: Ticket, timeout: Option<Duration>) -> Result<()> {
        self.waiter().wait(ticket, timeout)
    }

    /// What a completed step did.
    pub fn step_result(&self, ticket: Ticket) -> Result<StepResult> {
        step_result(self.handle(), ticket)
    }

    /// Totals since create, and what is held now.
    pub fn stats(&self) -> Result<Stats> {
        stats(self.handle())
    }

    /// For other threads to wait with.
    pub fn waiter(&self) -> Waiter<'q> {
        Waiter { handle: self.handle(), queue: PhantomData }
    }

    /// Makes later work on the stream wait until the params (none named: all) hold the values of
    /// the ticket.
    pub fn stream_wait(
        &mut self,
        ticket: Ticket,
        stream: &Stream<'_>,
        params: &[ParamId],
    ) -> Result<()> {
        let ids: Vec<u32> = params.iter().map(|id| id.0).collect();
        // SAFETY: the handle is alive, `ids` as long as said.
        check(unsafe {
            sys::offload_optimizer_stream_wait(
                self.handle(),
                ticket.0,
                stream.raw,
                if ids.is_empty() { std::ptr::null() } else { ids.as_ptr() },
                ids.len() as u32,
            )
        })
    }
}

impl fmt::Debug for Queue<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("optimizer", &self.optimizer).finish()
    }
}

/// Waits for an optimizer's tickets on any thread.
#[derive(Clone, Copy)]
pub struct Waiter<'q> {
    handle: sys::offload_optimizer_t,
    queue: PhantomData<&'q Handle>,
}

// SAFETY: the header allows these calls from any thread, at any time before destroy, which the
// borrow puts off.
unsafe impl Send for Waiter<'_> {}
unsafe impl Sync for Waiter<'_> {}

impl Waiter<'_> {
    /// Waits until the ticket's work is done. `TimedOut` says that it goes on; None is no limit.
    pub fn wait(&self, ticket: Ticket, timeout: Option<Duration>) -> Result<()> {
        // SAFETY: the handle is alive.
        check(unsafe { sys::offload_optimizer_wait(self.handle, ticket.0, timeout_ns(timeout)) })
    }

    /// What a completed step did.
    pub fn step_result(&self, ticket: Ticket) -> Result<StepResult> {
        step_result(self.handle, ticket)
    }

    /// Totals since create, and what is held now.
    pub fn stats(&self) -> Result<Stats> {
        stats(self.handle)
    }
}

impl fmt::Debug for Waiter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").finish_non_exhaustive()
    }
}
