//! A context: a device, and the threads and memory that work for it.

use std::ffi::{c_void, CStr};
use std::fmt;
use std::os::raw::c_char;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hybridopt_sys as sys;

use crate::contain::contain_and_forget;
use crate::error::{check, Code, Error, Result};
use crate::report::ContextInfo;

/// Where params and gradients are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// In host memory: one pass over them, no staging.
    #[default]
    Host,
    /// On an accelerator made of threads, for tests and machines without a GPU.
    Sim,
    /// On a CUDA device.
    Cuda,
}

impl DeviceKind {
    fn raw(self) -> i32 {
        match self {
            DeviceKind::Host => sys::OFFLOAD_DEVICE_HOST,
            DeviceKind::Sim => sys::OFFLOAD_DEVICE_SIM,
            DeviceKind::Cuda => sys::OFFLOAD_DEVICE_CUDA,
        }
    }
}

/// On which NUMA nodes the host memory of a context should lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NumaPolicy {
    /// On the nodes of the update threads.
    #[default]
    Near,
    /// Page by page on all nodes in turn.
    Interleaved,
}

/// The severity of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LogLevel {
    /// Information.
    Info,
    /// Something works, but not as well as possible.
    Warning,
    /// Something failed.
    Error,
}

type LogFunction = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// The settings of a [`Context`]; all have defaults.
#[must_use]
#[derive(Default)]
pub struct ContextBuilder {
    options: sys::offload_context_options_t,
    log: Option<LogFunction>,
}

impl ContextBuilder {
    /// Where params and gradients are; the host by default.
    pub fn device(mut self, kind: DeviceKind) -> Self {
        self.options.device_kind = kind.raw();
        self
    }

    /// The index of the CUDA device.
    pub fn device_index(mut self, index: i32) -> Self {
        self.options.device_index = index;
        self
    }

    /// CPU threads that update the host share; by default one per CPU of this rank's part.
    pub fn threads(mut self, threads: u32) -> Self {
        self.options.threads = threads;
        self
    }

    /// Cap on pinned host memory; none by default.
    pub fn pinned_bytes_max(mut self, bytes: u64) -> Self {
        self.options.pinned_bytes_max = bytes;
        self
    }

    /// The time without progress after which the device counts as failed; 600 s by default.
    pub fn device_timeout(mut self, timeout: Duration) -> Self {
        self.options.device_timeout_ns = nanoseconds(timeout);
        self
    }

    /// If true, memory that the system cannot pin is used without pinning, which is slower.
    pub fn allow_pageable(mut self, allow: bool) -> Self {
        self.options.allow_pageable = i32::from(allow);
        self
    }

    /// Bit n: update threads and host memory on NUMA node n; by default those near the device.
    pub fn numa_nodes(mut self, nodes: u64) -> Self {
        self.options.numa_nodes = nodes;
        self
    }

    /// The NUMA nodes of host memory; near the update threads by default. If the system refuses,
    /// the log and [`ContextInfo::notes`] say so.
    pub fn numa_policy(mut self, policy: NumaPolicy) -> Self {
        self.options.numa_policy = match policy {
            NumaPolicy::Near => sys::OFFLOAD_NUMA_NEAR,
            NumaPolicy::Interleaved => sys::OFFLOAD_NUMA_INTERLEAVED,
        };
        self
    }

    /// The number of this rank among the ranks of this host, so that no two ranks run on the same
    /// CPU. By default LOCAL_RANK and LOCAL_WORLD_SIZE of the environment are used.
    pub fn local_rank(mut self, rank: u32, world: u32) -> Self {
        self.options.local_rank = rank;
        self.options.local_world = world;
        self
    }

    /// Capacity of the simulated device; 1 GiB by default.
    pub fn sim_memory_bytes(mut self, bytes: u64) -> Self {
        self.options.sim_memory_bytes = bytes;
        self
    }

    /// Delays each command on a stream of the simulated device by a random time up to this.
    pub fn sim_delay_max(mut self, delay: Duration, seed: u64) -> Self {
        self.options.sim_delay_ns_max = nanoseconds(delay);
        self.options.sim_seed = seed;
        self
    }

    /// Host memory that the simulated device can pin; no limit by default.
    pub fn sim_pinned_bytes_max(mut self, bytes: u64) -> Self {
        self.options.sim_pinned_bytes_max = bytes;
        self
    }

    /// A closure that gets log messages; without one they go to stderr. Any thread may call it, also
    /// threads of the library. It must not call the library. A panic inside of it is caught.
    pub fn log(mut self, log: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
        self.log = Some(Box::new(log));
        self
    }

    /// Creates the context: opens the device and finds CPUs and NUMA nodes.
    pub fn create(mut self) -> Result<Context> {
        check_abi_version()?;
        // On the heap, because the library keeps a pointer to it while the context may move.
        let log = self.log.take().map(Arc::new);
        if let Some(log) = &log {
            self.options.log = Some(call_log);
            self.options.log_user = Arc::as_ptr(log) as *mut c_void;
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: `options` is a whole struct; `log` outlives the context, see Drop.
        check(unsafe { sys::offload_context_create(&self.options, &mut handle) })?;
        Ok(Context { handle: Mutex::new(Handle(handle)), log })
    }
}

impl fmt::Debug for ContextBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextBuilder").finish_non_exhaustive()
    }
}

unsafe extern "C" fn call_log(user: *mut c_void, level: i32, text: *const c_char) {
    // SAFETY: `user` is the closure of the context, which lives as long as the context does; `text` is
    // a string for the time of this call.
    let (log, text) = unsafe { (&*(user as *const LogFunction), CStr::from_ptr(text)) };
    let level = match level {
        sys::OFFLOAD_LOG_INFO => LogLevel::Info,
        sys::OFFLOAD_LOG_WARNING => LogLevel::Warning,
        _ => LogLevel::Error,
    };
    contain_and_forget(|| log(level, &text.to_string_lossy()));
}

/// Checks that the library found at run time is of the same version as the header of this crate.
fn check_abi_version() -> Result<()> {
    const MAJOR: u32 = 0;
    const MINOR: u32 = 1;
    // SAFETY: takes nothing, never fails.
    let version = unsafe { sys::offload_abi_version() };
    if version == MAJOR * 1000 + MINOR {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "libhybridopt has ABI {}.{}, this crate needs {MAJOR}.{MINOR}; install the library and the \
         crate from one release",
        version / 1000,
        version % 1000
    )))
}

/// A timeout in nanoseconds. One that does not fit means no limit.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The timeout of a wait; None means no limit.
pub(crate) fn timeout_ns(timeout: Option<Duration>) -> i64 {
    timeout.map_or(-1, |limit| i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX))
}

struct Handle(sys::offload_context_t);
// SAFETY: a number, valid on every thread.
unsafe impl Send for Handle {}

/// A device, the threads and the host memory that work for it. Optimizers, streams and device
/// buffers borrow it, so that it outlives them.
///
/// Calls on one context take turns: it may be shared between threads.
pub struct Context {
    handle: Mutex<Handle>,
    log: Option<Arc<LogFunction>>,
}

impl Context {
    /// A context with settings of its own.
    pub fn builder() -> ContextBuilder {
        ContextBuilder::default()
    }

    /// The host device, with the defaults.
    pub fn host() -> Result<Context> {
        Context::builder().create()
    }

    /// The threads, the memory and the device of the context.
    pub fn info(&self) -> Result<ContextInfo> {
        let mut info = sys::offload_context_info_t::default();
        self.with(|handle| {
            // SAFETY: the handle is alive, and `info` a whole struct.
            check(unsafe { sys::offload_context_get_info(handle, &mut info) })
        })?;
        Ok(ContextInfo::from(&info))
    }

    /// Runs `call` under the lock: calls on one handle must not run at the same time.
    pub(crate) fn with<R>(&self, call: impl FnOnce(sys::offload_context_t) -> R) -> R {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        call(handle.0)
    }

    /// Waits for a stream, in slices: other threads may use the context meanwhile.
    pub(crate) fn synchronize(
        &self,
        stream: sys::offload_stream_t,
        timeout: Option<Duration>,
    ) -> Result<()> {
        const SLICE: Duration = Duration::from_millis(20);
        let mut left = timeout;
        loop {
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            let result = self.with(|handle| {
                // SAFETY: the handle is alive; the library checks the stream.
                check(unsafe {
                    sys::offload_stream_synchronize(handle, stream, timeout_ns(Some(slice)))
                })
            });
            left = left.map(|left| left - slice);
            match result {
                Err(error) if error.code() == Code::TimedOut => {}
                other => return other,
            }
            if left == Some(Duration::ZERO) {
                return Err(Error::timed_out(format!(
                    "work on the stream was not done within {:?}; it goes on, wait again",
                    timeout.unwrap_or_default()
                )));
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner).0;
        // SAFETY: nothing borrows the context any more.
        let status = unsafe { sys::offload_context_destroy(handle) };
        // An optimizer that was leaked, or a fork, keeps the context alive: then it may still log.
        if status != sys::OFFLOAD_OK {
            std::mem::forget(self.log.take());
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}
