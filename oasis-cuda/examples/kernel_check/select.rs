//! Selection, against the selector and the working set of oasis-core.

use crate::rig::{Outcome, Rig, name, poisoned, selector};
use oasis_core::ids::{BlockId, KvHead, LayerId, SlotId, Step};
use oasis_core::policy::{Kept, LinkRate, SelectBatch, SelectRequest, Selector, SelectorSpec};
use oasis_core::working_set::{Admission, Ranking, TransferPlan, WorkingSet, top_k};
use oasis_cuda::device::DeviceBuffer;
use oasis_cuda::kernels::{Address, CopyList, EntryCopy, LinkStamps, Select, SelectParams};
use oasis_cuda::layout::entry_bytes;
use oasis_cuda::measure::kernels::{Heads, KernelBench};
use oasis_policies::selectors::{AdaptiveCap, CappedLru, Hysteresis, Lfu};
use std::time::Duration;

const HEAD_DIM: usize = 128;
const STEPS: u32 = 12;
const ENTRY: usize = 2 * 16 * HEAD_DIM * 2;
/// Selection computes addresses and touches none of them.
const ENTRIES: Address = Address(1 << 40);
const TAIL: Address = Address(2 << 40);
const HOST: u64 = 3 << 40;

struct Batch {
    shape: Select,
    kv_heads: usize,
    stride: usize,
    cap: usize,
    kept: Kept,
    scores: DeviceBuffer<f32>,
    position: DeviceBuffer<i32>,
    slot_block: DeviceBuffer<i32>,
    last_selected: DeviceBuffer<u32>,
    times_selected: DeviceBuffer<u32>,
    host: DeviceBuffer<u64>,
    list: DeviceBuffer<CopyList>,
    copies: DeviceBuffer<EntryCopy>,
    step: DeviceBuffer<u32>,
    link_cap: DeviceBuffer<u32>,
    stamps: DeviceBuffer<LinkStamps>,
}

impl Batch {
    fn new(rig: &Rig, shape: Select, requests: usize, kv_heads: usize, stride: usize, cap: usize) -> Outcome<Self> {
        let places = requests * kv_heads * shape.slots;
        let hosts: Vec<u64> = (0..requests as u64).map(|request| HOST + (request << 36)).collect();
        Ok(Self {
            shape,
            kv_heads,
            stride,
            cap,
            kept: Kept::default(),
            scores: poisoned(&rig.device, requests * kv_heads * stride)?,
            position: rig.device.zeros(requests)?,
            slot_block: rig.device.upload(&vec![-1; places])?,
            last_selected: rig.device.zeros(places)?,
            times_selected: poisoned(&rig.device, places)?,
            host: rig.device.upload(&hosts)?,
            list: rig.device.zeros(1)?,
            copies: rig.device.zeros(requests * kv_heads * (shape.slots + 2))?,
            step: rig.device.zeros(1)?,
            link_cap: rig.device.zeros(1)?,
            stamps: rig.device.zeros(1)?,
        })
    }

    fn params(&self) -> SelectParams {
        SelectParams {
            scores: self.scores.address(),
            position: self.position.address(),
            slot_block: self.slot_block.address(),
            last_selected: self.last_selected.address(),
            times_selected: self.times_selected.address(),
            host: self.host.address(),
            entries: ENTRIES,
            tail: TAIL,
            list: self.list.address(),
            copies: self.copies.address(),
            step: self.step.address(),
            kv_heads: self.kv_heads as i32,
            stride: self.stride as i32,
            slots: self.shape.slots as i32,
            cap: self.cap as i32,
            sinks: self.kept.sinks as i32,
            recent: self.kept.recent as i32,
            link_cap: self.link_cap.address(),
            stamps: self.stamps.address(),
        }
    }
}

/// One head as oasis-core's pipeline keeps it: fill or promote, touch, then the selector.
struct Oracle {
    set: WorkingSet,
    selector: Box<dyn Selector>,
    kept: Kept,
    pair: usize,
    request: usize,
    kv_heads: usize,
}

impl Oracle {
    /// Selects for one step; gives the copies that it takes.
    fn select(
        &mut self,
        scores: &[f32],
        completed: Option<usize>,
        step: Step,
        link: Option<LinkRate>,
    ) -> Vec<EntryCopy> {
        let head = KvHead(0);
        let mut want = Ranking::new(1, 1);
        let mut scores = scores.to_vec();
        self.kept.raise(self.set.slots(), &mut scores);
        want.set(0, head, top_k(&scores, self.set.slots()));
        let first_slot = self.pair * self.set.slots();
        let slot_address = |slot: SlotId| ENTRIES.offset((first_slot + slot.index()) * ENTRY);
        let Self { pair, request, kv_heads, .. } = *self;
        let tail = |block: usize| TAIL.offset((pair * 2 + block % 2) * ENTRY);
        let host_of = |block: usize| {
            let entry = block * kv_heads + pair % kv_heads;
            Address(HOST + ((request as u64) << 36)).offset(entry * ENTRY)
        };
        let mut plan = TransferPlan::new(1, 1);
        if self.set.is_empty() {
            plan.fill(0, &want, &self.set);
        }
        let mut admissions = plan.head(0, head).to_vec();
        admissions.iter().for_each(|admission| self.set.place(head, *admission, step));
        self.set.touch(head, want.wanted(0, head), step);
        let mut promotion = None;
        if let Some(block) = completed.map(BlockId::from).filter(|block| !self.set.head(head).contains(*block)) {
            promotion = self.set.promotion_slot(head, want.wanted(0, head));
            if let Some(slot) = promotion {
                self.set.place(head, Admission { block, slot }, step);
            }
        }
        let mut plan = TransferPlan::new(1, 1);
        let requests = [SelectRequest { have: &self.set }];
        self.selector.plan(&SelectBatch { layer: LayerId(0), want: &want, requests: &requests, link }, &mut plan);
        admissions.extend(plan.head(0, head));
        plan.head(0, head).iter().for_each(|admission| self.set.place(head, *admission, step));

        let copy = |admission: &Admission| {
            let block = admission.block.index();
            let from = if completed == Some(block) { tail(block) } else { host_of(block) };
            EntryCopy { from, to: slot_address(admission.slot) }
        };
        let mut copies: Vec<EntryCopy> = admissions.iter().map(copy).collect();
        if let Some(block) = completed {
            copies.push(EntryCopy { from: tail(block), to: host_of(block) });
            // A promoted block whose slot is given away in the same step is not copied there.
            let kept = promotion.filter(|slot| admissions.iter().all(|admission| admission.slot != *slot));
            copies.push(
                kept.map_or_else(EntryCopy::default, |slot| EntryCopy { from: tail(block), to: slot_address(slot) }),
            );
        }
        copies
    }
}

/// Few distinct values, so that ties are everywhere; now and then all different.
fn scores(rig: &mut Rig, count: usize) -> Vec<f32> {
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, -1.5];
    let kind = rig.random.below(4);
    (0..count)
        .map(|_| match (kind, rig.random.below(12)) {
            (0, _) => rig.random.float(),
            (1, _) => 1.0,
            (_, choice) if choice < special.len() => special[choice],
            (_, choice) => choice as f32 / 4.0,
        })
        .collect()
}

fn check_run(rig: &mut Rig, spec: &dyn SelectorSpec, kept: Kept, slots: usize, blocks: usize) -> Outcome<()> {
    assert_eq!(ENTRY, entry_bytes(HEAD_DIM));
    let (requests, kv_heads) = (4, 2);
    let cap = spec.build()?.cap(slots);
    let follows_link = spec.build()?.cap_by_link(slots, 1, None).is_some();
    let shape = Select::for_blocks(HEAD_DIM, slots, blocks + 2, selector(spec)?).ok_or("too many blocks")?;
    let shape = Select { follows_link, ..shape };
    let kernel = rig.device.load(&rig.compiler, &shape)?;
    let mut batch = Batch::new(rig, shape, requests, kv_heads, blocks + 2, cap)?;
    batch.kept = kept;
    let mut oracles = Vec::new();
    for pair in 0..requests * kv_heads {
        let (set, selector) = (WorkingSet::new(1, slots), spec.build()?);
        oracles.push(Oracle { set, selector, kept, pair, request: pair / kv_heads, kv_heads });
    }
    // Padding, one that completes a block at once, one that does soon, one that has fewer blocks than slots.
    let mut positions = [-1, blocks as i32 * 16 - 1, blocks as i32 * 16 + 12, slots.min(blocks) as i32 * 8 + 13];
    let (mut different_slots, mut different_steps, mut different_copies) = (0, 0, 0);
    let (mut unstamped, mut last_stamp) = (0, 0);
    for step in 1..=STEPS {
        batch.position.write(&positions)?;
        batch.step.write(&[step])?;
        batch.list.fill(0)?;
        // An entry takes longer from step to step.
        let link = LinkRate { entry: Duration::from_micros(step.into()), interval: Duration::from_micros(200) };
        let link = follows_link.then_some(link);
        // The link is shared by all heads, of which the oracle has one at a time.
        batch.link_cap.write(&[spec.build()?.cap_by_link(slots, 1, link).unwrap_or(0) as u32])?;
        let all = scores(rig, requests * kv_heads * batch.stride);
        batch.scores.write(&all)?;
        // SAFETY: the buffers have the sizes that the shape asks for; the kernel only computes with the other addresses.
        unsafe { kernel.launch(&rig.stream, (kv_heads as u32, requests as u32), &batch.params())? };
        let (slot_block, last) = (batch.slot_block.read()?, batch.last_selected.read()?);
        let mut got = batch.copies.read()?;
        got.truncate(batch.list.read()?[0].count as usize);
        let mut want = Vec::new();
        for (pair, oracle) in oracles.iter_mut().enumerate() {
            let position = positions[pair / kv_heads];
            let complete = ((position + 1) / 16) as usize;
            if complete > 0 {
                let completed = ((position + 1) % 16 == 0).then(|| complete - 1);
                let scores = &all[pair * batch.stride..][..complete];
                want.extend(oracle.select(scores, completed, Step(step.into()), link));
            }
            let have = oracle.set.head(KvHead(0));
            for slot in 0..slots {
                let block = have.blocks[slot].map_or(-1, |block| block.0 as i32);
                different_slots += usize::from(slot_block[pair * slots + slot] != block);
                different_steps +=
                    usize::from(block >= 0 && u64::from(last[pair * slots + slot]) != have.last_selected[slot].0);
            }
        }
        let order = |copy: &EntryCopy| (copy.to.0, copy.from.0);
        got.sort_by_key(order);
        want.sort_by_key(order);
        different_copies += usize::from(got != want);
        let selected = batch.stamps.read()?[0].selected;
        unstamped += usize::from(follows_link != (selected > last_stamp));
        last_stamp = selected;
        positions.iter_mut().filter(|position| **position >= 0).for_each(|position| *position += 1);
    }
    let Kept { sinks, recent } = kept;
    let what = format!("{}, {slots} slots, {blocks} blocks, cap {cap}, kept {sinks} {recent}", shape.selector.name);
    let got = [different_slots, different_steps, different_copies, unstamped];
    rig.same(name::<Select>(&format!("{what}: slots, steps, copies, stamps")), &got, &[0; 4]);
    Ok(())
}

/// Sinks and recent blocks, as far as there are slots for them.
const KEPT: [(usize, usize); 4] = [(1, 0), (0, 3), (2, 5), (1, usize::MAX)];

pub fn check(rig: &mut Rig) -> Outcome<()> {
    for (slots, blocks, fetch_ratio) in [
        (128, 1022, 0.05),
        (128, 2046, 0.05),
        (128, 130, 0.05),
        (128, 90, 0.05),
        (128, 1022, 0.0),
        (128, 1022, 1.0),
        (1, 40, 1.0),
        (8, 8, 0.5),
        (20, 33, 0.5),
        (300, 3000, 0.03),
        (300, 8000, 0.03),
        (512, 16_000, 1.0),
    ] {
        let lru: &dyn SelectorSpec = &CappedLru { fetch_ratio };
        let lfu: &dyn SelectorSpec = &Lfu { fetch_ratio };
        let hysteresis = [0.0, 0.1, 0.6, 1.0].map(|margin| Hysteresis { fetch_ratio, margin });
        let none = Kept::default();
        for _ in 0..3 {
            check_run(rig, lru, none, slots, blocks)?;
        }
        let adaptive = AdaptiveCap { min_ratio: fetch_ratio / 4.0, max_ratio: fetch_ratio, load: 0.5 };
        check_run(rig, &adaptive, none, slots, blocks)?;
        for spec in [lru, lfu, &hysteresis[2]] {
            for (sinks, recent) in KEPT {
                let kept = Kept { sinks: sinks.min(slots), recent: recent.min(slots) };
                check_run(rig, spec, kept, slots, blocks)?;
            }
        }
        for spec in hysteresis.iter().map(|spec| spec as &dyn SelectorSpec).chain([lfu, lfu]) {
            check_run(rig, spec, none, slots, blocks)?;
        }
    }
    Ok(())
}

pub fn time(rig: &mut Rig, bench: &KernelBench) -> Outcome<()> {
    let heads = Heads { head_dim: HEAD_DIM, kv_heads: 8, group: 4 };
    let kinds: [(&str, &dyn SelectorSpec); 3] =
        [("capped-lru", &CappedLru::default()), ("lfu", &Lfu::default()), ("hysteresis", &Hysteresis::default())];
    let shapes = [(8, 1024), (64, 1024), (64, 2048), (128, 1024)].map(|shape| (shape, kinds[0]));
    let others = kinds[1..].iter().map(|kind| ((64, 1024), *kind));
    for (batch, (kind, spec)) in shapes.into_iter().chain(others) {
        rig.push(bench.time_select(heads, batch, (128, 6), kind, selector(spec)?)?);
    }
    Ok(())
}
