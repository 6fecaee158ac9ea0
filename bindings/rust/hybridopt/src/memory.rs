//! The memory of params and gradients: borrowed, owned, or promised by the caller.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;

use crate::context::Context;
use crate::device::{DeviceBuffer, DeviceMemory};
use crate::element::{Dtype, Element};
use crate::error::{Error, Result};

/// Who keeps the memory alive.
enum Owner<'a> {
    /// A `&'a mut` slice.
    Borrowed,
    /// A vector, kept as its parts, because the library writes to it without Rust's knowledge.
    Vector {
        capacity: usize,
        free: unsafe fn(*mut c_void, usize, usize),
    },
    Device(DeviceMemory<'a>),
    /// The promise made to [`Memory::from_raw`].
    Caller,
}

/// The memory of a param or of a gradient. An optimizer holds it until its address is given up or
/// the optimizer is dropped; nothing else can reach it meanwhile.
///
/// Made by `From`, out of `&mut [T]`, `&mut Vec<T>`, `Vec<T>` or [`DeviceBuffer`].
pub struct Memory<'a> {
    pub(crate) address: *mut c_void,
    pub(crate) dtype: Dtype,
    pub(crate) count: usize,
    owner: Owner<'a>,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: plain numbers, reached through the object that holds this; device addresses are followed
// by the library alone. For `from_raw` the caller has promised it.
unsafe impl Send for Memory<'_> {}
unsafe impl Sync for Memory<'_> {}

impl<'a> Memory<'a> {
    fn new(address: *mut c_void, dtype: Dtype, count: usize, owner: Owner<'a>) -> Self {
        Memory { address, dtype, count, owner, borrowed: PhantomData }
    }

    /// Memory that something else owns, such as a tensor of another crate on a CUDA device.
    ///
    /// # Safety
    /// `address` is the start of `count` elements where the context's device is. For `'a` (in the
    /// end: until the optimizer that it is given to has been dropped, or has given the address up)
    /// they stay valid, and nothing touches them but in the order of a stream that the library was
    /// told about. A leaked optimizer holds them for ever.
    pub unsafe fn from_raw(address: *mut c_void, dtype: Dtype, count: usize) -> Self {
        Memory::new(address, dtype, count, Owner::Caller)
    }

    /// For add_params and bind. NULL for an empty slice: its dangling address is not known to a
    /// device.
    pub(crate) fn data_address(&self) -> *mut c_void {
        match self.count {
            0 => std::ptr::null_mut(),
            _ => self.address,
        }
    }

    /// Refuses memory of another context's device.
    pub(crate) fn check_context(&self, context: &Context, what: &str) -> Result<()> {
        match &self.owner {
            Owner::Device(memory) if !std::ptr::eq(memory.context, context) => {
                Err(Error::invalid_argument(format!(
                    "{what} is a DeviceBuffer of another context; make it with the optimizer's"
                )))
            }
            _ => Ok(()),
        }
    }

    /// The context on whose device it is.
    pub(crate) fn device_context(&self) -> Option<&Context> {
        match &self.owner {
            Owner::Device(memory) => Some(memory.context),
            _ => None,
        }
    }

    /// Whether this process can dereference the address.
    pub(crate) fn in_host_memory(&self) -> bool {
        matches!(self.owner, Owner::Borrowed | Owner::Vector { .. })
    }

    /// # Safety
    /// Nothing else reads or writes the elements during `'s`, and T is of our dtype.
    pub(crate) unsafe fn slice_mut<'s, T: Element>(&self) -> &'s mut [T] {
        debug_assert!(self.dtype == T::DTYPE && self.in_host_memory());
        // SAFETY: made from a slice of that type and length; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.count) }
    }

    /// # Safety
    /// Nothing writes the elements during `'s`, and T is of our dtype.
    pub(crate) unsafe fn slice<'s, T: Element>(&self) -> &'s [T] {
        debug_assert!(self.dtype == T::DTYPE && self.in_host_memory());
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.address as *const T, self.count) }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for Memory<'a> {
    fn from(slice: &'a mut [T]) -> Self {
        let count = slice.len();
        Memory::new(slice.as_mut_ptr().cast(), T::DTYPE, count, Owner::Borrowed)
    }
}

impl<'a, T: Element, const N: usize> From<&'a mut [T; N]> for Memory<'a> {
    fn from(array: &'a mut [T; N]) -> Self {
        Memory::from(&mut array[..])
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for Memory<'a> {
    fn from(vector: &'a mut Vec<T>) -> Self {
        Memory::from(&mut vector[..])
    }
}

impl<T: Element> From<Vec<T>> for Memory<'_> {
    fn from(vector: Vec<T>) -> Self {
        unsafe fn free<T>(address: *mut c_void, count: usize, capacity: usize) {
            // SAFETY: these are the parts of a vector that was not dropped.
            drop(unsafe { Vec::from_raw_parts(address.cast::<T>(), count, capacity) });
        }
        let mut vector = ManuallyDrop::new(vector);
        let owner = Owner::Vector { capacity: vector.capacity(), free: free::<T> };
        Memory::new(vector.as_mut_ptr().cast(), T::DTYPE, vector.len(), owner)
    }
}

impl<'a, T: Element> From<DeviceBuffer<'a, T>> for Memory<'a> {
    fn from(buffer: DeviceBuffer<'a, T>) -> Self {
        let DeviceBuffer { memory, count, .. } = buffer;
        Memory::new(memory.address, T::DTYPE, count, Owner::Device(memory))
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        if let Owner::Vector { capacity, free } = self.owner {
            // SAFETY: the vector's parts, once.
            unsafe { free(self.address, self.count, capacity) };
        }
    }
}

impl fmt::Debug for Memory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.owner {
            Owner::Borrowed => "borrowed",
            Owner::Vector { .. } => "owned",
            Owner::Device(_) => "device",
            Owner::Caller => "raw",
        };
        f.debug_struct("Memory")
            .field("place", &place)
            .field("dtype", &self.dtype)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}
