//! Greedy tokens and logits, bf16 on the GPU against f32 on the CPU. The GPU is forced along the CPU's tokens, so that
//! every place is compared, not only those before the first difference.

use crate::{NEAR, Scene};
use oasis_core::ids::TokenId;
use oasis_core::pipeline::Tracer;
use oasis_core::testkit::Random;
use oasis_models::checkpoint;
use oasis_tests::gpu::{Parity, Setup, Speech, Twin};
use oasis_tests::models::{self, dense, read};
use oasis_tests::references::{smollm2, workspace};
use oasis_tests::synthetic::{self, Shape};

/// Blocks per KV head: fewer than most contexts have.
const BUDGET: usize = 24;

/// Ways to decode, by settings with spaces between them; none is dense.
const KINDS: [Option<&str>; 4] =
    [None, Some("predictor.kind=draft-query"), Some("predictor.kind=last-query"), Some("predictor.kind=exact")];

/// Compares all kinds over prompts. How far rounding carries a model depends on the model and on the text: small models
/// of long contexts answer a disturbance of 2^-8 with logits that are off by a tenth of their spread and more. So the
/// measure of what is rounding is the CPU with disturbed weights: the GPU, which rounds activations at ten places of a
/// layer, may be off by 2.5 times as much. One disturbance of one kind is a small sample, so a kind is measured by its
/// own control or by that of all kinds, whichever is larger.
fn check(scene: &Scene, name: &str, model: &Twin, kinds: &[Option<&str>], prompts: &[Vec<TokenId>], tokens: usize) {
    let longest = prompts.iter().map(Vec::len).max().expect("a prompt") + tokens;
    let disturbed = model.disturbed();
    let read = |model| prompts.iter().map(|prompt| read(model, prompt, 512)).collect::<Vec<_>>();
    let (states, disturbed_states) = (read(&model.cpu), read(&disturbed));
    let (mut sums, mut pooled) = (Vec::new(), Parity::default());
    for &kind in kinds {
        let settings: Vec<&str> =
            kind.into_iter().flat_map(|kind| kind.split(' ')).chain(["selector.fetch_ratio=0.25"]).collect();
        let cpu = |model| match kind {
            None => dense(model, 512),
            Some(_) => models::sparse(model, BUDGET, &settings, Tracer::default()),
        };
        let setup = match kind {
            None => Setup::dense(2, longest),
            Some(_) => Setup::sparse(BUDGET, &settings, 2, longest),
        };
        let (mut cpu, mut control, mut gpu) = (cpu(&model.cpu), cpu(&disturbed), setup.start(&scene.device, model));
        let (mut sum, mut control_sum) = (Parity::default(), Parity::default());
        let what = format!("{name}, {}", kind.unwrap_or("dense"));
        for ((prompt, state), disturbed) in prompts.iter().zip(&states).zip(&disturbed_states) {
            let want = Speech::resumed(&mut cpu, state, tokens);
            let parity = want.compare(&Speech::along(&mut gpu, prompt, &want.tokens));
            println!("  {what}, prompt of {}: {parity}", prompt.len());
            sum.add(&parity);
            control_sum.add(&want.compare(&Speech::resumed_along(&mut control, disturbed, &want.tokens)));
        }
        println!("  {what}: {sum}\n  {what}, disturbed CPU: {control_sum}");
        pooled.add(&control_sum);
        sums.push((what, sum, control_sum));
    }
    let usual = pooled.different as f64 / kinds.len() as f64;
    let within = |got: f64, control: f64, pooled: f64, floor: f64| got <= 2.5 * control.max(pooled) + floor;
    let is_rounding = |sum: &Parity, control: &Parity| {
        within(sum.error(), control.error(), pooled.error(), 5e-3)
            && within(sum.median(), control.median(), pooled.median(), 5e-3)
            && within(sum.different as f64, control.different as f64, usual, 5.0)
    };
    let bad: Vec<String> = (sums.iter().filter(|(_, sum, control)| !is_rounding(sum, control)))
        .map(|(what, sum, control)| format!("{what}: {sum}\n  disturbed CPU: {control}, all kinds: {pooled}"))
        .collect();
    assert!(bad.is_empty(), "beyond rounding:\n{}", bad.join("\n"));
}

pub fn oasis_tiny_says_what_it_says_on_the_cpu(scene: &Scene) {
    let long = scene.prompts.tasks().iter().position(|task| task.length == 16_384).expect("a long task");
    let prompts = [1, 15, 16, 17, 300, 2_100, 4_096, 8_000].map(|tokens| scene.prompts.prose(tokens, long));
    check(scene, "oasis-tiny", &scene.tiny, &KINDS, &prompts, 70);
}

pub fn other_policies_say_what_they_say_on_the_cpu(scene: &Scene) {
    let kinds = [
        "predictor.kind=draft-query summarizer.kind=quest-fp8",
        "predictor.kind=draft-query kv.draft_blocks=8",
        "predictor.kind=exact summarizer.kind=arkvale predictor.sinks=1 predictor.recent=2",
        "predictor.kind=last-query summarizer.kind=quest-int4 selector.kind=lfu",
        // Longer than a chunk of a prefill, shorter than some prompts.
        "predictor.kind=draft-query selector.kind=hysteresis selector.margin=0.2 kv.draft_blocks=100",
        "predictor.kind=streaming-llm",
    ];
    let prompts = [1, 300, 2_100, 4_096].map(|tokens| scene.prompts.prose(tokens, 3));
    check(scene, "oasis-tiny", &scene.tiny, &kinds.map(Some), &prompts, 70);
}

pub fn predictors_that_correct_or_look_ahead_say_what_they_say_on_the_cpu(scene: &Scene) {
    let kinds = [
        "predictor.kind=freekv",
        "predictor.kind=freekv predictor.min_similarity=0.6 predictor.sinks=1 selector.kind=lfu",
        "predictor.kind=infinigen",
        "predictor.kind=infinigen summarizer.kind=quest-fp8 predictor.recent=2 selector.kind=hysteresis",
    ];
    let prompts = [1, 17, 300, 2_100, 4_096].map(|tokens| scene.prompts.prose(tokens, 5));
    check(scene, "oasis-tiny", &scene.tiny, &kinds.map(Some), &prompts, 70);
    let shape =
        Shape { hidden: 576, layers: 5, q_heads: 9, kv_heads: 3, head_dim: 64, inner: 1_536, ..Shape::rounded() };
    let (spec, weights, head) = synthetic::weights(3, &shape);
    let (vocab, random) = (spec.vocab, &mut Random::new(12));
    let model = Twin::new(spec, weights, head.into());
    let prompts = [31, 600].map(|n| (0..n).map(|_| TokenId::from(random.below(vocab))).collect::<Vec<_>>());
    check(scene, "9 x 3 heads of 64", &model, &[Some(kinds[0]), Some(kinds[2])], &prompts, 66);
}

/// Answers to questions that the model is trained for, word for word: there it is sure of every token.
pub fn answers_are_those_of_the_cpu(scene: &Scene) {
    let questions: Vec<Vec<TokenId>> = [4_096, 8_192]
        .into_iter()
        .flat_map(|length| scene.prompts.tasks().iter().filter(move |task| task.length == length).take(6))
        .map(|task| scene.prompts.chat(&task.question))
        .collect();
    let (longest, tokens) = (questions.iter().map(Vec::len).max().expect("a question") + 24, 24);
    let states: Vec<_> = questions.iter().map(|prompt| read(&scene.tiny.cpu, prompt, 512)).collect();
    for kind in KINDS {
        let settings: Vec<&str> = kind.into_iter().collect();
        let (mut cpu, setup) = match kind {
            None => (dense(&scene.tiny.cpu, 512), Setup::dense(1, longest)),
            Some(_) => (
                models::sparse(&scene.tiny.cpu, 64, &settings, Tracer::default()),
                Setup::sparse(64, &settings, 1, longest),
            ),
        };
        let mut gpu = setup.start(&scene.device, &scene.tiny);
        let (mut right, mut told) = (0, 0);
        for (prompt, state) in questions.iter().zip(&states) {
            let want = Speech::resumed(&mut cpu, state, tokens);
            let end = want.tokens.iter().position(|token| *token == scene.prompts.stop()).map_or(tokens, |end| end + 1);
            let got = Speech::along(&mut gpu, prompt, &want.tokens);
            right += usize::from(got.tokens[..end] == want.tokens[..end]);
            told += end;
            if let Some(place) = (0..end).find(|place| got.tokens[*place] != want.tokens[*place]) {
                let gap = want.gap(place, got.tokens[place]);
                println!("  {kind:?}, question of {}: parts at {place} with a gap of {gap:.4}", prompt.len());
                assert!(gap < NEAR, "{kind:?}, question of {}: parts at {place} with a gap of {gap}", prompt.len());
            }
        }
        println!("  {kind:?}: {right} of {} answers are the CPU's, {told} tokens", questions.len());
        assert!(right + 2 >= questions.len(), "{kind:?}: only {right} of {} answers are the CPU's", questions.len());
    }
}

pub fn other_shapes_say_what_they_say_on_the_cpu(scene: &Scene) {
    // A group of 3 with heads of 64, and one of 4 with heads of 128; a head of a smaller vocabulary.
    let shapes = [
        Shape { hidden: 576, layers: 5, q_heads: 9, kv_heads: 3, head_dim: 64, inner: 1_536, ..Shape::rounded() },
        Shape { hidden: 512, layers: 3, q_heads: 8, kv_heads: 2, head_dim: 128, inner: 640, ..Shape::rounded() },
    ];
    for (seed, shape) in shapes.iter().enumerate() {
        let (spec, weights, head) = synthetic::weights(seed as u64, shape);
        let vocab = spec.vocab;
        let model = Twin::new(spec, weights, head.into());
        let random = &mut Random::new(seed as u64 + 9);
        let prompts = [1, 31, 64, 600].map(|n| (0..n).map(|_| TokenId::from(random.below(vocab))).collect::<Vec<_>>());
        let name = format!("{} x {} heads of {}", shape.q_heads, shape.kv_heads, shape.head_dim);
        check(scene, &name, &model, &KINDS, &prompts, 66);
        check(scene, &name, &model, &[Some("predictor.kind=draft-query summarizer.kind=quest-fp8")], &prompts, 66);
    }
}

pub fn smollm2_says_what_it_says_on_the_cpu(scene: &Scene) {
    let Some(path) = smollm2() else { return };
    let (path, head) = (path.to_str().unwrap().to_owned(), workspace().join("oasis-models/assets/smollm2-135m-eagle3"));
    let model = Twin::load(&path, head.to_str().unwrap());
    let text = &scene.prompts.tasks()[1].question;
    let ids = checkpoint::open(&path).unwrap().tokenizer().unwrap().encode_prompt(text).unwrap();
    let prompts = [1, 17, 300, 2_100].map(|tokens| ids[..tokens].iter().copied().map(TokenId).collect::<Vec<_>>());
    check(scene, "SmolLM2-135M", &model, &KINDS, &prompts, 66);
}

pub fn a_budget_of_all_blocks_is_dense(scene: &Scene) {
    let prompts = [5, 160, 1_000].map(|tokens| scene.prompts.prose(tokens, 2));
    let mut dense = Setup::dense(1, 1_200).start(&scene.device, &scene.tiny);
    let want = prompts.each_ref().map(|prompt| Speech::alone(&mut dense, prompt, 80));
    let others = ["predictor.kind=freekv", "predictor.kind=infinigen"];
    for kind in KINDS.into_iter().flatten().chain(others) {
        let mut sparse = Setup::sparse(1 << 20, &[kind], 1, 1_200).start(&scene.device, &scene.tiny);
        for (prompt, want) in prompts.iter().zip(&want) {
            let parity = want.compare(&Speech::along(&mut sparse, prompt, &want.tokens));
            println!("  {kind}, prompt of {}: {parity}", prompt.len());
            // The same numbers in another order.
            assert!(parity.median() < 5e-2 && parity.gap < NEAR, "{kind}, prompt of {}: {parity}", prompt.len());
        }
    }
}
