//! Attention of a decode step: every row of every request over its working set, its tail block and its own token.

use crate::cpu::decoder::AttentionShape;
use crate::cpu::kernels::{KvRun, decode_attention};
use oasis_core::ids::KvHead;
use oasis_core::memory::{FetchedEntries, Resident};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;

/// What one request's attention reads.
pub(super) struct AttentionView<'a> {
    /// Its rows: the normal token, the draft token where there is one, then probes.
    pub rows: Range<usize>,
    pub has_draft: bool,
    pub resident: &'a Resident,
    /// All complete blocks `[kv_heads][blocks]`, read instead of the slots.
    pub full_kv: Option<&'a FetchedEntries>,
}

/// Attends for all rows of `qkv[rows][qkv_width]`; gives `[rows][q_heads * head_dim]`.
pub(super) fn attend(shape: AttentionShape, views: &[AttentionView<'_>], qkv: &[f32]) -> Vec<f32> {
    let group = shape.q_width() / shape.kv_heads;
    let tasks: Vec<(&AttentionView<'_>, usize)> =
        views.iter().flat_map(|view| (0..shape.kv_heads).map(move |head| (view, head))).collect();
    let outputs: Vec<Vec<f32>> = tasks.par_iter().map(|&(view, head)| attend_head(shape, view, head, qkv)).collect();

    let mut attended = vec![0.0; qkv.len() / shape.qkv_width() * shape.q_width()];
    for ((view, head), output) in tasks.into_iter().zip(outputs) {
        for (row, out) in view.rows.clone().zip(output.chunks_exact(group)) {
            attended[row * shape.q_width() + head * group..][..group].copy_from_slice(out);
        }
    }
    attended
}

/// One KV head of one request, `[rows][group][head_dim]`.
fn attend_head(shape: AttentionShape, view: &AttentionView<'_>, head: usize, qkv: &[f32]) -> Vec<f32> {
    let AttentionShape { head_dim, .. } = shape;
    let group = shape.q_width() / shape.kv_heads;
    let row = |index: usize| shape.split(&qkv[index * shape.qkv_width()..][..shape.qkv_width()]);
    let query = |index: usize| &row(index).0[head * group..][..group];
    let own = |index: usize, first_query: usize| {
        let (_, keys, values) = row(index);
        let range = head * head_dim..(head + 1) * head_dim;
        KvRun { keys: &keys[range.clone()], values: &values[range], first_query }
    };

    let full = view.full_kv.map_or_else(Vec::new, |fetched| entries_of(fetched, shape.kv_heads, head));
    let mut runs = match view.full_kv {
        Some(_) => full.iter().map(|entry| entry_run(entry)).collect(),
        None => resident_runs(view.resident, KvHead::from(head)),
    };
    let (tail, head_id) = (&view.resident.tail, KvHead::from(head));
    runs.push(KvRun { keys: tail.keys(head_id), values: tail.values(head_id), first_query: 0 });
    let shared = runs.len();

    // The normal and the draft row read the working set together; the draft row alone sees its own key.
    let pair = view.rows.start..view.rows.start + 1 + usize::from(view.has_draft);
    let mut out = vec![0.0; view.rows.len() * group];
    let (paired, probed) = out.split_at_mut(pair.len() * group);
    let queries: Vec<f32> = pair.clone().flat_map(query).copied().collect();
    if view.has_draft {
        runs.push(own(pair.end - 1, group / head_dim));
    }
    decode_attention(&queries, head_dim, &runs, shape.scale(), paired);
    for (probe, out) in (pair.end..view.rows.end).zip(probed.chunks_exact_mut(group)) {
        runs.truncate(shared);
        runs.push(own(probe, 0));
        decode_attention(query(probe), head_dim, &runs, shape.scale(), out);
    }
    out
}

fn resident_runs(resident: &Resident, head: KvHead) -> Vec<KvRun<'_>> {
    resident.in_block_order(head).into_iter().map(|(_, slot)| entry_run(resident.slot(head, slot))).collect()
}

fn entry_run(entry: &[f32]) -> KvRun<'_> {
    let (keys, values) = entry.split_at(entry.len() / 2);
    KvRun { keys, values, first_query: 0 }
}

/// Entries of one head; a store's memory need not be aligned for floats.
fn entries_of(fetched: &FetchedEntries, kv_heads: usize, head: usize) -> Vec<Cow<'_, [f32]>> {
    let blocks = fetched.entries.len() / kv_heads;
    (fetched.entries[head * blocks..][..blocks].iter())
        .map(|entry| match bytemuck::try_cast_slice(entry.bytes()) {
            Ok(floats) => Cow::Borrowed(floats),
            Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(entry.bytes())),
        })
        .collect()
}
