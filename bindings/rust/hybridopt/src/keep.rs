//! Memory and closures that queued work needs until it is done.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use crate::contain::{contain, Payload};
use crate::memory::Memory;

/// An object that queued work needs until it is done.
pub(crate) enum Keep<'a> {
    /// An address that the library gives up.
    #[allow(dead_code)] // only kept alive
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

/// A closure that gets the bytes done and the total bytes.
pub(crate) type ProgressFunction<'p> = Box<dyn FnMut(u64, u64) + Send + 'p>;

/// A progress closure that the library calls, on any thread.
pub(crate) struct Progress(Mutex<ProgressState>);

struct ProgressState {
    function: ProgressFunction<'static>,
    panic: Option<Payload>,
    silent: bool,
}

impl Progress {
    /// # Safety
    /// The caller drops the result before the end of what the closure borrows.
    pub(crate) unsafe fn new(function: ProgressFunction<'_>) -> Arc<Self> {
        // SAFETY: only the lifetime changes; the rest is the caller's promise.
        let function = unsafe {
            std::mem::transmute::<ProgressFunction<'_>, ProgressFunction<'static>>(function)
        };
        Arc::new(Progress(Mutex::new(ProgressState { function, panic: None, silent: false })))
    }

    /// The value with which the closure panicked. A second call returns None.
    pub(crate) fn take_panic(&self) -> Option<Payload> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).panic.take()
    }

    /// Calls the closure. After a panic it does not call it again.
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
