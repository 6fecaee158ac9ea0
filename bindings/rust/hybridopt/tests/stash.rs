//! Activations that wait on the host: their bytes come back, and what does not fit is kept.

mod common;

use std::time::Duration;

use common::sim;
use hybridopt::*;

const COUNT: usize = 1 << 19; // 2 MiB
const SLAB: u64 = 1 << 20;

fn values(seed: usize) -> Vec<f32> {
    (0..COUNT).map(|i| ((i + 1) * (seed + 3) % 8191) as f32).collect()
}

fn taken<'s, 'c>(
    stash: &'s Stash<'c>,
    context: &'c Context,
    seed: usize,
    stream: Option<&Stream<'c>>,
) -> Result<Stashed<'s, 'c, f32>> {
    let buffer = DeviceBuffer::from_slice(context, &values(seed))?;
    match stash.push(buffer, stream)? {
        Pushed::Taken(stashed) => Ok(stashed),
        Pushed::Kept(_) => panic!("buffer {} found no room", seed),
    }
}

#[test]
fn the_bytes_come_back_in_other_memory() -> Result<()> {
    // The device has room for three of eight activations.
    let context = Context::builder()
        .device(DeviceKind::Sim)
        .sim_memory_bytes(6 << 20)
        .sim_delay_max(Duration::from_millis(2), 7)
        .create()?;
    let stream = Stream::new(&context)?;
    let stash = Stash::builder(&context, 16 << 20).slab_bytes(SLAB).create()?;
    let mut waiting = Vec::new();
    for seed in 0..8 {
        waiting.push(taken(&stash, &context, seed, Some(&stream))?);
        waiting[seed].release()?;
        waiting[seed].release()?; // a second one has nothing to do
    }
    assert_eq!(context.info()?.device_memory_free_bytes, 6 << 20);
    assert_eq!(stash.used_bytes()?, (16 << 20, 16 << 20));
    for seed in (0..8).rev() {
        let mut stashed = waiting.pop().unwrap();
        stashed.prefetch(Some(&stream))?;
        stashed.prefetch(Some(&stream))?; // likewise
        let mut back = vec![0.0; COUNT];
        stashed.take(Some(&stream))?.download(&mut back)?;
        assert!(back == values(seed));
    }
    assert_eq!(stash.used_bytes()?, (0, 16 << 20));
    Ok(())
}

#[test]
fn take_needs_no_release_and_no_prefetch() -> Result<()> {
    let context = sim();
    let stash = Stash::builder(&context, 4 << 20).slab_bytes(SLAB).create()?;
    let stashed = taken(&stash, &context, 1, None)?;
    let mut back = vec![0.0; COUNT];
    stashed.take(None)?.download(&mut back)?;
    assert!(back == values(1));
    Ok(())
}

#[test]
fn what_is_not_taken_stays_as_it_is() -> Result<()> {
    let context = sim();
    let stash = Stash::builder(&context, 2 << 20).slab_bytes(SLAB).create()?;
    let first = taken(&stash, &context, 1, None)?;
    for buffer in [
        DeviceBuffer::from_slice(&context, &values(2))?, // no room
        DeviceBuffer::from_slice(&context, &[1.0f32; 4])?, // less than min_bytes
        DeviceBuffer::new(&context, 0)?,
    ] {
        let count = buffer.len();
        match stash.push(buffer, None)? {
            Pushed::Kept(buffer) => assert_eq!(buffer.len(), count),
            Pushed::Taken(_) => panic!("{} elements were taken", count),
        }
    }
    drop(first); // its room is free again
    assert_eq!(stash.used_bytes()?.0, 0);
    taken(&stash, &context, 3, None).map(drop)
}

#[test]
fn buffers_that_are_dropped_or_leaked_harm_nothing() -> Result<()> {
    let context = sim();
    let stash = Stash::builder(&context, 8 << 20).slab_bytes(SLAB).create()?;
    std::mem::forget(taken(&stash, &context, 1, None)?);
    let mut prefetched = taken(&stash, &context, 2, None)?;
    prefetched.prefetch(None)?;
    drop(prefetched);
    drop(stash); // with one that lives
    assert_eq!(context.info()?.stashes, 0);
    Ok(())
}

#[test]
fn a_prefetch_without_room_on_the_device_may_be_tried_again() -> Result<()> {
    let context = Context::builder().device(DeviceKind::Sim).sim_memory_bytes(4 << 20).create()?;
    let stash = Stash::builder(&context, 4 << 20).slab_bytes(SLAB).create()?;
    let mut stashed = taken(&stash, &context, 1, None)?;
    stashed.release()?;
    let full = DeviceBuffer::<f32>::new(&context, 2 * COUNT)?;
    let error = stashed.prefetch(None).unwrap_err();
    assert_eq!(error.code(), Code::OutOfDeviceMemory);
    drop(full);
    let mut back = vec![0.0; COUNT];
    stashed.take(None)?.download(&mut back)?;
    assert!(back == values(1));
    Ok(())
}

#[test]
fn errors_say_what_was_wrong() {
    let context = sim();
    let error = Stash::builder(&context, 0).create().unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("budget_bytes"), "{}", error.message());
    let error = Stash::builder(&context, 8 << 20).slab_bytes(4097).create().unwrap_err();
    assert!(error.message().contains("slab_bytes"), "{}", error.message());
}
