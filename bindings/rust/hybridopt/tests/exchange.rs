//! Matrices of which ranks have parts: the bits are those of one rank that has the whole of them.

mod common;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::*;
use hybridopt::*;

const ROWS: usize = 6;
const COLS: usize = 4;
const PARAM: u32 = 1;
const GRADS: u32 = 10;

fn muon() -> Group {
    Group { lr: 0.02, momentum: 0.95, nesterov: true, eps: 1e-7, ..Group::default() }
}

fn matrix(seed: u32) -> Vec<f32> {
    values(ROWS * COLS, seed)
}

/// A Muon optimizer with the whole matrix, its gradient in `grad`.
fn optimizer_of<'a>(
    context: &'a Context,
    whole: impl Into<Memory<'a>>,
    grad: impl Into<Memory<'a>>,
) -> Result<(Optimizer<'a>, ParamId)> {
    let mut adding = Optimizer::builder(context, Algorithm::Muon).create()?;
    let group = adding.add_group(&muon())?;
    let shape = [ROWS as i64, COLS as i64];
    let shard = Shard::of(&shape).with_box(&[0, 0], &shape);
    let param = adding.add_param(Param::new("up", group, whole).grad(grad).shard(shard))?;
    Ok((adding.commit()?, param))
}

fn on_one_rank(context: &Context) -> Result<Vec<f32>> {
    let (mut optimizer, param) = optimizer_of(context, matrix(PARAM), matrix(0))?;
    for step in 0..STEPS {
        optimizer.write_grad(param, &matrix(GRADS + step))?;
        optimizer.step(&StepOptions::default())?;
    }
    let mut params = matrix(0);
    optimizer.read(param, &mut params)?;
    Ok(params)
}

/// The first row of each rank's part, and one behind the last.
fn rows_of(world: usize, rank: usize) -> (usize, usize) {
    (rank * ROWS / world, (rank + 1) * ROWS / world)
}

fn exchange_of<'c>(
    context: &'c Context,
    ranks: &Arc<Ranks>,
    world: usize,
    rank: usize,
) -> Result<Exchange<'c>> {
    let (begin, end) = rows_of(world, rank);
    let shard = Shard::of(&[ROWS as i64, COLS as i64])
        .with_box(&[begin as i64, 0], &[(end - begin) as i64, COLS as i64]);
    let builder = Exchange::builder(context, ranks.comm_with_exchange(rank))
        .matrix("up", Dtype::Fp32, Dtype::Fp32, shard)
        .timeout(Duration::from_secs(60));
    assert!(builder.plan()?.home_count <= 1);
    builder.create()
}

fn part_of(all: &[f32], world: usize, rank: usize) -> Vec<f32> {
    let (begin, end) = rows_of(world, rank);
    all[begin * COLS..end * COLS].to_vec()
}

/// Slices, as where the device is the host.
fn train_in_slices(ranks: &Arc<Ranks>, world: usize, rank: usize) -> Result<Vec<f32>> {
    let context = Context::builder().threads(1).create()?;
    let mut exchange = exchange_of(&context, ranks, world, rank)?;
    let mut part = part_of(&matrix(PARAM), world, rank);
    let grad_of = |step| part_of(&matrix(GRADS + step), world, rank);
    if exchange.home(0)? != rank as i32 {
        exchange.gather(0, &part, None, None)?;
        for step in 0..STEPS {
            exchange.gather(0, &grad_of(step), None, None)?;
            exchange.scatter(0, None, &mut part, None)?;
        }
        return Ok(part);
    }
    let mut whole = matrix(0);
    exchange.gather(0, &part, Some((&mut whole).into()), None)?;
    assert_eq!(whole, matrix(PARAM));
    let (mut optimizer, param) = optimizer_of(&context, &mut whole, matrix(0))?;
    for step in 0..STEPS {
        exchange.gather(0, &grad_of(step), Some(optimizer.grad_elements_mut(param)?), None)?;
        optimizer.step(&StepOptions::default())?;
        exchange.scatter(0, Some(optimizer.elements(param)?), &mut part, None)?;
    }
    Ok(part)
}

/// Device buffers.
fn train_on_device(ranks: &Arc<Ranks>, world: usize, rank: usize) -> Result<Vec<f32>> {
    let context = sim();
    let mut exchange = exchange_of(&context, ranks, world, rank)?;
    let mut part = DeviceBuffer::from_slice(&context, &part_of(&matrix(PARAM), world, rank))?;
    let mut grad = DeviceBuffer::<f32>::new(&context, part.len())?;
    let is_home = exchange.home(0)? == rank as i32;
    let mut whole = DeviceBuffer::<f32>::new(&context, if is_home { ROWS * COLS } else { 0 })?;
    exchange.gather(0, &part, is_home.then(|| (&mut whole).into()), None)?;
    let mut trained = match is_home {
        true => {
            let whole_grad = DeviceBuffer::from_slice(&context, &matrix(0))?;
            Some(optimizer_of(&context, whole, whole_grad)?)
        }
        false => None,
    };
    for step in 0..STEPS {
        grad.upload(&part_of(&matrix(GRADS + step), world, rank))?;
        match &mut trained {
            Some((optimizer, param)) => {
                exchange.gather(0, &grad, Some(optimizer.grad_elements_mut(*param)?), None)?;
                optimizer.step(&StepOptions::default())?;
                exchange.scatter(0, Some(optimizer.elements(*param)?), &mut part, None)?;
            }
            None => {
                exchange.gather(0, &grad, None, None)?;
                exchange.scatter(0, None, &mut part, None)?;
            }
        }
    }
    let mut values = vec![0f32; part.len()];
    part.download(&mut values)?;
    Ok(values)
}

type Train = fn(&Arc<Ranks>, usize, usize) -> Result<Vec<f32>>;

#[test]
fn parts_have_the_bits_of_the_whole() -> Result<()> {
    let expected = on_one_rank(&Context::host()?)?;
    assert_ne!(expected, matrix(PARAM));
    for world in [1, 2, 3, 8] {
        for train in [train_in_slices as Train, train_on_device as Train] {
            let ranks = Ranks::new(world);
            let parts: Vec<Vec<f32>> = thread::scope(|scope| {
                let threads: Vec<_> = (0..world)
                    .map(|rank| {
                        scope.spawn({
                            let ranks = &ranks;
                            move || train(ranks, world, rank)
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<_>>()
            })?;
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&parts.concat()), bits(&expected), "world {world}");
        }
    }
    Ok(())
}

/// One rank that has all of a matrix of 2 by 3.
fn alone<'c>(context: &'c Context, comm: Comm<'c>) -> ExchangeBuilder<'c> {
    let shard = Shard::of(&[2, 3]).with_box(&[0, 0], &[2, 3]);
    Exchange::builder(context, comm).matrix("up", Dtype::Bf16, Dtype::Fp32, shard)
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let context = Context::host()?;
    let no_exchange = || Ranks::new(1).comm(0);
    let comm = || Ranks::new(1).comm_with_exchange(0);
    let invalid = Code::InvalidArgument;
    assert_error(alone(&context, no_exchange()).create(), invalid, &["exchange"]);
    assert_error(Exchange::builder(&context, comm()).create(), invalid, &["matrix_count"]);
    let nul = Exchange::builder(&context, comm()).matrix(
        "a\0b",
        Dtype::Fp32,
        Dtype::Fp32,
        Shard::of(&[1, 1]),
    );
    assert_error(nul.create(), invalid, &["NUL", "leave it out"]);

    let mut exchange = alone(&context, comm()).create()?;
    let (part, mut whole) = (vec![Bf16(0); 6], vec![Bf16(0); 6]);
    assert_error(exchange.home(1), invalid, &["matrix"]);
    let short = &part[1..];
    assert_error(
        exchange.gather(0, short, Some((&mut whole).into()), None),
        invalid,
        &["part has 5 elements, expected 6", "'up'"],
    );
    assert_error(
        exchange.gather(0, &part, Some((&mut whole[1..]).into()), None),
        invalid,
        &["whole has 5 elements, expected 6", "'up'"],
    );
    assert_error(
        exchange.gather(0, &part, None, None),
        invalid,
        &["whole is None", "home of 'up'", "6 elements"],
    );
    let mut other = vec![0f32; 6];
    assert_error(
        exchange.gather(0, &part, Some((&mut other).into()), None),
        invalid,
        &["whole of 'up' is Fp32, expected Bf16"],
    );
    assert_error(
        exchange.scatter(0, Some((&vec![Fp16(0); 6]).into()), &mut vec![Fp16(0); 6], None),
        invalid,
        &["dtype"],
    );
    exchange.gather(0, &part, Some((&mut whole).into()), None)
}

#[test]
fn memory_must_be_where_the_exchange_is() -> Result<()> {
    let (context, other) = (sim(), sim());
    let comm = || Ranks::new(1).comm_with_exchange(0);
    let mut exchange = alone(&context, comm()).create()?;
    let part = vec![Bf16(0); 6];
    let mut whole = DeviceBuffer::<Bf16>::new(&context, 6)?;
    assert_error(
        exchange.gather(0, &part, Some((&mut whole).into()), None),
        Code::InvalidArgument,
        &["part of 'up' is in host memory", "DeviceBuffer"],
    );
    let part = DeviceBuffer::<Bf16>::new(&other, 6)?;
    assert_error(
        exchange.gather(0, &part, Some((&mut whole).into()), None),
        Code::InvalidArgument,
        &["part of 'up' is of another context"],
    );
    Ok(())
}

#[test]
fn a_rank_that_fails_fails_the_call() -> Result<()> {
    let ranks = Ranks::new(2);
    let train = |rank: usize| -> Result<Code> {
        let context = Context::host()?;
        let numbers = ranks.comm(rank);
        let comm = if rank == 0 {
            numbers.with_exchange(|_, _| panic!("in the exchange"))
        } else {
            numbers.with_exchange(|_, _| Err(CommError::TimedOut))
        };
        let shard = Shard::of(&[2, 3]).with_box(&[rank as i64, 0], &[1, 3]);
        let mut exchange = Exchange::builder(&context, comm)
            .matrix("up", Dtype::Fp32, Dtype::Fp32, shard)
            .timeout(Duration::from_secs(60))
            .create()?;
        let mut whole = vec![0f32; 6];
        let is_home = exchange.home(0)? == rank as i32;
        let whole = is_home.then(|| ElementsMut::from(&mut whole));
        let failed = exchange.gather(0, &vec![1f32; 3], whole, None).unwrap_err();
        let (whole, mut part) = (vec![0f32; 6], vec![0f32; 3]);
        let whole = is_home.then(|| (&whole).into());
        assert_error(exchange.scatter(0, whole, &mut part, None), Code::Poisoned, &["earlier"]);
        Ok(failed.code())
    };
    let codes: Vec<Code> = thread::scope(|scope| {
        let other = scope.spawn(|| train(1));
        Ok::<_, Error>(vec![train(0)?, other.join().unwrap()?])
    })?;
    assert_eq!(codes, [Code::CommFailed, Code::CommFailed]);
    Ok(())
}
