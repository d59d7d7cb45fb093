//! The answer is in the working set or nowhere: with the worst-ranked blocks on the device it must be lost.

use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::{BlockId, KvHead, RequestId, TokenId};
use oasis_core::pipeline::Tracer;
use oasis_core::policy::{Aggregate, PredictBatch, Predictor, QuerySource, rank_by_score};
use oasis_core::sampling::SamplingParams;
use oasis_core::working_set::{RankedBlock, Ranking};
use oasis_models::cpu::{CpuExecutor, PromptState, Residency};
use oasis_tests::models::{oasis_tiny, options, parts, read};
use oasis_tests::prompts::Prompts;

/// Wants the blocks that the current query wants least.
struct Worst;

impl Predictor for Worst {
    fn query_source(&self) -> QuerySource {
        QuerySource::Current
    }

    fn predict(&mut self, batch: &PredictBatch<'_>, ranking: &mut Ranking) {
        let everything = PredictBatch { budget: usize::MAX, ..*batch };
        rank_by_score(&everything, Aggregate::Sum, &mut Vec::new(), ranking);
        for request in 0..batch.requests.len() {
            for head in (0..ranking.kv_heads()).map(KvHead::from) {
                let worst: Vec<RankedBlock> =
                    ranking.head(request, head).iter().rev().take(batch.budget).copied().collect();
                assert!(worst.iter().all(|w| w.block < BlockId::from(batch.requests[request].blocks)));
                ranking.set(request, head, worst);
            }
        }
    }
}

fn answer(executor: &mut CpuExecutor, state: &PromptState, stop: TokenId) -> Vec<TokenId> {
    let request = RequestId(1);
    let mut token = executor.resume(state, request, 64, SamplingParams::default()).unwrap();
    let mut answer = vec![token];
    while token != stop && answer.len() < 64 {
        token = executor.decode(&[DecodeRow { request, token }]).unwrap().remove(0).unwrap();
        answer.push(token);
    }
    executor.release(request);
    answer
}

#[test]
fn a_working_set_of_the_worst_blocks_loses_the_answers() {
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let settings = ["predictor.kind=last-query", "selector.kind=fetch-all"];
    let executor = |worst: bool| {
        let mut parts = parts(&model, 64, 16, &settings);
        if worst {
            parts.predictor = Box::new(Worst);
        }
        CpuExecutor::new(model.clone(), Residency::Sparse(parts), options(512), Tracer::default()).unwrap()
    };
    let (mut best, mut worst) = (executor(false), executor(true));
    let (mut best_right, mut worst_right, mut asked) = (0, 0, 0);
    // Of 4,096 tokens, 64 blocks are a quarter; counting is left out, as a guess is right too often.
    for kind in ["copy", "list", "multi", "table", "kv"] {
        let task = prompts.tasks().iter().find(|t| t.length == 4096 && t.kind == kind).unwrap();
        let state = read(&model, &prompts.chat(&task.question), 512);
        for (executor, right) in [(&mut best, &mut best_right), (&mut worst, &mut worst_right)] {
            let text = prompts.decode(&answer(executor, &state, prompts.stop()));
            println!("{kind}: {}", text.trim());
            *right += usize::from(text.trim() == task.answer.trim());
        }
        asked += 1;
    }
    println!("right with the best blocks {best_right}, with the worst {worst_right}, of {asked}");
    assert!(best_right >= 3, "the best blocks answer {best_right} of {asked}");
    assert_eq!(worst_right, 0, "the worst blocks answer {worst_right} of {asked}");
}
