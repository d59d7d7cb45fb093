//! The fused append.

use crate::rig::{Outcome, Rig, floats, name, poisoned};
use crate::summaries::{Form, forms};
use half::bf16;
use oasis_cuda::device::DeviceBuffer;
use oasis_cuda::kernels::{Address, Append, AppendParams};
use oasis_cuda::layout::{entry_bytes, key_offset, tile_bytes, value_offset};
use oasis_cuda::measure::kernels::KernelBench;
use oasis_policies::summarizers::Quest;

pub const EPS: f64 = 1e-6;

/// Norm, where there is a weight, and rotation of one head.
pub fn transformed(x: &[bf16], weight: Option<&[bf16]>, angles: Option<&[f32]>) -> Vec<f64> {
    let half = x.len() / 2;
    let mut x: Vec<f64> = floats(x).collect();
    if let Some(weight) = weight {
        let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + EPS).sqrt();
        x.iter_mut().zip(floats(weight)).for_each(|(x, weight)| *x *= scale * weight);
    }
    let Some(angles) = angles else { return x };
    (0..2 * half)
        .map(|d| {
            let (cos, sin) = (f64::from(angles[d % half * 2]), f64::from(angles[d % half * 2 + 1]));
            if d < half { x[d] * cos - x[d + half] * sin } else { x[d] * cos + x[d - half] * sin }
        })
        .collect()
}

/// Cosines and sines of random angles, `[positions][head_dim / 2]`.
pub fn angles(rig: &mut Rig, positions: usize, head_dim: usize) -> Vec<f32> {
    (0..positions * head_dim / 2)
        .flat_map(|_| {
            let angle = rig.random.float() * 3.0;
            [angle.cos(), angle.sin()]
        })
        .collect()
}

/// Compares summaries with those of the policy's own code; codes are the same, bit for bit.
pub fn compare_summaries(rig: &mut Rig, form: &Form, what: &str, mut got: Vec<f64>, mut want: Vec<f64>) {
    if form.has_side() && !want.is_empty() {
        // Far larger than the rows are, perhaps: on their own.
        let apart = |numbers: &mut Vec<f64>, each: usize| -> Vec<f64> {
            let sides = numbers.iter().copied().skip(each - 1).step_by(each).collect();
            *numbers = numbers.chunks(each).flat_map(|block| block[..each - 1].to_vec()).collect();
            sides
        };
        let each = form.numbers();
        let (got_sides, want_sides) = (apart(&mut got, each), apart(&mut want, each));
        rig.compare(format!("{what}: beside the rows"), got_sides, &want_sides, 3e-3);
    }
    let limit = if form.is_packed() { 0.0 } else { 3e-3 };
    rig.compare(format!("{what}: summaries"), got, &want, limit);
}

fn check_shape(rig: &mut Rig, form: &Form, shape: Append, norms: bool, paged: bool) -> Outcome<()> {
    let Append { head_dim, queries, .. } = shape;
    let positions = [0, -1, 14, 15, 31, 16, 47 * 16 + 15, 300];
    let (requests, q_heads, kv_heads, max_tiles) = (positions.len(), 6, 2, 3);
    let heads = q_heads + 2 * kv_heads;
    let elements = entry_bytes(head_dim) / 2;
    let qkv = rig.random.bf16s(requests * queries * heads * head_dim);
    let (q_norm, k_norm) = (rig.random.bf16s(head_dim), rig.random.bf16s(head_dim));
    let angles = angles(rig, 1024, head_dim);
    // Pages of the longest context and of the draft token's block.
    let stride = 49;
    let pages = rig.random.shuffled(requests * stride);
    let tail = rig.random.bf16s(if paged { requests * stride } else { requests * 2 } * kv_heads * elements);
    let tile = tile_bytes(shape.bytes);
    let d_qkv = rig.device.upload(&qkv)?;
    let (d_q_norm, d_k_norm) = (rig.device.upload(&q_norm)?, rig.device.upload(&k_norm)?);
    let (d_angles, d_position) = (rig.device.upload(&angles)?, rig.device.upload(&positions)?);
    let (d_tail, d_pages) = (rig.device.upload(&tail)?, rig.device.upload(&pages)?);
    let d_q: DeviceBuffer<bf16> = poisoned(&rig.device, requests * queries * q_heads * head_dim)?;
    let d_summaries: DeviceBuffer<u8> = poisoned(&rig.device, requests * kv_heads * max_tiles * tile)?;
    let kernel = rig.device.load(&rig.compiler, &shape)?;
    let params = AppendParams {
        qkv: d_qkv.address(),
        q_norm: if norms { d_q_norm.address() } else { Address::NONE },
        k_norm: d_k_norm.address(),
        rotation: d_angles.address(),
        position: d_position.address(),
        q: d_q.address(),
        tail: d_tail.address(),
        pages: if paged { d_pages.address() } else { Address::NONE },
        summaries: if paged { Address::NONE } else { d_summaries.address() },
        requests: requests as i32,
        q_heads: q_heads as i32,
        kv_heads: kv_heads as i32,
        max_tiles: max_tiles as i32,
        page_stride: stride as i32,
        eps: EPS as f32,
    };
    // SAFETY: all buffers have the sizes that the parameters ask for.
    unsafe { kernel.launch(&rig.stream, (shape.ctas(requests, q_heads, kv_heads), 1), &params)? };
    let (got_q, got_tail, got_summaries) = (d_q.read()?, d_tail.read()?, d_summaries.read()?);

    let mut want_tail: Vec<f64> = floats(&tail).collect();
    let (mut want_q, mut have_q) = (Vec::new(), Vec::new());
    let (mut want_rows, mut have_rows, mut summarised) = (Vec::new(), Vec::new(), 0);
    for (request, first) in positions.iter().enumerate().filter(|(_, first)| **first >= 0) {
        for token in 0..queries {
            let (row, position) = (request * queries + token, *first as usize + token);
            let head = |h: usize| &qkv[(row * heads + h) * head_dim..][..head_dim];
            let angles = &angles[position * head_dim..][..head_dim];
            for h in 0..q_heads {
                want_q.extend(transformed(head(h), norms.then_some(&q_norm[..]), Some(angles)));
                have_q.extend(floats(&got_q[(row * q_heads + h) * head_dim..][..head_dim]));
            }
            for h in 0..kv_heads {
                let entry = elements
                    * match paged {
                        true => pages[request * stride + position / 16] as usize * kv_heads + h,
                        false => (request * kv_heads + h) * 2 + position / 16 % 2,
                    };
                let key = transformed(head(q_heads + h), norms.then_some(&k_norm[..]), Some(angles));
                let value = transformed(head(q_heads + kv_heads + h), None, None);
                for d in 0..head_dim {
                    want_tail[entry + key_offset(head_dim, position % 16, d) / 2] = key[d];
                    want_tail[entry + value_offset(head_dim, position % 16, d) / 2] = value[d];
                }
            }
        }
        if first % 16 != 15 || paged {
            continue;
        }
        // The summary of what now lies in the tail.
        let block = *first as usize / 16;
        for h in 0..kv_heads {
            let entry = &got_tail[((request * kv_heads + h) * 2 + block % 2) * elements..][..elements];
            let tile_at = ((request * kv_heads + h) * max_tiles + block / 16) * tile;
            want_rows.extend(form.of_keys(entry));
            have_rows.extend(form.read(&got_summaries[tile_at..], block % 16));
            summarised += form.written_of_block();
        }
    }
    let place = if paged { "pages" } else { "tail" };
    let what = format!("{} d {head_dim}, {queries} rows, norms {norms}, {place}", shape.summarizer.name);
    rig.compare(name::<Append>(&format!("{what}: queries")), have_q, &want_q, 3e-3);
    rig.compare(name::<Append>(&format!("{what}: entries")), floats(&got_tail), &want_tail, 3e-3);
    if !paged {
        compare_summaries(rig, form, &name::<Append>(&what), have_rows, want_rows);
    }
    let written = form.written(&got_summaries);
    rig.same(name::<Append>(&format!("{what}: no other summary")), &[written], &[summarised]);
    Ok(())
}

pub fn check(rig: &mut Rig) -> Outcome<()> {
    for (head_dim, queries, norms) in [(128, 2, true), (64, 1, false), (64, 2, true)] {
        let forms = forms(head_dim)?;
        let shape = |form: &Form| Append { head_dim, queries, summarizer: form.code, bytes: form.bytes };
        for form in &forms {
            check_shape(rig, form, shape(form), norms, false)?;
        }
        check_shape(rig, &forms[1], shape(&forms[1]), norms, true)?;
    }
    Ok(())
}

pub fn time(rig: &mut Rig, _: &KernelBench) -> Outcome<()> {
    let form = Form::new(&Quest {}, 128)?;
    let shape = Append { head_dim: 128, queries: 2, summarizer: form.code, bytes: form.bytes };
    let (requests, q_heads, kv_heads, max_tiles) = (64, 32, 8, 64);
    let kernel = rig.device.load(&rig.compiler, &shape)?;
    let qkv = rig.random.bf16s(requests * 2 * 48 * 128);
    let (qkv, weight) = (rig.device.upload(&qkv)?, rig.device.upload(&vec![bf16::ONE; 128])?);
    let rotation: DeviceBuffer<f32> = rig.device.zeros(16_500 * 128)?;
    let positions: Vec<i32> = (0..requests as i32).map(|request| 16_384 + request % 16).collect();
    let position = rig.device.upload(&positions)?;
    let q: DeviceBuffer<bf16> = rig.device.zeros(requests * 2 * q_heads * 128)?;
    let tail: DeviceBuffer<u8> = rig.device.zeros(requests * kv_heads * 2 * 8192)?;
    let summaries: DeviceBuffer<u8> = rig.device.zeros(requests * kv_heads * (max_tiles + 1) * 8192)?;
    let params = AppendParams {
        qkv: qkv.address(),
        q_norm: weight.address(),
        k_norm: weight.address(),
        rotation: rotation.address(),
        position: position.address(),
        q: q.address(),
        tail: tail.address(),
        pages: Address::NONE,
        summaries: summaries.address(),
        requests: requests as i32,
        q_heads: q_heads as i32,
        kv_heads: kv_heads as i32,
        max_tiles: max_tiles as i32 + 1,
        page_stride: 0,
        eps: 1e-6,
    };
    // SAFETY: as in `check_shape`.
    let micros = unsafe {
        rig.micros(24, |_| kernel.launch(&rig.stream, (shape.ctas(requests, q_heads, kv_heads), 1), &params))?
    };
    rig.record("append, batch 64 with draft rows, 1 in 16 completes a block", micros, 0.0, "aim 2-3 us");
    Ok(())
}
