//! Catches panics of the caller's closures: a panic must not unwind into C.

use std::any::Any;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// The value that a panic carries.
pub(crate) type Payload = Box<dyn Any + Send>;

/// Runs the closure. If it panics, returns the value of the panic.
pub(crate) fn contain<R>(closure: impl FnOnce() -> R) -> Result<R, Payload> {
    catch_unwind(AssertUnwindSafe(closure))
}

/// Runs a closure for which no caller waits. A panic ends here: the panic hook has reported it.
pub(crate) fn contain_and_forget<R>(closure: impl FnOnce() -> R) -> Option<R> {
    match contain(closure) {
        Ok(value) => Some(value),
        Err(payload) => {
            // Dropping the value might panic again.
            std::mem::forget(payload);
            None
        }
    }
}
