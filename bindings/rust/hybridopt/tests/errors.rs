//! Every refusal comes with the library's text, and nothing crashes.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use hybridopt::*;

#[test]
fn settings_of_a_context() {
    let builder = Context::builder;
    assert_error(builder().threads(5000).create(), Code::InvalidArgument, &["threads", "1024"]);
    assert_error(
        builder().sim_memory_bytes(1 << 20).create(),
        Code::InvalidArgument,
        &["sim_*", "leave them 0"],
    );
    assert_error(
        builder().device(DeviceKind::Sim).device_index(3).create(),
        Code::InvalidArgument,
        &["device_index is 3"],
    );
    assert_error(
        builder().device(DeviceKind::Sim).sim_delay_max(Duration::from_secs(9), 1).create(),
        Code::InvalidArgument,
        &["sim_delay_ns_max"],
    );
    assert_error(builder().local_rank(4, 2).create(), Code::InvalidArgument, &["local_rank"]);
    assert_error(
        builder().device_timeout(Duration::MAX).create(),
        Code::InvalidArgument,
        &["device_timeout_ns"],
    );
    assert_error(builder().numa_nodes(1 << 63).create(), Code::InvalidArgument, &["numa_nodes"]);
}

#[test]
fn settings_of_an_optimizer() {
    let context = sim();
    let builder = || Optimizer::builder(&context, Algorithm::AdamW);
    assert_error(
        builder().device_fraction(1.5).create(),
        Code::InvalidArgument,
        &["device_fraction is 1.5"],
    );
    assert_error(
        builder().chunk_elements(3).create(),
        Code::InvalidArgument,
        &["chunk_elements is 3"],
    );
    assert_error(
        builder().staging_slots(1).create(),
        Code::InvalidArgument,
        &["staging_slots is 1"],
    );
    assert_error(
        builder().disk(0.5, [""; 0]).create(),
        Code::InvalidArgument,
        &["disk_fraction is 0.5", "disk_paths is NULL"],
    );
    assert_error(
        builder().disk(0.5, ["/tmp/a:b"]).create(),
        Code::InvalidArgument,
        &["/tmp/a:b", "has a ':' in its name"],
    );
    assert_error(
        builder().disk_ring_bytes(9).create(),
        Code::InvalidArgument,
        &["disk_ring_bytes is 9"],
    );
    let comm = Comm::new(2, 2, |_, _| Ok(()), |_, _| Ok(()), |_| Ok(()));
    assert_error(
        builder().comm(comm, Duration::from_secs(1)).create(),
        Code::InvalidArgument,
        &["comm", "rank"],
    );
}

#[test]
fn registering() {
    let context = sim();
    let other = sim();
    let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create().unwrap();
    assert_error(
        adding.add_group(&Group { momentum: 0.9, ..adamw() }),
        Code::InvalidArgument,
        &["momentum"],
    );
    assert_error(
        adding.add_group(&Group { lr: f64::NAN, ..adamw() }),
        Code::InvalidArgument,
        &["lr"],
    );
    let group = adding.add_group(&adamw()).unwrap();
    let buffer = |count| DeviceBuffer::<f32>::new(&context, count).unwrap();
    assert_error(
        adding.add_param(Param::new("x", group, buffer(4)).grad(buffer(3))),
        Code::InvalidArgument,
        &["gradient of 'x' has 3 elements, expected 4"],
    );
    assert_error(
        adding.add_param(Param::new("a\0b", group, buffer(4))),
        Code::InvalidArgument,
        &["NUL"],
    );
    assert_error(
        adding.add_param(Param::new("", group, buffer(4))),
        Code::InvalidArgument,
        &["name"],
    );
    assert_error(
        adding.add_param(Param::new("x", group, vec![0f32; 4])),
        Code::InvalidArgument,
        &["data"],
    );
    let foreign = DeviceBuffer::<f32>::new(&other, 4).unwrap();
    assert_error(
        adding.add_param(Param::new("x", group, foreign)),
        Code::InvalidArgument,
        &["another context"],
    );
}

#[test]
fn registering_shards() {
    let context = sim();
    let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create().unwrap();
    let group = adding.add_group(&adamw()).unwrap();
    let buffer = |count| DeviceBuffer::<f32>::new(&context, count).unwrap();
    assert_error(
        adding.add_param(Param::new("x", group, buffer(4)).shard(Shard::of(&[2, 4]))),
        Code::InvalidArgument,
        &["box_count"],
    );
    assert_error(
        adding.add_param(
            Param::new("x", group, buffer(4)).shard(Shard::of(&[2, 4]).with_box(&[0], &[1, 4])),
        ),
        Code::InvalidArgument,
        &["box 0 has 1 offsets and 2 extents", "2 dimensions"],
    );
    assert_error(
        adding.add_param(
            Param::new("x", group, buffer(4))
                .shard(Shard::of(&[2, 4]).with_box(&[0, 0], &[2, 4]).with_range(6, 4)),
        ),
        Code::InvalidArgument,
        &["range"],
    );
    assert_error(
        adding.add_param(Param::new("x", group, buffer(4)).placement(Placement::Disk)),
        Code::InvalidArgument,
        &["param 'x' has placement OFFLOAD_PLACE_DISK", "disk_paths is NULL"],
    );
    adding
        .add_param(
            Param::new("x", group, buffer(4))
                .shard(Shard::of(&[2, 4]).with_box(&[0, 0], &[2, 4]).with_range(4, 4))
                .placement(Placement::Device)
                .replica(true)
                .chunk_order(-1),
        )
        .unwrap();
    assert_error(
        adding.add_param(Param::new("x", group, buffer(4))),
        Code::InvalidArgument,
        &["'x'"],
    );
    let plan = adding.plan().unwrap();
    assert_eq!((plan.param_count, plan.elements.device, plan.fits), (1, 4, true));
}

#[test]
fn commit() {
    let context = Context::builder()
        .device(DeviceKind::Sim)
        .sim_memory_bytes(1 << 20)
        .pinned_bytes_max(4096)
        .create()
        .unwrap();
    let adding = || Optimizer::builder(&context, Algorithm::AdamW).create().unwrap();
    assert_error(adding().commit(), Code::InvalidState, &["add_params"]);
    let mut pinned = adding();
    let group = pinned.add_group(&adamw()).unwrap();
    let buffer = || DeviceBuffer::<f32>::new(&context, 100_000).unwrap();
    pinned.add_param(Param::new("x", group, buffer()).grad(buffer())).unwrap();
    assert_error(pinned.commit(), Code::InvalidArgument, &["pinned_bytes_max"]);

    let small =
        Context::builder().device(DeviceKind::Sim).sim_memory_bytes(1 << 20).create().unwrap();
    assert_error(DeviceBuffer::<f32>::new(&small, 1 << 20), Code::OutOfDeviceMemory, &["4194304"]);
    let mut full =
        Optimizer::builder(&small, Algorithm::AdamW).device_fraction(1.0).create().unwrap();
    let group = full.add_group(&adamw()).unwrap();
    let buffer = DeviceBuffer::<f32>::new(&small, 200_000).unwrap();
    full.add_param(Param::new("x", group, buffer)).unwrap();
    assert!(!full.plan().unwrap().fits);
    assert_error(full.commit(), Code::OutOfDeviceMemory, &["device_fraction"]);
}

#[test]
fn memory_and_types() -> Result<()> {
    let context = sim();
    let builder = Optimizer::builder(&context, Algorithm::AdamW);
    let (mut optimizer, weight, bias) = on_device(&context, builder)?;
    use Code::InvalidArgument as Bad;
    assert_error(optimizer.data::<f32>(bias), Bad, &["bias", "device"]);
    assert_error(optimizer.grad_mut::<f32>(bias), Bad, &["gradient of 'bias'", "write_grad"]);
    assert_error(optimizer.read(weight, &mut [0f32; WEIGHTS]), Bad, &["weight", "Bf16, not Fp32"]);
    assert_error(optimizer.read(bias, &mut [0f32; 3]), Bad, &["values has 3", "expected 37"]);
    assert_error(optimizer.write_grad(bias, &[0f32; 3]), Bad, &["values has 3", "expected 37"]);
    assert_error(optimizer.bind_grad(bias, vec![Bf16(0); BIASES]), Bad, &["Bf16", "Fp32", "bias"]);
    assert_error(optimizer.bind_grad(bias, vec![0f32; 2]), Bad, &["2 elements, expected 37"]);
    assert_error(
        optimizer.bind_grad(bias, vec![0f32; BIASES]),
        Bad,
        &["'bias'", "not in this device's memory"],
    );
    assert_error(optimizer.bind_data(bias, vec![0f32; 2]), Bad, &["2 of Fp32, expected 37"]);
    assert_error(
        optimizer.state(bias, StateKind::MomentumBuffer).map(drop),
        Bad,
        &["bias", "AdamW does not keep"],
    );
    assert_error(
        optimizer.state(bias, StateKind::ExpAvg)?.host::<Bf16>(),
        Bad,
        &["Fp32, not Bf16"],
    );
    assert_error(optimizer.state(bias, StateKind::ExpAvg)?.read(&mut [0f32]), Bad, &["has 1"]);
    assert_error(optimizer.set_step_count(bias, u64::MAX), Bad, &["step_count"]);
    assert_error(
        optimizer.step(&StepOptions { grad_scale: -1.0, ..Default::default() }),
        Bad,
        &["grad_scale"],
    );
    assert_error(
        optimizer.offload_params(&Move::default()),
        Code::InvalidState,
        &["OFFLOAD_MOVABLE_PARAMS"],
    );
    // An id of a larger optimizer.
    let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create()?;
    let group = adding.add_group(&adamw())?;
    let mut id = weight;
    for name in ["a", "b", "c"] {
        id = adding.add_param(Param::new(name, group, DeviceBuffer::<f32>::new(&context, 1)?))?;
    }
    assert_error(optimizer.read(id, &mut [0f32]), Bad, &["param id is 2", "2"]);
    assert_error(optimizer.refresh_masters(&Move::of(&[id])), Bad, &["params"]);
    assert_error(optimizer.clear_grad(id), Bad, &["param id is 2"]);
    assert_error(optimizer.name(id), Bad, &["param id is 2"]);
    assert_eq!(optimizer.name(bias)?, "bias");
    // After all that it still trains.
    write_grads(&mut optimizer, weight, bias, 1)?;
    assert_eq!(optimizer.step(&step_options())?.step, 1);
    Ok(())
}

#[test]
fn host_memory() -> Result<()> {
    let mut none: [f32; 0] = [];
    let context = Context::host()?;
    let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
    let group = adding.add_group(&Group { lr: 1.0, ..Group::default() })?;
    let x = adding.add_param(Param::new("x", group, vec![1f32]))?;
    let empty = adding.add_param(Param::new("empty", group, &mut none).grad(Vec::<f32>::new()))?;
    let mut optimizer = adding.commit()?;
    assert_error(optimizer.grad::<f32>(x), Code::InvalidState, &["'x'", "bind_grad"]);
    assert_error(optimizer.data::<Bf16>(x), Code::InvalidArgument, &["'x'", "Fp32, not Bf16"]);
    assert_eq!(optimizer.step(&StepOptions::default())?.step, 1);
    assert_eq!(optimizer.data::<f32>(empty)?, []);
    optimizer.bind_grad(x, vec![0.5f32])?;
    optimizer.step(&StepOptions::default())?;
    assert_eq!(optimizer.data::<f32>(x)?, [0.5]);
    let kept = context.info()?;
    assert_eq!((kept.optimizers, kept.device_memory_bytes), (1, 0));
    Ok(())
}

#[test]
fn queues() -> Result<()> {
    let context = sim();
    let builder = Optimizer::builder(&context, Algorithm::AdamW).chunk_elements(1024);
    let (mut optimizer, weight, bias) = on_device(&context, builder)?;
    write_grads(&mut optimizer, weight, bias, 1)?;
    // The steps stand behind a stream that goes on when it is told to, or when a failed assertion
    // drops the sender.
    let stream = &Stream::new(&context)?;
    let (go_on, told) = std::sync::mpsc::channel::<()>();
    stream.run(move || {
        let _ = told.recv();
    })?;
    let result = optimizer.queue(move |queue| {
        let behind = StepOptions { stream: Some(stream), ..step_options() };
        let ticket = queue.step(&behind)?;
        assert_error(queue.step_result(ticket), Code::InvalidState, &["running"]);
        assert_error(queue.wait(ticket, Some(Duration::ZERO)), Code::TimedOut, &["wait again"]);
        let a_moment = Some(Duration::from_millis(45));
        assert_error(stream.synchronize(a_moment), Code::TimedOut, &["within 45ms"]);
        assert_eq!(queue.stats()?.queued, 1);
        // 8 fit, this one included.
        let refused = (0..8).map(|_| queue.step(&behind)).find_map(Result::err);
        assert_error(refused.map_or(Ok(()), Err), Code::InvalidState, &["8 steps"]);
        go_on.send(()).unwrap();
        Ok::<_, Error>(ticket)
    });
    assert_eq!(optimizer.step_result(result?)?.step, 1);
    let stats = optimizer.stats()?;
    assert_eq!((stats.queued, stats.steps_applied), (0, 8));

    // The body's own error comes first; the work is waited for all the same.
    #[derive(Debug)]
    enum Mine {
        Enough,
        Library(Error),
    }
    impl From<Error> for Mine {
        fn from(error: Error) -> Self {
            Mine::Library(error)
        }
    }
    let result: Result<(), Mine> = optimizer.queue(|queue| {
        queue.step(&step_options())?;
        Err(Mine::Enough)
    });
    assert!(matches!(result, Err(Mine::Enough)), "{result:?}");
    assert_eq!(optimizer.stats()?.queued, 0);
    let result: Result<(), Mine> = optimizer.queue(|queue| {
        queue.step(&StepOptions { grad_scale: -1.0, ..step_options() })?;
        Ok(())
    });
    assert!(matches!(result, Err(Mine::Library(error)) if error.message().contains("grad_scale")));

    // So it is when the body panics.
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        optimizer.queue(|queue| -> Result<()> {
            queue.step(&step_options())?;
            panic!("in the body")
        })
    }));
    assert!(panicked.is_err());
    let stats = optimizer.stats()?;
    assert_eq!((stats.queued, stats.steps_applied), (0, 10));
    Ok(())
}

#[test]
fn the_log_is_heard_and_its_panics_end_there() -> Result<()> {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let ears = heard.clone();
    let context = Context::builder()
        .device(DeviceKind::Sim)
        .sim_pinned_bytes_max(1)
        .allow_pageable(true)
        .log(move |level, text| {
            ears.lock().unwrap().push((level, text.to_string()));
            panic!("in the log");
        })
        .create()?;
    let (mut optimizer, weight, bias) =
        on_device(&context, Optimizer::builder(&context, Algorithm::AdamW))?;
    write_grads(&mut optimizer, weight, bias, 1)?;
    optimizer.step(&step_options())?;
    assert!(context.info()?.notes.contains("pin"));
    let heard = heard.lock().unwrap_or_else(|poison| poison.into_inner());
    assert!(heard.iter().any(|(level, text)| *level == LogLevel::Warning && text.contains("pin")));
    Ok(())
}

#[test]
fn a_context_ends_with_its_log() -> Result<()> {
    let held_by_log = Arc::new(());
    let held = held_by_log.clone();
    drop(Context::builder().log(move |_, _| drop(held.clone())).create()?);
    assert_eq!(Arc::strong_count(&held_by_log), 1);
    Ok(())
}

#[test]
fn a_leaked_optimizer_keeps_what_it_needs() -> Result<()> {
    let mut weights = values::<f32>(1000, 1);
    let held_by_log = Arc::new(());
    {
        let held = held_by_log.clone();
        let context = Context::builder().log(move |_, _| drop(held.clone())).create()?;
        let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create()?;
        let group = adding.add_group(&adamw())?;
        let x =
            adding.add_param(Param::new("x", group, &mut weights).grad(values::<f32>(1000, 2)))?;
        let mut optimizer = adding.commit()?;
        optimizer.queue(|queue| queue.step(&StepOptions::default()))?;
        assert_eq!(optimizer.data::<f32>(x)?.len(), 1000);
        std::mem::forget(optimizer);
    }
    // The context lives on with its optimizer, and may still log.
    assert_eq!(Arc::strong_count(&held_by_log), 2);
    // Nothing runs any more: the memory is ours, and stepped.
    assert_ne!(weights, values::<f32>(1000, 1));
    weights.fill(0.0);
    Ok(())
}
