//! The suites fail what breaks an obligation: a suite that passes everything would be worth nothing.

use super::doubles::{FirstKey, MapStore, PredictWith, SelectWith, lru_selector};
use super::faulty::{Faults, FaultyStore, FaultyTransport};
use super::*;
use crate::geometry::HeadShape;
use crate::ids::{BlockId, KvHead, SlotId};
use crate::memory::{EntryCopy, EntryTarget, KvStore, Transport};
use crate::policy::{Aggregate, PredictBatch, Predictor, ScoreTask, SelectBatch, Selector};
use crate::policy::{SpecError, SummarizeTask, Summarizer};
use crate::working_set::{Admission, RankedBlock, Ranking, TransferPlan};
use serde::{Deserialize, Serialize};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A spec with a chosen fault; `None` is sound.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Broken {
    fault: Option<String>,
}

fn broken(fault: &str) -> Broken {
    Broken { fault: Some(fault.to_owned()) }
}

impl Broken {
    fn is(&self, fault: &str) -> bool {
        self.fault.as_deref() == Some(fault)
    }
}

/// Asserts that `suite` panics, with `expected` in the message.
fn caught(expected: &str, suite: impl FnOnce()) {
    let panic = catch_unwind(AssertUnwindSafe(suite)).expect_err(expected);
    let message =
        panic.downcast_ref::<String>().cloned().unwrap_or_else(|| (*panic.downcast_ref::<&str>().unwrap()).to_owned());
    assert!(message.contains(expected), "expected `{expected}` in: {message}");
}

#[typetag::serde(name = "broken")]
impl SelectorSpec for Broken {
    fn build(&self) -> Result<Box<dyn Selector>, SpecError> {
        let fault = self.fault.clone().unwrap_or_default();
        let mut sound = lru_selector(2);
        let mut calls = 0;
        let plan = move |batch: &SelectBatch<'_>, plan: &mut TransferPlan| {
            calls += 1;
            if fault == "stateful" && calls == 2 || batch.requests.is_empty() {
                return;
            }
            sound.plan(batch, plan);
            let head = KvHead(0);
            let Some(&first) = plan.head(0, head).first() else { return };
            match fault.as_str() {
                "twice" => plan.push(0, head, first),
                "beyond" => plan.push(0, head, Admission { block: BlockId(9999), slot: SlotId(0) }),
                _ => {}
            }
        };
        Ok(Box::new(SelectWith { cap: if self.is("over the cap") { 1 } else { 3 }, plan }))
    }
}

#[test]
fn the_selector_suite_catches_broken_plans() {
    selector::conforms(&Broken::default());
    caught("is named twice", || selector::conforms(&broken("twice")));
    caught("is admitted but not wanted", || selector::conforms(&broken("beyond")));
    caught("the cap is 1", || selector::conforms(&broken("over the cap")));
    caught("the same arguments give another plan", || selector::conforms(&broken("stateful")));
    caught("", || selector::equals_capped_lru(&Broken::default()));
}

#[typetag::serde(name = "broken")]
impl PredictorSpec for Broken {
    fn build(&self) -> Result<Box<dyn Predictor>, SpecError> {
        let fault = self.fault.clone().unwrap_or_default();
        let mut sound = super::doubles::ByScore::default();
        let predict = move |batch: &PredictBatch<'_>, ranking: &mut Ranking| {
            sound.predict(batch, ranking);
            for request in 0..batch.requests.len() {
                let mut ranked = ranking.head(request, KvHead(0)).to_vec();
                match fault.as_str() {
                    "worst first" => ranked.reverse(),
                    "too many" => ranked.push(RankedBlock { block: BlockId(0), score: f32::NEG_INFINITY }),
                    "leaves out" => drop(ranked.pop()),
                    _ => {}
                }
                ranking.set(request, KvHead(0), ranked);
            }
        };
        Ok(Box::new(PredictWith(predict)))
    }
}

#[test]
fn the_predictor_suite_catches_broken_rankings() {
    predictor::conforms(&Broken::default());
    caught("not best first", || predictor::conforms(&broken("worst first")));
    caught("", || predictor::conforms(&broken("too many")));
    caught("all blocks fit the budget", || predictor::conforms(&broken("leaves out")));
}

#[typetag::serde(name = "broken")]
impl SummarizerSpec for Broken {
    fn build(&self, _shape: HeadShape) -> Result<Box<dyn Summarizer>, SpecError> {
        Ok(Box::new(BrokenSummarizer(self.fault.clone().unwrap_or_default())))
    }
}

struct BrokenSummarizer(String);

impl Summarizer for BrokenSummarizer {
    fn rows_per_block(&self) -> usize {
        1
    }

    fn summarize(&self, shape: HeadShape, tasks: &mut [SummarizeTask<'_>]) {
        let old: Vec<u32> = tasks.iter().filter_map(|t| t.rows.last().copied()).collect();
        FirstKey.summarize(shape, tasks);
        for (task, old) in tasks.iter_mut().zip(old) {
            match (self.0.as_str(), task.rows.last_mut()) {
                ("leaves old", Some(last)) => *last = old,
                ("mixes blocks", Some(last)) => *last = task.keys.iter().sum::<f32>().to_bits(),
                _ => {}
            }
        }
    }

    fn score(&self, shape: HeadShape, aggregate: Aggregate, tasks: &mut [ScoreTask<'_>]) {
        FirstKey.score(shape, aggregate, tasks);
    }
}

#[test]
fn the_summarizer_suite_catches_broken_rows() {
    summarizer::conforms(&Broken::default());
    caught("over different old contents", || summarizer::conforms(&broken("leaves old")));
    caught("together and one by one", || summarizer::conforms(&broken("mixes blocks")));
    caught("above the bound", || summarizer::bounds_every_key(&Broken::default()));
}

#[typetag::serde(name = "broken")]
impl TransportSpec for Broken {
    fn build(&self) -> Result<Box<dyn Transport>, SpecError> {
        let inner: Box<dyn Transport> =
            if self.is("short") { Box::new(Short) } else { super::doubles::copy_transport() };
        Ok(Box::new(FaultyTransport { inner, faults: Arc::new(Faults::none()) }))
    }
}

/// Copies as much as fits.
struct Short;

#[async_trait::async_trait]
impl Transport for Short {
    async fn gather(&mut self, copies: &mut [EntryCopy<'_>]) -> anyhow::Result<()> {
        for copy in copies {
            if let EntryTarget::Host(target) = &mut copy.target {
                target.iter_mut().zip(copy.source).for_each(|(to, from)| *to = *from);
            }
        }
        Ok(())
    }
}

#[test]
fn the_transport_suite_catches_sizes_that_differ() {
    caught("a target that is too long is taken", || transport::conforms(&broken("short")));
}

#[typetag::serde(name = "broken")]
impl StoreSpec for Broken {
    fn build(&self) -> Result<Arc<dyn KvStore>, SpecError> {
        Ok(Arc::new(FaultyStore {
            inner: Arc::new(MapStore::default()),
            puts: Faults::none(),
            fetches: Faults::seeded(1, 2, 10),
        }))
    }
}

#[test]
fn the_store_suite_catches_a_store_that_never_says_no() {
    caught("more than the whole store", || store::conforms(&Broken::default()));
}

#[test]
fn seeded_faults_are_the_same_each_time() {
    let struck = |seed| format!("{:?}", Faults::seeded(seed, 3, 50));
    assert_eq!(struck(5), struck(5));
    assert_ne!(struck(5), struck(6));
}
