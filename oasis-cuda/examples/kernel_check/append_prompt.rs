//! The append of a prompt.

use crate::append::{EPS, angles, compare_summaries, transformed};
use crate::rig::{Outcome, Rig, floats, name, poisoned};
use crate::summaries::{Form, forms};
use half::bf16;
use oasis_cuda::device::DeviceBuffer;
use oasis_cuda::kernels::{Address, AppendPrompt, AppendPromptParams};
use oasis_cuda::layout::{entry_bytes, key_offset, tile_bytes, value_offset};
use oasis_cuda::measure::kernels::KernelBench;
use oasis_policies::summarizers::Quest;

const Q_HEADS: usize = 5;
const KV_HEADS: usize = 2;
const HEADS: usize = Q_HEADS + 2 * KV_HEADS;
/// Tiles of a KV head, and blocks that there is room for.
const TILES: usize = 3;
const BLOCKS: usize = 40;

/// What is appended and where it goes.
#[derive(Debug, Clone, Copy)]
struct Case {
    head_dim: usize,
    /// Which of the summarizers.
    form: usize,
    norms: bool,
    paged: bool,
    /// Whether the prompt ends here: its last block goes to a tail, too.
    ends: bool,
    first_block: usize,
    tokens: usize,
    first_query: usize,
}

impl Case {
    fn blocks(&self) -> usize {
        self.tokens.div_ceil(16)
    }
}

/// What a launch left on the device.
struct Got {
    qkv: Vec<bf16>,
    entries: Vec<bf16>,
    tail: Vec<bf16>,
    summaries: Vec<u8>,
}

/// What it was given.
struct Given {
    qkv: Vec<bf16>,
    q_norm: Vec<bf16>,
    k_norm: Vec<bf16>,
    angles: Vec<f32>,
    entries: Vec<bf16>,
    tail: Vec<bf16>,
    pages: Vec<i32>,
}

fn launch(rig: &Rig, case: &Case, form: &Form, given: &Given) -> Outcome<Got> {
    let device = &rig.device;
    let (qkv, angles) = (device.upload(&given.qkv)?, device.upload(&given.angles)?);
    let (q_norm, k_norm) = (device.upload(&given.q_norm)?, device.upload(&given.k_norm)?);
    let (entries, tail, pages) =
        (device.upload(&given.entries)?, device.upload(&given.tail)?, device.upload(&given.pages)?);
    let summaries: DeviceBuffer<u8> = poisoned(device, KV_HEADS * TILES * tile_bytes(form.bytes))?;
    let shape = AppendPrompt { head_dim: case.head_dim, summarizer: form.code, bytes: form.bytes };
    let kernel = device.load(&rig.compiler, &shape)?;
    let given = |given: bool, address: Address| if given { address } else { Address::NONE };
    let params = AppendPromptParams {
        qkv: qkv.address(),
        q_norm: given(case.norms, q_norm.address()),
        k_norm: given(case.norms, k_norm.address()),
        rotation: angles.address(),
        entries: entries.address(),
        pages: given(case.paged, pages.address()),
        tail: given(case.ends, tail.address()),
        summaries: summaries.address(),
        tokens: case.tokens as i32,
        first_query: case.first_query as i32,
        q_heads: Q_HEADS as i32,
        kv_heads: KV_HEADS as i32,
        max_tiles: TILES as i32,
        first_block: case.first_block as i32,
        last_block: (case.first_block + case.blocks() - 1) as i32,
        eps: EPS as f32,
    };
    // SAFETY: all buffers have the sizes that the parameters ask for.
    unsafe { kernel.launch(&rig.stream, (case.blocks() as u32, (Q_HEADS + KV_HEADS) as u32), &params)? };
    Ok(Got { qkv: qkv.read()?, entries: entries.read()?, tail: tail.read()?, summaries: summaries.read()? })
}

fn check_case(rig: &mut Rig, case: Case) -> Outcome<()> {
    let Case { head_dim, form, norms, paged, ends, first_block, tokens, first_query } = case;
    let elements = entry_bytes(head_dim) / 2;
    let given = Given {
        qkv: rig.random.bf16s(tokens * HEADS * head_dim),
        q_norm: rig.random.bf16s(head_dim),
        k_norm: rig.random.bf16s(head_dim),
        angles: angles(rig, BLOCKS * 16, head_dim),
        entries: rig.random.bf16s(BLOCKS * KV_HEADS * elements),
        tail: rig.random.bf16s(KV_HEADS * 2 * elements),
        pages: rig.random.shuffled(BLOCKS),
    };
    let form = forms(head_dim)?.swap_remove(form);
    let got = launch(rig, &case, &form, &given)?;

    let mut want_qkv: Vec<f64> = floats(&given.qkv).collect();
    let (mut want_entries, mut want_tail): (Vec<f64>, Vec<f64>) =
        (floats(&given.entries).collect(), floats(&given.tail).collect());
    let entry_of = |block: usize, head: usize| {
        let block = if paged { given.pages[block] as usize } else { block };
        (block * KV_HEADS + head) * elements
    };
    for token in 0..tokens {
        let (block, place) = (first_block + token / 16, token % 16);
        let angles = &given.angles[(first_block * 16 + token) * head_dim..][..head_dim];
        for head in 0..Q_HEADS + KV_HEADS {
            if head < Q_HEADS && token < first_query {
                continue;
            }
            let row = (token * HEADS + head) * head_dim;
            let weight = if head < Q_HEADS { &given.q_norm } else { &given.k_norm };
            let turned = transformed(&given.qkv[row..][..head_dim], norms.then_some(weight), Some(angles));
            want_qkv[row..][..head_dim].copy_from_slice(&turned);
            let Some(kv_head) = head.checked_sub(Q_HEADS) else { continue };
            let value = (token * HEADS + Q_HEADS + KV_HEADS + kv_head) * head_dim;
            let value: Vec<f64> = floats(&given.qkv[value..][..head_dim]).collect();
            let is_last = ends && block + 1 == first_block + case.blocks();
            let tail = is_last.then_some((kv_head * 2 + block % 2) * elements);
            for d in 0..head_dim {
                let (key_at, value_at) = (key_offset(head_dim, place, d) / 2, value_offset(head_dim, place, d) / 2);
                want_entries[entry_of(block, kv_head) + key_at] = turned[d];
                want_entries[entry_of(block, kv_head) + value_at] = value[d];
                if let Some(tail) = tail {
                    want_tail[tail + key_at] = turned[d];
                    want_tail[tail + value_at] = value[d];
                }
            }
        }
    }
    let tile = tile_bytes(form.bytes);
    let (mut want_rows, mut have_rows, mut summarised) = (Vec::new(), Vec::new(), 0);
    for (block, head) in (first_block..first_block + tokens / 16).flat_map(|b| (0..KV_HEADS).map(move |h| (b, h))) {
        want_rows.extend(form.of_keys(&got.entries[entry_of(block, head)..][..elements]));
        have_rows.extend(form.read(&got.summaries[(head * TILES + block / 16) * tile..], block % 16));
        summarised += form.written_of_block();
    }
    let what = format!("{} {case:?}", form.code.name).replace("Case ", "");
    rig.compare(name::<AppendPrompt>(&format!("{what}: queries, keys")), floats(&got.qkv), &want_qkv, 3e-3);
    rig.compare(name::<AppendPrompt>(&format!("{what}: entries")), floats(&got.entries), &want_entries, 3e-3);
    rig.compare(name::<AppendPrompt>(&format!("{what}: tail")), floats(&got.tail), &want_tail, 3e-3);
    compare_summaries(rig, &form, &name::<AppendPrompt>(&what), have_rows, want_rows);
    let written = form.written(&got.summaries);
    rig.same(name::<AppendPrompt>(&format!("{what}: no other summary")), &[written], &[summarised]);
    Ok(())
}

pub fn check(rig: &mut Rig) -> Outcome<()> {
    for (head_dim, form, norms, paged, ends, first_block, tokens) in [
        (128, 0, true, false, true, 0, 19 * 16 + 5),
        (64, 1, false, false, true, 0, 9),
        (64, 0, true, false, true, 0, 16),
        (128, 1, true, false, true, 0, 34 * 16),
        (128, 0, false, true, false, 0, 150),
        (64, 1, true, true, true, 14, 5 * 16 + 1),
        (64, 0, false, false, false, 33, 6 * 16 + 15),
        (128, 2, true, false, true, 0, 19 * 16 + 5),
        (64, 2, true, false, true, 5, 20 * 16),
        (128, 3, true, false, true, 0, 19 * 16 + 5),
        (64, 3, false, false, true, 3, 66),
        (128, 4, true, false, true, 0, 19 * 16 + 5),
        (64, 5, false, true, true, 3, 66),
        (128, 5, true, false, true, 0, 160),
        (128, 6, true, false, true, 0, 19 * 16 + 5),
        (64, 6, true, true, true, 5, 20 * 16),
    ] {
        // All queries, that of the last token, none: of a layer, of the last one, of a draft head.
        for first_query in [0, tokens - 1, tokens] {
            check_case(rig, Case { head_dim, form, norms, paged, ends, first_block, tokens, first_query })?;
        }
    }
    Ok(())
}

pub fn time(rig: &mut Rig, _: &KernelBench) -> Outcome<()> {
    let (tokens, q_heads, kv_heads, head_dim) = (16_384, 32, 8, 128);
    let heads = q_heads + 2 * kv_heads;
    let form = Form::new(&Quest {}, head_dim)?;
    let kernel =
        rig.device.load(&rig.compiler, &AppendPrompt { head_dim, summarizer: form.code, bytes: form.bytes })?;
    let qkv: DeviceBuffer<bf16> = rig.device.zeros(tokens * heads * head_dim)?;
    let weight = rig.device.upload(&vec![bf16::ONE; head_dim])?;
    let rotation: DeviceBuffer<f32> = rig.device.zeros(tokens * head_dim)?;
    let entries: DeviceBuffer<u8> = rig.device.zeros(tokens / 16 * kv_heads * entry_bytes(head_dim))?;
    let summaries: DeviceBuffer<u8> = rig.device.zeros(kv_heads * tokens / 256 * tile_bytes(form.bytes))?;
    let params = AppendPromptParams {
        qkv: qkv.address(),
        q_norm: weight.address(),
        k_norm: weight.address(),
        rotation: rotation.address(),
        entries: entries.address(),
        pages: Address::NONE,
        tail: Address::NONE,
        summaries: summaries.address(),
        tokens: tokens as i32,
        first_query: 0,
        q_heads: q_heads as i32,
        kv_heads: kv_heads as i32,
        max_tiles: (tokens / 256) as i32,
        first_block: 0,
        last_block: -1,
        eps: EPS as f32,
    };
    let grid = ((tokens / 16) as u32, (q_heads + kv_heads) as u32);
    // SAFETY: as in `launch`.
    let micros = unsafe { rig.micros(8, |_| kernel.launch(&rig.stream, grid, &params))? };
    // Queries and keys in and out, values in, entries and summaries out.
    let moved = 2 * (q_heads + kv_heads) + kv_heads + 2 * kv_heads;
    let bytes = (moved * tokens * head_dim * 2) as f64 + summaries.bytes() as f64;
    rig.record_bytes("append of a prompt of 16,384 tokens, Qwen3-8B", micros, bytes);
    Ok(())
}
