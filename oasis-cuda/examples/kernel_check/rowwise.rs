//! Small kernels.

use crate::rig::{Outcome, Random, Rig, floats, name, poisoned, starts};
use half::bf16;
use oasis_cuda::device::DeviceBuffer;
use oasis_cuda::kernels::{
    Activation, ActivationParams, AddNorm, AddNormParams, Address, Embed, EmbedParams, RandomWeights,
    RandomWeightsParams, Schedule, ScheduleParams, StepInput, Taps, TapsParams,
};
use oasis_cuda::measure::kernels::KernelBench;

pub fn check(rig: &mut Rig) -> Outcome<()> {
    for queries in [1, 2] {
        check_schedule(rig, queries, 0)?;
        check_schedule(rig, queries, 1)?;
    }
    for hidden in [64, 576, 4096, 16_384] {
        check_norm(rig, hidden, true)?;
        check_norm(rig, hidden, false)?;
    }
    check_activation(rig)?;
    check_embed(rig)?;
    check_taps(rig)?;
    check_random(rig)
}

fn check_schedule(rig: &mut Rig, queries: usize, lag: i32) -> Outcome<()> {
    let (requests, slots, draft_blocks) = (777, 128, 100);
    let positions: Vec<i32> = (0..requests).map(|_| rig.random.below(4100) as i32 - 1).collect();
    let full = |p: i32| (p / 16).min(slots) as usize;
    let tails = |p: i32| ((p + queries as i32 - 1) / 16 - p / 16 + 1) as usize;
    let entries: Vec<usize> = positions.iter().map(|p| if *p < 0 { 0 } else { full(*p) + tails(*p) }).collect();
    let blocks: Vec<i32> = positions.iter().map(|p| if *p < 0 { 0 } else { (p + 1 - lag) / 16 }).collect();
    let tiles: Vec<usize> = blocks.iter().map(|blocks| (*blocks as usize).div_ceil(16)).collect();
    let ranked: Vec<i32> = positions.iter().map(|p| if *p < 0 { -1 } else { p - lag }).collect();
    let draft_position: Vec<i32> = positions.iter().map(|p| (p - 1).max(-1)).collect();
    let draft_entries: Vec<usize> = draft_position.iter().map(|p| ((p + 16) / 16).min(draft_blocks) as usize).collect();
    let inputs: Vec<StepInput> = positions
        .iter()
        .enumerate()
        .map(|(i, position)| StepInput { token: i as i32 * 3, position: *position })
        .collect();
    let tokens: Vec<i32> = inputs.iter().map(|input| input.token).collect();
    let inputs = rig.device.upload(&inputs)?;
    let mut out: Vec<DeviceBuffer<i32>> = Vec::new();
    for _ in 0..8 {
        out.push(poisoned(&rig.device, requests + 1)?);
    }
    let step = rig.device.upload(&[6_u32])?;
    let kernel = rig.device.load(&rig.compiler, &Schedule { queries })?;
    let params = ScheduleParams {
        inputs: inputs.address(),
        token: out[0].address(),
        position: out[1].address(),
        ranked: out[2].address(),
        entry_start: out[3].address(),
        tile_start: out[4].address(),
        blocks: out[5].address(),
        draft_position: out[6].address(),
        draft_entry_start: out[7].address(),
        step: step.address(),
        requests: requests as i32,
        slots,
        draft_blocks,
        lag,
    };
    // SAFETY: all buffers have the sizes that the parameters ask for.
    unsafe { kernel.launch(&rig.stream, (1, 1), &params)? };
    for (index, (what, want)) in [
        ("tokens", &tokens),
        ("positions", &positions),
        ("ranked", &ranked),
        ("entries", &starts(&entries)),
        ("tiles", &starts(&tiles)),
        ("blocks", &blocks),
        ("draft positions", &draft_position),
        ("draft entries", &starts(&draft_entries)),
    ]
    .into_iter()
    .enumerate()
    {
        let got = out[index].read()?;
        rig.same(name::<Schedule>(&format!("{queries} rows, lag {lag}: {what}")), &got[..want.len()], want);
    }
    rig.same(name::<Schedule>(&format!("{queries} rows, lag {lag}: step")), &step.read()?, &[7]);
    Ok(())
}

fn check_norm(rig: &mut Rig, hidden: usize, add: bool) -> Outcome<()> {
    let (rows, eps) = (5, 1e-5);
    let (residual, x, weight) =
        (rig.random.bf16s(rows * hidden), rig.random.bf16s(rows * hidden), rig.random.bf16s(hidden));
    let (d_residual, d_x, d_weight) =
        (rig.device.upload(&residual)?, rig.device.upload(&x)?, rig.device.upload(&weight)?);
    // Rows of the output may lie apart.
    let stride = hidden + 64;
    let out: DeviceBuffer<bf16> = poisoned(&rig.device, rows * stride)?;
    let shape = AddNorm { hidden };
    let kernel = rig.device.load(&rig.compiler, &shape)?;
    let params = AddNormParams {
        residual: d_residual.address(),
        x: if add { d_x.address() } else { Address::NONE },
        weight: d_weight.address(),
        out: out.address(),
        hidden: hidden as i32,
        out_stride: stride as i32,
        eps: eps as f32,
    };
    // SAFETY: as above.
    unsafe { kernel.launch(&rig.stream, (rows as u32, 1), &params)? };
    let sums: Vec<f64> = floats(&residual).zip(floats(&x)).map(|(a, b)| if add { a + b } else { a }).collect();
    let want: Vec<f64> = sums
        .chunks(hidden)
        .flat_map(|row| {
            let scale = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / hidden as f64 + eps).sqrt();
            row.iter().zip(floats(&weight)).map(move |(x, weight)| x * scale * weight).collect::<Vec<_>>()
        })
        .collect();
    let (got, updated) = (out.read()?, d_residual.read()?);
    let rows_of_out = got.chunks(stride).flat_map(|row| floats(&row[..hidden]));
    rig.compare(name::<AddNorm>(&format!("hidden {hidden}, add {add}: out")), rows_of_out, &want, 4e-3);
    rig.compare(name::<AddNorm>(&format!("hidden {hidden}, add {add}: residual")), floats(&updated), &sums, 3e-3);
    Ok(())
}

fn check_activation(rig: &mut Rig) -> Outcome<()> {
    let (rows, width) = (7, 1528);
    let gate_up: Vec<bf16> = (0..rows * 2 * width).map(|_| bf16::from_f32(rig.random.float() * 40.0)).collect();
    let (input, out) = (rig.device.upload(&gate_up)?, poisoned::<bf16>(&rig.device, rows * width)?);
    let kernel = rig.device.load(&rig.compiler, &Activation)?;
    let params =
        ActivationParams { gate_up: input.address(), out: out.address(), rows: rows as i32, width: width as i32 };
    // SAFETY: as above.
    unsafe { kernel.launch(&rig.stream, (Activation.ctas(rows, width), 1), &params)? };
    let want: Vec<f64> = gate_up
        .chunks(2 * width)
        .flat_map(|row| {
            let (gate, up) = row.split_at(width);
            floats(gate).zip(floats(up)).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect::<Vec<_>>()
        })
        .collect();
    let got = out.read()?;
    rig.compare(name::<Activation>("width 1528"), floats(&got), &want, 3e-3);
    Ok(())
}

fn check_embed(rig: &mut Rig) -> Outcome<()> {
    let (vocab, draft_vocab, hidden, requests) = (1000, 300, 584, 33);
    let table = rig.random.bf16s(vocab * hidden);
    let mut ids =
        |below: usize, count: usize| -> Vec<i32> { (0..count).map(|_| rig.random.below(below) as i32).collect() };
    let (tokens, drafts, targets) = (ids(vocab, requests), ids(draft_vocab, requests), ids(vocab, draft_vocab));
    let (d_table, d_tokens) = (rig.device.upload(&table)?, rig.device.upload(&tokens)?);
    let (d_drafts, d_targets) = (rig.device.upload(&drafts)?, rig.device.upload(&targets)?);
    for queries in [1, 2] {
        let out: DeviceBuffer<bf16> = poisoned(&rig.device, requests * queries * hidden)?;
        let kernel = rig.device.load(&rig.compiler, &Embed { queries })?;
        let params = EmbedParams {
            table: d_table.address(),
            tokens: d_tokens.address(),
            draft_tokens: d_drafts.address(),
            target_ids: d_targets.address(),
            out: out.address(),
            hidden: hidden as i32,
        };
        // SAFETY: as above.
        unsafe { kernel.launch(&rig.stream, ((requests * queries) as u32, 1), &params)? };
        let rows = (0..requests).flat_map(|r| [tokens[r], targets[drafts[r] as usize]].into_iter().take(queries));
        let want: Vec<bf16> = rows.flat_map(|t| &table[t as usize * hidden..][..hidden]).copied().collect();
        rig.same(name::<Embed>(&format!("hidden {hidden}, {queries} rows")), &out.read()?, &want);
    }
    Ok(())
}

fn check_taps(rig: &mut Rig) -> Outcome<()> {
    let (hidden, queries, positions) = (584, 2, [3, -1, 0, 7]);
    let residual = rig.random.bf16s(positions.len() * queries * hidden);
    let before = rig.random.bf16s(positions.len() * 3 * hidden);
    let (d_residual, d_position) = (rig.device.upload(&residual)?, rig.device.upload(&positions)?);
    let d_taps = rig.device.upload(&before)?;
    let kernel = rig.device.load(&rig.compiler, &Taps { queries })?;
    let params = TapsParams {
        residual: d_residual.address(),
        position: d_position.address(),
        taps: d_taps.address().offset(hidden * 2),
        hidden: hidden as i32,
    };
    // SAFETY: as above.
    unsafe { kernel.launch(&rig.stream, (positions.len() as u32, 1), &params)? };
    let mut want = before;
    for request in (0..positions.len()).filter(|r| positions[*r] >= 0) {
        want[(request * 3 + 1) * hidden..][..hidden].copy_from_slice(&residual[request * queries * hidden..][..hidden]);
    }
    rig.same(name::<Taps>("hidden 584"), &d_taps.read()?, &want);
    Ok(())
}

/// Random weights against the same hash.
fn check_random(rig: &mut Rig) -> Outcome<()> {
    let (pairs, seed, width, mask) = (70_001, rig.seed, 0.37_f32, 0xffbf_ff7f);
    let data: DeviceBuffer<u32> = rig.device.zeros(pairs + 1)?;
    let kernel = rig.device.load(&rig.compiler, &RandomWeights)?;
    let params = RandomWeightsParams { data: data.address(), pairs: pairs as u64, seed, width, mask };
    // SAFETY: as above.
    unsafe { kernel.launch(&rig.stream, (7, 1), &params)? };
    let number = |bits: u32| bf16::from_f32(bits as i32 as f32 * (1.0 / (1_u64 << 31) as f32) * width).to_bits();
    let mut state = Random(seed);
    let pair = |bits: u64| u32::from(number(bits as u32)) | u32::from(number((bits >> 32) as u32)) << 16;
    // SplitMix64 is what the checks draw from, too.
    let mut want: Vec<u32> = (0..pairs).map(|_| pair(state.next()) & mask).collect();
    want.push(0);
    rig.same(name::<RandomWeights>("70,001 pairs"), &data.read()?, &want);
    Ok(())
}

pub fn time(rig: &mut Rig, _: &KernelBench) -> Outcome<()> {
    let (rows, hidden, width) = (128, 4096, 12_288);
    let (residual, x) =
        (rig.device.upload(&rig.random.bf16s(rows * hidden))?, rig.device.upload(&rig.random.bf16s(rows * hidden))?);
    let (weight, out) = (rig.device.upload(&rig.random.bf16s(hidden))?, rig.device.zeros::<bf16>(rows * width)?);
    let norm = rig.device.load(&rig.compiler, &AddNorm { hidden })?;
    let params = AddNormParams {
        residual: residual.address(),
        x: x.address(),
        weight: weight.address(),
        out: out.address(),
        hidden: hidden as i32,
        out_stride: hidden as i32,
        eps: 1e-6,
    };
    // SAFETY: as in `check_norm`.
    let micros = unsafe { rig.micros(40, |_| norm.launch(&rig.stream, (rows as u32, 1), &params))? };
    rig.record("add + RMSNorm, 128 rows of 4,096", micros, 0.0, "aim 2-3 us");

    let gate_up = rig.device.upload(&rig.random.bf16s(rows * 2 * width))?;
    let activation = rig.device.load(&rig.compiler, &Activation)?;
    let params =
        ActivationParams { gate_up: gate_up.address(), out: out.address(), rows: rows as i32, width: width as i32 };
    // SAFETY: as in `check_activation`.
    let micros =
        unsafe { rig.micros(40, |_| activation.launch(&rig.stream, (Activation.ctas(rows, width), 1), &params))? };
    rig.record("SwiGLU, 128 rows of 12,288 (in cache)", micros, 0.0, "aim 2-3 us");
    Ok(())
}
