//! A panic of a caller's closure must not unwind into C.

use std::any::Any;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// What a panic carries.
pub(crate) type Payload = Box<dyn Any + Send>;

/// Runs the closure; a panic comes back as a value.
pub(crate) fn contain<R>(closure: impl FnOnce() -> R) -> Result<R, Payload> {
    catch_unwind(AssertUnwindSafe(closure))
}

/// The same for those that nobody waits for: the panic hook has said what there was to say.
pub(crate) fn contain_and_forget<R>(closure: impl FnOnce() -> R) -> Option<R> {
    match contain(closure) {
        Ok(value) => Some(value),
        Err(payload) => {
            // Dropping it might panic again.
            std::mem::forget(payload);
            None
        }
    }
}
