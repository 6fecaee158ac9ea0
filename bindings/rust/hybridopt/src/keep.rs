//! What queued work needs until it is done: memory, and closures that the library calls.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use crate::contain::{contain, Payload};
use crate::memory::Memory;

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
        if let Err(payload) = contain(|| (state.function)(done, total)) {
            state.silent = true;
            state.panic = Some(payload);
        }
    }
}
