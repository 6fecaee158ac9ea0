//! The same bits as a C program gets, wherever the memory is.

mod common;

use common::*;
use hybridopt::*;

/// Steps, and what the C program would print then.
fn train(mut optimizer: Optimizer<'_>, weight: ParamId, bias: ParamId) -> Result<String> {
    let mut norm = f64::NAN;
    for step in 1..=STEPS {
        write_grads(&mut optimizer, weight, bias, step)?;
        let result = optimizer.step(&step_options())?;
        assert!(!result.skipped);
        norm = result.grad_norm;
    }
    summary(&mut optimizer, weight, bias, norm)
}

#[test]
fn borrowed_host_memory() -> Result<()> {
    let (mut weights, mut weight_grads) = (values::<Bf16>(WEIGHTS, 1), vec![Bf16(0); WEIGHTS]);
    let (mut biases, mut bias_grads) = (values::<f32>(BIASES, 2), vec![0f32; BIASES]);
    let context = Context::host()?;
    let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create()?;
    let group = adding.add_group(&adamw())?;
    let weight =
        adding.add_param(Param::new("weight", group, &mut weights).grad(&mut weight_grads))?;
    let bias = adding.add_param(Param::new("bias", group, &mut biases).grad(&mut bias_grads))?;
    let optimizer = adding.commit()?;
    assert_eq!(train(optimizer, weight, bias)?, expected());
    // The optimizer is gone: the memory is the caller's again, with the new values.
    assert_ne!(biases, values::<f32>(BIASES, 2));
    Ok(())
}

#[test]
fn interleaved_memory() -> Result<()> {
    let context =
        Context::builder().numa_policy(NumaPolicy::Interleaved).log(|_, _| ()).create()?;
    let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create()?;
    let group = adding.add_group(&adamw())?;
    let weight = adding.add_param(
        Param::new("weight", group, values::<Bf16>(WEIGHTS, 1)).grad(vec![Bf16(0); WEIGHTS]),
    )?;
    let bias = adding
        .add_param(Param::new("bias", group, values::<f32>(BIASES, 2)).grad(vec![0f32; BIASES]))?;
    let mut optimizer = adding.commit()?;
    let plan = optimizer.plan()?;
    assert_eq!(plan.numa_bytes.iter().sum::<u64>() + plan.numa_unknown_bytes, plan.host_bytes);
    assert_eq!(train(optimizer, weight, bias)?, expected());
    let info = context.info()?;
    assert_eq!(info.numa_policy == 1, !info.notes.contains("memory is not interleaved"));
    Ok(())
}

#[test]
fn owned_host_memory() -> Result<()> {
    let context = Context::host()?;
    let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create()?;
    let group = adding.add_group(&adamw())?;
    let weight = adding.add_param(
        Param::new("weight", group, values::<Bf16>(WEIGHTS, 1)).grad(vec![Bf16(0); WEIGHTS]),
    )?;
    let bias = adding
        .add_param(Param::new("bias", group, values::<f32>(BIASES, 2)).grad(vec![0f32; BIASES]))?;
    let mut optimizer = adding.commit()?;
    for step in 1..=STEPS {
        optimizer.grad_mut(weight)?.copy_from_slice(&values::<Bf16>(WEIGHTS, 10 + step));
        optimizer.grad_mut(bias)?.copy_from_slice(&values::<f32>(BIASES, 20 + step));
        optimizer.step(&step_options())?;
    }
    assert_eq!(optimizer.grad::<f32>(bias)?, values::<f32>(BIASES, 20 + STEPS));
    let expected = expected();
    let mut hash = Hash::new();
    hash.add_bf16(optimizer.data(weight)?);
    hash.add_f32(optimizer.data(bias)?);
    assert_eq!(expected.lines().next().unwrap(), format!("params {:016x}", hash.0));
    Ok(())
}

#[test]
fn any_fraction_of_a_device() -> Result<()> {
    for fraction in [0.0, 0.37, 1.0] {
        let context = sim();
        let builder = Optimizer::builder(&context, Algorithm::AdamW)
            .device_fraction(fraction)
            .chunk_elements(1024);
        let (optimizer, weight, bias) = on_device(&context, builder)?;
        assert_eq!(train(optimizer, weight, bias)?, expected(), "fraction {fraction}");
    }
    Ok(())
}

/// Tests of other settings mean nothing if the bits do not depend on what is trained.
#[test]
fn other_gradients_give_other_bits() -> Result<()> {
    let context = sim();
    let builder = Optimizer::builder(&context, Algorithm::AdamW);
    let (mut optimizer, weight, bias) = on_device(&context, builder)?;
    let mut grads = values::<f32>(BIASES, 21);
    grads[BIASES - 1] += 0.25;
    write_grads(&mut optimizer, weight, bias, 1)?;
    optimizer.write_grad(bias, &grads)?;
    optimizer.step(&step_options())?;
    assert_ne!(train(optimizer, weight, bias)?, expected());
    Ok(())
}

#[test]
fn other_algorithms_step() -> Result<()> {
    let cases = [
        (Algorithm::Sgd, Group { lr: 0.5, ..Group::default() }, 1.0 - 0.5 * 2.0),
        (Algorithm::Lion, Group { lr: 0.5, beta1: 0.9, beta2: 0.99, ..Group::default() }, 0.5),
        (Algorithm::Adagrad, Group { lr: 0.5, eps: 1e-10, ..Group::default() }, 0.5),
        (Algorithm::Signum, Group { lr: 0.5, momentum: 0.9, ..Group::default() }, 0.5),
        (
            Algorithm::Adam,
            Group { lr: 0.5, beta1: 0.9, beta2: 0.99, eps: 1e-12, ..Group::default() },
            0.5,
        ),
        (Algorithm::Sgd, Group { lr: 0.5, maximize: true, ..Group::default() }, 1.0 + 0.5 * 2.0),
        (
            Algorithm::AdamW,
            Group {
                lr: 0.5,
                eps: 2.0,
                weight_decay: 0.5,
                maximize: true,
                cautious_weight_decay: true,
                ..Group::default()
            },
            1.0 + 0.5 * 2.0 / (2.0 + 2.0),
        ),
    ];
    for (algorithm, group, expected) in cases {
        let other = if algorithm == Algorithm::Sgd { Algorithm::AdamW } else { Algorithm::Sgd };
        // The optimizer has the algorithm, or the group names it.
        for (of_optimizer, of_group) in [(algorithm, None), (other, Some(algorithm))] {
            let context = Context::host()?;
            let mut adding = Optimizer::builder(&context, of_optimizer).create()?;
            let id = adding.add_group(&Group { algorithm: of_group, ..group })?;
            let x = adding.add_param(Param::new("x", id, vec![1f32]).grad(vec![2f32]))?;
            let mut optimizer = adding.commit()?;
            optimizer.step(&StepOptions::default())?;
            assert!((optimizer.data::<f32>(x)?[0] - expected).abs() < 1e-6, "{algorithm:?}");
        }
    }
    Ok(())
}

#[test]
fn a_scheduler_reaches_the_next_step() -> Result<()> {
    let context = Context::host()?;
    let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
    let group = adding.add_group(&Group { lr: 1.0, ..Group::default() })?;
    let x = adding.add_param(Param::new("x", group, vec![0f32]).grad(vec![-1f32]))?;
    let mut optimizer = adding.commit()?;
    optimizer.step(&StepOptions::default())?;
    optimizer.set_group(group, &Group { lr: 0.25, ..Group::default() })?;
    optimizer.step(&StepOptions { assume_finite: true, ..StepOptions::default() })?;
    assert_eq!(optimizer.data::<f32>(x)?, [1.25]);
    optimizer.clear_grad(x)?;
    optimizer.step(&StepOptions::default())?;
    assert_eq!(optimizer.data::<f32>(x)?, [1.25]);
    optimizer.bind_grad(x, vec![f32::INFINITY])?;
    let result = optimizer.step(&StepOptions::default())?;
    assert!(result.skipped && result.grad_norm.is_infinite());
    assert_eq!(optimizer.data::<f32>(x)?, [1.25]);
    assert_eq!(optimizer.stats()?.steps_skipped, 1);
    Ok(())
}

/// A weight of 1 with a gradient of 1; a step takes half of the gradient.
fn with_one_weight(context: &Context) -> Result<(Optimizer<'_>, ParamId)> {
    let mut adding = Optimizer::builder(context, Algorithm::Sgd).create()?;
    let group = adding.add_group(&Group { lr: 0.5, ..Group::default() })?;
    let x = adding
        .add_param(Param::new("x", group, vec![Bf16::from(1.0)]).grad(vec![Bf16::from(1.0)]))?;
    Ok((adding.commit()?, x))
}

#[test]
fn a_step_follows_weights_from_outside() -> Result<()> {
    let context = Context::host()?;
    let (mut optimizer, x) = with_one_weight(&context)?;
    optimizer.data_mut(x)?[0] = Bf16::from(8.0);
    optimizer.step(&StepOptions { follow_params: true, ..StepOptions::default() })?;
    assert_eq!(f32::from(optimizer.data::<Bf16>(x)?[0]), 7.5);
    optimizer.data_mut(x)?[0] = Bf16::from(8.0);
    optimizer.step(&StepOptions::default())?;
    assert_eq!(f32::from(optimizer.data::<Bf16>(x)?[0]), 7.0);
    Ok(())
}

#[test]
fn weights_from_outside() -> Result<()> {
    let context = Context::host()?;
    let (mut optimizer, x) = with_one_weight(&context)?;
    optimizer.data_mut(x)?[0] = Bf16::from(8.0);
    optimizer.refresh_masters(&Move::default())?;
    optimizer.step(&StepOptions::default())?;
    assert_eq!(f32::from(optimizer.data::<Bf16>(x)?[0]), 7.5);
    // State may be written in place too.
    let mut master = optimizer.state(x, StateKind::Master)?;
    assert_eq!((master.host::<f32>()?, master.step_count()), (&[7.5f32][..], 1));
    master.host_mut::<f32>()?[0] = 3.0;
    optimizer.set_step_count(x, 7)?;
    optimizer.step(&StepOptions::default())?;
    assert_eq!(f32::from(optimizer.data::<Bf16>(x)?[0]), 2.5);
    assert_eq!(optimizer.state(x, StateKind::Master)?.step_count(), 8);
    // Or copied, as the numbers that steps use; with a master its param is written.
    optimizer.write_state(x, StateKind::Master, 0, &[1.0 + 0.5f32.powi(20)])?;
    assert_eq!(f32::from(optimizer.data::<Bf16>(x)?[0]), 1.0);
    let mut read = [0.0f32];
    optimizer.read_state(x, StateKind::Master, 0, &mut read)?;
    assert_eq!(read[0], 1.0 + 0.5f32.powi(20));
    Ok(())
}

#[test]
fn less_state_on_the_host() -> Result<()> {
    let context = Context::host()?;
    let train = |builder: OptimizerBuilder<'_>| -> Result<(u64, Vec<Bf16>, Option<Dtype>, Dtype)> {
        let mut adding = builder.create()?;
        let group = adding.add_group(&adamw())?;
        let grad = values::<Bf16>(WEIGHTS, 11);
        let x = adding.add_param(Param::new("x", group, values::<Bf16>(WEIGHTS, 1)).grad(grad))?;
        let plan = adding.plan()?;
        let mut optimizer = adding.commit()?;
        for _ in 0..STEPS {
            optimizer.step(&step_options())?;
        }
        let low = match optimizer.state(x, StateKind::MasterLow) {
            Ok(state) if state.dtype() == Dtype::I8 => {
                assert_eq!(state.host::<i8>()?.len(), WEIGHTS);
                Some(Dtype::I8)
            }
            Ok(state) => {
                assert_eq!(state.host::<u16>()?.len(), WEIGHTS);
                Some(state.dtype())
            }
            Err(_) => None,
        };
        let dtype = optimizer.state(x, StateKind::ExpAvg)?.dtype();
        Ok((plan.state_bytes.host.iter().sum(), optimizer.data(x)?.to_vec(), low, dtype))
    };
    let builder = || Optimizer::builder(&context, Algorithm::AdamW);
    let full = train(builder())?;
    let split = train(builder().master_layout(MasterLayout::Split))?;
    assert_eq!(split.1, full.1, "the bits of the params");
    assert!(split.0 < full.0 && split.2 == Some(Dtype::U16) && full.2.is_none());
    let split24 = train(builder().master_layout(MasterLayout::Split24))?;
    assert!(split24.0 < split.0 && split24.2 == Some(Dtype::I8));
    let small =
        |rounding, seed| train(builder().moment_dtype(Dtype::Bf16).moment_rounding(rounding, seed));
    let nearest = small(Rounding::Nearest, 0)?;
    assert_eq!((nearest.3, full.3), (Dtype::Bf16, Dtype::Fp32));
    assert!(nearest.0 < full.0);
    assert_ne!(small(Rounding::Stochastic, 1)?.1, nearest.1);
    assert_ne!(small(Rounding::Stochastic, 1)?.1, small(Rounding::Stochastic, 2)?.1);
    Ok(())
}

#[test]
fn parts_of_fused_matrices_and_coefficients_of_each_step() -> Result<()> {
    let context = Context::host()?;
    let train = |split: &[u64], count: usize, rows: usize| -> Result<Vec<f32>> {
        let mut group =
            Group { lr: 0.1, momentum: 0.9, eps: 1e-7, ns_steps: 2, ..Group::default() };
        group.ns_coefficients[0] = [3.0, -3.2, 1.2];
        if rows == 2 {
            group.ns_coefficients[1] = [2.0, -1.5, 0.5];
        }
        let mut adding = Optimizer::builder(&context, Algorithm::Muon).create()?;
        let group = adding.add_group(&group)?;
        let (data, grad) = (values::<f32>(24, 1), values::<f32>(24, 2));
        let x = adding.add_param(
            Param::new("x", group, data[..count].to_vec())
                .grad(grad[..count].to_vec())
                .shard(Shard::of(&[count as i64 / 4, 4]).with_box(&[0, 0], &[count as i64 / 4, 4]))
                .split_rows(split),
        )?;
        let mut optimizer = adding.commit()?;
        optimizer.step(&StepOptions::default())?;
        Ok(optimizer.data(x)?.to_vec())
    };
    let (whole, split) = (train(&[], 24, 2)?, train(&[3, 3], 24, 2)?);
    assert_eq!(train(&[6], 24, 2)?, whole);
    assert_ne!(split, whole);
    assert_eq!(split[..12], train(&[], 12, 2)?);
    assert_ne!(train(&[], 24, 1)?, whole);
    let refused = train(&[4], 24, 2).unwrap_err().to_string();
    assert!(refused.contains("split_rows add up to 4"), "{refused}");
    Ok(())
}
