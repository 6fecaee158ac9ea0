//! What other threads, other ranks and other processes may do.

mod common;

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::*;
use hybridopt::*;

fn is_send<T: Send>() {}
fn is_sync<T: Sync>() {}

#[test]
fn what_may_cross_threads() {
    is_send::<Context>();
    is_sync::<Context>();
    is_send::<Optimizer<'_>>();
    is_sync::<Optimizer<'_>>();
    is_send::<Registration<'_>>();
    is_send::<Waiter<'_>>();
    is_sync::<Waiter<'_>>();
    is_send::<Stream<'_>>();
    is_send::<DeviceBuffer<'_, f32>>();
    is_send::<Stash<'_>>();
    is_sync::<Stash<'_>>();
    is_send::<Stashed<'_, '_, f32>>();
    is_send::<Ticket>();
    is_send::<Error>();
    is_sync::<Error>();
}

fn train(context: &Context) -> Result<String> {
    let builder =
        Optimizer::builder(context, Algorithm::AdamW).device_fraction(0.5).chunk_elements(1024);
    let (mut optimizer, weight, bias) = on_device(context, builder)?;
    let mut norm = f64::NAN;
    for step in 1..=STEPS {
        write_grads(&mut optimizer, weight, bias, step)?;
        norm = optimizer.step(&step_options())?.grad_norm;
    }
    summary(&mut optimizer, weight, bias, norm)
}

#[test]
fn optimizers_of_one_context_on_many_threads() -> Result<()> {
    let context = sim();
    let expected = expected();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| train(&context))).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap()?, expected);
        }
        Ok(())
    })
}

#[test]
fn one_thread_queues_and_another_waits() -> Result<()> {
    let context = sim();
    let (mut optimizer, weight, bias) =
        on_device(&context, Optimizer::builder(&context, Algorithm::AdamW))?;
    write_grads(&mut optimizer, weight, bias, 1)?;
    optimizer.queue(|queue| {
        let waiter = queue.waiter();
        thread::scope(|scope| {
            let (tickets, received) = mpsc::channel();
            let watcher = scope.spawn(move || -> Result<u64> {
                let mut last = 0;
                for ticket in received {
                    waiter.wait(ticket, None)?;
                    last = waiter.step_result(ticket)?.step;
                    assert!(waiter.stats()?.steps_applied >= last);
                }
                Ok(last)
            });
            for _ in 0..5 {
                tickets.send(queue.step(&step_options())?).unwrap();
            }
            drop(tickets);
            assert_eq!(watcher.join().unwrap()?, 5);
            Ok::<_, Error>(())
        })
    })
}

/// Two ranks with half of the vector each clip by the norm of the whole.
#[test]
fn ranks_agree_on_the_norm() -> Result<()> {
    let ranks = Ranks::new(2);
    let half = |rank: usize| -> Result<(f64, Vec<f32>)> {
        let context = Context::builder().local_rank(0, 1).threads(1).create()?;
        let mut adding = Optimizer::builder(&context, Algorithm::Sgd)
            .comm(ranks.comm(rank), Duration::from_secs(60))
            .create()?;
        let group = adding.add_group(&Group { lr: 1.0, ..Group::default() })?;
        let part = Shard::of(&[4]).with_box(&[2 * rank as i64], &[2]);
        let grad = [vec![3f32, 0.0], vec![0.0, 4.0]][rank].clone();
        let x = adding.add_param(Param::new("x", group, vec![0f32; 2]).grad(grad).shard(part))?;
        let mut optimizer = adding.commit()?;
        let result = optimizer.step(&StepOptions { grad_norm_max: 1.0, ..Default::default() })?;
        let values = optimizer.data::<f32>(x)?.to_vec();
        Ok((result.grad_norm, values))
    };
    let (first, second) = thread::scope(|scope| {
        let second = scope.spawn(|| half(1));
        (half(0), second.join().unwrap())
    });
    let ((norm, first), (other_norm, second)) = (first?, second?);
    assert_eq!((norm, other_norm), (5.0, 5.0));
    assert!((first[0] + 0.6).abs() < 1e-5 && (second[1] + 0.8).abs() < 1e-5);
    Ok(())
}

fn alone_with<'a>(context: &'a Context, comm: Comm<'a>) -> Result<(Optimizer<'a>, ParamId)> {
    let mut adding = Optimizer::builder(context, Algorithm::Sgd)
        .comm(comm, Duration::from_millis(100))
        .create()?;
    let group = adding.add_group(&Group { lr: 1.0, ..Group::default() })?;
    let x = adding.add_param(Param::new("x", group, vec![1f32]).grad(vec![1f32]))?;
    Ok((adding.commit()?, x))
}

#[test]
fn a_lost_rank_fails_the_step_and_poisons() -> Result<()> {
    let context = Context::host()?;
    let ranks = Ranks::new(2); // the other one never comes
    let (mut optimizer, x) = alone_with(&context, ranks.comm(0))?;
    assert_error(optimizer.step(&StepOptions::default()), Code::CommFailed, &["rank 0"]);
    assert_error(optimizer.step(&StepOptions::default()), Code::Poisoned, &["earlier"]);
    assert_eq!(optimizer.data::<f32>(x)?, [1.0], "nothing was written");
    assert_eq!(optimizer.stats()?.steps_applied, 0);
    Ok(())
}

#[test]
fn a_comm_closure_may_fail_or_panic() -> Result<()> {
    let context = Context::host()?;
    let mut calls = 0;
    {
        let comm = Comm::new(
            0,
            2,
            |_, _| {
                calls += 1; // borrowed from this frame
                Err(CommError::Failed)
            },
            |_, _| Ok(()),
            |_| Ok(()),
        );
        let (mut optimizer, _) = alone_with(&context, comm)?;
        assert_error(optimizer.step(&StepOptions::default()), Code::CommFailed, &["rank 0"]);
    }
    assert_eq!(calls, 1);
    let comm = Comm::new(0, 2, |_, _| panic!("in the sum"), |_, _| Ok(()), |_| Ok(()));
    let (mut optimizer, x) = alone_with(&context, comm)?;
    assert_error(optimizer.step(&StepOptions::default()), Code::CommFailed, &["rank 0"]);
    assert_eq!(optimizer.data::<f32>(x)?, [1.0]);
    Ok(())
}

extern "C" {
    fn fork() -> i32;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
}

#[test]
fn a_forked_child_gets_errors_and_the_parent_goes_on() -> Result<()> {
    let context = Context::host()?;
    let mut adding = Optimizer::builder(&context, Algorithm::Sgd).create()?;
    let group = adding.add_group(&Group { lr: 1.0, ..Group::default() })?;
    let x = adding.add_param(Param::new("x", group, vec![4f32]).grad(vec![1f32]))?;
    let mut optimizer = adding.commit()?;
    optimizer.step(&StepOptions::default())?;
    // SAFETY: the child makes a few calls and leaves without running anything else.
    let child = unsafe { fork() };
    assert!(child >= 0);
    if child == 0 {
        let refused =
            |error: &Error| error.code() == Code::InvalidState && error.message().contains("fork");
        let step = matches!(optimizer.step(&StepOptions::default()), Err(e) if refused(&e));
        let stats = matches!(optimizer.stats(), Err(e) if refused(&e));
        let info = matches!(context.info(), Err(e) if refused(&e));
        drop(optimizer); // does nothing, and does not hang
        unsafe { _exit(i32::from(!(step && stats && info))) };
    }
    let mut status = -1;
    assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child's calls were not refused");
    optimizer.step(&StepOptions::default())?;
    assert_eq!(optimizer.data::<f32>(x)?, [2.0]);
    Ok(())
}
