//! Networks and nodes that fail, leases that end, requests that are cancelled.

use crate::{LIMIT, alone, setup};
use oasis_core::ids::RequestId;
use oasis_nodes::{PrefillNode, PrefillOptions, TransferMode};
use oasis_tests::drive::request;
use oasis_tests::nodes::{Network, Said, Setup, assert_idle, eventually, run};
use oasis_tests::survivors::{prompt, requests};
use oasis_tests::within;
use std::time::{Duration, Instant};

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
    eventually("a later request is answered", || {
        let (_, again) = run(&mut decode, &requests()[..1], |_, _, _| ());
        // On a busy machine an honest answer may miss a short deadline too.
        let is_late = again[0].error.as_ref().is_some_and(|error| error.contains("no answer within"));
        assert!(is_late || again[0] == expected[0], "a later request: {:?}", again[0]);
        !is_late
    });
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
            oasis_tests::drive::assert_nothing_held(decode.executor().inner());

            let store = oasis_core::config::Resolved::new(&[]).unwrap().config.store.build().unwrap();
            let options = PrefillOptions {
                listen: address.to_string(),
                terms: setup.terms(),
                lease: setup.lease,
                wait: Duration::from_secs(1),
                staging: None,
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
