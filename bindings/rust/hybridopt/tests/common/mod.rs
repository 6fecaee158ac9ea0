//! The training that tests/bindings/training_step.c does, and what it prints.
#![allow(dead_code)] // each test uses some of it

use std::path::{Path, PathBuf};
use std::process::Command;

use hybridopt::*;

pub const WEIGHTS: usize = 5000;
pub const BIASES: usize = 37;
pub const STEPS: u32 = 3;

/// One of 251 multiples of 1/64 between -2 and 2.
pub fn value(i: u32, seed: u32) -> f32 {
    ((i * 37 + seed * 101) % 251) as f32 / 64.0 - 125.0 / 64.0
}

pub fn values<T: Element + From<f32>>(count: usize, seed: u32) -> Vec<T> {
    (0..count as u32).map(|i| T::from(value(i, seed))).collect()
}

pub fn adamw() -> Group {
    Group {
        lr: 0.01,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        cautious_weight_decay: true,
        ..Group::default()
    }
}

pub fn step_options<'s>() -> StepOptions<'s> {
    StepOptions { grad_scale: 4.0, grad_norm_max: 1.0, ..StepOptions::default() }
}

/// FNV-1a.
pub struct Hash(pub u64);

impl Hash {
    pub fn new() -> Self {
        Hash(0xcbf2_9ce4_8422_2325)
    }
    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    pub fn add_f32(&mut self, values: &[f32]) {
        values.iter().for_each(|value| self.add(&value.to_ne_bytes()));
    }
    pub fn add_bf16(&mut self, values: &[Bf16]) {
        values.iter().for_each(|value| self.add(&value.0.to_ne_bytes()));
    }
}

/// What the C program prints; `summary` is the same of an optimizer.
pub fn expected() -> String {
    let program = match std::env::var_os("HYBRIDOPT_TRAINING_STEP") {
        Some(named) => PathBuf::from(named),
        None => Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../../build/dev/tests/bindings_training_step"),
    };
    let output = Command::new(&program).output().unwrap_or_else(|why| {
        let program = program.display();
        panic!("{program}: {why}; build it, or set HYBRIDOPT_TRAINING_STEP to its path")
    });
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub fn summary(
    optimizer: &mut Optimizer<'_>,
    weight: ParamId,
    bias: ParamId,
    norm: f64,
) -> Result<String> {
    let mut params = Hash::new();
    let (mut bits, mut floats) = (vec![Bf16(0); WEIGHTS], vec![0f32; BIASES]);
    optimizer.read(weight, &mut bits)?;
    optimizer.read(bias, &mut floats)?;
    params.add_bf16(&bits);
    params.add_f32(&floats);
    let mut states = Hash::new();
    for param in [weight, bias] {
        for kind in [StateKind::Master, StateKind::ExpAvg, StateKind::ExpAvgSq] {
            let state = optimizer.state(param, kind)?;
            let mut values = vec![0f32; state.len()];
            state.read(&mut values)?;
            states.add_f32(&values);
        }
    }
    Ok(format!(
        "params {:016x}\nstates {:016x}\nnorm {:016x}\n",
        params.0,
        states.0,
        norm.to_bits()
    ))
}

pub fn sim() -> Context {
    Context::builder().device(DeviceKind::Sim).sim_memory_bytes(64 << 20).create().unwrap()
}

/// Both params on the context's device, registered and committed.
pub fn on_device<'a>(
    context: &'a Context,
    builder: OptimizerBuilder<'a>,
) -> Result<(Optimizer<'a>, ParamId, ParamId)> {
    let mut adding = builder.create()?;
    let group = adding.add_group(&adamw())?;
    let weight = adding.add_param(
        Param::new(
            "weight",
            group,
            DeviceBuffer::from_slice(context, &values::<Bf16>(WEIGHTS, 1))?,
        )
        .grad(DeviceBuffer::<Bf16>::new(context, WEIGHTS)?),
    )?;
    let bias = adding.add_param(
        Param::new("bias", group, DeviceBuffer::from_slice(context, &values::<f32>(BIASES, 2))?)
            .grad(DeviceBuffer::<f32>::new(context, BIASES)?),
    )?;
    Ok((adding.commit()?, weight, bias))
}

pub fn write_grads(
    optimizer: &mut Optimizer<'_>,
    weight: ParamId,
    bias: ParamId,
    step: u32,
) -> Result<()> {
    optimizer.write_grad(weight, &values::<Bf16>(WEIGHTS, 10 + step))?;
    optimizer.write_grad(bias, &values::<f32>(BIASES, 20 + step))
}

/// The code and the text, which must hold all of the words.
#[track_caller]
pub fn assert_error<T>(result: Result<T>, code: Code, words: &[&str]) {
    let error = match result {
        Ok(_) => panic!("expected {code:?}"),
        Err(error) => error,
    };
    assert_eq!(error.code(), code, "{error}");
    for word in words {
        assert!(error.message().contains(word), "'{word}' is not in: {error}");
    }
    assert_eq!(error.to_string(), format!("{}: {}", code.name(), error.message()));
}
