//! Saves and loads checkpoints, and inspects and verifies them without an optimizer.

use std::ffi::{c_void, CStr, CString};
use std::fmt;
use std::os::raw::c_char;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use hybridopt_sys as sys;

use crate::contain::{contain, Payload};
use crate::device::{raw_of, Stream};
use crate::element::Dtype;
use crate::error::{check, Error, Result};
use crate::handle::Ticket;
use crate::keep::{Keep, Progress, ProgressFunction};
use crate::optimizer::Optimizer;
use crate::queue::Queue;
use crate::report::CheckpointInfo;
use crate::state::StateKind;

/// The options of a save.
#[derive(Default)]
pub struct SaveOptions<'p> {
    /// Saves no moments. Such a checkpoint can only be loaded with `fresh_moments`.
    pub masters_only: bool,
    /// The number of blocks of 8 MiB that are written at the same time, 1 to 64; 0 means 4.
    pub io_depth: u32,
    /// Params that are their own masters are read after the work that is on this stream now; None
    /// is the NULL stream.
    pub stream: Option<&'p Stream<'p>>,
    /// A closure that gets the bytes done and the total bytes. A thread of the library calls it.
    pub progress: Option<ProgressFunction<'p>>,
}

/// The options of a load.
#[derive(Default)]
pub struct LoadOptions<'p> {
    /// Loads the weights only: moments are as after commit, step counts are 0.
    pub fresh_moments: bool,
    /// Together with `fresh_moments`: loads step counts from the checkpoint too.
    pub keep_steps: bool,
    /// Does not compare hashes before it replaces state, so that it reads the files once instead of
    /// twice.
    pub no_verify: bool,
    /// As for save.
    pub io_depth: u32,
    /// Params are written after the work that is on this stream now; None is the NULL stream.
    pub stream: Option<&'p Stream<'p>>,
    /// As for save.
    pub progress: Option<ProgressFunction<'p>>,
}

impl fmt::Debug for SaveOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SaveOptions")
            .field("masters_only", &self.masters_only)
            .field("io_depth", &self.io_depth)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for LoadOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadOptions")
            .field("fresh_moments", &self.fresh_moments)
            .field("keep_steps", &self.keep_steps)
            .field("no_verify", &self.no_verify)
            .field("io_depth", &self.io_depth)
            .finish_non_exhaustive()
    }
}

unsafe extern "C" fn call_progress(user: *mut c_void, done: u64, total: u64) {
    // SAFETY: `user` is kept until the work is done.
    unsafe { &*(user as *const Progress) }.call(done, total);
}

/// The closure as C takes it.
fn raw_progress(
    progress: Option<&Arc<Progress>>,
) -> (sys::offload_progress_function_t, *mut c_void) {
    match progress {
        Some(progress) => (Some(call_progress), Arc::as_ptr(progress) as *mut c_void),
        None => (None, ptr::null_mut()),
    }
}

fn resume(progress: Option<&Arc<Progress>>) {
    if let Some(payload) = progress.and_then(|progress| progress.take_panic()) {
        std::panic::resume_unwind(payload);
    }
}

fn flag(set: bool, flag: u32) -> u32 {
    if set {
        flag
    } else {
        0
    }
}

pub(crate) fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| {
        Error::invalid_argument(format!("path {path:?} has a NUL in it, which no file name may"))
    })
}

/// A save or a load: both are queued and may report progress.
trait Transfer<'p> {
    fn take_progress(&mut self) -> Option<ProgressFunction<'p>>;

    /// # Safety
    /// `progress` lives until the work is done.
    unsafe fn queue(
        &self,
        handle: sys::offload_optimizer_t,
        path: &Path,
        progress: Option<&Arc<Progress>>,
    ) -> Result<Ticket>;
}

impl<'p> Transfer<'p> for SaveOptions<'p> {
    fn take_progress(&mut self) -> Option<ProgressFunction<'p>> {
        self.progress.take()
    }

    unsafe fn queue(
        &self,
        handle: sys::offload_optimizer_t,
        path: &Path,
        progress: Option<&Arc<Progress>>,
    ) -> Result<Ticket> {
        let path = c_path(path)?;
        let (function, user) = raw_progress(progress);
        let options = sys::offload_save_options_t {
            flags: flag(self.masters_only, sys::OFFLOAD_SAVE_MASTERS_ONLY),
            path: path.as_ptr(),
            stream: raw_of(self.stream),
            progress: function,
            progress_user: user,
            io_depth: self.io_depth,
            ..Default::default()
        };
        let mut ticket = 0;
        // SAFETY: the handle is alive and the struct whole; the path is copied.
        check(unsafe { sys::offload_optimizer_save(handle, &options, &mut ticket) })?;
        Ok(Ticket(ticket))
    }
}

impl<'p> Transfer<'p> for LoadOptions<'p> {
    fn take_progress(&mut self) -> Option<ProgressFunction<'p>> {
        self.progress.take()
    }

    unsafe fn queue(
        &self,
        handle: sys::offload_optimizer_t,
        path: &Path,
        progress: Option<&Arc<Progress>>,
    ) -> Result<Ticket> {
        let path = c_path(path)?;
        let (function, user) = raw_progress(progress);
        let options = sys::offload_load_options_t {
            flags: flag(self.fresh_moments, sys::OFFLOAD_LOAD_FRESH_MOMENTS)
                | flag(self.keep_steps, sys::OFFLOAD_LOAD_KEEP_STEPS)
                | flag(self.no_verify, sys::OFFLOAD_LOAD_NO_VERIFY),
            path: path.as_ptr(),
            stream: raw_of(self.stream),
            progress: function,
            progress_user: user,
            io_depth: self.io_depth,
            ..Default::default()
        };
        let mut ticket = 0;
        // SAFETY: as for save.
        check(unsafe { sys::offload_optimizer_load(handle, &options, &mut ticket) })?;
        Ok(Ticket(ticket))
    }
}

impl<'a> Queue<'_, 'a> {
    fn transfer(&mut self, path: &Path, mut options: impl Transfer<'a>) -> Result<Ticket> {
        // SAFETY: kept with the optimizer, whose lifetime the closure has.
        let progress = options.take_progress().map(|function| unsafe { Progress::new(function) });
        // SAFETY: kept until the end of the queue.
        let ticket = unsafe { options.queue(self.handle(), path, progress.as_ref()) };
        self.optimizer.kept.extend(progress.map(Keep::progress));
        ticket
    }

    /// Saves masters, moments and step counts as they are at this point, while later steps follow.
    /// A save that fails does not poison the optimizer; a wait for its ticket returns the error.
    pub fn save(&mut self, path: impl AsRef<Path>, options: SaveOptions<'a>) -> Result<Ticket> {
        self.transfer(path.as_ref(), options)
    }

    /// Loads masters, moments, step counts and the params. A load that is refused changes nothing;
    /// a wait for its ticket returns the error.
    pub fn load(&mut self, path: impl AsRef<Path>, options: LoadOptions<'a>) -> Result<Ticket> {
        self.transfer(path.as_ref(), options)
    }
}

impl Optimizer<'_> {
    fn transfer<'p>(&mut self, path: &Path, mut options: impl Transfer<'p>) -> Result<()> {
        // SAFETY: it ends with this frame.
        let progress = options.take_progress().map(|function| unsafe { Progress::new(function) });
        let result = self.queue(|queue| {
            // SAFETY: `progress` lives in this frame, which `queue` does not leave before it is
            // done.
            let ticket = unsafe { options.queue(queue.handle(), path, progress.as_ref()) };
            queue.wait(ticket?, None)
        });
        resume(progress.as_ref());
        result
    }

    /// See [`Queue::save`]; returns when the checkpoint is whole and on disk.
    pub fn save(&mut self, path: impl AsRef<Path>, options: SaveOptions<'_>) -> Result<()> {
        self.transfer(path.as_ref(), options)
    }

    /// See [`Queue::load`]; returns when it is done.
    pub fn load(&mut self, path: impl AsRef<Path>, options: LoadOptions<'_>) -> Result<()> {
        self.transfer(path.as_ref(), options)
    }
}

/// One stored array: one kind of state of one rank's part of one param.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckpointTensor {
    /// The name of the param.
    pub name: String,
    /// Which kind of its state; None if this release does not know it.
    pub kind: Option<StateKind>,
    /// The dtype of the stored elements; None if this release does not know it.
    pub dtype: Option<Dtype>,
    /// The rank that saved it.
    pub rank: u32,
    /// The shape of the whole tensor.
    pub global_shape: Vec<i64>,
    /// Offsets and extents of the rank's boxes in the tensor.
    pub boxes: Vec<(Vec<i64>, Vec<i64>)>,
    /// The first stored element, counted through the boxes in order.
    pub range_begin: u64,
    /// How many elements are stored.
    pub range_count: u64,
    /// The file's name in the directory.
    pub file: String,
    /// The offset of the first element in the file, in bytes.
    pub file_offset: u64,
    /// How many bytes are stored.
    pub bytes: u64,
    /// How many steps have updated the param.
    pub step_count: u64,
}

impl CheckpointTensor {
    /// # Safety
    /// `raw` is what the library gave to a visit.
    unsafe fn from_raw(raw: &sys::offload_checkpoint_tensor_t) -> Self {
        let text = |text: *const c_char| {
            // SAFETY: strings and arrays are valid during the visit.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let numbers = |start: *const i64, count: usize| match count {
            0 => Vec::new(),
            // SAFETY: as above.
            _ => unsafe { std::slice::from_raw_parts(start, count) }.to_vec(),
        };
        let dimensions = raw.dimensions as usize;
        let of_boxes = dimensions * raw.box_count as usize;
        let offsets = numbers(raw.box_offsets, of_boxes);
        let extents = numbers(raw.box_extents, of_boxes);
        let each = |all: &[i64], i: usize| all[i * dimensions..(i + 1) * dimensions].to_vec();
        CheckpointTensor {
            name: text(raw.name),
            kind: StateKind::from_raw(raw.kind),
            dtype: Dtype::from_raw(raw.dtype),
            rank: raw.rank,
            global_shape: numbers(raw.global_shape, dimensions),
            boxes: (0..raw.box_count as usize)
                .map(|i| (each(&offsets, i), each(&extents, i)))
                .collect(),
            range_begin: raw.range_begin,
            range_count: raw.range_count,
            file: text(raw.file),
            file_offset: raw.file_offset,
            bytes: raw.bytes,
            step_count: raw.step_count,
        }
    }
}

struct Visit {
    tensors: Vec<CheckpointTensor>,
    panic: Option<Payload>,
}

unsafe extern "C" fn visit(user: *mut c_void, tensor: *const sys::offload_checkpoint_tensor_t) {
    // SAFETY: `user` is the Visit of the call under way, on this thread; the library's struct has
    // at least the fields of this header.
    let (state, tensor) = unsafe { (&mut *user.cast::<Visit>(), &*tensor) };
    // SAFETY: `tensor` comes from the library.
    match contain(|| unsafe { CheckpointTensor::from_raw(tensor) }) {
        Ok(tensor) => state.tensors.push(tensor),
        Err(payload) => state.panic = Some(payload),
    }
}

/// Reads and checks the manifest and the headers, but not the data.
pub fn inspect(path: impl AsRef<Path>) -> Result<(CheckpointInfo, Vec<CheckpointTensor>)> {
    let path = c_path(path.as_ref())?;
    let mut info = sys::offload_checkpoint_info_t::default();
    let mut state = Visit { tensors: Vec::new(), panic: None };
    let user: *mut Visit = &mut state;
    // SAFETY: the struct is whole, and `state` outlives the call.
    let result = check(unsafe {
        sys::offload_checkpoint_inspect(path.as_ptr(), &mut info, Some(visit), user.cast())
    });
    if let Some(payload) = state.panic {
        std::panic::resume_unwind(payload);
    }
    result?;
    Ok((CheckpointInfo::from(&info), state.tensors))
}

/// The options of a verification.
#[derive(Default)]
pub struct VerifyOptions<'p> {
    /// As for save.
    pub io_depth: u32,
    /// A closure that gets the bytes done and the total bytes. This thread calls it.
    pub progress: Option<ProgressFunction<'p>>,
}

impl fmt::Debug for VerifyOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerifyOptions").field("io_depth", &self.io_depth).finish_non_exhaustive()
    }
}

/// Makes a call with the raw form of the options; a panic of `progress` is resumed after the call.
fn with_raw_options<T>(
    mut options: VerifyOptions<'_>,
    call: impl FnOnce(&sys::offload_verify_options_t) -> Result<T>,
) -> Result<T> {
    // SAFETY: it ends with this frame.
    let progress = options.progress.take().map(|function| unsafe { Progress::new(function) });
    let (function, user) = raw_progress(progress.as_ref());
    let result = call(&sys::offload_verify_options_t {
        io_depth: options.io_depth,
        progress: function,
        progress_user: user,
        ..Default::default()
    });
    resume(progress.as_ref());
    result
}

/// Reads every byte and compares every hash.
pub fn verify(path: impl AsRef<Path>, options: VerifyOptions<'_>) -> Result<()> {
    let path = c_path(path.as_ref())?;
    with_raw_options(options, |raw| {
        // SAFETY: the struct is whole, and what it refers to outlives the call.
        check(unsafe { sys::offload_checkpoint_verify(path.as_ptr(), raw) })
    })
}

/// The checkpoint with the highest step in a directory, among those whose manifest and headers are
/// good.
pub fn newest(directory: impl AsRef<Path>) -> Result<PathBuf> {
    newest_of(directory.as_ref(), std::ptr::null())
}

/// The same, but the data must be good too: it is read, beginning with the highest step, until a
/// checkpoint without damage is found.
pub fn newest_verified(directory: impl AsRef<Path>, options: VerifyOptions<'_>) -> Result<PathBuf> {
    with_raw_options(options, |raw| newest_of(directory.as_ref(), raw))
}

fn newest_of(directory: &Path, verify: *const sys::offload_verify_options_t) -> Result<PathBuf> {
    const PATH_MAX: usize = 4096;
    let directory = c_path(directory)?;
    let mut path = vec![0u8; PATH_MAX];
    // SAFETY: `path` is as long as said, and `verify` is NULL or whole.
    check(unsafe {
        sys::offload_checkpoint_newest(
            directory.as_ptr(),
            verify,
            path.as_mut_ptr().cast(),
            path.len() as u64,
        )
    })?;
    path.truncate(path.iter().position(|&byte| byte == 0).unwrap_or(path.len()));
    Ok(PathBuf::from(std::ffi::OsString::from_vec(path)))
}
