//! The training that tests/bindings/training_step.c does, and what it prints.
#![allow(dead_code)] // each test uses some of it

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

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

/// The values of each rank in this round, and how many have read them.
type Round = (Vec<Option<Vec<f64>>>, usize);

/// What one rank has sent to another and the other has not received, in order.
type Sent = HashMap<(i32, i32), VecDeque<Vec<u8>>>;

/// Ranks that are threads: all write, then each adds up in rank order.
pub struct Ranks {
    world: usize,
    round: Mutex<Round>,
    changed: Condvar,
    sent: Mutex<Sent>,
    arrived: Condvar,
}

impl Ranks {
    pub fn new(world: usize) -> Arc<Self> {
        let round = Mutex::new((vec![None; world], 0));
        Arc::new(Ranks {
            world,
            round,
            changed: Condvar::new(),
            sent: Mutex::default(),
            arrived: Condvar::new(),
        })
    }

    fn all(
        &self,
        rank: usize,
        mine: Vec<f64>,
        timeout: Duration,
    ) -> Result<Vec<Vec<f64>>, CommError> {
        let wait = |guard, until: fn(&mut Round) -> bool| {
            let (guard, result) =
                self.changed.wait_timeout_while(guard, timeout, |round| !until(round)).unwrap();
            if result.timed_out() {
                return Err(CommError::TimedOut);
            }
            Ok(guard)
        };
        // The round before has been read by all.
        let mut round = wait(self.round.lock().unwrap(), |round| round.1 == 0)?;
        round.0[rank] = Some(mine);
        self.changed.notify_all();
        let mut round = wait(round, |round| round.0.iter().all(Option::is_some))?;
        let all = round.0.iter().map(|values| values.clone().unwrap()).collect();
        round.1 += 1;
        if round.1 == self.world {
            *round = (vec![None; self.world], 0);
            self.changed.notify_all();
        } else {
            let _round = wait(round, |round| round.1 == 0)?;
        }
        Ok(all)
    }

    pub fn comm(self: &Arc<Self>, rank: usize) -> Comm<'static> {
        let (sum, max, barrier) = (self.clone(), self.clone(), self.clone());
        Comm::new(
            rank as i32,
            self.world as i32,
            move |values, timeout| {
                let all = sum.all(rank, values.to_vec(), timeout)?;
                values.fill(0.0);
                for other in all {
                    values.iter_mut().zip(other).for_each(|(value, other)| *value += other);
                }
                Ok(())
            },
            move |values, timeout| {
                let mine = values.iter().map(|&value| f64::from(value)).collect();
                for other in max.all(rank, mine, timeout)? {
                    for (value, other) in values.iter_mut().zip(other) {
                        *value = (*value).max(other as i32);
                    }
                }
                Ok(())
            },
            move |timeout| barrier.all(rank, Vec::new(), timeout).map(drop),
        )
    }

    pub fn comm_with_exchange(self: &Arc<Self>, rank: usize) -> Comm<'static> {
        let ranks = self.clone();
        self.comm(rank)
            .with_exchange(move |messages, timeout| ranks.exchange(rank as i32, messages, timeout))
    }

    fn exchange(
        &self,
        rank: i32,
        messages: &mut [Message<'_>],
        timeout: Duration,
    ) -> Result<(), CommError> {
        let mut sent = self.sent.lock().unwrap();
        for message in &*messages {
            if let Message::Send { to, bytes } = message {
                sent.entry((rank, *to)).or_default().push_back(bytes.to_vec());
            }
        }
        self.arrived.notify_all();
        for message in messages {
            if let Message::Receive { from, bytes } = message {
                let key = (*from, rank);
                let (guard, result) = self
                    .arrived
                    .wait_timeout_while(sent, timeout, |sent| {
                        sent.get(&key).map_or(true, VecDeque::is_empty)
                    })
                    .unwrap();
                if result.timed_out() {
                    return Err(CommError::TimedOut);
                }
                sent = guard;
                bytes.copy_from_slice(&sent.get_mut(&key).unwrap().pop_front().unwrap());
            }
        }
        Ok(())
    }
}
