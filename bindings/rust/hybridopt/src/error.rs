//! Errors of the library: a code, and a text that says what to do.

use std::ffi::CStr;
use std::fmt;

use hybridopt_sys as sys;

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// An argument is wrong. Nothing has changed.
    InvalidArgument,
    /// The object is in a state that does not allow the call. Nothing has changed.
    InvalidState,
    /// This build, device or release does not support the call. Nothing has changed.
    Unsupported,
    /// The text names bytes asked for and bytes there.
    OutOfHostMemory,
    /// The text names bytes asked for and bytes there.
    OutOfDeviceMemory,
    /// The device has reported an error, perhaps one of earlier work.
    DeviceFailed,
    /// Another rank failed or vanished.
    CommFailed,
    /// The text names the file and the system's error.
    IoFailed,
    /// The bytes on disk differ from those that were written.
    CheckpointCorrupt,
    /// The checkpoint is intact, but belongs to another model.
    CheckpointMismatch,
    /// The wait timed out. The work goes on: wait again.
    TimedOut,
    /// Earlier queued work of this optimizer failed.
    Poisoned,
    /// The library has a bug. Please report the text.
    Internal,
    /// A status that this release of the crate does not know.
    Unknown(i32),
}

impl Code {
    fn from_status(status: i32) -> Self {
        match status {
            sys::OFFLOAD_INVALID_ARGUMENT => Code::InvalidArgument,
            sys::OFFLOAD_INVALID_STATE => Code::InvalidState,
            sys::OFFLOAD_UNSUPPORTED => Code::Unsupported,
            sys::OFFLOAD_OUT_OF_HOST_MEMORY => Code::OutOfHostMemory,
            sys::OFFLOAD_OUT_OF_DEVICE_MEMORY => Code::OutOfDeviceMemory,
            sys::OFFLOAD_DEVICE_FAILED => Code::DeviceFailed,
            sys::OFFLOAD_COMM_FAILED => Code::CommFailed,
            sys::OFFLOAD_IO_FAILED => Code::IoFailed,
            sys::OFFLOAD_CHECKPOINT_CORRUPT => Code::CheckpointCorrupt,
            sys::OFFLOAD_CHECKPOINT_MISMATCH => Code::CheckpointMismatch,
            sys::OFFLOAD_TIMED_OUT => Code::TimedOut,
            sys::OFFLOAD_POISONED => Code::Poisoned,
            sys::OFFLOAD_INTERNAL => Code::Internal,
            other => Code::Unknown(other),
        }
    }

    /// The name that the C header gives it, such as `INVALID_ARGUMENT`.
    pub fn name(self) -> &'static str {
        let status = match self {
            Code::InvalidArgument => sys::OFFLOAD_INVALID_ARGUMENT,
            Code::InvalidState => sys::OFFLOAD_INVALID_STATE,
            Code::Unsupported => sys::OFFLOAD_UNSUPPORTED,
            Code::OutOfHostMemory => sys::OFFLOAD_OUT_OF_HOST_MEMORY,
            Code::OutOfDeviceMemory => sys::OFFLOAD_OUT_OF_DEVICE_MEMORY,
            Code::DeviceFailed => sys::OFFLOAD_DEVICE_FAILED,
            Code::CommFailed => sys::OFFLOAD_COMM_FAILED,
            Code::IoFailed => sys::OFFLOAD_IO_FAILED,
            Code::CheckpointCorrupt => sys::OFFLOAD_CHECKPOINT_CORRUPT,
            Code::CheckpointMismatch => sys::OFFLOAD_CHECKPOINT_MISMATCH,
            Code::TimedOut => sys::OFFLOAD_TIMED_OUT,
            Code::Poisoned => sys::OFFLOAD_POISONED,
            Code::Internal => sys::OFFLOAD_INTERNAL,
            Code::Unknown(status) => status,
        };
        // SAFETY: a static string, never NULL.
        unsafe { CStr::from_ptr(sys::offload_status_name(status)) }.to_str().unwrap_or("UNKNOWN")
    }
}

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    code: Code,
    message: String,
}

impl Error {
    /// What kind of failure it was.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Names the parameter, what was got, what was expected, and what to do.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// For errors that this crate finds before it calls the library.
    pub(crate) fn invalid_argument(message: String) -> Self {
        Error { code: Code::InvalidArgument, message }
    }

    pub(crate) fn timed_out(message: String) -> Self {
        Error { code: Code::TimedOut, message }
    }

    pub(crate) fn invalid_state(message: String) -> Self {
        Error { code: Code::InvalidState, message }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.name(), self.message)
    }
}

impl std::error::Error for Error {}

/// A result whose error is the library's.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The status of a call that this thread has just made. The text is read here and now: the next
/// failed call of this thread replaces it.
pub(crate) fn check(status: i32) -> Result<()> {
    if status == sys::OFFLOAD_OK {
        return Ok(());
    }
    // SAFETY: never NULL, and valid until this thread's next failed call.
    let text = unsafe { CStr::from_ptr(sys::offload_last_error()) };
    Err(Error { code: Code::from_status(status), message: text.to_string_lossy().into_owned() })
}
