//! Speed of scoring on one core: bytes of summaries read per second, cold from memory and warm from cache.

use oasis_core::geometry::HeadShape;
use oasis_core::policy::{Aggregate, ScoreTask, SummarizeTask, SummarizerSpec};
use oasis_policies::summarizers::{Mean, Quest, QuestFp8, QuestInt4};
use std::hint::black_box;
use std::time::Instant;

const SHAPE: HeadShape = HeadShape { group: 4, head_dim: 64, block_tokens: 16 };
const BLOCKS: usize = 512;
const ROUNDS: usize = 5;

fn main() {
    let specs: [(&str, &dyn SummarizerSpec); 4] =
        [("quest", &Quest {}), ("quest-fp8", &QuestFp8 {}), ("quest-int4", &QuestInt4 {}), ("mean", &Mean {})];
    for (name, spec) in specs {
        let summarizer = spec.build(SHAPE).expect("the built-in summarizers take any shape");
        let width = summarizer.rows_per_block() * summarizer.row_words(SHAPE);
        let query: Vec<f32> = (0..SHAPE.group * SHAPE.head_dim).map(|i| (i as f32 * 0.37).sin()).collect();
        for (place, heads) in [("memory", 2048), ("cache", 4)] {
            let block = SHAPE.block_tokens * SHAPE.head_dim;
            let keys: Vec<f32> = (0..BLOCKS * block).map(|i| (i as f32 * 0.11).fract() - 0.5).collect();
            let mut head = vec![0; BLOCKS * width];
            summarizer.summarize(SHAPE, &mut [SummarizeTask { keys: &keys, rows: &mut head }]);
            let summaries = head.repeat(heads);
            let mut scores = vec![0.0; heads * BLOCKS];
            for aggregate in [Aggregate::Sum, Aggregate::Max] {
                let repeats = 4096 / heads;
                let mut best = f64::INFINITY;
                for _ in 0..ROUNDS {
                    let start = Instant::now();
                    for _ in 0..repeats {
                        let mut tasks: Vec<ScoreTask<'_>> = (summaries.chunks_exact(BLOCKS * width))
                            .zip(scores.chunks_exact_mut(BLOCKS))
                            .map(|(summaries, scores)| ScoreTask { query: &query, summaries, scores })
                            .collect();
                        summarizer.score(SHAPE, aggregate, black_box(&mut tasks));
                    }
                    best = best.min(start.elapsed().as_secs_f64() / repeats as f64);
                }
                let rate = size_of_val(summaries.as_slice()) as f64 / best / 1e9;
                println!(
                    "{name:10} {aggregate:?} from {place}: {rate:.1} GB/s, {:.2} us a head",
                    best / heads as f64 * 1e6
                );
            }
        }
    }
}
