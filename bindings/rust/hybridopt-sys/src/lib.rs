//! The C ABI of [hybridopt](https://docs.rs/hybridopt), declared by hand. The manual is `offload.h`;
//! tests compare every declaration here with it, and every size, offset and value with what a C
//! compiler says.
//!
//! Structs have a `Default`: all zero, which always stands for the documented default, and
//! `struct_size` set.
//!
//! ```
//! use hybridopt_sys::*;
//!
//! let options = offload_context_options_t {
//!     device_kind: OFFLOAD_DEVICE_SIM,
//!     ..Default::default()
//! };
//! let mut context = std::ptr::null_mut();
//! unsafe {
//!     assert_eq!(offload_context_create(&options, &mut context), OFFLOAD_OK);
//!     assert_eq!(offload_context_destroy(context), OFFLOAD_OK);
//! }
//! ```
#![allow(non_camel_case_types)]

mod constants;
mod functions;
mod types;

pub use constants::*;
pub use functions::*;
pub use types::*;
