//! A stash: host memory for activations that wait there between forward and backward pass.

use std::fmt;
use std::mem;
use std::ptr;

use hybridopt_sys as sys;

use crate::context::Context;
use crate::device::{raw_of, DeviceBuffer, Stream};
use crate::element::Element;
use crate::error::{check, Result};

/// The settings of a [`Stash`].
#[must_use]
pub struct StashBuilder<'c> {
    context: &'c Context,
    options: sys::offload_stash_options_t,
}

impl<'c> StashBuilder<'c> {
    /// The size of the equal pieces of its memory, a multiple of 4096; 4 MiB by default.
    pub fn slab_bytes(mut self, bytes: u64) -> Self {
        self.options.slab_bytes = bytes;
        self
    }

    /// Smaller buffers are not taken; 1 MiB by default.
    pub fn min_bytes(mut self, bytes: u64) -> Self {
        self.options.min_bytes = bytes;
        self
    }

    /// How many buffers it holds at most; by default one for each slab.
    pub fn buffers_max(mut self, count: u32) -> Self {
        self.options.tickets_max = count;
        self
    }

    /// Takes the memory: all that the stash ever uses.
    pub fn create(self) -> Result<Stash<'c>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the context is alive and the struct whole.
        check(
            self.context.with(|handle| unsafe {
                sys::offload_stash_create(handle, &self.options, &mut raw)
            }),
        )?;
        Ok(Stash { context: self.context, raw })
    }
}

/// Host memory for activations.
///
/// ```
/// use hybridopt::{Context, DeviceBuffer, DeviceKind, Pushed, Stash};
///
/// let context = Context::builder().device(DeviceKind::Sim).create()?;
/// let stash = Stash::builder(&context, 16 << 20).create()?;
/// let activation = DeviceBuffer::from_slice(&context, &vec![1.5f32; 1 << 20])?;
/// match stash.push(activation, None)? {
///     Pushed::Taken(mut stashed) => {
///         stashed.release()?; // the device has its memory again
///         stashed.prefetch(None)?; // a little before the backward pass needs it
///         assert_eq!(stashed.take(None)?.len(), 1 << 20);
///     }
///     Pushed::Kept(_) => unreachable!("there is room for it"),
/// }
/// # Ok::<(), hybridopt::Error>(())
/// ```
pub struct Stash<'c> {
    context: &'c Context,
    raw: sys::offload_stash_t,
}

// SAFETY: any thread may call any function of a stash at any time before destroy.
unsafe impl Send for Stash<'_> {}
unsafe impl Sync for Stash<'_> {}

/// What became of a push.
pub enum Pushed<'s, 'c, T: Element> {
    /// The bytes are on their way to the host.
    Taken(Stashed<'s, 'c, T>),
    /// It is smaller than the least size, or there is no room: nothing has happened.
    Kept(DeviceBuffer<'c, T>),
}

impl<'c> Stash<'c> {
    /// A stash of `budget_bytes` of host memory, rounded up to whole slabs.
    pub fn builder(context: &'c Context, budget_bytes: u64) -> StashBuilder<'c> {
        let options = sys::offload_stash_options_t { budget_bytes, ..Default::default() };
        StashBuilder { context, options }
    }

    /// Queues the copy of the buffer to the host, behind the work that is on the stream now; None
    /// is the NULL stream. After an error the buffer's memory stays with the context.
    pub fn push<T: Element>(
        &self,
        buffer: DeviceBuffer<'c, T>,
        stream: Option<&Stream<'c>>,
    ) -> Result<Pushed<'_, 'c, T>> {
        let bytes = (buffer.len() * mem::size_of::<T>()) as u64;
        if bytes == 0 {
            return Ok(Pushed::Kept(buffer));
        }
        let mut ticket = 0;
        // SAFETY: the buffer has these bytes; it lives until the copy has ended.
        let pushed = check(unsafe {
            sys::offload_stash_push(
                self.raw,
                0,
                buffer.memory.address,
                bytes,
                raw_of(stream),
                &mut ticket,
            )
        });
        if let Err(error) = pushed {
            mem::forget(buffer); // a part of it may be on its way
            return Err(error);
        }
        if ticket == 0 {
            return Ok(Pushed::Kept(buffer));
        }
        let count = buffer.len();
        Ok(Pushed::Taken(Stashed {
            stash: self,
            ticket,
            count,
            source: Some(buffer),
            destination: None,
        }))
    }

    /// Bytes of slabs that are in use now, and the most that ever were.
    pub fn used_bytes(&self) -> Result<(u64, u64)> {
        let mut stats = sys::offload_stash_stats_t::default();
        // SAFETY: the handle is alive and the struct whole.
        check(unsafe { sys::offload_stash_get_stats(self.raw, &mut stats) })?;
        Ok((stats.used_bytes, stats.used_bytes_max))
    }
}

impl fmt::Debug for Stash<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stash").finish_non_exhaustive()
    }
}

impl Drop for Stash<'_> {
    fn drop(&mut self) {
        // SAFETY: the stash is this object's own. Destroy ends the copies first.
        unsafe { sys::offload_stash_destroy(self.raw) };
    }
}

/// A buffer that a [`Stash`] has taken. Dropping it ends it, after its copies.
pub struct Stashed<'s, 'c, T: Element> {
    stash: &'s Stash<'c>,
    ticket: sys::offload_stash_ticket_t, // 0: it has ended
    count: usize,
    source: Option<DeviceBuffer<'c, T>>,
    destination: Option<DeviceBuffer<'c, T>>,
}

impl<'c, T: Element> Stashed<'_, 'c, T> {
    /// Waits until the copy to the host has ended, and frees the buffer's device memory. Call it
    /// some layers after the push, when the copy has ended already.
    pub fn release(&mut self) -> Result<()> {
        if self.source.is_some() {
            self.wait()?;
            self.source = None;
        }
        Ok(())
    }

    /// Takes device memory, and queues the copy back behind the work that is on the stream now. The
    /// copies run in the order of the calls: call it in the order of the backward pass.
    pub fn prefetch(&mut self, stream: Option<&Stream<'c>>) -> Result<()> {
        if self.destination.is_some() {
            return Ok(());
        }
        let destination = DeviceBuffer::new(self.stash.context, self.count)?;
        let bytes = (self.count * mem::size_of::<T>()) as u64;
        let address = destination.memory.address;
        // SAFETY: the buffer has these bytes; it lives until the copy has ended.
        let queued = check(unsafe {
            sys::offload_stash_prefetch(self.stash.raw, self.ticket, address, bytes, raw_of(stream))
        });
        if let Err(error) = queued {
            mem::forget(destination); // a part of it may be on its way
            return Err(error);
        }
        self.destination = Some(destination);
        Ok(())
    }

    /// The bytes as they were pushed, in new device memory; prefetches if nothing has. Returns when
    /// they are there, and gives their room on the host back.
    pub fn take(mut self, stream: Option<&Stream<'c>>) -> Result<DeviceBuffer<'c, T>> {
        self.prefetch(stream)?;
        self.wait()?;
        // SAFETY: the handle is alive.
        check(unsafe { sys::offload_stash_pop(self.stash.raw, self.ticket, raw_of(stream), 0) })?;
        self.ticket = 0;
        Ok(self.destination.take().expect("prefetched"))
    }

    fn wait(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        check(unsafe { sys::offload_stash_wait(self.stash.raw, self.ticket, -1) })
    }
}

impl<T: Element> fmt::Debug for Stashed<'_, '_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stashed").field("count", &self.count).finish_non_exhaustive()
    }
}

impl<T: Element> Drop for Stashed<'_, '_, T> {
    fn drop(&mut self) {
        if self.ticket == 0 {
            return;
        }
        if self.wait().is_err() {
            // Copies may be under way: the memory stays with the context.
            mem::forget(self.source.take());
            mem::forget(self.destination.take());
        }
        // SAFETY: the handle is alive. A stash that is poisoned refuses, and has nothing to end.
        unsafe { sys::offload_stash_drop(self.stash.raw, self.ticket, ptr::null_mut()) };
    }
}
