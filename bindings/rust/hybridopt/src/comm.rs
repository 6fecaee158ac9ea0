//! The comm table: closures by which the ranks of one model exchange numbers, and parts of matrices.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
type Exchange<'a> =
    Box<dyn FnMut(&mut [Message<'_>], Duration) -> Result<(), CommError> + Send + 'a>;

/// One message of an exchange, to or from another rank.
#[derive(Debug)]
pub enum Message<'m> {
    /// Send these bytes to rank `to`.
    Send {
        /// The other rank.
        to: i32,
        /// At least one.
        bytes: &'m [u8],
    },
    /// Write what rank `from` sends; it sends as many bytes.
    Receive {
        /// The other rank.
        from: i32,
        /// At least one.
        bytes: &'m mut [u8],
    },
}

struct Functions<'a> {
    sum: Sum<'a>,
    max: Max<'a>,
    barrier: Barrier<'a>,
    exchange: Option<Exchange<'a>>,
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
        let functions: Functions<'a> = Functions {
            sum: Box::new(sum),
            max: Box::new(max),
            barrier: Box::new(barrier),
            exchange: None,
        };
        // SAFETY: only the lifetime changes, and `borrowed` holds the real one: the closures are
        // called by an optimizer that has this object, and dropped with it.
        let functions: Functions<'static> = unsafe { std::mem::transmute(functions) };
        let functions = Arc::new(Mutex::new(functions));
        Comm { rank, world, functions, borrowed: PhantomData }
    }

    /// Adds what an [`Exchange`](crate::Exchange) of matrices needs: a closure that sends and receives
    /// all messages of the list at the same time (none may wait for another one of the list), and
    /// returns when all have been sent and have arrived. Messages from one rank to another arrive in
    /// the order in which they are sent. Only ranks that have messages call it, on the thread that
    /// calls gather or scatter.
    pub fn with_exchange(
        self,
        exchange: impl FnMut(&mut [Message<'_>], Duration) -> Result<(), CommError> + Send + 'a,
    ) -> Self {
        let exchange: Exchange<'a> = Box::new(exchange);
        // SAFETY: as for the closures of `new`.
        let exchange: Exchange<'static> = unsafe { std::mem::transmute(exchange) };
        self.lock().exchange = Some(exchange);
        self
    }

    pub(crate) fn rank(&self) -> i32 {
        self.rank
    }

    fn lock(&self) -> MutexGuard<'_, Functions<'static>> {
        self.functions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Points to the closures of this object, which must outlive the optimizer or exchange.
    pub(crate) fn raw(&self) -> sys::offload_comm_t {
        sys::offload_comm_t {
            rank: self.rank,
            world: self.world,
            user: Arc::as_ptr(&self.functions) as *mut c_void,
            sum: Some(call_sum),
            max: Some(call_max),
            barrier: Some(call_barrier),
            exchange: self.lock().exchange.as_ref().map(|_| call_exchange as _),
            exchange_on_host: 1,
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

unsafe extern "C" fn call_exchange(
    user: *mut c_void,
    messages: *const sys::offload_message_t,
    count: u32,
    _stream: sys::offload_stream_t,
    ns: i64,
) -> i32 {
    // SAFETY: `messages` has `count` elements, and a message its bytes, during this call; for `user`
    // see below.
    let mut messages = unsafe { messages_of(messages, count) };
    unsafe {
        call(user, |functions| match &mut functions.exchange {
            Some(exchange) => exchange(&mut messages, duration(ns)),
            None => Err(CommError::Failed),
        })
    }
}

/// # Safety
/// `raw` points to `count` messages whose memory is reached through this list alone during `'m`.
unsafe fn messages_of<'m>(raw: *const sys::offload_message_t, count: u32) -> Vec<Message<'m>> {
    let mut next = raw.cast::<u8>();
    let mut messages = Vec::with_capacity(count as usize);
    for _ in 0..count {
        // SAFETY: the caller's promise; messages lie struct_size bytes apart.
        let message = unsafe { &*next.cast::<sys::offload_message_t>() };
        let (data, bytes) = (message.data.cast::<u8>(), message.bytes as usize);
        // SAFETY: as above.
        messages.push(unsafe {
            match message.sends {
                0 => Message::Receive {
                    from: message.rank,
                    bytes: std::slice::from_raw_parts_mut(data, bytes),
                },
                _ => Message::Send {
                    to: message.rank,
                    bytes: std::slice::from_raw_parts(data, bytes),
                },
            }
        });
        // SAFETY: the next one, or one behind the last.
        next = unsafe { next.add(message.struct_size as usize) };
    }
    messages
}

/// # Safety
/// `user` is the table of a living optimizer or exchange.
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
