//! The algorithms. Written by generate_abi.py; do not edit.

use hybridopt_sys as sys;

/// The update rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Adam with decoupled weight decay; state exp_avg, exp_avg_sq.
    AdamW,
    /// Adam with L2 weight decay; state exp_avg, exp_avg_sq.
    Adam,
    /// Momentum, dampening, nesterov; state momentum_buffer if momentum > 0.
    Sgd,
    /// Sign of an interpolated momentum; state exp_avg.
    Lion,
    /// Gradients divided by the root of a sum of their squares; state sum.
    Adagrad,
    /// SignSGD with momentum: sign of averaged gradients; state exp_avg.
    Signum,
    /// Newton-Schulz of momentum, for matrices; state momentum_buffer.
    Muon,
}

impl Algorithm {
    pub(crate) fn raw(self) -> i32 {
        match self {
            Algorithm::AdamW => sys::OFFLOAD_ADAMW,
            Algorithm::Adam => sys::OFFLOAD_ADAM,
            Algorithm::Sgd => sys::OFFLOAD_SGD,
            Algorithm::Lion => sys::OFFLOAD_LION,
            Algorithm::Adagrad => sys::OFFLOAD_ADAGRAD,
            Algorithm::Signum => sys::OFFLOAD_SIGNUM,
            Algorithm::Muon => sys::OFFLOAD_MUON,
        }
    }
}
