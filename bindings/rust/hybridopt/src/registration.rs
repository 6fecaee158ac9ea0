//! Before commit: options, groups, params.

use std::ffi::{c_void, CString, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

use hybridopt_sys as sys;

use crate::algorithm::Algorithm;
use crate::checkpoint::c_path;
use crate::comm::Comm;
use crate::context::{nanoseconds, Context};
use crate::element::Dtype;
use crate::error::{check, Error, Result};
use crate::group::Group;
use crate::handle::Handle;
use crate::optimizer::Optimizer;
use crate::param::{GroupId, Param, ParamId};
use crate::report::Plan;
use crate::slot::Slot;

/// What may be offloaded later. The plan includes the memory for it on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Movable {
    /// Params.
    pub params: bool,
    /// Gradients.
    pub grads: bool,
    /// Masters and moments of the device share.
    pub states: bool,
    /// Gradients, and memory to add them up in fp32. It includes `grads`.
    pub accumulate: bool,
}

impl Movable {
    fn raw(self) -> u32 {
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        flag(self.params, sys::OFFLOAD_MOVABLE_PARAMS)
            | flag(self.grads, sys::OFFLOAD_MOVABLE_GRADS)
            | flag(self.states, sys::OFFLOAD_MOVABLE_STATES)
            | flag(self.accumulate, sys::OFFLOAD_MOVABLE_ACCUMULATE)
    }
}

/// How the fp32 master of a bf16 param is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MasterLayout {
    /// As 4 bytes of state.
    #[default]
    Fp32,
    /// The bf16 param is its upper half, 2 bytes of state are the lower. The same masters.
    Split,
    /// The same with 1 byte of state: a step rounds the lower 8 bits of the master away.
    Split24,
}

/// Which executors update the host share if the device has memory of its own. The bits do not depend
/// on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HostExecutors {
    /// CPU threads and, if the host's state can be pinned, the device.
    #[default]
    Auto,
    /// CPU threads alone.
    Cpu,
    /// The device alone, through which state streams.
    Streamed,
}

/// How moments in bf16 are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// At random, so that the mean of many roundings is the number itself.
    #[default]
    Stochastic,
    /// To nearest, ties to even: small changes are lost.
    Nearest,
}

/// The settings of an [`Optimizer`]; all but the algorithm have defaults.
#[must_use]
pub struct OptimizerBuilder<'a> {
    context: &'a Context,
    options: sys::offload_optimizer_options_t,
    disk_paths: Vec<PathBuf>,
    comm: Option<Comm<'a>>,
}

impl<'a> Optimizer<'a> {
    /// Starts with the default settings.
    pub fn builder(context: &'a Context, algorithm: Algorithm) -> OptimizerBuilder<'a> {
        OptimizerBuilder::new(context, algorithm)
    }
}

impl<'a> OptimizerBuilder<'a> {
    pub(crate) fn new(context: &'a Context, algorithm: Algorithm) -> Self {
        let options =
            sys::offload_optimizer_options_t { algorithm: algorithm.raw(), ..Default::default() };
        OptimizerBuilder { context, options, disk_paths: Vec::new(), comm: None }
    }

    /// Share of the elements whose state lives on the device, in [0, 1]; 0 by default. No effect
    /// on the host device, which has one memory.
    pub fn device_fraction(mut self, fraction: f64) -> Self {
        self.options.device_fraction = fraction;
        self
    }

    /// The most elements of a chunk; 2^20 by default, on CUDA 2^22.
    pub fn chunk_elements(mut self, elements: u64) -> Self {
        self.options.chunk_elements = elements;
        self
    }

    /// Chunks in the staging ring; 8 by default.
    pub fn staging_slots(mut self, slots: u32) -> Self {
        self.options.staging_slots = slots;
        self
    }

    /// Which executors update the host share; CPU threads and the device by default.
    pub fn host_executors(mut self, executors: HostExecutors) -> Self {
        self.options.host_executors = match executors {
            HostExecutors::Auto => sys::OFFLOAD_EXECUTORS_AUTO,
            HostExecutors::Cpu => sys::OFFLOAD_EXECUTORS_CPU,
            HostExecutors::Streamed => sys::OFFLOAD_EXECUTORS_STREAMED,
        };
        self
    }

    /// Device memory for the ring through which state on the host streams; the state of 3 chunks by
    /// default.
    pub fn stream_ring_bytes(mut self, bytes: u64) -> Self {
        self.options.stream_ring_bytes = bytes;
        self
    }

    /// Pinned host memory for chunks that CPU threads update before their step, as soon as
    /// [`offload_grads`](crate::Optimizer::offload_grads) has brought their gradients; none by
    /// default.
    pub fn early_update_bytes(mut self, bytes: u64) -> Self {
        self.options.early_update_bytes = bytes;
        self
    }

    /// Whether steps note which elements of params they change, for
    /// [`changes`](crate::Optimizer::changes); they do not by default.
    pub fn track_changes(mut self, track: bool) -> Self {
        self.options.track_changes = i32::from(track);
        self
    }

    /// Host memory to which a step copies state before it overwrites it, while a save has still to
    /// read it; none by default: the step waits for the save. `u64::MAX`: at most a
    /// quarter of the host memory that is free, which the first save takes.
    pub fn save_buffer_bytes(mut self, bytes: u64) -> Self {
        self.options.save_buffer_bytes = bytes;
        self
    }

    /// Share of the elements whose state lives on disk, in [0, 1], in files without a name in these
    /// directories, one on each drive; none by default. The last params that are registered, beside
    /// those of `Placement::Disk`.
    pub fn disk<P: Into<PathBuf>>(
        mut self,
        fraction: f64,
        paths: impl IntoIterator<Item = P>,
    ) -> Self {
        self.options.disk_fraction = fraction;
        self.disk_paths = paths.into_iter().map(Into::into).collect();
        self
    }

    /// Host memory through which state on disk goes; at most 256 MiB by default.
    pub fn disk_ring_bytes(mut self, bytes: u64) -> Self {
        self.options.disk_ring_bytes = bytes;
        self
    }

    /// What may be offloaded later; nothing by default.
    pub fn movable(mut self, movable: Movable) -> Self {
        self.options.movable = movable.raw();
        self
    }

    /// How the fp32 masters of bf16 params are kept; as fp32 by default.
    pub fn master_layout(mut self, layout: MasterLayout) -> Self {
        self.options.master_layout = match layout {
            MasterLayout::Fp32 => sys::OFFLOAD_MASTER_FP32,
            MasterLayout::Split => sys::OFFLOAD_MASTER_SPLIT,
            MasterLayout::Split24 => sys::OFFLOAD_MASTER_SPLIT24,
        };
        self
    }

    /// The dtype of moments, fp32 or bf16; fp32 by default.
    pub fn moment_dtype(mut self, dtype: Dtype) -> Self {
        self.options.moment_dtype = dtype.raw();
        self
    }

    /// How bf16 moments and 24-bit masters are rounded; at random by default, from a seed that is the same on all
    /// ranks and after a load.
    pub fn moment_rounding(mut self, rounding: Rounding, seed: u64) -> Self {
        self.options.moment_rounding = match rounding {
            Rounding::Stochastic => sys::OFFLOAD_ROUND_STOCHASTIC,
            Rounding::Nearest => sys::OFFLOAD_ROUND_NEAREST,
        };
        self.options.rounding_seed = seed;
        self
    }

    /// The comm table, and the time after which a rank that does not answer counts as failed.
    pub fn comm(mut self, comm: Comm<'a>, timeout: Duration) -> Self {
        self.comm = Some(comm);
        self.options.comm_timeout_ns = nanoseconds(timeout);
        self
    }

    /// Creates the optimizer. Add groups and params next; commit allocates the memory.
    pub fn create(mut self) -> Result<Registration<'a>> {
        let comm = self.comm.as_ref().map(Comm::raw);
        self.options.comm = comm.as_ref().map_or(ptr::null(), |comm| comm);
        let disk_paths = c_paths(&self.disk_paths)?;
        self.options.disk_paths = disk_paths.as_ref().map_or(ptr::null(), |paths| paths.as_ptr());
        let mut handle = ptr::null_mut();
        check(self.context.with(|context| {
            // SAFETY: `options` is a whole struct, what it points to lives during the call, and
            // the closures behind `comm` outlive the optimizer.
            unsafe { sys::offload_optimizer_create(context, &self.options, &mut handle) }
        }))?;
        Ok(Registration {
            handle: Handle(handle),
            context: self.context,
            slots: Vec::new(),
            comm: self.comm,
        })
    }
}

/// The directories with `:` between them, as the library takes them; `None` if there are none.
fn c_paths(paths: &[PathBuf]) -> Result<Option<CString>> {
    if let Some(path) = paths.iter().find(|path| path.as_os_str().as_bytes().contains(&b':')) {
        return Err(Error::invalid_argument(format!(
            "directory {path:?} for state on disk has a ':' in its name, expected none; name it by a link without one"
        )));
    }
    let names: Vec<_> = paths.iter().map(|path| path.as_os_str().to_os_string()).collect();
    let joined = names.join(&OsString::from(":"));
    if joined.is_empty() {
        return Ok(None);
    }
    c_path(Path::new(&joined)).map(Some)
}

impl fmt::Debug for OptimizerBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OptimizerBuilder").finish_non_exhaustive()
    }
}

/// An optimizer to which groups and params are added, until [`commit`](Registration::commit).
pub struct Registration<'a> {
    // The order matters: the handle is dropped before the memory that the library may still use.
    handle: Handle,
    context: &'a Context,
    slots: Vec<Slot<'a>>,
    comm: Option<Comm<'a>>,
}

impl<'a> Registration<'a> {
    /// Adds a group of params that share hyperparameters.
    pub fn add_group(&mut self, group: &Group) -> Result<GroupId> {
        let mut id = 0;
        // SAFETY: the handle is alive and the struct whole.
        check(unsafe { sys::offload_optimizer_add_group(self.handle.0, &group.raw(), &mut id) })?;
        Ok(GroupId(id))
    }

    /// Registers a param. From now on its memory belongs to the optimizer, until the optimizer is
    /// dropped or the address is given up.
    pub fn add_param(&mut self, param: Param<'a>) -> Result<ParamId> {
        param.data.check_context(self.context, "data")?;
        if let Some(grad) = &param.grad {
            grad.check_context(self.context, "grad")?;
        }
        let mut id = 0;
        param.with_raw(|raw| {
            // SAFETY: the struct is whole; its memory lives in the slot below.
            check(unsafe { sys::offload_optimizer_add_params(self.handle.0, raw, 1, &mut id) })
        })?;
        debug_assert_eq!(id as usize, self.slots.len());
        self.slots.push(Slot::new(param));
        Ok(ParamId(id))
    }

    /// Every byte that commit will take.
    pub fn plan(&mut self) -> Result<Plan> {
        self.handle.plan()
    }

    /// Takes the memory of the plan, copies masters from the params and sets the moments to zero.
    /// After an error all memory has been given back; start again with other settings.
    pub fn commit(self) -> Result<Optimizer<'a>> {
        // SAFETY: the handle is alive; NULL is a stream of every device.
        check(unsafe { sys::offload_optimizer_commit(self.handle.0, ptr::null_mut::<c_void>()) })?;
        Ok(Optimizer::new(self.handle, self.context, self.slots, self.comm))
    }
}

impl fmt::Debug for Registration<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("params", &self.slots.len()).finish_non_exhaustive()
    }
}
