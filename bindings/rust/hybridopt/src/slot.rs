//! A param of an optimizer, with the memory that it has now.

use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::param::Param;

/// A param, with the memory that Rust owns for it.
pub(crate) struct Slot<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) grad_dtype: Dtype,
    pub(crate) count: usize,
    /// None after an offload has given the address up.
    pub(crate) data: Option<Memory<'a>>,
    pub(crate) grad: Option<Memory<'a>>,
    /// Whether the content of the param is on the host. It may have an address all the same.
    pub(crate) offloaded: bool,
}

impl<'a> Slot<'a> {
    pub(crate) fn new(param: Param<'a>) -> Self {
        Slot {
            name: param.name,
            dtype: param.data.dtype,
            grad_dtype: param.grad_dtype,
            count: param.data.count,
            data: Some(param.data),
            grad: param.grad,
            offloaded: false,
        }
    }

    pub(crate) fn data(&self) -> Result<&Memory<'a>> {
        match (&self.data, self.offloaded) {
            (Some(data), false) => Ok(data),
            (None, _) => Err(Error::invalid_state(format!(
                "the address of '{}' was given up by offload_params; bind_data, then reload_params",
                self.name
            ))),
            (Some(_), true) => Err(Error::invalid_state(format!(
                "'{}' is on the host, and its new address is still empty; reload_params first",
                self.name
            ))),
        }
    }

    pub(crate) fn grad(&self) -> Result<&Memory<'a>> {
        self.grad.as_ref().ok_or_else(|| {
            Error::invalid_state(format!("'{}' has no gradient; bind_grad one", self.name))
        })
    }
}
