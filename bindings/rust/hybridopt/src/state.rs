//! Views of masters and moments.

use std::fmt;

use hybridopt_sys as sys;

use crate::device::{download, upload};
use crate::element::{Dtype, Element};
use crate::error::{check, Error, Result};
use crate::optimizer::Optimizer;
use crate::param::ParamId;

/// The kinds of state. A param has the kinds of its algorithm, and a master if it needs one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateKind {
    /// The fp32 value of a param.
    Master,
    /// AdamW, Adam, Lion, Signum.
    ExpAvg,
    /// AdamW, Adam.
    ExpAvgSq,
    /// SGD.
    MomentumBuffer,
    /// Adagrad.
    Sum,
    /// The part of masters that their bf16 params lack, if [`MasterLayout`](crate::MasterLayout)
    /// stores only that part.
    MasterLow,
}

impl StateKind {
    const ALL: [StateKind; 6] = [
        StateKind::Master,
        StateKind::ExpAvg,
        StateKind::ExpAvgSq,
        StateKind::MomentumBuffer,
        StateKind::Sum,
        StateKind::MasterLow,
    ];

    pub(crate) fn raw(self) -> i32 {
        match self {
            StateKind::Master => sys::OFFLOAD_STATE_MASTER,
            StateKind::ExpAvg => sys::OFFLOAD_STATE_EXP_AVG,
            StateKind::ExpAvgSq => sys::OFFLOAD_STATE_EXP_AVG_SQ,
            StateKind::MomentumBuffer => sys::OFFLOAD_STATE_MOMENTUM_BUFFER,
            StateKind::Sum => sys::OFFLOAD_STATE_SUM,
            StateKind::MasterLow => sys::OFFLOAD_STATE_MASTER_LOW,
        }
    }

    pub(crate) fn from_raw(raw: i32) -> Option<Self> {
        StateKind::ALL.into_iter().find(|kind| kind.raw() == raw)
    }
}

/// One kind of state of one param: the first elements are on the device, the next ones in host memory.
/// The rest is on disk and not in the view; [`Optimizer::read_state`] reads it.
pub struct State<'s, 'a> {
    optimizer: &'s mut Optimizer<'a>,
    view: sys::offload_state_view_t,
    dtype: Dtype,
}

impl<'a> Optimizer<'a> {
    /// The view of one kind of state. An fp32 param that is updated in place has no separate
    /// master: the view is then the param itself.
    pub fn state(&mut self, id: ParamId, kind: StateKind) -> Result<State<'_, 'a>> {
        self.slot(id)?;
        let mut view = sys::offload_state_view_t::default();
        // SAFETY: the handle is alive and the struct whole.
        check(unsafe { sys::offload_optimizer_state(self.handle.0, id.0, kind.raw(), &mut view) })?;
        let dtype = Dtype::from_raw(view.dtype).ok_or_else(|| {
            Error::invalid_argument(format!(
                "state has dtype {}, which this release of the crate does not know",
                view.dtype
            ))
        })?;
        Ok(State { optimizer: self, view, dtype })
    }
}

impl Optimizer<'_> {
    /// Copies elements of one kind of state, from `first` on, as the numbers that steps use: in
    /// every layout, wherever they are. For [`StateKind::Master`] these are the whole masters.
    pub fn read_state(
        &mut self,
        id: ParamId,
        kind: StateKind,
        first: usize,
        values: &mut [f32],
    ) -> Result<()> {
        self.slot(id)?;
        // SAFETY: the handle is alive and `values` has room for as many.
        check(unsafe {
            sys::offload_optimizer_read_state(
                self.handle.0,
                id.0,
                kind.raw(),
                first as u64,
                values.len() as u64,
                values.as_mut_ptr(),
            )
        })
    }

    /// Replaces elements of one kind of state, from `first` on. Numbers that the layout cannot
    /// represent are rounded to nearest. With a master its param is written too.
    pub fn write_state(
        &mut self,
        id: ParamId,
        kind: StateKind,
        first: usize,
        values: &[f32],
    ) -> Result<()> {
        self.slot(id)?;
        // SAFETY: the handle is alive and `values` has as many.
        check(unsafe {
            sys::offload_optimizer_write_state(
                self.handle.0,
                id.0,
                kind.raw(),
                first as u64,
                values.len() as u64,
                values.as_ptr(),
            )
        })
    }
}

impl State<'_, '_> {
    /// Elements in memory.
    pub fn len(&self) -> usize {
        (self.view.device_count + self.view.host_count) as usize
    }

    /// Whether there is no element in memory.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements on disk: those behind the ones in memory.
    pub fn disk_len(&self) -> usize {
        self.view.disk_count as usize
    }

    /// How many of the elements are on the device.
    pub fn device_len(&self) -> usize {
        self.view.device_count as usize
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// How many steps have updated this param.
    pub fn step_count(&self) -> u64 {
        self.view.step_count
    }

    /// The elements in host memory.
    pub fn host<T: Element>(&self) -> Result<&[T]> {
        self.check_type::<T>()?;
        if self.view.host_count == 0 {
            return Ok(&[]);
        }
        // SAFETY: stable while nothing is queued, and the optimizer is borrowed for as long.
        Ok(unsafe {
            std::slice::from_raw_parts(self.view.host_data.cast(), self.view.host_count as usize)
        })
    }

    /// The same, writable.
    pub fn host_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check_type::<T>()?;
        if self.view.host_count == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as above, and may be written then.
        Ok(unsafe {
            std::slice::from_raw_parts_mut(
                self.view.host_data.cast(),
                self.view.host_count as usize,
            )
        })
    }

    /// Copies all elements out, the device's first.
    pub fn read<T: Element>(&self, values: &mut [T]) -> Result<()> {
        self.check_len(values.len())?;
        let host = self.host::<T>()?;
        let (on_device, on_host) = values.split_at_mut(self.device_len());
        on_host.copy_from_slice(host);
        // SAFETY: the view holds that many of that type, and nothing is queued.
        unsafe { download(self.optimizer.context, self.view.device_data, on_device) }
    }

    /// Copies all elements in, the device's first.
    pub fn write<T: Element>(&mut self, values: &[T]) -> Result<()> {
        self.check_len(values.len())?;
        let (on_device, on_host) = values.split_at(self.device_len());
        self.host_mut::<T>()?.copy_from_slice(on_host);
        // SAFETY: as above.
        unsafe { upload(self.optimizer.context, self.view.device_data, on_device) }
    }

    fn check_type<T: Element>(&self) -> Result<()> {
        if self.dtype == T::DTYPE {
            return Ok(());
        }
        Err(Error::invalid_argument(format!("the state is {:?}, not {:?}", self.dtype, T::DTYPE)))
    }

    fn check_len(&self, got: usize) -> Result<()> {
        if got == self.len() {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "values has {got} elements, expected {}, as many as the state",
            self.len()
        )))
    }
}

impl fmt::Debug for State<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("dtype", &self.dtype)
            .field("len", &self.len())
            .field("device_len", &self.device_len())
            .finish_non_exhaustive()
    }
}
