//! Params, groups and shards, as they are registered.

use std::ffi::CString;

use hybridopt_sys as sys;

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::memory::Memory;

/// A group of an optimizer, as `add_group` numbered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub(crate) u32);

/// A param of an optimizer, as `add_param` numbered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub(crate) u32);

/// Where the state of one param is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// `device_fraction` and the fraction of `OptimizerBuilder::disk` decide.
    #[default]
    Auto,
    /// All on the host.
    Host,
    /// All on the device.
    Device,
    /// All on disk, in the directories of `OptimizerBuilder::disk`.
    Disk,
}

impl Placement {
    fn raw(self) -> i32 {
        match self {
            Placement::Auto => sys::OFFLOAD_PLACE_AUTO,
            Placement::Host => sys::OFFLOAD_PLACE_HOST,
            Placement::Device => sys::OFFLOAD_PLACE_DEVICE,
            Placement::Disk => sys::OFFLOAD_PLACE_DISK,
        }
    }
}

/// The part of a global tensor that this process owns: boxes in the tensor, then a row-major range
/// inside them, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    global_shape: Vec<i64>,
    offsets: Vec<i64>,
    extents: Vec<i64>,
    boxes: usize,
    range: Option<(u64, u64)>,
    error: Option<String>,
}

impl Shard {
    /// A shard of a tensor of this shape. Add the boxes next.
    pub fn of(global_shape: &[i64]) -> Self {
        Shard {
            global_shape: global_shape.to_vec(),
            offsets: Vec::new(),
            extents: Vec::new(),
            boxes: 0,
            range: None,
            error: None,
        }
    }

    /// Adds a box. Both slices have one number for each dimension of the tensor.
    #[must_use]
    pub fn with_box(mut self, offset: &[i64], extent: &[i64]) -> Self {
        let dimensions = self.global_shape.len();
        if offset.len() != dimensions || extent.len() != dimensions {
            self.error.get_or_insert(format!(
                "shard box {} has {} offsets and {} extents, but the tensor has {dimensions} \
                 dimensions; give one of each per dimension",
                self.boxes,
                offset.len(),
                extent.len()
            ));
        }
        self.offsets.extend_from_slice(offset);
        self.extents.extend_from_slice(extent);
        self.boxes += 1;
        self
    }

    /// Limits the shard to these elements, counted through the boxes in order.
    #[must_use]
    pub fn with_range(mut self, begin: u64, count: u64) -> Self {
        self.range = Some((begin, count));
        self
    }

    /// Elements of the whole tensor.
    pub(crate) fn tensor_elements(&self) -> u64 {
        product(&self.global_shape)
    }

    /// Elements of the shard.
    pub(crate) fn elements(&self) -> u64 {
        match self.range {
            Some((_, count)) => count,
            None => self.extents.chunks(self.global_shape.len().max(1)).map(product).sum(),
        }
    }

    pub(crate) fn raw(&self) -> Result<sys::offload_shard_t> {
        if let Some(error) = &self.error {
            return Err(Error::invalid_argument(error.clone()));
        }
        let (range_begin, range_count) = self.range.unwrap_or_default();
        Ok(sys::offload_shard_t {
            dimensions: self.global_shape.len() as u32,
            box_count: self.boxes as u32,
            flags: self.range.map_or(0, |_| sys::OFFLOAD_SHARD_RANGE),
            global_shape: self.global_shape.as_ptr(),
            box_offsets: self.offsets.as_ptr(),
            box_extents: self.extents.as_ptr(),
            range_begin,
            range_count,
            ..Default::default()
        })
    }
}

/// Of numbers that the library has checked.
fn product(numbers: &[i64]) -> u64 {
    numbers.iter().map(|&number| number as u64).product()
}

/// A param and its gradient, for `Registration::add_param`.
#[must_use]
#[derive(Debug)]
pub struct Param<'a> {
    pub(crate) name: String,
    pub(crate) data: Memory<'a>,
    pub(crate) grad: Option<Memory<'a>>,
    pub(crate) grad_dtype: Dtype,
    group: GroupId,
    placement: Placement,
    replica: bool,
    chunk_order: i32,
    split_rows: Vec<u64>,
    shard: Option<Shard>,
}

impl<'a> Param<'a> {
    /// `name` identifies the param in checkpoints; `data` is a `&mut [T]`, a `Vec<T>` or a
    /// [`DeviceBuffer`](crate::DeviceBuffer).
    pub fn new(name: &str, group: GroupId, data: impl Into<Memory<'a>>) -> Self {
        let data = data.into();
        Param {
            name: name.to_string(),
            grad_dtype: data.dtype,
            data,
            grad: None,
            group,
            placement: Placement::Auto,
            replica: false,
            chunk_order: 0,
            split_rows: Vec::new(),
            shard: None,
        }
    }

    /// The memory of the gradient, with as many elements as `data`. Without it the param has no
    /// gradient until `bind_grad`.
    pub fn grad(mut self, grad: impl Into<Memory<'a>>) -> Self {
        let grad = grad.into();
        self.grad_dtype = grad.dtype;
        self.grad = Some(grad);
        self
    }

    /// The dtype of gradients that are bound later; by default that of `data`.
    pub fn grad_dtype(mut self, dtype: Dtype) -> Self {
        self.grad_dtype = dtype;
        self
    }

    /// Where its state is.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// Says that another rank counts this shard in the norm and saves it.
    pub fn replica(mut self, replica: bool) -> Self {
        self.replica = replica;
        self
    }

    /// Params with a lower number are updated first. It does not change the bits.
    pub fn chunk_order(mut self, order: i32) -> Self {
        self.chunk_order = order;
        self
    }

    /// Muon updates each part of a fused matrix as a matrix of its own; `rows` has the rows of each
    /// part. If their sum is less than the rows of the matrix, the list is repeated, and a
    /// part has its rows of each repetition.
    pub fn split_rows(mut self, rows: &[u64]) -> Self {
        self.split_rows = rows.to_vec();
        self
    }

    /// Which part of which tensor the param is; by default it is a whole tensor of one dimension.
    pub fn shard(mut self, shard: Shard) -> Self {
        self.shard = Some(shard);
        self
    }

    /// Calls `add` with the struct of the library, whose pointers end with the call.
    pub(crate) fn with_raw<R>(
        &self,
        add: impl FnOnce(&sys::offload_param_t) -> Result<R>,
    ) -> Result<R> {
        let name = c_name("param", &self.name)?;
        if let Some(grad) = &self.grad {
            check_count(grad.count, self.data.count, &self.name)?;
        }
        let shard = self.shard.as_ref().map(Shard::raw).transpose()?;
        add(&sys::offload_param_t {
            group: self.group.0,
            dtype: self.data.dtype.raw(),
            grad_dtype: self.grad_dtype.raw(),
            placement: self.placement.raw(),
            flags: if self.replica { sys::OFFLOAD_PARAM_REPLICA } else { 0 },
            name: name.as_ptr(),
            data: self.data.data_address(),
            grad: self.grad.as_ref().map_or(std::ptr::null(), |grad| grad.address),
            count: self.data.count as u64,
            shard: shard.as_ref().map_or(std::ptr::null(), |shard| shard),
            chunk_order: self.chunk_order,
            split_count: u32::try_from(self.split_rows.len()).map_err(|_| {
                Error::invalid_argument(format!(
                    "split_rows of '{}' has {} numbers, expected fewer than 2^32",
                    self.name,
                    self.split_rows.len()
                ))
            })?,
            split_rows: self.split_rows.as_ptr(),
            ..Default::default()
        })
    }
}

/// The name of a param or matrix, as the library takes it.
pub(crate) fn c_name(of: &str, name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| {
        Error::invalid_argument(format!("the {of}'s name {name:?} has a NUL in it; leave it out"))
    })
}

/// Fails unless the gradient has as many elements as the param: the library gets one count for both.
pub(crate) fn check_count(grad: usize, data: usize, name: &str) -> Result<()> {
    if grad == data {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "the gradient of '{name}' has {grad} elements, expected {data}, as many as the param"
    )))
}
