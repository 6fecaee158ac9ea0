//! The comm table: three closures by which the ranks of one model exchange numbers.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hybridopt_sys as sys;

use crate::contain::contain_and_forget;

/// Why a closure of the comm table failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommError {
    /// A rank did not answer within the timeout.
    TimedOut,
    /// Any other failure.
    Failed,
}

type Sum<'a> = Box<dyn FnMut(&mut [f64], Duration) -> Result<(), CommError> + Send + 'a>;
type Max<'a> = Box<dyn FnMut(&mut [i32], Duration) -> Result<(), CommError> + Send + 'a>;
type Barrier<'a> = Box<dyn FnMut(Duration) -> Result<(), CommError> + Send + 'a>;

struct Functions<'a> {
    sum: Sum<'a>,
    max: Max<'a>,
    barrier: Barrier<'a>,
}

/// A table of functions, over MPI, NCCL, sockets or threads. Threads of the library make the calls,
/// one at a time for each optimizer and in the same order on all ranks, but not always on the same
/// thread. Results must have the same bits on all ranks. A closure that panics counts as failed.
pub struct Comm<'a> {
    rank: i32,
    world: i32,
    /// The real lifetime is 'a; it is 'static here because a mutex is invariant over its lifetimes.
    functions: Arc<Mutex<Functions<'static>>>,
    borrowed: PhantomData<Functions<'a>>,
}

// SAFETY: the closures are behind a mutex; `borrowed` holds nothing.
unsafe impl Sync for Comm<'_> {}

impl<'a> Comm<'a> {
    /// `sum` and `max` work in place, over all ranks; `barrier` returns when all ranks have called
    /// it. Each closure gets its timeout.
    pub fn new(
        rank: i32,
        world: i32,
        sum: impl FnMut(&mut [f64], Duration) -> Result<(), CommError> + Send + 'a,
        max: impl FnMut(&mut [i32], Duration) -> Result<(), CommError> + Send + 'a,
        barrier: impl FnMut(Duration) -> Result<(), CommError> + Send + 'a,
    ) -> Self {
        let functions: Functions<'a> =
            Functions { sum: Box::new(sum), max: Box::new(max), barrier: Box::new(barrier) };
        // SAFETY: only the lifetime changes, and `borrowed` holds the real one: the closures are
        // called by an optimizer that has this object, and dropped with it.
        let functions: Functions<'static> = unsafe { std::mem::transmute(functions) };
        let functions = Arc::new(Mutex::new(functions));
        Comm { rank, world, functions, borrowed: PhantomData }
    }

    /// Points to the closures of this object, which must outlive the optimizer.
    pub(crate) fn raw(&self) -> sys::offload_comm_t {
        sys::offload_comm_t {
            rank: self.rank,
            world: self.world,
            user: Arc::as_ptr(&self.functions) as *mut c_void,
            sum: Some(call_sum),
            max: Some(call_max),
            barrier: Some(call_barrier),
            ..Default::default()
        }
    }
}

impl fmt::Debug for Comm<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Comm")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

unsafe extern "C" fn call_sum(user: *mut c_void, values: *mut f64, count: u32, ns: i64) -> i32 {
    // SAFETY: `values` points to `count` elements during this call; for `user` see `call`.
    let values = unsafe { slice(values, count) };
    unsafe { call(user, |functions| (functions.sum)(values, duration(ns))) }
}

unsafe extern "C" fn call_max(user: *mut c_void, values: *mut i32, count: u32, ns: i64) -> i32 {
    // SAFETY: as above.
    let values = unsafe { slice(values, count) };
    unsafe { call(user, |functions| (functions.max)(values, duration(ns))) }
}

unsafe extern "C" fn call_barrier(user: *mut c_void, ns: i64) -> i32 {
    // SAFETY: see below.
    unsafe { call(user, |functions| (functions.barrier)(duration(ns))) }
}

/// # Safety
/// `user` is the table of a living optimizer.
unsafe fn call(
    user: *mut c_void,
    function: impl FnOnce(&mut Functions<'_>) -> Result<(), CommError>,
) -> i32 {
    // SAFETY: the caller's promise.
    let functions = unsafe { &*(user as *const Mutex<Functions<'_>>) };
    let mut functions = functions.lock().unwrap_or_else(PoisonError::into_inner);
    match contain_and_forget(|| function(&mut functions)) {
        Some(Ok(())) => sys::OFFLOAD_OK,
        Some(Err(CommError::TimedOut)) => sys::OFFLOAD_TIMED_OUT,
        Some(Err(CommError::Failed)) | None => sys::OFFLOAD_COMM_FAILED,
    }
}

/// # Safety
/// As for `std::slice::from_raw_parts_mut`, but that `count` may be 0 with NULL.
unsafe fn slice<'s, T>(values: *mut T, count: u32) -> &'s mut [T] {
    if count == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(values, count as usize) }
}

fn duration(timeout_ns: i64) -> Duration {
    u64::try_from(timeout_ns).map_or(Duration::MAX, Duration::from_nanos)
}
