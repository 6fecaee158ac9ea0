//! Save and load: whole, with the bits of their point in time, and with errors that name the file.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use common::*;
use hybridopt::*;

/// A directory that ends with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }
    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn step(optimizer: &mut Optimizer<'_>, weight: ParamId, bias: ParamId, step: u32) -> Result<f64> {
    write_grads(optimizer, weight, bias, step)?;
    Ok(optimizer.step(&step_options())?.grad_norm)
}

/// On the host device, committed, not stepped.
fn on_host(context: &Context) -> Result<(Optimizer<'_>, ParamId, ParamId)> {
    let mut adding = Optimizer::builder(context, Algorithm::AdamW).create()?;
    let group = adding.add_group(&adamw())?;
    let weights = values::<Bf16>(WEIGHTS, 1);
    let weight =
        adding
            .add_param(Param::new("weight", group, weights).grad(vec![Bf16::default(); WEIGHTS]))?;
    let biases = values::<f32>(BIASES, 2);
    let bias = adding.add_param(Param::new("bias", group, biases).grad(vec![0f32; BIASES]))?;
    Ok((adding.commit()?, weight, bias))
}

#[test]
fn one_optimizer_saves_and_another_goes_on() -> Result<()> {
    let scratch = Scratch::new("goes_on");
    let path = scratch.join("step-2");
    let context = Context::host()?;
    let (mut first, weight, bias) = on_host(&context)?;
    step(&mut first, weight, bias, 1)?;
    step(&mut first, weight, bias, 2)?;
    let (mut calls, mut last) = (0, (0, 0));
    let progress = |done: u64, total: u64| {
        assert!(done >= last.0 && done <= total);
        calls += 1;
        last = (done, total);
    };
    first.save(&path, SaveOptions { progress: Some(Box::new(progress)), ..Default::default() })?;
    assert!(calls > 0 && last.0 == last.1 && last.1 > 0, "{calls} calls, the last {last:?}");

    let (info, tensors) = inspect(&path)?;
    assert_eq!((info.step, info.world, info.param_count), (2, 1, 2));
    assert_eq!(info.tensor_count, tensors.len() as u64);
    let of_weight = |kind| {
        tensors.iter().find(|tensor| tensor.name == "weight" && tensor.kind == Some(kind)).unwrap()
    };
    let exp_avg = of_weight(StateKind::ExpAvg);
    assert_eq!((exp_avg.dtype, exp_avg.step_count), (Some(Dtype::Fp32), 2));
    assert_eq!((exp_avg.range_count, exp_avg.bytes), (WEIGHTS as u64, 4 * WEIGHTS as u64));
    assert_eq!(exp_avg.global_shape, [WEIGHTS as i64]);
    assert_eq!(exp_avg.boxes, [(vec![0], vec![WEIGHTS as i64])]);
    assert!(path.join(&exp_avg.file).is_file());
    let read = AtomicU64::new(0);
    let progress = |done, _| read.store(done, Ordering::Relaxed);
    verify(&path, VerifyOptions { progress: Some(Box::new(progress)), ..Default::default() })?;
    assert!(read.into_inner() >= info.bytes);
    assert_eq!(newest(&scratch.0)?, path);
    assert_eq!(newest_verified(&scratch.0, VerifyOptions::default())?, path);

    // Another device, another fraction, weights of before: the bits of the third step are the same.
    let sim = sim();
    let builder = Optimizer::builder(&sim, Algorithm::AdamW).device_fraction(0.4);
    let (mut second, weight, bias) = on_device(&sim, builder)?;
    second.load(&path, LoadOptions::default())?;
    let norm = step(&mut second, weight, bias, 3)?;
    assert_eq!(summary(&mut second, weight, bias, norm)?, expected());
    Ok(())
}

#[test]
fn state_on_disk_has_the_same_bits() -> Result<()> {
    let scratch = Scratch::new("on_disk");
    let drives = ["a", "b"].map(|name| scratch.join(name));
    for drive in &drives {
        fs::create_dir(drive).unwrap();
    }
    let context = sim();
    let builder = Optimizer::builder(&context, Algorithm::AdamW)
        .device_fraction(0.25)
        .chunk_elements(1024)
        .disk(0.5, drives.clone());
    let (mut optimizer, weight, bias) = on_device(&context, builder)?;
    step(&mut optimizer, weight, bias, 1)?;
    step(&mut optimizer, weight, bias, 2)?;
    let norm = step(&mut optimizer, weight, bias, 3)?;
    let (plan, stats) = (optimizer.plan()?, optimizer.stats()?);
    assert!(plan.elements.disk > 0 && stats.state_bytes.disk > 0);
    // Threads may have read a part of what a fourth step needs.
    assert!(stats.disk_read_bytes >= 3 * plan.disk_step_bytes);
    assert!(stats.disk_read_bytes <= 3 * plan.disk_step_bytes + plan.host_disk_bytes);
    assert!(drives.iter().all(|drive| fs::read_dir(drive).unwrap().next().is_none()));
    let view = optimizer.state(weight, StateKind::ExpAvg)?;
    let (in_memory, on_disk) = (view.len(), view.disk_len());
    assert!(on_disk > 0 && in_memory + on_disk == WEIGHTS);
    let mut rest = vec![0f32; on_disk];
    optimizer.read_state(weight, StateKind::ExpAvg, in_memory, &mut rest)?;
    assert!(rest.iter().any(|value| *value != 0.0));
    optimizer.save(&scratch.join("step-3"), SaveOptions::default())?;
    let builder = Optimizer::builder(&context, Algorithm::AdamW);
    let (mut in_memory, weight, bias) = on_device(&context, builder)?;
    in_memory.load(&scratch.join("step-3"), LoadOptions::default())?;
    assert_eq!(summary(&mut in_memory, weight, bias, norm)?, expected());
    Ok(())
}

#[test]
fn a_step_may_follow_a_save() -> Result<()> {
    let scratch = Scratch::new("follow");
    let path = scratch.join("step-2");
    let context = Context::host()?;
    let (mut first, weight, bias) = on_host(&context)?;
    step(&mut first, weight, bias, 1)?;
    write_grads(&mut first, weight, bias, 2)?;
    let calls = AtomicU64::new(0);
    {
        let (mut copy, weight, bias) = on_host(&context)?;
        step(&mut copy, weight, bias, 1)?;
        write_grads(&mut copy, weight, bias, 2)?;
        let progress = |_, _| {
            calls.fetch_add(1, Ordering::Relaxed);
        };
        copy.queue(|queue| {
            queue.step(&step_options())?;
            let options = SaveOptions { progress: Some(Box::new(progress)), ..Default::default() };
            queue.save(&path, options)?;
            queue.step(&step_options())
        })?;
        assert_eq!(copy.stats()?.steps_applied, 3);
    }
    assert!(calls.into_inner() > 0);
    first.queue(|queue| queue.load(&path, LoadOptions::default()))?;
    let norm = step(&mut first, weight, bias, 3)?;
    assert_eq!(summary(&mut first, weight, bias, norm)?, expected());
    Ok(())
}

#[test]
fn masters_without_moments() -> Result<()> {
    let scratch = Scratch::new("masters");
    let path = scratch.join("weights");
    let context = Context::host()?;
    let (mut optimizer, weight, bias) = on_host(&context)?;
    step(&mut optimizer, weight, bias, 1)?;
    optimizer.save(&path, SaveOptions { masters_only: true, io_depth: 1, ..Default::default() })?;
    let weights = optimizer.data::<Bf16>(weight)?.to_vec();
    step(&mut optimizer, weight, bias, 2)?;
    assert_ne!(optimizer.data::<Bf16>(weight)?, weights);
    assert_error(
        optimizer.load(&path, LoadOptions::default()),
        Code::CheckpointMismatch,
        &["FRESH_MOMENTS"],
    );
    let fresh = || LoadOptions { fresh_moments: true, no_verify: true, ..Default::default() };
    optimizer.load(&path, fresh())?;
    assert_eq!(optimizer.data::<Bf16>(weight)?, weights);
    let state = optimizer.state(bias, StateKind::ExpAvg)?;
    assert_eq!((state.host::<f32>()?, state.step_count()), (&[0f32; BIASES][..], 0));
    optimizer.load(&path, LoadOptions { keep_steps: true, ..fresh() })?;
    assert_eq!(optimizer.state(bias, StateKind::ExpAvg)?.step_count(), 1);
    Ok(())
}

#[test]
fn refusals_name_the_file_and_change_nothing() -> Result<()> {
    let scratch = Scratch::new("refusals");
    let path = scratch.join("good");
    let context = Context::host()?;
    let (mut optimizer, weight, bias) = on_host(&context)?;
    step(&mut optimizer, weight, bias, 1)?;
    optimizer.save(&path, SaveOptions::default())?;
    assert_error(
        optimizer.save(&path, SaveOptions::default()),
        Code::InvalidArgument,
        &["refusals", "good"],
    );
    assert_error(
        optimizer.save(scratch.join("no/where"), SaveOptions::default()),
        Code::InvalidArgument,
        &["no/where", "make it first"],
    );
    assert_error(optimizer.save("a\0b", SaveOptions::default()), Code::InvalidArgument, &["NUL"]);
    assert_error(
        optimizer.save(scratch.join("x"), SaveOptions { io_depth: 99, ..Default::default() }),
        Code::InvalidArgument,
        &["io_depth is 99"],
    );
    let nowhere = scratch.join("nowhere");
    assert_error(optimizer.load(&nowhere, LoadOptions::default()), Code::IoFailed, &["nowhere"]);
    assert_error(inspect(&nowhere), Code::IoFailed, &["nowhere"]);
    assert_error(verify(&nowhere, VerifyOptions::default()), Code::IoFailed, &["nowhere"]);
    assert_error(newest(scratch.join("empty/none")), Code::IoFailed, &["none"]);
    fs::create_dir(scratch.join("empty")).unwrap();
    assert_error(newest(scratch.join("empty")), Code::InvalidState, &["empty"]);

    // Of another model.
    let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create()?;
    let group = adding.add_group(&adamw())?;
    adding.add_param(Param::new("other", group, vec![0f32; 3]))?;
    let mut other = adding.commit()?;
    assert_error(
        other.load(&path, LoadOptions::default()),
        Code::CheckpointMismatch,
        &["good", "other"],
    );

    // One byte of it flipped.
    let (_, tensors) = inspect(&path)?;
    let tensor = &tensors[0];
    let file = path.join(&tensor.file);
    let mut bytes = fs::read(&file).unwrap();
    bytes[tensor.file_offset as usize] ^= 1;
    fs::write(&file, bytes).unwrap();
    let words = [tensor.file.as_str(), tensor.name.as_str()];
    assert_error(verify(&path, VerifyOptions::default()), Code::CheckpointCorrupt, &words);
    let before = optimizer.data::<Bf16>(weight)?.to_vec();
    assert_error(optimizer.load(&path, LoadOptions::default()), Code::CheckpointCorrupt, &words);
    assert_eq!(optimizer.data::<Bf16>(weight)?, before);

    // None of that has poisoned: the training of the C program goes on.
    step(&mut optimizer, weight, bias, 2)?;
    let norm = step(&mut optimizer, weight, bias, 3)?;
    assert_eq!(summary(&mut optimizer, weight, bias, norm)?, expected());
    Ok(())
}

/// A failure that nobody has asked for comes out of the queue's end, once.
#[test]
fn failures_in_a_queue_are_told_there() -> Result<()> {
    let scratch = Scratch::new("told");
    let context = Context::host()?;
    let (mut optimizer, weight, bias) = on_host(&context)?;
    write_grads(&mut optimizer, weight, bias, 1)?;
    let nowhere = scratch.join("nowhere");
    let result = optimizer.queue(|queue| {
        queue.load(&nowhere, LoadOptions::default())?;
        queue.step(&step_options())?;
        queue.load(&nowhere, LoadOptions::default())
    });
    assert_error(result, Code::IoFailed, &["nowhere"]);
    assert_eq!(optimizer.stats()?.queued, 0);
    optimizer.queue(|queue| queue.step(&step_options()))?; // nothing is left to tell
    assert_eq!(optimizer.stats()?.steps_applied, 2);
    Ok(())
}

#[test]
fn a_panic_in_progress_goes_on_where_it_is_waited_for() -> Result<()> {
    let scratch = Scratch::new("panic");
    let context = Context::host()?;
    let (mut optimizer, weight, bias) = on_host(&context)?;
    step(&mut optimizer, weight, bias, 1)?;
    let text = |result: std::thread::Result<Result<()>>| {
        result.expect_err("no panic").downcast_ref::<&str>().map(|text| text.to_string()).unwrap()
    };
    let catch = |call: &mut dyn FnMut() -> Result<()>| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(call))
    };
    let path = scratch.join("saved");
    let panicking =
        || -> Option<Box<dyn FnMut(u64, u64) + Send>> { Some(Box::new(|_, _| panic!("told"))) };
    let saved = catch(&mut || {
        optimizer.save(&path, SaveOptions { progress: panicking(), ..Default::default() })
    });
    assert_eq!(text(saved), "told");
    // The save itself was not disturbed.
    let verified =
        catch(&mut || verify(&path, VerifyOptions { progress: panicking(), ..Default::default() }));
    assert_eq!(text(verified), "told");
    verify(&path, VerifyOptions::default())?;
    let queued = catch(&mut || {
        optimizer.queue(|queue| {
            let options = LoadOptions { progress: panicking(), ..Default::default() };
            queue.load(&path, options).map(drop)
        })
    });
    assert_eq!(text(queued), "told");
    step(&mut optimizer, weight, bias, 2)?;
    let norm = step(&mut optimizer, weight, bias, 3)?;
    assert_eq!(summary(&mut optimizer, weight, bias, norm)?, expected());
    Ok(())
}
