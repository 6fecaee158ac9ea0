//! Params, gradients and states leave the device and come back: the bits do not notice, and the
//! buffers that the optimizer owns are freed.

mod common;

use common::*;
use hybridopt::*;

const ALL: Movable = Movable { params: true, grads: true, states: true, accumulate: false };

fn free_bytes(context: &Context) -> u64 {
    context.info().unwrap().device_memory_free_bytes
}

#[test]
fn a_cycle_with_everything_out() -> Result<()> {
    let context = sim();
    let free_at_first = free_bytes(&context);
    let builder = Optimizer::builder(&context, Algorithm::AdamW).device_fraction(0.5).movable(ALL);
    let (mut optimizer, weight, bias) = on_device(&context, builder)?;
    let mut norm = f64::NAN;
    for step in 1..=STEPS {
        write_grads(&mut optimizer, weight, bias, step)?;
        let ticket = optimizer.queue(|queue| {
            queue.offload_grads(&Move::default())?;
            queue.offload_states(&Move::default())?;
            queue.offload_params(&Move::default())
        })?;
        assert!(optimizer.stats()?.params_bytes.host > 0);
        assert_eq!(free_bytes(&context), free_at_first, "everything has left the device");
        assert_error(optimizer.step_result(ticket), Code::InvalidState, &["not of one", "steps"]);
        assert_error(optimizer.step(&step_options()), Code::InvalidState, &["reload_states"]);
        // Twice is once.
        optimizer.offload_params(&Move::default())?;
        assert_error(
            optimizer.read::<f32>(bias, &mut [0.0; BIASES]),
            Code::InvalidState,
            &["bias", "bind_data"],
        );

        optimizer.bind_data(weight, DeviceBuffer::<Bf16>::new(&context, WEIGHTS)?)?;
        optimizer.bind_data(bias, DeviceBuffer::<f32>::new(&context, BIASES)?)?;
        // Bound, and still on the host: the address must stay.
        optimizer.offload_params(&Move::of(&[bias]))?;
        assert_error(
            optimizer.read::<f32>(bias, &mut [0.0; BIASES]),
            Code::InvalidState,
            &["bias", "reload_params"],
        );
        optimizer.queue(|queue| {
            queue.reload_params(&Move::of(&[bias, weight]))?;
            queue.reload_states(&Move::default())
        })?;
        // The gradients stay where they are: the step uses them up there.
        norm = optimizer.step(&step_options())?.grad_norm;
        optimizer.bind_grad(weight, DeviceBuffer::<Bf16>::new(&context, WEIGHTS)?)?;
        optimizer.bind_grad(bias, DeviceBuffer::<f32>::new(&context, BIASES)?)?;
    }
    assert_eq!(summary(&mut optimizer, weight, bias, norm)?, expected());
    drop(optimizer);
    assert_eq!(free_bytes(&context), free_at_first);
    Ok(())
}

#[test]
fn the_device_fraction_changes_between_steps() -> Result<()> {
    let context = sim();
    let builder = Optimizer::builder(&context, Algorithm::AdamW).device_fraction(0.5);
    let (mut optimizer, weight, bias) = on_device(&context, builder)?;
    let all_bytes = {
        let stats = optimizer.stats()?;
        stats.state_bytes.host + stats.state_bytes.device
    };
    let mut norm = f64::NAN;
    for step in 1..=STEPS {
        write_grads(&mut optimizer, weight, bias, step)?;
        optimizer.set_device_fraction([0.25, 1.0, 0.0][step as usize % 3])?;
        norm = optimizer.step(&step_options())?.grad_norm;
    }
    assert_eq!(summary(&mut optimizer, weight, bias, norm)?, expected());
    optimizer.set_device_fraction(1.0)?;
    assert_eq!(optimizer.grads_to_keep()?, [true, true]);
    optimizer.set_device_fraction(0.0)?;
    assert_eq!(optimizer.stats()?.state_bytes.device, 0);
    assert!(optimizer.stats()?.state_bytes.host >= all_bytes);
    assert_error(
        optimizer.set_device_fraction(1.5),
        Code::InvalidArgument,
        &["device_fraction", "1.5"],
    );
    Ok(())
}

#[test]
fn gradients_add_up_on_the_host() -> Result<()> {
    let context = sim();
    let movable = Movable { accumulate: true, ..Movable::default() };
    let mut adding = Optimizer::builder(&context, Algorithm::Sgd).movable(movable).create()?;
    let group = adding.add_group(&Group { lr: 1.0, ..Group::default() })?;
    let x = adding.add_param(Param::new(
        "x",
        group,
        DeviceBuffer::from_slice(&context, &[0f32, 0.0])?,
    ))?;
    let mut optimizer = adding.commit()?;
    for micro_batch in 1..=3 {
        let grad = DeviceBuffer::from_slice(&context, &[micro_batch as f32, 0.5])?;
        optimizer.bind_grad(x, grad)?;
        optimizer.accumulate_grads(&Move::of(&[x]))?;
        assert_error(optimizer.read_grad(x, &mut [0f32; 2]), Code::InvalidState, &["bind_grad"]);
    }
    optimizer.step(&StepOptions::default())?;
    let mut values = [0f32; 2];
    optimizer.read(x, &mut values)?;
    assert_eq!(values, [-6.0, -1.5]);

    // A dropped gradient changes nothing.
    optimizer.bind_grad(x, DeviceBuffer::from_slice(&context, &[9f32, 9.0])?)?;
    optimizer.drop_grads(&Move::default())?;
    optimizer.step(&StepOptions::default())?;
    optimizer.read(x, &mut values)?;
    assert_eq!(values, [-6.0, -1.5]);
    Ok(())
}

#[test]
fn gradients_come_back() -> Result<()> {
    let context = sim();
    let builder = Optimizer::builder(&context, Algorithm::AdamW).movable(ALL);
    let (mut optimizer, weight, bias) = on_device(&context, builder)?;
    write_grads(&mut optimizer, weight, bias, 1)?;
    optimizer.offload_grads(&Move::default())?;
    optimizer.bind_grad(bias, DeviceBuffer::<f32>::new(&context, BIASES)?)?;
    optimizer.reload_grads(&Move::of(&[bias]))?;
    let mut grads = vec![0f32; BIASES];
    optimizer.read_grad(bias, &mut grads)?;
    assert_eq!(grads, values::<f32>(BIASES, 21));
    Ok(())
}

#[test]
fn streams_are_waited_for() -> Result<()> {
    let context = Context::builder()
        .device(DeviceKind::Sim)
        .sim_memory_bytes(64 << 20)
        .sim_delay_max(std::time::Duration::from_micros(200), 7)
        .create()?;
    let builder =
        Optimizer::builder(&context, Algorithm::AdamW).device_fraction(0.5).chunk_elements(1024);
    let (mut optimizer, weight, bias) = on_device(&context, builder)?;
    let stream = Stream::new(&context)?;
    let (ran, runs) = std::sync::mpsc::channel();
    let mut norm = f64::NAN;
    for step in 1..=STEPS {
        write_grads(&mut optimizer, weight, bias, step)?;
        let ticket = optimizer.queue(|queue| {
            let ticket = queue.step(&StepOptions { stream: Some(&stream), ..step_options() })?;
            queue.stream_wait(ticket, &stream, &[bias])?;
            queue.stream_wait(ticket, &stream, &[])?;
            let ran = ran.clone();
            stream.run(move || ran.send(step).unwrap())?;
            Ok::<_, Error>(ticket)
        })?;
        stream.synchronize(None)?;
        assert_eq!(runs.try_recv(), Ok(step));
        norm = optimizer.step_result(ticket)?.grad_norm;
    }
    assert_eq!(summary(&mut optimizer, weight, bias, norm)?, expected());
    // A panic ends with its function.
    stream.run(|| panic!("inside a stream's function"))?;
    stream.run(move || ran.send(99).unwrap())?;
    stream.synchronize(Some(std::time::Duration::from_secs(60)))?;
    assert_eq!(runs.try_recv(), Ok(99));
    Ok(())
}

/// A gradient that a stream writes, late.
fn write_late(stream: &Stream<'_>, mapped: *mut f32, value: f32) -> Result<()> {
    let address = mapped as usize;
    stream.run(move || {
        std::thread::sleep(std::time::Duration::from_millis(30));
        // SAFETY: one element of a buffer that the optimizer holds; nothing else is under way.
        unsafe { *(address as *mut f32) = value };
    })
}

#[test]
fn gradients_are_taken_behind_their_stream() -> Result<()> {
    let context = sim();
    let movable = Movable { accumulate: true, ..Movable::default() };
    let mut adding = Optimizer::builder(&context, Algorithm::Sgd).movable(movable).create()?;
    let group = adding.add_group(&Group { lr: 1.0, ..Group::default() })?;
    let x =
        adding.add_param(Param::new("x", group, DeviceBuffer::from_slice(&context, &[0f32])?))?;
    let mut optimizer = adding.commit()?;
    let stream = Stream::new(&context)?;

    let grad = DeviceBuffer::from_slice(&context, &[100f32])?;
    let mapped = grad.map()?;
    optimizer.bind_grad(x, grad)?;
    write_late(&stream, mapped, 1.0)?;
    optimizer.step(&StepOptions { stream: Some(&stream), ..StepOptions::default() })?;
    let mut value = [0f32];
    optimizer.read(x, &mut value)?;
    assert_eq!(value, [-1.0], "the step took the gradient before it was written");

    write_late(&stream, mapped, 2.0)?;
    optimizer.accumulate_grads(&Move { streams: &[&stream], ..Move::default() })?;
    optimizer.step(&StepOptions::default())?;
    optimizer.read(x, &mut value)?;
    assert_eq!(value, [-3.0], "the move took the gradient before it was written");
    Ok(())
}
