//! Groups of params. Written by generate_abi.py; do not edit.

use crate::algorithm::Algorithm;
use hybridopt_sys as sys;

/// Hyperparameters, as PyTorch names and means them. There are no silent defaults: `Default` is all
/// zero, and a field that the algorithm does not use must stay zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Group {
    /// None: that of the optimizer. set_group cannot change it.
    pub algorithm: Option<Algorithm>,
    /// All algorithms.
    pub lr: f64,
    /// AdamW, Adam, Lion; in [0, 1).
    pub beta1: f64,
    /// AdamW, Adam, Lion; in [0, 1).
    pub beta2: f64,
    /// AdamW, Adam, Adagrad, Muon; above 0.
    pub eps: f64,
    /// All algorithms.
    pub weight_decay: f64,
    /// SGD; commit fixes whether it is zero, see offload_optimizer_set_group. Signum, Muon: in [0,
    /// 1).
    pub momentum: f64,
    /// SGD; needs momentum > 0.
    pub dampening: f64,
    /// Adagrad.
    pub lr_decay: f64,
    /// Adagrad; commit fills sum with it, later it has no effect.
    pub initial_accumulator_value: f64,
    /// SGD, Muon; needs momentum > 0 and dampening 0.
    pub nesterov: bool,
    /// `true`: step along the gradient; `false`: against it.
    pub maximize: bool,
    /// AdamW; `true`: an element gets no weight decay if the update, without the decay, moves it
    /// away from zero.
    pub cautious_weight_decay: bool,
    /// Muon; steps of Newton-Schulz, at most 99; 0 = 5.
    pub ns_steps: i32,
    /// Muon; if it is 0, a matrix has lr * max(1, rows / cols)^0.5; else lr * update_rms *
    /// max(rows, cols)^0.5, where 0.2 fits the lr of AdamW.
    pub update_rms: f64,
    /// Muon; a, b and c of each step of Newton-Schulz, of either sign; a row of zeros ends the
    /// list; no row = 3.4445, -4.775, 2.0315; steps behind the list use its last row.
    pub ns_coefficients: [[f64; 3]; 10],
}

impl Group {
    pub(crate) fn raw(&self) -> sys::offload_group_t {
        sys::offload_group_t {
            algorithm: self.algorithm.map_or(0, Algorithm::raw),
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            momentum: self.momentum,
            dampening: self.dampening,
            lr_decay: self.lr_decay,
            initial_accumulator_value: self.initial_accumulator_value,
            nesterov: i32::from(self.nesterov),
            maximize: i32::from(self.maximize),
            cautious_weight_decay: i32::from(self.cautious_weight_decay),
            ns_steps: self.ns_steps,
            update_rms: self.update_rms,
            ns_coefficients: self.ns_coefficients,
            ..Default::default()
        }
    }
}
