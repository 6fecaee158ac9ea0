//! A committed optimizer: steps, memory, state.

use std::ffi::c_void;
use std::fmt;
use std::ptr;

use hybridopt_sys as sys;

use crate::comm::Comm;
use crate::context::Context;
use crate::device::{download, raw_of, upload, Stream};
use crate::element::Element;
use crate::error::{check, Error, Result};
use crate::exchange::{Elements, ElementsMut};
use crate::group::Group;
use crate::handle::{stats, step_result, Handle, Ticket};
use crate::keep::Keep;
use crate::memory::Memory;
use crate::param::{check_count, GroupId, ParamId};
use crate::report::{Plan, Stats, StepResult};
use crate::slot::Slot;

fn check_type<T: Element>(memory: &Memory<'_>, name: &str, what: &str) -> Result<()> {
    if memory.dtype == T::DTYPE {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "the {what} of '{name}' is {:?}, not {:?}",
        memory.dtype,
        T::DTYPE
    )))
}

fn check_host<T: Element>(memory: &Memory<'_>, name: &str, what: &str) -> Result<()> {
    check_type::<T>(memory, name, what)?;
    if memory.in_host_memory() {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "the {what} of '{name}' is in memory of a device, which has no slice; use the calls that \
         copy (read, write, write_grad)"
    )))
}

fn check_len(got: usize, expected: usize, name: &str) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "values has {got} elements, expected {expected}, as many as '{name}'"
    )))
}

/// The options of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepOptions<'s> {
    /// The loss scale: gradients are divided by it; 0 stands for 1.
    pub grad_scale: f64,
    /// The global norm of the unscaled gradients is clipped to this; 0 stands for no clipping.
    pub grad_norm_max: f64,
    /// The caller guarantees that every gradient is finite, so the step does not check it. If one
    /// is not, the resulting numbers are unspecified.
    pub assume_finite: bool,
    /// If other code has written 16-bit params that the step updates, the step first makes their
    /// masters equal to them. Only with params in host memory.
    pub follow_params: bool,
    /// Gradients and params are ready after the work that is on this stream now; None is the NULL
    /// stream.
    pub stream: Option<&'s Stream<'s>>,
}

impl StepOptions<'_> {
    pub(crate) fn raw(&self) -> sys::offload_step_options_t {
        sys::offload_step_options_t {
            flags: (if self.assume_finite { sys::OFFLOAD_STEP_ASSUME_FINITE } else { 0 })
                | (if self.follow_params { sys::OFFLOAD_STEP_FOLLOW_PARAMS } else { 0 }),
            grad_scale: self.grad_scale,
            grad_norm_max: self.grad_norm_max,
            stream: raw_of(self.stream),
            ..Default::default()
        }
    }
}

/// An optimizer that owns its state, and holds the memory of its params and gradients.
///
/// Outside [`queue`](Optimizer::queue) nothing is ever under way: what queues work waits for it
/// before it returns. That is what makes it safe to look at params in between, and to leak the
/// optimizer.
///
/// ```compile_fail,E0502
/// # use hybridopt::{Algorithm, Context, Group, Optimizer, Param, StepOptions};
/// # let context = Context::host()?;
/// # let (mut weight, mut grad) = (vec![0f32; 4], vec![1f32; 4]);
/// # let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
/// # let group = adding.add_group(&Group { lr: 0.1, ..Group::default() })?;
/// # let param = adding.add_param(Param::new("weight", group, &mut weight).grad(&mut grad))?;
/// # let mut optimizer = adding.commit()?;
/// let before = optimizer.data::<f32>(param)?;
/// optimizer.step(&StepOptions::default())?; // would write what `before` reads
/// println!("{}", before[0]);
/// # Ok::<(), hybridopt::Error>(())
/// ```
pub struct Optimizer<'a> {
    // The order matters: the handle is dropped before the memory that the library may still use.
    pub(crate) handle: Handle,
    pub(crate) context: &'a Context,
    pub(crate) slots: Vec<Slot<'a>>,
    /// Objects that queued work needs until it is done.
    pub(crate) kept: Vec<Keep<'a>>,
    comm: Option<Comm<'a>>,
}

impl<'a> Optimizer<'a> {
    pub(crate) fn new(
        handle: Handle,
        context: &'a Context,
        slots: Vec<Slot<'a>>,
        comm: Option<Comm<'a>>,
    ) -> Self {
        Optimizer { handle, context, slots, kept: Vec::new(), comm }
    }

    /// New hyperparameters for a group, for instance a learning rate.
    pub fn set_group(&mut self, id: GroupId, group: &Group) -> Result<()> {
        // SAFETY: the handle is alive and the struct whole.
        check(unsafe { sys::offload_optimizer_set_group(self.handle.0, id.0, &group.raw()) })
    }

    /// Updates every param that has a gradient, and returns when that is done. If any gradient is Inf
    /// or NaN, the step is skipped: it changes no bit.
    pub fn step(&mut self, options: &StepOptions<'_>) -> Result<StepResult> {
        let ticket = self.queue(|queue| queue.step(options))?;
        self.step_result(ticket)
    }

    /// The result of a completed step. The library keeps the last 64.
    pub fn step_result(&self, ticket: Ticket) -> Result<StepResult> {
        step_result(self.handle.0, ticket)
    }

    /// The memory that commit has taken.
    pub fn plan(&mut self) -> Result<Plan> {
        self.handle.plan()
    }

    /// Totals since create, and the memory in use now.
    pub fn stats(&self) -> Result<Stats> {
        stats(self.handle.0)
    }

    // ------------------------------------------------------------------------------------ memory

    pub(crate) fn slot(&self, id: ParamId) -> Result<&Slot<'a>> {
        self.slots.get(id.0 as usize).ok_or_else(|| self.unknown(id))
    }

    pub(crate) fn unknown(&self, id: ParamId) -> Error {
        Error::invalid_argument(format!(
            "param id is {}, expected one of this optimizer's {}",
            id.0,
            self.slots.len()
        ))
    }

    /// The name under which a param was registered.
    pub fn name(&self, id: ParamId) -> Result<&str> {
        Ok(&self.slot(id)?.name)
    }

    /// The elements of a param in host memory.
    pub fn data<T: Element>(&self, id: ParamId) -> Result<&[T]> {
        let slot = self.slot(id)?;
        let data = slot.data()?;
        check_host::<T>(data, &slot.name, "data")?;
        // SAFETY: nothing is queued, so only holders of `&mut self` could write.
        Ok(unsafe { data.slice() })
    }

    /// The same, writable. Afterwards call [`refresh_masters`](Optimizer::refresh_masters), or step
    /// with `follow_params`; otherwise the next step restores the old values.
    pub fn data_mut<T: Element>(&mut self, id: ParamId) -> Result<&mut [T]> {
        let slot = self.slot(id)?;
        let data = slot.data()?;
        check_host::<T>(data, &slot.name, "data")?;
        // SAFETY: nothing is queued, and `self` is borrowed for as long.
        Ok(unsafe { data.slice_mut() })
    }

    /// The gradient of a param in host memory.
    pub fn grad<T: Element>(&self, id: ParamId) -> Result<&[T]> {
        let slot = self.slot(id)?;
        let grad = slot.grad()?;
        check_host::<T>(grad, &slot.name, "gradient")?;
        // SAFETY: as for `data`.
        Ok(unsafe { grad.slice() })
    }

    /// The same, writable.
    pub fn grad_mut<T: Element>(&mut self, id: ParamId) -> Result<&mut [T]> {
        let slot = self.slot(id)?;
        let grad = slot.grad()?;
        check_host::<T>(grad, &slot.name, "gradient")?;
        // SAFETY: as for `data_mut`.
        Ok(unsafe { grad.slice_mut() })
    }

    /// The elements of a param, wherever they are, for [`Exchange::scatter`](crate::Exchange::scatter).
    pub fn elements(&self, id: ParamId) -> Result<Elements<'_>> {
        Ok(Elements::of_memory(self.slot(id)?.data()?))
    }

    /// The gradient of a param, wherever it is, for [`Exchange::gather`](crate::Exchange::gather).
    pub fn grad_elements_mut(&mut self, id: ParamId) -> Result<ElementsMut<'_>> {
        Ok(ElementsMut::of_memory(self.slot(id)?.grad()?))
    }

    /// Copies a param's elements out, wherever they are.
    pub fn read<T: Element>(&self, id: ParamId, values: &mut [T]) -> Result<()> {
        let slot = self.slot(id)?;
        let data = slot.data()?;
        check_type::<T>(data, &slot.name, "data")?;
        check_len(values.len(), slot.count, &slot.name)?;
        // SAFETY: nothing is queued, and both sides have that type and length.
        unsafe { copy_out(self.context, data, values) }
    }

    /// Copies elements into a param, wherever it is; see [`data_mut`](Optimizer::data_mut).
    pub fn write<T: Element>(&mut self, id: ParamId, values: &[T]) -> Result<()> {
        let slot = self.slot(id)?;
        let data = slot.data()?;
        check_type::<T>(data, &slot.name, "data")?;
        check_len(values.len(), slot.count, &slot.name)?;
        // SAFETY: as for `read`, and `self` is borrowed.
        unsafe { copy_in(self.context, data, values) }
    }

    /// Copies a gradient in, wherever it is.
    pub fn write_grad<T: Element>(&mut self, id: ParamId, values: &[T]) -> Result<()> {
        let slot = self.slot(id)?;
        let grad = slot.grad()?;
        check_type::<T>(grad, &slot.name, "gradient")?;
        check_len(values.len(), slot.count, &slot.name)?;
        // SAFETY: as for `write`.
        unsafe { copy_in(self.context, grad, values) }
    }

    /// Copies a gradient out, wherever it is.
    pub fn read_grad<T: Element>(&self, id: ParamId, values: &mut [T]) -> Result<()> {
        let slot = self.slot(id)?;
        let grad = slot.grad()?;
        check_type::<T>(grad, &slot.name, "gradient")?;
        check_len(values.len(), slot.count, &slot.name)?;
        // SAFETY: as for `read`.
        unsafe { copy_out(self.context, grad, values) }
    }

    /// Binds a new address for a param: it has the param's content already or, after
    /// offload_params, will get it.
    pub fn bind_data(&mut self, id: ParamId, data: impl Into<Memory<'a>>) -> Result<()> {
        let data = data.into();
        data.check_context(self.context, "data")?;
        let slot = self.slot(id)?;
        if data.dtype != slot.dtype || data.count != slot.count {
            return Err(Error::invalid_argument(format!(
                "data is {} of {:?}, expected {} of {:?} as '{}' was registered",
                data.count, data.dtype, slot.count, slot.dtype, slot.name
            )));
        }
        let grad = slot.grad.as_ref().map_or(ptr::null_mut(), |grad| grad.address);
        self.bind(id, data.data_address(), grad)?;
        self.slots[id.0 as usize].data = Some(data);
        Ok(())
    }

    /// Binds a new gradient for a param.
    pub fn bind_grad(&mut self, id: ParamId, grad: impl Into<Memory<'a>>) -> Result<()> {
        let grad = grad.into();
        grad.check_context(self.context, "grad")?;
        let slot = self.slot(id)?;
        check_count(grad.count, slot.count, &slot.name)?;
        if grad.dtype != slot.grad_dtype {
            return Err(Error::invalid_argument(format!(
                "grad is {:?}, expected {:?} as '{}' was registered",
                grad.dtype, slot.grad_dtype, slot.name
            )));
        }
        self.bind(id, ptr::null_mut(), grad.address)?;
        self.slots[id.0 as usize].grad = Some(grad);
        Ok(())
    }

    /// Removes the gradient of a param: the next step does not update it.
    pub fn clear_grad(&mut self, id: ParamId) -> Result<()> {
        self.slot(id)?;
        self.bind(id, ptr::null_mut(), ptr::null_mut())?;
        self.slots[id.0 as usize].grad = None;
        Ok(())
    }

    /// For each param, in the order of ids: whether its gradient should stay on the device, where
    /// the next step reads it, instead of being given to
    /// [`offload_grads`](Optimizer::offload_grads).
    pub fn grads_to_keep(&self) -> Result<Vec<bool>> {
        let mut keep = vec![0u8; self.slots.len()];
        // SAFETY: the handle is alive; `keep` has room for one byte a param.
        check(unsafe {
            sys::offload_optimizer_grads_to_keep(
                self.handle.0,
                keep.as_mut_ptr(),
                keep.len() as u32,
            )
        })?;
        Ok(keep.into_iter().map(|byte| byte != 0).collect())
    }

    /// Sets how many steps have updated a param, for state that comes from elsewhere and was
    /// written through [`state`](Optimizer::state).
    pub fn set_step_count(&mut self, id: ParamId, count: u64) -> Result<()> {
        // SAFETY: the handle is alive.
        check(unsafe { sys::offload_optimizer_set_step_count(self.handle.0, id.0, count) })
    }

    fn bind(&mut self, id: ParamId, data: *mut c_void, grad: *mut c_void) -> Result<()> {
        let binding = sys::offload_binding_t { param: id.0, data, grad, ..Default::default() };
        // SAFETY: the struct is whole; the callers keep the memory.
        check(unsafe { sys::offload_optimizer_bind(self.handle.0, &binding, 1) })
    }
}

impl fmt::Debug for Optimizer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Optimizer")
            .field("params", &self.slots.len())
            .field("comm", &self.comm)
            .finish_non_exhaustive()
    }
}

/// # Safety
/// Nothing else writes the memory, whose type and length are those of `values`.
unsafe fn copy_out<T: Element>(
    context: &Context,
    memory: &Memory<'_>,
    values: &mut [T],
) -> Result<()> {
    if memory.in_host_memory() {
        // SAFETY: the caller's promise.
        values.copy_from_slice(unsafe { memory.slice() });
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { download(context, memory.address, values) }
}

/// # Safety
/// As for `copy_out`, and nothing else reads the memory.
unsafe fn copy_in<T: Element>(context: &Context, memory: &Memory<'_>, values: &[T]) -> Result<()> {
    if memory.in_host_memory() {
        // SAFETY: the caller's promise.
        unsafe { memory.slice_mut() }.copy_from_slice(values);
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { upload(context, memory.address, values) }
}
