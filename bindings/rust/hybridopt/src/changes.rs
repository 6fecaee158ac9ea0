//! The elements of params that steps have changed, for programs that follow an optimizer.

use std::ptr;
use std::slice;

use hybridopt_sys as sys;

use crate::element::Dtype;
use crate::error::{check, Error, Result};
use crate::optimizer::Optimizer;
use crate::param::ParamId;

/// The part of a take that concerns one param.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The param.
    pub param: ParamId,
    /// The dtype of the values.
    pub dtype: Dtype,
    /// The elements that may differ, counted in the param, in order. `None`: all may; send the
    /// whole param.
    pub elements: Option<Vec<u64>>,
    /// The bytes of the new values of these elements. Empty if the param is to be sent whole.
    pub values: Vec<u8>,
    /// The hash of the whole param ([`content_hash`]). The follower's param must have it
    /// afterwards.
    pub hash: u64,
    /// The hash as of the take that was acknowledged last; `None` if there was none.
    pub base_hash: Option<u64>,
}

/// The result of [`Optimizer::changes`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// One entry for each param, in the order of ids.
    pub params: Vec<Change>,
    take: u64,
}

impl Optimizer<'_> {
    /// The elements of all params that may have changed since changes were last acknowledged. The
    /// optimizer must have been made with
    /// [`track_changes`](crate::OptimizerBuilder::track_changes). The first take contains all params
    /// whole. Later a param is whole if more than the fraction `dense_above` of it has changed. With
    /// `None` it is whole if its changed elements would take at least as many bytes.
    pub fn changes(&mut self, dense_above: Option<f64>) -> Result<Changes> {
        let mut buffer: Vec<u64> = Vec::new();
        loop {
            let bytes = (buffer.len() * 8) as u64;
            let options = sys::offload_changes_options_t {
                buffer: if bytes == 0 { ptr::null_mut() } else { buffer.as_mut_ptr().cast() },
                buffer_bytes: bytes,
                dense_above: dense_above.unwrap_or(0.0),
                ..Default::default()
            };
            let mut taken = sys::offload_changes_t::default();
            // SAFETY: the handle is alive, and the buffer has the bytes that the options say.
            let result = check(unsafe {
                sys::offload_optimizer_changes(self.handle.0, ptr::null(), 0, &options, &mut taken)
            });
            if result.is_err() && taken.bytes > bytes {
                buffer = vec![0; (taken.bytes as usize + 7) / 8];
                continue;
            }
            result?;
            // SAFETY: the library has written that many structs, and keeps them until the next take.
            let params = unsafe { slice::from_raw_parts(taken.params, taken.param_count as usize) };
            let params = params.iter().map(|raw| change_of(raw, &buffer)).collect::<Result<_>>()?;
            return Ok(Changes { params, take: taken.take });
        }
    }

    /// Says that the followers have all of a take: later takes begin from its values.
    pub fn acknowledge_changes(&mut self, changes: &Changes) -> Result<()> {
        // SAFETY: the handle is alive.
        check(unsafe { sys::offload_optimizer_acknowledge_changes(self.handle.0, changes.take) })
    }

    /// Makes the next take contain all params whole: for a new follower, or after a write that the
    /// library could not see.
    pub fn mark_changed(&mut self) -> Result<()> {
        // SAFETY: the handle is alive; NULL stands for all params.
        check(unsafe { sys::offload_optimizer_mark_changed(self.handle.0, ptr::null(), 0) })
    }
}

fn change_of(raw: &sys::offload_change_t, buffer: &[u64]) -> Result<Change> {
    let dtype = Dtype::from_raw(raw.dtype)
        .ok_or_else(|| Error::invalid_argument(format!("dtype {} is not known", raw.dtype)))?;
    let mut change = Change {
        param: ParamId(raw.param),
        dtype,
        elements: None,
        values: Vec::new(),
        hash: raw.hash,
        base_hash: (raw.has_base != 0).then_some(raw.base_hash),
    };
    if raw.dense == 0 {
        let indices = bytes_at(buffer, raw.indices_offset, raw.count * u64::from(raw.index_bytes));
        change.elements = Some(
            indices
                .chunks_exact(raw.index_bytes.max(1) as usize)
                .map(|bytes| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
                .collect(),
        );
        change.values = bytes_at(buffer, raw.values_offset, raw.count * dtype.size() as u64);
    }
    Ok(change)
}

/// A part of the buffer as bytes; offset and count are the library's.
fn bytes_at(buffer: &[u64], offset: u64, count: u64) -> Vec<u8> {
    // SAFETY: the words of the buffer are as many bytes, and every byte is a number.
    let bytes = unsafe { slice::from_raw_parts(buffer.as_ptr().cast::<u8>(), buffer.len() * 8) };
    bytes[offset as usize..(offset + count) as usize].to_vec()
}

/// The hash of bytes that a follower compares with [`Change::hash`].
pub fn content_hash(content: &[u8]) -> u64 {
    let mut hash = 0;
    // SAFETY: the slice has that many bytes.
    let result = check(unsafe {
        sys::offload_content_hash(content.as_ptr().cast(), content.len() as u64, &mut hash)
    });
    result.expect("the address and the length are those of a slice");
    hash
}
