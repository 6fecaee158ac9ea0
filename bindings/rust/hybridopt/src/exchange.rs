//! An exchange of matrices: brings the parts that ranks have together on one rank, and takes them
//! back.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ptr;
use std::time::Duration;

use hybridopt_sys as sys;

use crate::comm::Comm;
use crate::context::{nanoseconds, Context};
use crate::device::{raw_of, DeviceBuffer, Stream};
use crate::element::{Dtype, Element};
use crate::error::{check, Error, Result};
use crate::memory::Memory;
use crate::param::{c_name, Shard};

/// Where elements are.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Host,
    /// On the device of this context.
    Device(*const Context),
    /// Where the caller of [`Memory::from_raw`] has promised.
    Promised,
}

/// Elements that an exchange reads: made by `From`, out of `&[T]`, `&Vec<T>` or
/// `&DeviceBuffer<T>`, or of a param by [`Optimizer::elements`](crate::Optimizer::elements).
pub struct Elements<'e> {
    address: *mut c_void,
    dtype: Dtype,
    count: usize,
    place: Place,
    borrowed: PhantomData<&'e [u8]>,
}

/// Elements that an exchange writes: made by `From`, out of `&mut [T]`, `&mut Vec<T>` or
/// `&mut DeviceBuffer<T>`, or of a gradient by
/// [`Optimizer::grad_elements_mut`](crate::Optimizer::grad_elements_mut).
pub struct ElementsMut<'e> {
    elements: Elements<'e>,
    borrowed: PhantomData<&'e mut [u8]>,
}

impl<'e> Elements<'e> {
    /// Elements that live, and that nothing writes, during `'e`.
    pub(crate) fn of_memory(memory: &'e Memory<'_>) -> Self {
        let place = match memory.device_context() {
            Some(context) => Place::Device(context),
            None if memory.in_host_memory() => Place::Host,
            None => Place::Promised,
        };
        Elements::new(memory.address, memory.dtype, memory.count, place)
    }

    fn new(address: *mut c_void, dtype: Dtype, count: usize, place: Place) -> Self {
        Elements { address, dtype, count, place, borrowed: PhantomData }
    }

    fn check(&self, what: &str, exchange: &Exchange<'_>, count: u64, name: &str) -> Result<()> {
        if self.count as u64 != count {
            return Err(Error::invalid_argument(format!(
                "{what} has {} elements, expected {count}, those of '{name}' there",
                self.count
            )));
        }
        let fits = match self.place {
            _ if self.count == 0 => true,
            Place::Host => exchange.on_host,
            Place::Device(context) => ptr::eq(context, exchange.context),
            Place::Promised => true,
        };
        if fits {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{what} of '{name}' is {}; give it a DeviceBuffer of the exchange's context",
            if self.place == Place::Host { "in host memory" } else { "of another context" }
        )))
    }

    /// NULL for no elements: the dangling address of an empty slice is not known to a device.
    fn pointer(&self) -> *mut c_void {
        if self.count == 0 {
            return ptr::null_mut();
        }
        self.address
    }
}

impl<'e> ElementsMut<'e> {
    /// Elements that live, and that nothing else reads or writes, during `'e`.
    pub(crate) fn of_memory(memory: &'e Memory<'_>) -> Self {
        ElementsMut { elements: Elements::of_memory(memory), borrowed: PhantomData }
    }
}

impl<'e, T: Element> From<&'e [T]> for Elements<'e> {
    fn from(slice: &'e [T]) -> Self {
        Elements::new(slice.as_ptr() as *mut c_void, T::DTYPE, slice.len(), Place::Host)
    }
}

impl<'e, T: Element> From<&'e Vec<T>> for Elements<'e> {
    fn from(vector: &'e Vec<T>) -> Self {
        Elements::from(&vector[..])
    }
}

impl<'e, T: Element> From<&'e DeviceBuffer<'_, T>> for Elements<'e> {
    fn from(buffer: &'e DeviceBuffer<'_, T>) -> Self {
        let memory = &buffer.memory;
        Elements::new(memory.address, T::DTYPE, buffer.len(), Place::Device(memory.context))
    }
}

impl<'e, T: Element> From<&'e mut [T]> for ElementsMut<'e> {
    fn from(slice: &'e mut [T]) -> Self {
        let address = slice.as_mut_ptr().cast();
        let elements = Elements::new(address, T::DTYPE, slice.len(), Place::Host);
        ElementsMut { elements, borrowed: PhantomData }
    }
}

impl<'e, T: Element> From<&'e mut Vec<T>> for ElementsMut<'e> {
    fn from(vector: &'e mut Vec<T>) -> Self {
        ElementsMut::from(&mut vector[..])
    }
}

impl<'e, T: Element> From<&'e mut DeviceBuffer<'_, T>> for ElementsMut<'e> {
    fn from(buffer: &'e mut DeviceBuffer<'_, T>) -> Self {
        let memory = &buffer.memory;
        let place = Place::Device(memory.context);
        let elements = Elements::new(memory.address, T::DTYPE, buffer.len(), place);
        ElementsMut { elements, borrowed: PhantomData }
    }
}

/// What an exchange takes on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangePlan {
    /// Matrices whose home is this rank.
    pub home_count: u32,
    /// Elements of those.
    pub home_elements: u64,
    /// Device memory for messages.
    pub device_bytes: u64,
    /// Host memory for messages; pinned if there is a device.
    pub host_bytes: u64,
}

struct Matrix {
    name: String,
    dtype: Dtype,
    grad_dtype: Dtype,
    shard: Shard,
}

/// The settings of an [`Exchange`].
#[must_use]
pub struct ExchangeBuilder<'c> {
    context: &'c Context,
    comm: Comm<'c>,
    timeout_ns: u64,
    matrices: Vec<Matrix>,
}

impl<'c> ExchangeBuilder<'c> {
    /// Adds a matrix, or a stack of them, of which this rank has a shard, which may be empty. All
    /// ranks add the same ones in the same order; their numbers count from 0.
    pub fn matrix(mut self, name: &str, dtype: Dtype, grad_dtype: Dtype, shard: Shard) -> Self {
        self.matrices.push(Matrix { name: name.to_string(), dtype, grad_dtype, shard });
        self
    }

    /// The time after which a rank that does not answer counts as failed; 600 s by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout_ns = nanoseconds(timeout);
        self
    }

    /// What `create` would take. It calls no other rank.
    pub fn plan(&self) -> Result<ExchangePlan> {
        let mut plan = sys::offload_exchange_plan_t::default();
        self.with_raw(|context, options| {
            // SAFETY: the handle is alive and the structs whole.
            check(unsafe { sys::offload_exchange_plan(context, options, &mut plan) })
        })?;
        Ok(ExchangePlan {
            home_count: plan.home_count,
            home_elements: plan.home_elements,
            device_bytes: plan.device_bytes,
            host_bytes: plan.host_bytes,
        })
    }

    /// Makes the exchange. All ranks call it, each with a context of its own: a call that waits for
    /// other ranks keeps its context busy.
    pub fn create(self) -> Result<Exchange<'c>> {
        let mut raw = ptr::null_mut();
        self.with_raw(|context, options| {
            // SAFETY: as above; the closures behind `comm` outlive the exchange.
            check(unsafe { sys::offload_exchange_create(context, options, &mut raw) })
        })?;
        let ExchangeBuilder { context, comm, matrices, .. } = self;
        let mut exchange = Exchange { raw, context, on_host: false, matrices, comm };
        exchange.on_host = context.info()?.device_kind == sys::OFFLOAD_DEVICE_HOST;
        Ok(exchange)
    }

    fn with_raw<R>(
        &self,
        call: impl FnOnce(sys::offload_context_t, &sys::offload_exchange_options_t) -> Result<R>,
    ) -> Result<R> {
        let count = u32::try_from(self.matrices.len())
            .map_err(|_| Error::invalid_argument("expected fewer than 2^32 matrices".into()))?;
        let names = (self.matrices.iter())
            .map(|matrix| c_name("matrix", &matrix.name))
            .collect::<Result<Vec<_>>>()?;
        let shards =
            self.matrices.iter().map(|matrix| matrix.shard.raw()).collect::<Result<Vec<_>>>()?;
        let matrices: Vec<_> = (self.matrices.iter().zip(&names).zip(&shards))
            .map(|((matrix, name), shard)| sys::offload_exchange_matrix_t {
                dtype: matrix.dtype.raw(),
                grad_dtype: matrix.grad_dtype.raw(),
                name: name.as_ptr(),
                shard,
                ..Default::default()
            })
            .collect();
        let comm = self.comm.raw();
        let options = sys::offload_exchange_options_t {
            matrix_count: count,
            matrices: matrices.as_ptr(),
            comm: &comm,
            comm_timeout_ns: self.timeout_ns,
            ..Default::default()
        };
        self.context.with(|handle| call(handle, &options))
    }
}

/// Muon updates whole matrices. Where ranks have parts of them, each matrix has a home: the rank
/// that registers the whole of it in its optimizer. An exchange brings the parts together on the
/// home, and takes them back from there. It has a [`Comm`] of its own, with
/// [`with_exchange`](Comm::with_exchange).
///
/// ```
/// use hybridopt::{Comm, Context, Dtype, Exchange, Shard};
///
/// // One rank here, which has the whole matrix; docs/guides/from_rust.md has more of them.
/// let context = Context::host()?;
/// let comm = Comm::new(0, 1, |_, _| Ok(()), |_, _| Ok(()), |_| Ok(())).with_exchange(|_, _| Ok(()));
/// let shard = Shard::of(&[4, 3]).with_box(&[0, 0], &[4, 3]);
/// let mut exchange =
///     Exchange::builder(&context, comm).matrix("up", Dtype::Fp32, Dtype::Fp32, shard).create()?;
/// let (part, mut whole) = (vec![1.5f32; 12], vec![0f32; 12]);
/// assert_eq!(exchange.home(0)?, 0);
/// exchange.gather(0, &part, Some((&mut whole).into()), None)?;
/// assert_eq!(whole, part);
/// # Ok::<(), hybridopt::Error>(())
/// ```
pub struct Exchange<'c> {
    raw: sys::offload_exchange_t,
    context: &'c Context,
    /// Whether the device is the host, so that its memory is that of slices.
    on_host: bool,
    matrices: Vec<Matrix>,
    /// The library calls its closures until destroy.
    comm: Comm<'c>,
}

// SAFETY: the handle is a number, valid on every thread; gather and scatter take `&mut self`.
unsafe impl Send for Exchange<'_> {}
unsafe impl Sync for Exchange<'_> {}

impl<'c> Exchange<'c> {
    /// An exchange between the ranks of `comm`. Add the matrices next.
    pub fn builder(context: &'c Context, comm: Comm<'c>) -> ExchangeBuilder<'c> {
        ExchangeBuilder { context, comm, timeout_ns: 0, matrices: Vec::new() }
    }

    /// The rank that is the home of a matrix.
    pub fn home(&self, matrix: u32) -> Result<i32> {
        let mut rank = 0;
        // SAFETY: the handle is alive.
        check(unsafe { sys::offload_exchange_home(self.raw, matrix, &mut rank) })?;
        Ok(rank)
    }

    /// Puts the parts of all ranks together in `whole`, which only the home gives. All ranks make
    /// the calls of gather and scatter in the same order, for the same matrices and dtypes. The
    /// call comes behind the work on the stream (None: the NULL stream), and returns when it is
    /// done. After a failure of another rank, `whole` may have some parts.
    pub fn gather<'e>(
        &mut self,
        matrix: u32,
        part: impl Into<Elements<'e>>,
        whole: Option<ElementsMut<'e>>,
        stream: Option<&Stream<'c>>,
    ) -> Result<()> {
        let part = part.into();
        let whole = self.checked(matrix, &part, whole.map(|whole| whole.elements))?;
        let dtype = part.dtype.raw();
        // SAFETY: both have as many elements as the matrix has there, and live during the call.
        check(unsafe {
            sys::offload_exchange_gather(
                self.raw,
                matrix,
                dtype,
                part.pointer(),
                whole,
                raw_of(stream),
            )
        })
    }

    /// The other way: every rank gets its part of the home's `whole`.
    pub fn scatter<'e>(
        &mut self,
        matrix: u32,
        whole: Option<Elements<'e>>,
        part: impl Into<ElementsMut<'e>>,
        stream: Option<&Stream<'c>>,
    ) -> Result<()> {
        let part = part.into().elements;
        let whole = self.checked(matrix, &part, whole)?;
        let dtype = part.dtype.raw();
        // SAFETY: as for `gather`.
        check(unsafe {
            sys::offload_exchange_scatter(
                self.raw,
                matrix,
                dtype,
                whole,
                part.pointer(),
                raw_of(stream),
            )
        })
    }

    /// The address of the whole, or NULL on other ranks than the home.
    fn checked(
        &self,
        matrix: u32,
        part: &Elements<'_>,
        whole: Option<Elements<'_>>,
    ) -> Result<*mut c_void> {
        let is_home = self.home(matrix)? == self.rank();
        let Matrix { name, shard, .. } = &self.matrices[matrix as usize];
        part.check("part", self, shard.elements(), name)?;
        let whole = match whole {
            Some(whole) if is_home => whole,
            None if is_home => {
                return Err(Error::invalid_argument(format!(
                    "whole is None, but this rank is the home of '{name}'; give it room for {} \
                     elements",
                    shard.tensor_elements()
                )))
            }
            _ => return Ok(ptr::null_mut()),
        };
        whole.check("whole", self, shard.tensor_elements(), name)?;
        if whole.dtype == part.dtype {
            return Ok(whole.pointer());
        }
        Err(Error::invalid_argument(format!(
            "whole of '{name}' is {:?}, expected {:?}, as part is",
            whole.dtype, part.dtype
        )))
    }

    fn rank(&self) -> i32 {
        self.comm.rank()
    }
}

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is this object's own. If a stream still uses its memory, that is kept.
        unsafe { sys::offload_exchange_destroy(self.raw) };
    }
}

impl fmt::Debug for Exchange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("matrices", &self.matrices.len()).finish_non_exhaustive()
    }
}
