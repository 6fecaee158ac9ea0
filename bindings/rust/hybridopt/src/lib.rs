//! Safe bindings to libhybridopt: optimizer state lives in host memory, wholly or in part, and is
//! updated there at memory speed.
//!
//! ```
//! use hybridopt::{Algorithm, Context, Group, Optimizer, Param, StepOptions};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let (mut weights, mut grads) = (vec![1.0f32; 8], vec![0.5f32; 8]);
//!     let context = Context::host()?;
//!     let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create()?;
//!     let adamw = Group { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, ..Group::default() };
//!     let group = adding.add_group(&adamw)?;
//!     let weight = adding.add_param(Param::new("weight", group, &mut weights).grad(&mut grads))?;
//!     let mut optimizer = adding.commit()?;
//!     optimizer.grad_mut::<f32>(weight)?.fill(0.25);
//!     let result = optimizer.step(&StepOptions { grad_norm_max: 1.0, ..Default::default() })?;
//!     println!("norm {}, weight {}", result.grad_norm, optimizer.data::<f32>(weight)?[0]);
//! #     assert_eq!(optimizer.data::<f32>(weight)?[0], 0.999);
//!     Ok(())
//! }
//! ```
//!
//! # What the compiler checks
//!
//! The library works on the caller's memory, from threads of its own. So an optimizer borrows (or
//! owns) the memory of its params and gradients for as long as it lives, and is the only way to
//! it meanwhile:
//!
//! ```compile_fail,E0502
//! # use hybridopt::{Algorithm, Context, Group, Optimizer, Param};
//! # let mut weights = vec![1.0f32; 8];
//! # let context = Context::host()?;
//! # let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
//! # let group = adding.add_group(&Group { lr: 0.1, ..Group::default() })?;
//! let weight = adding.add_param(Param::new("weight", group, &mut weights))?;
//! println!("{}", weights[0]);
//! let optimizer = adding.commit()?;
//! # Ok::<(), hybridopt::Error>(())
//! ```
//!
//! It cannot outlive that memory,
//!
//! ```compile_fail,E0597
//! # use hybridopt::{Algorithm, Context, Group, Optimizer, Param};
//! # let context = Context::host()?;
//! # let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
//! # let group = adding.add_group(&Group { lr: 0.1, ..Group::default() })?;
//! {
//!     let mut weights = vec![1.0f32; 8];
//!     adding.add_param(Param::new("weight", group, &mut weights))?;
//! }
//! let optimizer = adding.commit()?;
//! # Ok::<(), hybridopt::Error>(())
//! ```
//!
//! nor its context:
//!
//! ```compile_fail,E0505
//! # use hybridopt::{Algorithm, Context, Group, Optimizer, Param};
//! # let context = Context::host()?;
//! let adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
//! drop(context);
//! let optimizer = adding.commit()?;
//! # Ok::<(), hybridopt::Error>(())
//! ```
//!
//! No memory is registered twice,
//!
//! ```compile_fail,E0499
//! # use hybridopt::{Algorithm, Context, Group, Optimizer, Param};
//! # let context = Context::host()?;
//! # let mut weights = vec![1.0f32; 8];
//! # let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
//! # let group = adding.add_group(&Group { lr: 0.1, ..Group::default() })?;
//! adding.add_param(Param::new("first", group, &mut weights))?;
//! adding.add_param(Param::new("second", group, &mut weights))?;
//! # Ok::<(), hybridopt::Error>(())
//! ```
//!
//! and a device buffer belongs to the optimizer once it is registered:
//!
//! ```compile_fail,E0382
//! # use hybridopt::{Algorithm, Context, DeviceBuffer, DeviceKind, Group, Optimizer, Param};
//! # let context = Context::builder().device(DeviceKind::Sim).create()?;
//! # let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
//! # let group = adding.add_group(&Group { lr: 0.1, ..Group::default() })?;
//! let buffer = DeviceBuffer::from_slice(&context, &[1.0f32; 8])?;
//! adding.add_param(Param::new("weight", group, buffer))?;
//! drop(buffer);
//! # Ok::<(), hybridopt::Error>(())
//! ```
//!
//! Work that is under way never outlives the borrow: [`Optimizer::step`] waits, and
//! [`Optimizer::queue`] waits at its end, even if its body panics. So nothing depends on a
//! destructor, and leaking an optimizer or a ticket is safe.
//!
//! # Threads
//!
//! A [`Context`] may be shared; calls on it take turns. An [`Optimizer`] may move to another
//! thread, and its `&self` calls may be made from several. A [`Waiter`] waits on any thread while
//! another queues. A [`Stream`] belongs to one thread at a time:
//!
//! ```compile_fail,E0277
//! # use hybridopt::{Context, Stream};
//! # let context = Context::host()?;
//! let stream = Stream::new(&context)?;
//! std::thread::scope(|scope| {
//!     scope.spawn(|| stream.synchronize(None));
//! });
//! # Ok::<(), hybridopt::Error>(())
//! ```
//!
//! After fork the child's calls return errors and touch nothing.
//!
//! # Closures
//!
//! Log, progress, comm and stream closures run on the library's threads. A panic inside never
//! reaches C: in a comm closure it counts as a failure, in a progress closure it resumes in the
//! thread that waits for the call, in the others it is dropped.
#![deny(missing_docs, unsafe_op_in_unsafe_fn)]

mod algorithm;
mod changes;
mod checkpoint;
mod comm;
mod contain;
mod context;
mod device;
mod element;
mod error;
mod exchange;
mod group;
mod handle;
mod keep;
mod lifecycle;
mod memory;
mod optimizer;
mod param;
mod queue;
mod registration;
mod report;
mod slot;
mod stash;
mod state;

pub use algorithm::Algorithm;
pub use changes::{content_hash, Change, Changes};
pub use checkpoint::{
    inspect, newest, newest_verified, verify, CheckpointTensor, LoadOptions, SaveOptions,
    VerifyOptions,
};
pub use comm::{Comm, CommError, Message};
pub use context::{Context, ContextBuilder, DeviceKind, LogLevel, NumaPolicy};
pub use device::{DeviceBuffer, Stream};
pub use element::{Bf16, Dtype, Element, Fp16};
pub use error::{Code, Error, Result};
pub use exchange::{Elements, ElementsMut, Exchange, ExchangeBuilder, ExchangePlan};
pub use group::Group;
pub use handle::Ticket;
pub use lifecycle::Move;
pub use memory::Memory;
pub use optimizer::{Optimizer, StepOptions};
pub use param::{GroupId, Param, ParamId, Placement, Shard};
pub use queue::{Queue, Waiter};
pub use registration::{
    HostExecutors, MasterLayout, Movable, OptimizerBuilder, Registration, Rounding,
};
pub use report::{ByTier, CheckpointInfo, ContextInfo, Plan, Stats, StepResult};
pub use stash::{Pushed, Stash, StashBuilder, Stashed};
pub use state::{State, StateKind};
