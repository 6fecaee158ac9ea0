//! Device memory and streams, for callers without a device runtime of their own.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::mem::size_of;
use std::ptr;
use std::time::Duration;

use hybridopt_sys as sys;

use crate::contain::contain_and_forget;
use crate::context::Context;
use crate::element::Element;
use crate::error::{check, Error, Result};

/// Memory of a context's device, freed when dropped.
pub(crate) struct DeviceMemory<'c> {
    pub(crate) context: &'c Context,
    pub(crate) address: *mut c_void,
}

// SAFETY: only the library dereferences it, under the context's lock.
unsafe impl Send for DeviceMemory<'_> {}
unsafe impl Sync for DeviceMemory<'_> {}

impl Drop for DeviceMemory<'_> {
    fn drop(&mut self) {
        // SAFETY: the address is this object's own; NULL is allowed. A refusal (after fork) leaves
        // the memory to the context.
        self.context.with(|handle| unsafe { sys::offload_device_free(handle, self.address) });
    }
}

/// `count` elements on the context's device, freed when dropped.
pub struct DeviceBuffer<'c, T: Element> {
    pub(crate) memory: DeviceMemory<'c>,
    pub(crate) count: usize,
    element: PhantomData<T>,
}

impl<'c, T: Element> DeviceBuffer<'c, T> {
    /// Takes the memory; its content is unspecified.
    pub fn new(context: &'c Context, count: usize) -> Result<Self> {
        let mut address = ptr::null_mut();
        if count > 0 {
            let bytes = (count * size_of::<T>()) as u64;
            // SAFETY: the handle is alive.
            check(
                context.with(|handle| unsafe {
                    sys::offload_device_alloc(handle, bytes, &mut address)
                }),
            )?;
        }
        let memory = DeviceMemory { context, address };
        Ok(DeviceBuffer { memory, count, element: PhantomData })
    }

    /// Takes the memory and copies the values into it.
    pub fn from_slice(context: &'c Context, values: &[T]) -> Result<Self> {
        let mut buffer = DeviceBuffer::new(context, values.len())?;
        buffer.upload(values)?;
        Ok(buffer)
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Copies all elements to the device, behind the work on the NULL stream; returns when done.
    pub fn upload(&mut self, values: &[T]) -> Result<()> {
        check_len(values.len(), self.count)?;
        // SAFETY: both sides are as long as `values`.
        unsafe { upload(self.memory.context, self.memory.address, values) }
    }

    /// Copies all elements from the device, behind the work on the NULL stream; returns when done.
    pub fn download(&self, values: &mut [T]) -> Result<()> {
        check_len(values.len(), self.count)?;
        // SAFETY: both sides are as long as `values`.
        unsafe { download(self.memory.context, self.memory.address, values) }
    }

    /// The address at which a function given to [`Stream::run`] sees the memory. Only such
    /// functions may dereference it, in the order of their streams.
    pub fn map(&self) -> Result<*mut T> {
        let mut mapped = ptr::null_mut();
        let bytes = (self.count * size_of::<T>()) as u64;
        let memory = &self.memory;
        // SAFETY: the handle is alive and the library checks the range.
        check(memory.context.with(|handle| unsafe {
            sys::offload_device_map(handle, memory.address, bytes, &mut mapped)
        }))?;
        Ok(mapped.cast())
    }
}

impl<T: Element> fmt::Debug for DeviceBuffer<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("count", &self.count).finish_non_exhaustive()
    }
}

fn check_len(got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "values has {got} elements, expected {expected}, as many as the buffer"
    )))
}

/// # Safety
/// `address` is device memory of at least `values.len()` elements.
pub(crate) unsafe fn upload<T: Element>(
    context: &Context,
    address: *mut c_void,
    values: &[T],
) -> Result<()> {
    let bytes = std::mem::size_of_val(values) as u64;
    let from = values.as_ptr().cast();
    // SAFETY: the caller's promise.
    check(context.with(|handle| unsafe {
        sys::offload_device_upload(handle, address, from, bytes, ptr::null_mut())
    }))
}

/// # Safety
/// As for `upload`.
pub(crate) unsafe fn download<T: Element>(
    context: &Context,
    address: *const c_void,
    values: &mut [T],
) -> Result<()> {
    let bytes = std::mem::size_of_val(values) as u64;
    let to = values.as_mut_ptr().cast();
    // SAFETY: the caller's promise; every bit pattern is an element.
    check(context.with(|handle| unsafe {
        sys::offload_device_download(handle, to, address, bytes, ptr::null_mut())
    }))
}

/// A stream of the context's device: its work is done in order. Dropping it first finishes its
/// work.
pub struct Stream<'c> {
    context: &'c Context,
    pub(crate) raw: sys::offload_stream_t,
}

// SAFETY: an address that only the library follows.
unsafe impl Send for Stream<'_> {}

impl<'c> Stream<'c> {
    /// A new stream. The host device has only the NULL stream, which `None` stands for everywhere.
    pub fn new(context: &'c Context) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is alive.
        check(context.with(|handle| unsafe { sys::offload_stream_create(handle, &mut raw) }))?;
        Ok(Stream { context, raw })
    }

    /// Queues a function that stands for a kernel. It must not call into the library. A panic
    /// inside ends with the function.
    pub fn run<F: FnOnce() + Send + 'static>(&self, function: F) -> Result<()> {
        unsafe extern "C" fn call<F: FnOnce()>(user: *mut c_void) {
            // SAFETY: the box that `run` gave away, for this one call.
            let function = unsafe { Box::from_raw(user.cast::<F>()) };
            contain_and_forget(*function);
        }
        let user = Box::into_raw(Box::new(function));
        let result = check(self.context.with(|handle| unsafe {
            // SAFETY: `call` takes the box once.
            sys::offload_stream_run(handle, self.raw, Some(call::<F>), user.cast())
        }));
        if result.is_err() {
            // SAFETY: it was not queued, so it is still ours.
            drop(unsafe { Box::from_raw(user) });
        }
        result
    }

    /// Waits until the work that is on the stream now is done.
    pub fn synchronize(&self, timeout: Option<Duration>) -> Result<()> {
        self.context.synchronize(self.raw, timeout)
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: the stream is this object's own.
        self.context.with(|handle| unsafe { sys::offload_stream_destroy(handle, self.raw) });
    }
}

impl fmt::Debug for Stream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").finish_non_exhaustive()
    }
}

/// None is the NULL stream.
pub(crate) fn raw_of(stream: Option<&Stream<'_>>) -> sys::offload_stream_t {
    stream.map_or(ptr::null_mut(), |stream| stream.raw)
}
