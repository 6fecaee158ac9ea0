//! A Rust program that trains a small network to tell two spirals apart: forward and backward in plain
//! Rust, AdamW in the library. Halfway it saves a checkpoint, gives the optimizer up and goes on from
//! the checkpoint with a new one.
//!
//!     cargo run --release --manifest-path examples/06_rust/Cargo.toml
//!
//! Takes a second, and some more to compile. Expect nine lines of falling losses, the fifth of which
//! comes from the new optimizer.
//!
//! With `-- --sim` params and gradients live on a simulated accelerator, and half of the AdamW state
//! too; the new optimizer has three quarters of it there, and everything leaves the device once. The
//! losses are the same.
use hybridopt::{
    Algorithm, Context, DeviceBuffer, DeviceKind, Group, LoadOptions, Memory, Movable, Move,
    Optimizer, Param, ParamId, Result, SaveOptions, StepOptions,
};

const HIDDEN: usize = 64;
const POINTS: usize = 200;
const STEPS: usize = 400;

/// splitmix64: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
    }
}

/// Point i: where it is, and on which arm.
fn point(i: usize) -> ([f32; 2], f32) {
    let along = (i / 2) as f32 / (POINTS / 2) as f32;
    let side = if i % 2 == 0 { 1.0 } else { -1.0 };
    let (sin, cos) = (0.5 + 5.0 * along).sin_cos();
    let radius = side * (0.1 + 0.9 * along);
    ([radius * cos, radius * sin], side)
}

/// Two layers with tanh: one vector per param.
struct Network {
    params: [Vec<f32>; 4], // weights and biases of the hidden layer, then of the output
    grads: [Vec<f32>; 4],
}

impl Network {
    const NAMES: [&'static str; 4] = ["hidden.weight", "hidden.bias", "out.weight", "out.bias"];

    fn new() -> Self {
        let mut random = Random(1);
        let mut fill = |count: usize, scale: f32| -> Vec<f32> {
            (0..count).map(|_| scale * (2.0 * random.uniform() - 1.0)).collect()
        };
        let params = [fill(2 * HIDDEN, 3.0), fill(HIDDEN, 2.0), fill(HIDDEN, 0.2), fill(1, 0.0)];
        let grads = [vec![0.0; 2 * HIDDEN], vec![0.0; HIDDEN], vec![0.0; HIDDEN], vec![0.0]];
        Network { params, grads }
    }

    /// Mean loss over all points; leaves the gradients.
    fn forward_backward(&mut self) -> f32 {
        let [weight, bias, out_weight, out_bias] = &self.params;
        self.grads.iter_mut().for_each(|grad| grad.fill(0.0));
        let [d_weight, d_bias, d_out_weight, d_out_bias] = &mut self.grads;
        let mut loss = 0.0;
        for i in 0..POINTS {
            let (x, label) = point(i);
            let mut hidden = [0.0; HIDDEN];
            let mut logit = out_bias[0];
            for h in 0..HIDDEN {
                hidden[h] = (weight[2 * h] * x[0] + weight[2 * h + 1] * x[1] + bias[h]).tanh();
                logit += out_weight[h] * hidden[h];
            }
            loss += (-label * logit).exp().ln_1p() / POINTS as f32;
            let d_logit = -label / (1.0 + (label * logit).exp()) / POINTS as f32;
            d_out_bias[0] += d_logit;
            for h in 0..HIDDEN {
                d_out_weight[h] += d_logit * hidden[h];
                let d_sum = d_logit * out_weight[h] * (1.0 - hidden[h] * hidden[h]);
                d_bias[h] += d_sum;
                d_weight[2 * h] += d_sum * x[0];
                d_weight[2 * h + 1] += d_sum * x[1];
            }
        }
        loss
    }
}

/// A param's memory, and its gradient's, where the context wants them.
fn memory<'a>(context: &'a Context, sim: bool, values: &[f32]) -> Result<Memory<'a>> {
    match sim {
        true => Ok(DeviceBuffer::from_slice(context, values)?.into()),
        false => Ok(values.to_vec().into()),
    }
}

/// Everything leaves the device, as for a rollout, and comes back to other addresses.
fn give_the_device_away<'a>(
    optimizer: &mut Optimizer<'a>,
    context: &'a Context,
    params: &[(ParamId, usize)],
) -> Result<()> {
    optimizer.queue(|queue| {
        queue.drop_grads(&Move::default())?;
        queue.offload_states(&Move::default())?;
        queue.offload_params(&Move::default())
    })?;
    println!(
        "everything has left: all {} bytes of the device are free",
        context.info()?.device_memory_free_bytes
    );
    for &(param, count) in params {
        optimizer.bind_data(param, DeviceBuffer::<f32>::new(context, count)?)?;
        optimizer.bind_grad(param, DeviceBuffer::<f32>::new(context, count)?)?;
    }
    optimizer.queue(|queue| {
        queue.reload_params(&Move::default())?;
        queue.reload_states(&Move::default()).map(drop)
    })
}

/// An optimizer over the network's params, and what these are called and how many elements they have.
fn make<'a>(
    context: &'a Context,
    network: &Network,
    device_fraction: f64,
) -> Result<(Optimizer<'a>, Vec<(ParamId, usize)>)> {
    let sim = context.info()?.device_memory_bytes > 0; // the host device has none of its own
    let mut adding = Optimizer::builder(context, Algorithm::AdamW)
        .device_fraction(device_fraction)
        .movable(Movable { params: sim, grads: sim, states: sim, accumulate: false })
        .create()?;
    let adamw = Group { lr: 0.03, beta1: 0.9, beta2: 0.99, eps: 1e-8, ..Group::default() };
    let group = adding.add_group(&adamw)?;
    let mut params = Vec::new();
    for (name, values) in Network::NAMES.iter().zip(&network.params) {
        let grad = memory(context, sim, &vec![0.0; values.len()])?;
        let param = Param::new(name, group, memory(context, sim, values)?).grad(grad);
        params.push((adding.add_param(param)?, values.len()));
    }
    let plan = adding.plan()?;
    println!(
        "AdamW over {} params with {} elements; its state takes {} bytes on the host, {} on the device",
        plan.param_count, plan.element_count, plan.host_bytes, plan.device_bytes
    );
    Ok((adding.commit()?, params))
}

/// A checkpoint's folder, which goes when the program ends.
struct Scratch(std::path::PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn train(sim: bool) -> Result<()> {
    let scratch = Scratch(std::env::temp_dir().join(format!("spirals-{}", std::process::id())));
    let mut network = Network::new();
    let context = match sim {
        true => Context::builder().device(DeviceKind::Sim).sim_memory_bytes(1 << 20).create()?,
        false => Context::host()?,
    };
    let (mut optimizer, mut params) = make(&context, &network, 0.5)?;

    for step in 0..=STEPS {
        if step == STEPS / 2 {
            optimizer.save(&scratch.0, SaveOptions::default())?;
            drop(optimizer);
            println!("saved before step {step}; a new optimizer goes on from the checkpoint");
            (optimizer, params) = make(&context, &Network::new(), 0.75)?;
            optimizer.load(&scratch.0, LoadOptions::default())?;
        }
        if sim && step == STEPS * 3 / 4 {
            give_the_device_away(&mut optimizer, &context, &params)?;
        }
        for ((param, _), values) in params.iter().zip(&mut network.params) {
            optimizer.read(*param, values)?;
        }
        let loss = network.forward_backward();
        for ((param, _), grad) in params.iter().zip(&network.grads) {
            optimizer.write_grad(*param, grad)?;
        }
        let result = optimizer.step(&StepOptions { grad_norm_max: 1.0, ..Default::default() })?;
        if step % 50 == 0 {
            println!("step {step:3}  loss {loss:.6}  gradient norm {:.4}", result.grad_norm);
        }
    }
    Ok(())
}

fn main() {
    let sim = std::env::args().any(|argument| argument == "--sim");
    if let Err(error) = train(sim) {
        eprintln!("spirals: {error}");
        std::process::exit(1);
    }
}
