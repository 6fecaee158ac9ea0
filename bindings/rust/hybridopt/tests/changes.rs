//! A follower that is updated only from takes of changes has every bit of the params.

mod common;

use common::*;
use hybridopt::*;

fn bytes_of(values: &[Bf16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.0.to_ne_bytes()).collect()
}

fn apply(change: &Change, whole: &[u8], follower: &mut Vec<u8>) {
    match &change.elements {
        None => *follower = whole.to_vec(),
        Some(elements) => {
            for (element, value) in elements.iter().zip(change.values.chunks_exact(2)) {
                follower[*element as usize * 2..][..2].copy_from_slice(value);
            }
        }
    }
    assert_eq!(follower, whole);
    assert_eq!(content_hash(follower), change.hash);
}

#[test]
fn a_follower_has_every_bit_after_each_take() -> Result<()> {
    let context = Context::host()?;
    let (mut weights, mut grads) = (values::<Bf16>(WEIGHTS, 1), vec![0.0f32; WEIGHTS]);
    let mut adding = Optimizer::builder(&context, Algorithm::AdamW).track_changes(true).create()?;
    let group = adding.add_group(&Group { lr: 1e-3, ..adamw() })?;
    let weight = adding.add_param(Param::new("weight", group, &mut weights).grad(&mut grads))?;
    let mut optimizer = adding.commit()?;
    let mut follower = Vec::new();
    let mut base_hash = None;
    for step in 1..=STEPS {
        let changes = optimizer.changes(Some(1.0))?;
        let change = &changes.params[0];
        assert_eq!((change.param, change.dtype), (weight, Dtype::Bf16));
        assert_eq!(change.elements.is_none(), step == 1);
        assert_eq!(change.base_hash, base_hash);
        apply(change, &bytes_of(optimizer.data::<Bf16>(weight)?), &mut follower);
        base_hash = Some(change.hash);
        optimizer.acknowledge_changes(&changes)?;
        optimizer.grad_mut::<f32>(weight)?[..100].copy_from_slice(&values::<f32>(100, step));
        optimizer.step(&StepOptions::default())?;
    }
    let changes = optimizer.changes(None)?;
    optimizer.mark_changed()?;
    assert!(changes.params[0].elements.is_some() || changes.params[0].values.is_empty());
    assert_eq!(optimizer.changes(None)?.params[0].elements, None);
    Ok(())
}

#[test]
fn without_tracking_a_take_is_refused() -> Result<()> {
    let context = Context::host()?;
    let (mut weights, mut grads) = (vec![1.0f32; 8], vec![0.0f32; 8]);
    let mut adding = Optimizer::builder(&context, Algorithm::AdamW).create()?;
    let group = adding.add_group(&adamw())?;
    adding.add_param(Param::new("weight", group, &mut weights).grad(&mut grads))?;
    let mut optimizer = adding.commit()?;
    assert_error(optimizer.changes(None), Code::InvalidState, &["track_changes"]);
    assert_error(optimizer.mark_changed(), Code::InvalidState, &["track_changes"]);
    Ok(())
}
