//! Prefill and decode on two nodes say what one node says, whatever happens to the network, or say why not.

use oasis_core::engine::GenerateRequest;
use oasis_core::executor::Executor;
use oasis_core::ids::RequestId;
use oasis_core::sampling::SamplingParams;
use oasis_core::testkit::{Random, for_all, fuzz_cases};
use oasis_models::cpu::CpuOptions;
use oasis_nodes::{PrefillNode, PrefillOptions, TransferMode};
use oasis_tests::drive::request;
use oasis_tests::nodes::{Network, Said, Setup, assert_idle, eventually, run};
use oasis_tests::prompts::Prompts;
use oasis_tests::survivors::{prompt, requests};
use oasis_tests::{models, references, synthetic, within};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(200);
const BOTH: [TransferMode; 2] = [TransferMode::Full, TransferMode::Partial];

/// Random weights, blocks of 4 tokens, K of 3 blocks.
fn setup(predictor: &str, selector: &str) -> Setup {
    let options = CpuOptions { block_tokens: 4, prefill_chunk: 16, threads: 1, kv_memory: 0 };
    let settings = [format!("predictor.kind={predictor}"), format!("selector.kind={selector}")];
    Setup::new(synthetic::model(7), options, 3, &settings.each_ref().map(String::as_str))
}

fn alone(setup: &Setup, requests: &[GenerateRequest]) -> Vec<Said> {
    let said = requests.iter().map(|request| run(&mut setup.single(), std::slice::from_ref(request), |_, _, _| ()).1);
    let said: Vec<Said> = said.flatten().collect();
    assert!(said.iter().all(|said| said.finished), "{said:?}");
    said
}

/// Contexts that end just before, at and after a block, shorter and longer than the budget.
fn boundaries() -> Vec<GenerateRequest> {
    let lengths = [1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65];
    let mut requests: Vec<_> = lengths.iter().map(|&tokens| request(&prompt(tokens, tokens as u32), 18)).collect();
    requests.extend([1, 2, 3].map(|tokens| request(&prompt(30, 4), tokens)));
    let sampling = SamplingParams { temperature: 0.9, top_p: 0.95, top_k: 20, seed: 3 };
    requests.extend([19, 34].map(|tokens| GenerateRequest { sampling, ..request(&prompt(tokens, 5), 30) }));
    requests
}

#[test]
fn two_nodes_say_what_one_says() {
    within(LIMIT, || {
        for (predictor, selector) in [
            ("draft-query", "capped-lru"),
            ("last-query", "fetch-all"),
            ("exact", "fetch-all"),
            ("freekv", "lfu"),
            ("infinigen", "hysteresis"),
        ] {
            let setup = setup(predictor, selector);
            let requests = boundaries();
            let expected = alone(&setup, &requests);
            let prefill = setup.prefill();
            for transfer in BOTH {
                let mut decode = setup.decode(prefill.address(), transfer);
                let (ids, said) = run(&mut decode, &requests, |_, _, _| ());
                for (index, (said, expected)) in said.iter().zip(&expected).enumerate() {
                    let tokens = requests[index].prompt.len();
                    assert_eq!(said, expected, "{predictor}, {transfer:?}, a prompt of {tokens} tokens");
                }
                for id in ids {
                    let metrics = decode.executor().metrics(id).expect("the last thousand are remembered");
                    assert!(metrics.blocks <= metrics.prompt_blocks, "a block crossed twice: {metrics:?}");
                    if transfer == TransferMode::Full {
                        assert_eq!(metrics.misses, 0, "{metrics:?}");
                    }
                }
                assert_idle(&prefill, decode.executor());
            }
        }
    });
}

#[test]
fn dense_layers_cross_whole() {
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        setup.settings.push("kv.dense_layers=1".to_owned());
        let requests = [request(&prompt(35, 1), 18), request(&prompt(8, 2), 9)];
        let expected = alone(&setup, &requests);
        let prefill = setup.prefill();
        let mut decode = setup.decode(prefill.address(), TransferMode::Partial);
        let (ids, said) = run(&mut decode, &requests, |_, _, _| ());
        assert_eq!(said, expected);
        let metrics = decode.executor().metrics(ids[0]).unwrap();
        assert!(metrics.blocks >= 9 && metrics.blocks <= metrics.prompt_blocks, "{metrics:?}");
        assert_idle(&prefill, decode.executor());
    });
}

#[test]
fn partial_transfer_brings_less_and_fetches_what_is_missed_once() {
    within(LIMIT, || {
        let setup = setup("draft-query", "fetch-all");
        let requests = [request(&prompt(400, 1), 100)];
        let prefill = setup.prefill();
        let mut crossed = Vec::new();
        for transfer in BOTH {
            let sent = prefill.status().blocks_sent;
            let mut decode = setup.decode(prefill.address(), transfer);
            let (ids, _) = run(&mut decode, &requests, |_, _, _| ());
            let metrics = decode.executor().metrics(ids[0]).unwrap();
            assert_eq!(metrics.blocks, prefill.status().blocks_sent - sent);
            assert_eq!(metrics.blocks * metrics.block_bytes, metrics.admission_bytes + metrics.miss_bytes);
            crossed.push(metrics);
        }
        let [full, partial] = crossed.try_into().unwrap();
        // At most K blocks of each of 2 KV heads in each of 2 layers.
        assert!(partial.admission_bytes <= 2 * 2 * 3 * partial.block_bytes, "{partial:?}");
        assert!(partial.misses > 0 && partial.resident_bytes < full.resident_bytes, "{partial:?} {full:?}");
        assert_eq!(full.admission_bytes, 2 * 100 * full.block_bytes);
    });
}

/// Answers of real models, tokens of prose.
fn real(setup: &Setup, requests: &[GenerateRequest]) {
    let expected = alone(setup, requests);
    let prefill = setup.prefill();
    for transfer in BOTH {
        let mut decode = setup.decode(prefill.address(), transfer);
        assert_eq!(run(&mut decode, requests, |_, _, _| ()).1, expected, "{transfer:?}");
        assert_idle(&prefill, decode.executor());
    }
}

#[test]
fn oasis_tiny_says_the_same_on_two_nodes() {
    within(LIMIT, || {
        let prompts = Prompts::new();
        let requests = [request(&prompts.passkey(48213, 700, 0), 24), request(&prompts.prose(500, 1), 40)];
        real(&Setup::new(models::oasis_tiny(), models::options(256), 8, &[]), &requests);
    });
}

#[test]
fn smollm2_says_the_same_on_two_nodes() {
    let Some(path) = references::smollm2() else { return };
    within(LIMIT, move || {
        let model = models::load(path.to_str().unwrap(), None);
        let tokens = |count: u32, seed: u32| {
            (0..count).map(|i| oasis_core::ids::TokenId((i * 7919 + i * i * seed) % 40_000 + 100)).collect::<Vec<_>>()
        };
        let requests = [request(&tokens(600, 3), 24), request(&tokens(337, 5), 24)];
        real(&Setup::new(model, models::options(256), 12, &["predictor.kind=last-query"]), &requests);
    });
}

/// Three requests of which each answers as it does alone, or fails with one reason; nothing is held afterwards, and a
/// later request is answered.
fn survive(
    setup: &Setup,
    prefill: &PrefillNode,
    network: &Network,
    mut fault: impl FnMut(&Network, usize, &[Said]),
) -> Vec<Option<String>> {
    let expected = alone(setup, &requests());
    let mut decode = setup.decode(network.address(), TransferMode::Partial);
    let start = Instant::now();
    let (_, said) = run(&mut decode, &requests(), |_, number, said| fault(network, number, said));
    assert!(start.elapsed() < 10 * setup.timeout + Duration::from_secs(10), "late: {:?}", start.elapsed());
    for (said, expected) in said.iter().zip(&expected) {
        match said.error {
            None => assert_eq!(said, expected),
            Some(_) => assert_eq!(said.tokens, expected.tokens[..said.tokens.len()], "what it said before it failed"),
        }
    }
    network.stop(false);
    network.delay(Duration::ZERO);
    network.cut_after(u64::MAX);
    let (_, again) = run(&mut decode, &requests()[..1], |_, _, _| ());
    assert_eq!(again[0], expected[0], "a later request");
    assert_idle(prefill, decode.executor());
    said.into_iter().map(|said| said.error).collect()
}

#[test]
fn a_network_that_is_cut_anywhere_ends_requests_with_a_reason() {
    within(LIMIT, || {
        let setup = setup("draft-query", "fetch-all");
        let prefill = setup.prefill();
        let network = Network::new(prefill.address());
        assert_eq!(survive(&setup, &prefill, &network, |_, _, _| ()), [None, None, None]);
        // Of the three requests and the one after them.
        let whole = network.passed() * 3 / 4;
        let mut failed = 0;
        for cut in 0..25 {
            // From the first byte of the greeting to the last miss.
            let after = whole * cut / 24;
            let errors = survive(&setup, &prefill, &network, |network, number, _| {
                if number == 0 {
                    network.cut_after(after);
                }
            });
            for error in errors.iter().flatten() {
                let reason = format!("prefill node {}: the peer closed the connection", network.address());
                assert!(error.contains(&reason), "{error}");
            }
            failed += errors.iter().flatten().count();
        }
        assert!(failed >= 12, "{failed} requests failed");
    });
}

#[test]
fn a_slow_network_changes_no_token_and_a_silent_one_ends_in_time() {
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        let prefill = setup.prefill();
        let network = Network::new(prefill.address());
        let delay = Duration::from_millis(3);
        assert_eq!(survive(&setup, &prefill, &network, |n, _, _| n.delay(delay)), [None, None, None]);

        // In every state: before the session, while a prompt is read, while blocks are fetched.
        setup.timeout = Duration::from_millis(400);
        let prefill = setup.prefill();
        let network = Network::new(prefill.address());
        for tokens in [0, 1, 2, 5] {
            let errors = survive(&setup, &prefill, &network, |network, _, said| {
                network.stop(said[0].tokens.len() >= tokens);
            });
            let first = errors[0].as_deref();
            let reasons = ["no answer within 400 ms", "the peer closed the connection"];
            // The first may have all it needs already.
            assert!(tokens > 2 || first.is_some_and(|e| reasons.iter().any(|r| e.contains(r))), "{tokens}: {errors:?}");
            assert!(errors[2].is_some(), "{tokens}: {errors:?}");
        }
    });
}

/// What one random case does to the network, and when.
fn random_fault(random: &mut Random, bytes: u64) -> impl FnMut(&Network, usize, &[Said]) + use<> {
    let (kind, at) = (random.below(4), random.below(30));
    let after = random.below(bytes as usize) as u64;
    let delay = Duration::from_millis(random.below(4) as u64);
    move |network, number, said| {
        if number == 0 {
            network.delay(delay);
        }
        match kind {
            0 if number == 0 => network.cut_after(after),
            1 if said.iter().map(|said| said.tokens.len()).sum::<usize>() == at => network.cut(),
            // Longer than the deadline, or shorter.
            2 => network.stop(said.iter().map(|said| said.tokens.len()).sum::<usize>() >= at),
            3 if number == at => {
                network.stop(true);
                std::thread::sleep(Duration::from_millis(20));
                network.stop(false);
            }
            _ => {}
        }
    }
}

#[test]
fn random_faults_give_no_wrong_token_and_leave_nothing() {
    within(Duration::from_secs(1500), || {
        let mut setup = setup("draft-query", "fetch-all");
        setup.timeout = Duration::from_millis(150);
        let prefill = setup.prefill();
        let network = Network::new(prefill.address());
        survive(&setup, &prefill, &network, |_, _, _| ());
        let bytes = network.passed();
        let mut failed = 0;
        for_all(fuzz_cases(40), |random| {
            let fault = random_fault(random, bytes);
            failed += survive(&setup, &prefill, &network, fault).iter().flatten().count();
        });
        assert!(failed > 10, "{failed} requests failed");
    });
}

#[test]
fn a_prefill_node_that_dies_ends_its_requests_and_its_successor_serves_new_ones() {
    within(LIMIT, || {
        let setup = setup("draft-query", "fetch-all");
        let expected = alone(&setup, &requests());
        for tokens in [0, 1, 4] {
            let mut prefill = Some(setup.prefill());
            let address = prefill.as_ref().unwrap().address();
            let mut decode = setup.decode(address, TransferMode::Partial);
            let (_, said) = run(&mut decode, &requests(), |_, _, said| {
                if said[0].tokens.len() >= tokens {
                    prefill = None;
                }
            });
            assert!(said.iter().all(|said| said.finished != said.error.is_some()), "{said:?}");
            assert!(said[2].error.as_ref().is_some_and(|e| e.contains("prefill node")), "{said:?}");
            oasis_tests::drive::assert_nothing_held(decode.executor().cpu());

            let store = oasis_core::config::Resolved::new(&[]).unwrap().config.store.build().unwrap();
            let options = PrefillOptions {
                listen: address.to_string(),
                terms: setup.terms(),
                lease: setup.lease,
                wait: Duration::from_secs(1),
            };
            let successor = PrefillNode::start(setup.executor(store.clone()), store, options).unwrap();
            assert_eq!(run(&mut decode, &requests(), |_, _, _| ()).1, expected);
            assert_idle(&successor, decode.executor());
        }
    });
}

#[test]
fn a_lease_ends_without_a_sign_of_life_and_the_reason_is_told() {
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        setup.lease = Duration::from_millis(300);
        let prefill = setup.prefill();
        let network = Network::new(prefill.address());
        let request = request(&prompt(400, 1), 100);
        let expected = alone(&setup, std::slice::from_ref(&request));
        let mut decode = setup.decode(network.address(), TransferMode::Partial);

        // Idle for longer than the lease: the node renews it by itself.
        let (_, said) = run(&mut decode, std::slice::from_ref(&request), |_, _, said| {
            if said[0].tokens.len() == 10 {
                std::thread::sleep(2 * setup.lease);
                assert_eq!(prefill.status().granted, 1);
            }
        });
        assert_eq!(said, expected);

        // What renews it does not get through.
        let (_, said) = run(&mut decode, &[request], |_, _, said| {
            if said[0].tokens.len() == 10 && prefill.status().granted == 1 {
                network.stop(true);
                eventually("the lease ends", || prefill.status().granted == 0);
                assert_eq!(prefill.status().store.used, 0);
                network.stop(false);
            }
        });
        let error = said[0].error.as_ref().expect("its blocks are gone");
        assert!(error.contains("its lease of 300 ms has ended"), "{error}");
        assert_eq!(said[0].tokens, expected[0].tokens[..said[0].tokens.len()]);
        assert_idle(&prefill, decode.executor());
    });
}

#[test]
fn a_request_can_be_cancelled_in_every_state() {
    within(LIMIT, || {
        let setup = setup("draft-query", "fetch-all");
        let prefill = setup.prefill();
        let network = Network::new(prefill.address());
        network.delay(Duration::from_millis(1));
        let expected = alone(&setup, &requests());
        let mut decode = setup.decode(network.address(), TransferMode::Partial);
        for step in 0..40 {
            let base = decode.submit(requests()[0].clone()).unwrap().0;
            decode.cancel(RequestId(base));
            let victim = RequestId(base + 1);
            let (_, said) = run(&mut decode, &requests(), |engine, number, _| {
                if number == step {
                    engine.cancel(victim);
                }
            });
            assert!(said[0].tokens == expected[0].tokens[..said[0].tokens.len()] && said[0].error.is_none());
            assert_eq!(said[1..], expected[1..], "cancelled before step {step}");
            assert_idle(&prefill, decode.executor());
        }
    });
}

#[test]
fn a_staging_pool_that_is_full_makes_a_prompt_wait() {
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        // Room for one of the three prompts, each of 8 to 10 blocks in 2 layers.
        setup.staging = 2 * 11 * setup.single().executor().info().geometry.block_bytes() as u64;
        let expected = alone(&setup, &requests());
        let prefill = setup.prefill();
        let mut decode = setup.decode(prefill.address(), TransferMode::Partial);
        let (_, said) = run(&mut decode, &requests(), |_, _, _| assert!(prefill.status().granted <= 1));
        assert_eq!(said, expected);
        let (_, said) = run(&mut decode, &[request(&prompt(60, 1), 9)], |_, _, _| ());
        let error = said[0].error.as_ref().expect("a prompt that never fits");
        assert!(error.contains("the KV store is too small"), "{error}");
        assert_idle(&prefill, decode.executor());
    });
}

#[test]
fn nodes_that_do_not_agree_refuse_each_other() {
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        setup.secret = "open sesame".to_owned();
        let prefill = setup.prefill();
        let error_of = |other: &Setup| {
            let mut decode = other.decode(prefill.address(), TransferMode::Partial);
            let (_, said) = run(&mut decode, &requests()[..1], |_, _, _| ());
            assert_idle(&prefill, decode.executor());
            said[0].error.clone().expect("a refusal")
        };
        let mut other = setup.clone();
        other.secret = "open barley".to_owned();
        let error = error_of(&other);
        assert!(error.contains("the shared secrets differ") && !error.contains("barley"), "{error}");
        other = setup.clone();
        other.model = synthetic::model(8);
        assert!(error_of(&other).contains("refused: weights: expected "), "{}", error_of(&other));
        other = setup.clone();
        other.budget_blocks = 4;
        assert!(error_of(&other).contains("kv.budget_blocks: expected 3, found 4; both nodes need the same"));
        other = setup.clone();
        other.options.block_tokens = 8;
        assert!(error_of(&other).contains("kv.block_tokens: expected 4, found 8; both nodes need the same"));
    });
}

#[test]
fn other_addresses_than_loopback_need_a_secret() {
    let setup = setup("draft-query", "fetch-all");
    let store = oasis_core::config::Resolved::new(&[]).unwrap().config.store.build().unwrap();
    let options = PrefillOptions {
        listen: "0.0.0.0:0".to_owned(),
        terms: setup.terms(),
        lease: setup.lease,
        wait: Duration::from_secs(1),
    };
    let error = PrefillNode::start(setup.executor(store.clone()), store, options).err().expect("a refusal");
    assert!(error.to_string().contains("expected a shared secret"), "{error}");
}
