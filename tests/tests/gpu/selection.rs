//! The device's selections, step by step, against the rules of oasis-core on the device's own scores.

use crate::Scene;
use oasis_core::config::{Layer, Resolved};
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, SlotId, Step};
use oasis_core::policy::{Kept, SelectBatch, SelectRequest, Selector};
use oasis_core::working_set::{Admission, Ranking, TransferPlan, WorkingSet, top_k};
use oasis_cuda::executor::Selection;
use oasis_tests::gpu::{Setup, step_all};
use oasis_tests::models::start;

const BUDGET: usize = 12;
const TOKENS: usize = 90;

/// Working sets of a layer as oasis-core's pipeline keeps them.
struct Oracle {
    set: WorkingSet,
    selector: Box<dyn Selector>,
    kept: Kept,
}

impl Oracle {
    fn select(&mut self, scores: &[Vec<f32>], completed: Option<usize>, step: Step) {
        let mut want = Ranking::new(1, scores.len());
        for (head, scores) in scores.iter().enumerate() {
            let mut scores = scores.clone();
            self.kept.raise(BUDGET, &mut scores);
            want.set(0, KvHead::from(head), top_k(&scores, BUDGET));
        }
        let mut plan = TransferPlan::new(1, scores.len());
        if self.set.is_empty() {
            plan.fill(0, &want, &self.set);
            self.apply(&plan, step);
        }
        for head in (0..scores.len()).map(KvHead::from) {
            self.set.touch(head, want.wanted(0, head), step);
            let Some(block) = completed.map(BlockId::from) else { continue };
            if !self.set.head(head).contains(block)
                && let Some(slot) = self.set.promotion_slot(head, want.wanted(0, head))
            {
                self.set.place(head, Admission { block, slot }, step);
            }
        }
        let mut plan = TransferPlan::new(1, scores.len());
        let requests = [SelectRequest { have: &self.set }];
        self.selector.plan(&SelectBatch { layer: LayerId(0), want: &want, requests: &requests, link: None }, &mut plan);
        self.apply(&plan, step);
    }

    fn apply(&mut self, plan: &TransferPlan, step: Step) {
        for head in (0..plan.kv_heads()).map(KvHead::from) {
            plan.head(0, head).iter().for_each(|admission| self.set.place(head, *admission, step));
        }
    }

    /// Which slots of the device are not those of the rules.
    fn differences(&self, got: &Selection) -> Vec<String> {
        let mut found = Vec::new();
        for (index, (blocks, last)) in got.blocks.iter().zip(&got.last_selected).enumerate() {
            let head = self.set.head(KvHead::from(index));
            for slot in 0..BUDGET {
                let want = (head.blocks[slot], head.last_selected[slot]);
                let block = u32::try_from(blocks[slot]).ok().map(BlockId);
                let same_step = block.is_none() || want.1 == Step(u64::from(last[slot]));
                if block != want.0 || !same_step {
                    let slot = SlotId::from(slot);
                    found.push(format!(
                        "head {index}, slot {slot}: {block:?} of step {}, expected {want:?}",
                        last[slot.index()]
                    ));
                }
            }
        }
        found
    }
}

pub fn every_selection_follows_the_rules_of_the_working_set(scene: &Scene) {
    let policies: [&[&str]; 19] = [
        // A plugin's, with device code of its own.
        &["predictor.kind=draft-query", "selector.kind=upper-half"],
        &["predictor.kind=draft-query", "selector.fetch_ratio=0.25"],
        &["predictor.kind=draft-query", "selector.kind=fetch-all", "summarizer.kind=mean"],
        &["predictor.kind=last-query", "selector.fetch_ratio=0.1"],
        &["predictor.kind=last-query", "selector.kind=static"],
        &["predictor.kind=exact", "selector.fetch_ratio=0.25"],
        &["predictor.kind=exact", "selector.kind=fetch-all"],
        &["predictor.kind=draft-query", "selector.kind=lfu", "selector.fetch_ratio=0.25", "summarizer.kind=quest-fp8"],
        &["predictor.kind=exact", "selector.kind=lfu", "summarizer.kind=quest-int4", "predictor.recent=2"],
        &["predictor.kind=last-query", "selector.kind=hysteresis", "selector.fetch_ratio=0.5", "selector.margin=0.3"],
        &["predictor.kind=exact", "selector.kind=hysteresis", "selector.fetch_ratio=1.0", "predictor.sinks=1"],
        &["predictor.kind=draft-query", "selector.kind=fetch-all", "predictor.sinks=2", "predictor.recent=20"],
        &["predictor.kind=last-query", "selector.fetch_ratio=0.25", "predictor.recent=3", "summarizer.kind=arkvale"],
        &["predictor.kind=draft-query", "selector.fetch_ratio=0.25", "summarizer.kind=shadowkv"],
        &["predictor.kind=streaming-llm", "selector.fetch_ratio=0.25"],
        &["predictor.kind=freekv", "predictor.min_similarity=-1", "selector.fetch_ratio=0.25"],
        &["predictor.kind=infinigen", "selector.fetch_ratio=0.25"],
        &["predictor.kind=infinigen", "selector.kind=lfu", "summarizer.kind=mean"],
        &["predictor.kind=random", "predictor.seed=5", "selector.fetch_ratio=0.5"],
    ];
    // One that begins without a block, and one that completes a block in its first step, among others.
    let prompts = [700, 9, 47, 320].map(|tokens| scene.prompts.prose(tokens, 6));
    for settings in policies {
        let layers: Vec<Layer> = settings.iter().map(|s| Layer::assignment("--set", s).unwrap()).collect();
        let config = Resolved::new(&layers).unwrap().config;
        let kept = config.predictor.build().unwrap().by_score().expect("a predictor that ranks by score").kept;
        let mut executor = Setup::sparse(BUDGET, settings, 4, 1_000).start(&scene.device, &scene.tiny);
        let (kv_heads, model_layers) = (scene.tiny.spec.kv_heads, scene.tiny.spec.layers);
        let lag = usize::from(settings[0].ends_with("exact") || settings[0].ends_with("infinigen"));
        let mut rows: Vec<_> = (0..)
            .map(RequestId)
            .zip(&prompts)
            .map(|(id, prompt)| (id, vec![start(&mut executor, id, prompt, TOKENS)]))
            .collect();
        let oracle =
            || Oracle { set: WorkingSet::new(kv_heads, BUDGET), selector: config.selector.build().unwrap(), kept };
        let mut oracles: Vec<Vec<Oracle>> =
            prompts.iter().map(|_| (0..model_layers).map(|_| oracle()).collect()).collect();
        let mut full = 0;
        for number in 1..TOKENS {
            // A request's first step counts for itself: one row at a time, so that the counter is that of its step.
            if number == 1 {
                rows.iter_mut().for_each(|row| {
                    step_all(&mut executor, std::slice::from_mut(row));
                    check(&executor, row.0, &prompts, number, lag, &mut oracles, settings);
                });
                continue;
            }
            step_all(&mut executor, &mut rows);
            for (id, _) in &rows {
                full += check(&executor, *id, &prompts, number, lag, &mut oracles, settings);
            }
        }
        assert!(full > TOKENS * model_layers, "{settings:?}: only {full} selections had more blocks than slots");
    }
}

/// Checks all layers of a request; gives how many had more blocks than slots.
fn check(
    executor: &oasis_cuda::executor::CudaExecutor,
    id: RequestId,
    prompts: &[Vec<oasis_core::ids::TokenId>],
    number: usize,
    lag: usize,
    oracles: &mut [Vec<Oracle>],
    settings: &[&str],
) -> usize {
    let (prompt, mut full) = (prompts[id.0 as usize].len(), 0);
    // Tokens that may be ranked after this step.
    let ranked = prompt + number - lag;
    for (layer, oracle) in oracles[id.0 as usize].iter_mut().enumerate() {
        let got = executor.selection(id, layer).unwrap().expect("a request that decodes");
        let blocks = ranked / 16;
        assert_eq!(got.scores[0].len(), blocks);
        if blocks > 0 {
            let completed = ranked.is_multiple_of(16).then(|| blocks - 1);
            oracle.select(&got.scores, completed, Step(u64::from(got.step)));
        }
        let differences = oracle.differences(&got);
        assert!(
            differences.is_empty(),
            "{settings:?}, prompt of {prompt}, step {number}, layer {layer}:\n{}",
            differences.join("\n")
        );
        full += usize::from(blocks > BUDGET);
    }
    full
}
