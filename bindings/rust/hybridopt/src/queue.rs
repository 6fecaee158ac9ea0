//! Calls that only queue work, and tickets to wait for.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use hybridopt_sys as sys;

use crate::contain::Payload;
use crate::context::timeout_ns;
use crate::device::Stream;
use crate::error::{check, Error, Result};
use crate::handle::{stats, step_result, Handle, Ticket};
use crate::keep::Keep;
use crate::optimizer::{Optimizer, StepOptions};
use crate::param::ParamId;
use crate::report::{Stats, StepResult};

impl<'a> Optimizer<'a> {
    /// Lets `body` queue several calls and do other things meanwhile. Whatever happens in `body`,
    /// this waits for all queued work before it returns. So safe code cannot reach the memory of
    /// params and gradients while the library works on it. If both the body and the work fail, this
    /// returns the error of the body.
    ///
    /// ```
    /// # use hybridopt::{Algorithm, Context, Error, Group, Optimizer, Param, StepOptions};
    /// # let context = Context::host()?;
    /// # let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
    /// # let group = adding.add_group(&Group { lr: 0.5, ..Group::default() })?;
    /// # let param = adding.add_param(Param::new("x", group, vec![3f32]).grad(vec![2f32]))?;
    /// # let mut optimizer = adding.commit()?;
    /// let batch = optimizer.queue(|queue| {
    ///     let ticket = queue.step(&StepOptions::default())?;
    ///     let batch = (1..5).sum::<i32>(); // the next batch is read while the step runs
    ///     queue.wait(ticket, None)?;
    ///     Ok::<_, Error>(batch)
    /// })?;
    /// assert_eq!((batch, optimizer.data::<f32>(param)?[0]), (10, 2.0));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// The params cannot be reached from inside:
    ///
    /// ```compile_fail,E0502
    /// # use hybridopt::{Algorithm, Context, Error, Group, Optimizer, Param, StepOptions};
    /// # let context = Context::host()?;
    /// # let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
    /// # let group = adding.add_group(&Group { lr: 0.5, ..Group::default() })?;
    /// # let param = adding.add_param(Param::new("x", group, vec![3f32]).grad(vec![2f32]))?;
    /// # let mut optimizer = adding.commit()?;
    /// optimizer.queue(|queue| {
    ///     queue.step(&StepOptions::default())?;
    ///     let x = optimizer.data::<f32>(param)?[0]; // the step may be writing it
    ///     Ok::<_, Error>(x)
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// The queue cannot leave the closure either:
    ///
    /// ```compile_fail,E0521
    /// # use hybridopt::{Algorithm, Context, Error, Group, Optimizer, Param, Queue, StepOptions};
    /// # let context = Context::host()?;
    /// # let mut optimizer = Optimizer::builder(&context, Algorithm::Sgd).create()?.commit()?;
    /// let mut leaked: Option<&mut Queue<'_, '_>> = None;
    /// optimizer.queue(|queue| {
    ///     leaked = Some(queue);
    ///     Ok::<_, Error>(())
    /// })?;
    /// # drop(leaked);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn queue<R, E: From<Error>>(
        &mut self,
        body: impl FnOnce(&mut Queue<'_, 'a>) -> Result<R, E>,
    ) -> Result<R, E> {
        struct OnPanic(sys::offload_optimizer_t);
        impl Drop for OnPanic {
            fn drop(&mut self) {
                // The error of the body has precedence.
                let _ = finish(self.0);
            }
        }
        let on_panic = OnPanic(self.handle.0);
        let result = body(&mut Queue { optimizer: self });
        std::mem::forget(on_panic);
        let finished = finish(self.handle.0);
        let panics: Vec<Payload> = self.kept.iter().filter_map(Keep::take_panic).collect();
        if finished.is_ok() {
            // After a failure the device memory is kept until the optimizer is dropped.
            self.kept.clear();
        }
        if let Some(payload) = panics.into_iter().next() {
            std::panic::resume_unwind(payload);
        }
        let value = result?;
        finished?;
        Ok(value)
    }
}

/// Waits until nothing is queued any more, and returns the first failure. A wait for everything
/// reports one failed save or load a call, so this waits until there is none left: otherwise the next
/// queue would get it.
fn finish(handle: sys::offload_optimizer_t) -> Result<()> {
    const CALLS_QUEUED_AT_MOST: usize = 256;
    let mut first = Ok(());
    for _ in 0..=CALLS_QUEUED_AT_MOST {
        // SAFETY: the handle is alive.
        match check(unsafe { sys::offload_optimizer_wait(handle, 0, -1) }) {
            Ok(()) => break,
            Err(error) => first = first.and(Err(error)),
        }
    }
    first
}

/// An optimizer inside [`Optimizer::queue`]. Calls queue work and return; the library does the work
/// in the order of the calls.
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

    /// The result of a completed step.
    pub fn step_result(&self, ticket: Ticket) -> Result<StepResult> {
        step_result(self.handle(), ticket)
    }

    /// Totals since create, and what is held now.
    pub fn stats(&self) -> Result<Stats> {
        stats(self.handle())
    }

    /// An object with which other threads can wait.
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

    /// The result of a completed step.
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
