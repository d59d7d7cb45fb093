//! A working set that holds every block gives what dense decoding gives, bit for bit, whatever chooses it; a smaller one
//! holds what it says it holds.

use oasis_core::config::Layer;
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::{BlockId, KvHead, LayerId, RequestId, TokenId};
use oasis_core::observer::{LayerView, StepObserver};
use oasis_core::pipeline::Tracer;
use oasis_core::registry::{self, Role};
use oasis_core::sampling::SamplingParams;
use oasis_models::cpu::{CpuExecutor, CpuModel, PromptState};
use oasis_tests::models::{dense, greedy, load, oasis_tiny, read, sparse};
use oasis_tests::prompts::Prompts;
use oasis_tests::references::shared;
use oasis_tests::synthetic;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

const BLOCK: usize = 16;

/// Tokens and logit bits of a greedy answer.
#[derive(PartialEq)]
struct Run {
    tokens: Vec<TokenId>,
    logits: Vec<Vec<u32>>,
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// Decodes `count` tokens of a prompt that was read before.
fn decode(executor: &mut CpuExecutor, state: &PromptState, count: usize) -> Run {
    let request = RequestId(1);
    let mut token = executor.resume(state, request, count, SamplingParams::default()).unwrap();
    let mut run = Run { tokens: vec![token], logits: vec![bits(executor.logits(request).unwrap())] };
    while run.tokens.len() < count {
        token = executor.decode(&[DecodeRow { request, token }]).unwrap().remove(0).unwrap();
        run.tokens.push(token);
        run.logits.push(bits(executor.logits(request).unwrap()));
    }
    executor.release(request);
    run
}

/// Every combination of registered policies that the model can run, as settings.
fn combinations(model: &CpuModel) -> Vec<[String; 3]> {
    let kinds = |role: Role| registry::plugins().into_iter().filter(move |p| p.role == role).map(|p| p.kind);
    let mut all = Vec::new();
    for summarizer in kinds(Role::Summarizer) {
        for predictor in kinds(Role::Predictor) {
            // A predictor that needs a draft head cannot run on a model without one.
            let setting = format!("predictor.kind={predictor}");
            let layer = Layer::assignment("--set", &setting).unwrap();
            let built = oasis_core::config::Resolved::new(&[layer]).unwrap().config.predictor.build().unwrap();
            if built.query_source() == oasis_core::policy::QuerySource::Draft && !model.has_draft() {
                continue;
            }
            for selector in kinds(Role::Selector) {
                all.push([
                    format!("summarizer.kind={summarizer}"),
                    setting.clone(),
                    format!("selector.kind={selector}"),
                ]);
            }
        }
    }
    all
}

fn largest_context(prompt: usize, count: usize) -> usize {
    (prompt + count - 1) / BLOCK
}

/// Compares every combination with dense decoding, K exactly the number of blocks and far above it in turn.
fn every_policy_equals_dense(name: &str, model: &Arc<CpuModel>, text: &[TokenId], lengths: &[usize], count: usize) {
    let combinations = combinations(model);
    assert!(combinations.len() >= 12, "{} combinations", combinations.len());
    for &length in lengths {
        let state = read(model, &text[..length], 64);
        let expected = decode(&mut dense(model, 64), &state, count);
        for (index, settings) in combinations.iter().enumerate() {
            let blocks = largest_context(length, count);
            let budget = if index % 2 == 0 { blocks.max(1) } else { blocks + 1000 };
            let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
            let mut executor = sparse(model, budget, &settings, Tracer::default());
            let got = decode(&mut executor, &state, count);
            let case = format!("{name}, {length} tokens, K {budget}, {settings:?}");
            assert_eq!(got.tokens, expected.tokens, "{case}");
            assert!(got.logits == expected.logits, "{case}: the tokens agree, the logits do not");
            assert_eq!(executor.stats().link_bytes, 0, "{case}: nothing needs to cross the link");
            assert_eq!(executor.stats().deferred_entries, 0, "{case}");
        }
    }
}

#[test]
fn every_policy_with_room_for_all_blocks_equals_dense_on_oasis_tiny() {
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    // Shorter than a block, around the edges of the first and of a later one; 36 tokens cross two or three more.
    let lengths = [1, 15, 16, 17, 319, 320, 321];
    every_policy_equals_dense("oasis-tiny", &model, &prompts.prose(400, 0), &lengths, 36);
}

#[test]
fn every_policy_with_room_for_all_blocks_equals_dense_on_llama() {
    let Some(folder) = shared("models/fixtures/llama") else { return };
    let model = load(folder.to_str().unwrap(), None);
    let text: Vec<TokenId> = (0..200).map(|i| TokenId((i * 37 + 11) % 320)).collect();
    every_policy_equals_dense("llama", &model, &text, &[1, 7, 31, 32, 33, 160], 40);
}

#[test]
fn every_policy_with_room_for_all_blocks_equals_dense_on_random_weights() {
    let text: Vec<TokenId> = (0..200).map(|i| TokenId((i * i * 7 + i) % synthetic::VOCAB as u32)).collect();
    every_policy_equals_dense("synthetic", &synthetic::model(5), &text, &[1, 47, 48, 49], 50);
}

#[test]
fn a_prefill_in_chunks_of_its_own_equals_a_resumed_one() {
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let text = prompts.prose(333, 3);
    let mut state = Vec::new();
    for budget in [8, 1000] {
        let (tokens, logits) = greedy(&mut sparse(&model, budget, &[], Tracer::default()), &text, 24);
        let resumed = decode(&mut sparse(&model, budget, &[], Tracer::default()), &read(&model, &text, 512), 24);
        assert_eq!(resumed.tokens, tokens);
        assert!(logits.iter().map(|l| bits(l)).eq(resumed.logits), "K {budget}");
        state.push(logits);
    }
    assert!(state[0] != state[1], "eight blocks of twenty must change the logits, or the test tests nothing");
}

/// Entries that were seen, `(layer, head, block)`, as bits.
type Entries = Arc<Mutex<HashMap<(LayerId, KvHead, BlockId), Vec<u32>>>>;

/// Checks the working set of every layer and step: as many blocks as there may be, none twice, none of the future, and
/// each with the entry it had when it was first seen.
struct Audit {
    seen: Entries,
    /// Steps before which a working set may not have been chosen.
    first: u64,
    steps: HashMap<LayerId, u64>,
    /// Views with a full working set.
    full: Arc<Mutex<usize>>,
}

impl StepObserver for Audit {
    fn layer(&mut self, view: &LayerView<'_>) {
        let step = self.steps.entry(view.layer).or_default();
        *step += 1;
        let held = view.resident.unwrap();
        let (set, complete) = (view.set, held.tail.block().index());
        let mut seen = self.seen.lock().unwrap();
        for head in (0..held.geometry().kv_heads).map(KvHead::from) {
            let resident = held.in_block_order(head);
            let blocks: BTreeSet<BlockId> = resident.iter().map(|&(block, _)| block).collect();
            assert_eq!(blocks.len(), resident.len(), "a block is in two slots");
            assert!(blocks.iter().all(|b| b.index() < complete), "a block of the future is resident");
            if *step >= self.first || complete <= set.slots() {
                assert_eq!(blocks.len(), set.slots().min(complete), "step {step}: a slot is free, or too much is held");
                *self.full.lock().unwrap() += 1;
            }
            for (block, slot) in resident {
                let entry = bits(held.slot(head, slot));
                let first = seen.entry((view.layer, head, block)).or_insert_with(|| entry.clone());
                assert!(*first == entry, "layer {}, head {head}, block {block}: another entry than before", view.layer);
            }
        }
    }
}

#[test]
fn every_slot_holds_the_entry_of_its_block_whatever_comes_and_goes() {
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    let count = 60;
    for (length, budget) in [(400, 8), (400, 24), (400, 25), (400, 26), (30, 3), (1, 1)] {
        let state = read(&model, &prompts.prose(length, 1), 512);
        // A dense cache holds the entries of the whole prompt.
        let seen = Entries::default();
        let audit = |first| {
            let full = Arc::new(Mutex::new(0));
            (Audit { seen: seen.clone(), first, steps: HashMap::new(), full: full.clone() }, full)
        };
        let mut reference = dense(&model, 512);
        reference.set_observer(Some(Box::new(audit(1).0)));
        decode(&mut reference, &state, 2);

        for predictor in ["draft-query", "last-query", "exact"] {
            for selector in ["capped-lru", "fetch-all", "static"] {
                // What comes after the prompt depends on the policy.
                let blocks_of_prompt = (length / BLOCK) as u32;
                seen.lock().unwrap().retain(|(_, _, block), _| block.0 < blocks_of_prompt);
                let settings = [format!("predictor.kind={predictor}"), format!("selector.kind={selector}")];
                let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
                let mut executor = sparse(&model, budget, &settings, Tracer::default());
                // The exact choice for a step is made after the audit has seen it.
                let (audit, full) = audit(if predictor == "exact" { 3 } else { 2 });
                executor.set_observer(Some(Box::new(audit)));
                decode(&mut executor, &state, count);
                assert!(*full.lock().unwrap() > 6 * 2 * (count - 5), "{length}, {budget}, {settings:?}");
                let stats = executor.stats();
                let crossed = stats.filled_entries + stats.admitted_entries;
                if largest_context(length, count) <= budget {
                    assert_eq!(crossed, 0, "{length}, {budget}, {settings:?}: everything was resident");
                }
                if selector == "static" {
                    assert_eq!(stats.admitted_entries, 0);
                }
                if length == 400 && budget == 8 && selector != "static" {
                    assert!(stats.admitted_entries > 0, "nothing came and went: {settings:?}");
                }
            }
        }
    }
}

#[test]
fn one_slot_too_few_changes_nothing_before_the_slots_are_full() {
    let (model, prompts) = (oasis_tiny(), Prompts::new());
    // 300 tokens are 18 blocks and 12 tokens; blocks 19, 20, 21 are completed by decode steps 4, 20 and 36.
    let state = read(&model, &prompts.prose(300, 2), 512);
    let expected = decode(&mut dense(&model, 512), &state, 40);
    for (predictor, budget, same) in [
        // The first step of a long context sees the full KV, so its logits and the prefill's are dense.
        ("draft-query", 17, 2),
        ("last-query", 17, 2),
        ("exact", 17, 2),
        // Step 4 itself still attends to every block: 18 resident, the 19th in the tail. So does the next one.
        ("draft-query", 18, 5),
        ("draft-query", 19, 21),
        ("draft-query", 20, 37),
        ("draft-query", 21, 40),
    ] {
        let setting = format!("predictor.kind={predictor}");
        let got = decode(&mut sparse(&model, budget, &[&setting], Tracer::default()), &state, 40);
        let agree = got.logits.iter().zip(&expected.logits).take_while(|(a, b)| a == b).count();
        assert_eq!(agree, same, "{predictor}, K {budget}: so many logits are dense's");
    }
}
