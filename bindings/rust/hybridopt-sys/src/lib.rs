//! The C ABI of [hybridopt](https://docs.rs/hybridopt). The manual is `offload.h`, from which
//! `bindings/generate_abi.py` writes every declaration here; a test compares every size, offset and
//! value with what a C compiler says.
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

/// All zero, which stands for the documented defaults, and `struct_size` set.
macro_rules! default_is_zero {
    ($name:ident) => {
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: numbers, null pointers and `None` functions are valid when all zero.
                let mut zero: Self = unsafe { std::mem::zeroed() };
                zero.struct_size = std::mem::size_of::<Self>() as u32;
                zero
            }
        }
    };
}

#[rustfmt::skip]
mod generated;

pub use generated::*;
