//! Blocks read from the prefill node's memory, by UCX over TCP: the same tokens, the same traffic, and clear ends.

use crate::{LIMIT, alone, setup};
use oasis_core::engine::GenerateRequest;
use oasis_core::ids::TokenId;
use oasis_nodes::TransferMode;
use oasis_tests::drive::request;
use oasis_tests::nodes::{Setup, assert_idle, has_ucx, run};
use oasis_tests::prompts::Prompts;
use oasis_tests::survivors::{prompt, requests};
use oasis_tests::{models, references, within};
use std::time::{Duration, Instant};

const BOTH: [TransferMode; 2] = [TransferMode::Full, TransferMode::Partial];

const MESSAGES_AND_READS: [bool; 2] = [false, true];

/// What one node says, two nodes say with reads of memory; and as much crosses as with messages, none of it by them.
fn say_the_same(mut setup: Setup, requests: &[GenerateRequest], reads: &[bool]) {
    let expected = alone(&setup, requests);
    for transfer in BOTH {
        let mut crossed = Vec::new();
        for &ucx in reads {
            setup.ucx = ucx;
            let prefill = setup.prefill();
            let mut decode = setup.decode(prefill.address(), transfer);
            let (ids, said) = run(&mut decode, requests, |_, _, _| ());
            assert_eq!(said, expected, "{transfer:?}, reads of memory: {ucx}");
            let metrics = ids.iter().map(|id| decode.executor().metrics(*id).unwrap());
            crossed.push(metrics.map(|m| (m.admission_bytes, m.blocks <= m.prompt_blocks)).collect::<Vec<_>>());
            assert_eq!(prefill.status().blocks_sent == 0, ucx, "messages with blocks");
            assert_idle(&prefill, decode.executor());
        }
        assert_eq!(crossed.first(), crossed.last(), "{transfer:?}");
        assert!(crossed[0].iter().all(|(_, once)| *once), "a block crossed twice");
    }
}

#[test]
fn reads_of_memory_say_what_one_node_says() {
    if !has_ucx() {
        return;
    }
    within(LIMIT, || {
        for (predictor, selector, dense) in
            [("draft-query", "capped-lru", 0), ("exact", "fetch-all", 1), ("freekv", "lfu", 0)]
        {
            let lengths = [1, 3, 4, 12, 13, 16, 33, 65];
            let requests: Vec<_> = lengths.map(|tokens| request(&prompt(tokens, tokens as u32), 18)).into();
            let mut setup = setup(predictor, selector);
            setup.settings.push(format!("kv.dense_layers={dense}"));
            say_the_same(setup, &requests, &MESSAGES_AND_READS);
        }
    });
}

#[test]
fn oasis_tiny_says_the_same_with_reads_of_memory() {
    if !has_ucx() {
        return;
    }
    within(LIMIT, || {
        let prompts = Prompts::new();
        let requests = [request(&prompts.passkey(48213, 700, 0), 24), request(&prompts.prose(500, 1), 40)];
        say_the_same(Setup::new(models::oasis_tiny(), models::options(256), 8, &[]), &requests, &MESSAGES_AND_READS);
    });
}

#[test]
fn smollm2_says_the_same_with_reads_of_memory() {
    let Some(path) = references::smollm2().filter(|_| has_ucx()) else { return };
    within(LIMIT, move || {
        let model = models::load(path.to_str().unwrap(), None);
        let tokens: Vec<TokenId> = (0..600).map(|i| TokenId((i * 7919 + i * i * 3) % 40_000 + 100)).collect();
        let setup = Setup::new(model, models::options(256), 12, &["predictor.kind=last-query"]);
        say_the_same(setup, &[request(&tokens, 24)], &[true]);
    });
}

#[test]
fn a_prefill_node_that_goes_ends_requests_with_a_reason() {
    if !has_ucx() {
        return;
    }
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        setup.ucx = true;
        let long = [request(&prompt(200, 1), 100), request(&prompt(90, 2), 60)];
        let expected = alone(&setup, &long);
        let mut prefill = Some(setup.prefill());
        let mut decode = setup.decode(prefill.as_ref().unwrap().address(), TransferMode::Partial);
        let (_, said) = run(&mut decode, &long, |_, _, said| {
            if said.iter().all(|said| said.tokens.len() > 8) {
                prefill = None;
            }
        });
        for (said, expected) in said.iter().zip(&expected) {
            assert!(expected.tokens.starts_with(&said.tokens), "{said:?}");
            assert_eq!(said.finished, said.error.is_none(), "{said:?}");
        }
        assert!(said.iter().any(|s| s.error.as_ref().is_some_and(|e| e.contains("prefill node"))), "{said:?}");
        oasis_tests::drive::assert_nothing_held(decode.executor().inner());
    });
}

#[test]
fn a_lease_that_has_ended_is_seen_by_reads_that_nobody_answers() {
    if !has_ucx() {
        return;
    }
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        setup.ucx = true;
        (setup.lease, setup.timeout) = (Duration::from_millis(300), Duration::from_secs(2));
        let prefill = setup.prefill();
        let network = oasis_tests::nodes::Network::new(prefill.address());
        let mut decode = setup.decode(network.address(), TransferMode::Partial);
        let mut stopped = None;
        let long = [request(&prompt(200, 1), 100)];
        let (_, said) = run(&mut decode, &long, |_, _, said| {
            // Renewals do not get through any more; reads of memory do not pass there.
            if said[0].tokens.len() > 8 && stopped.is_none() {
                network.stop(true);
                stopped = Some(Instant::now());
                oasis_tests::nodes::eventually("the lease ends", || prefill.status().granted == 0);
            }
        });
        assert!(said[0].error.is_some() && !said[0].finished, "{said:?}");
        assert!(stopped.unwrap().elapsed() < Duration::from_secs(20));
        network.stop(false);
        assert_idle(&prefill, decode.executor());
    });
}

#[test]
fn nodes_of_different_transports_say_so() {
    if !has_ucx() {
        return;
    }
    within(LIMIT, || {
        let mut setup = setup("draft-query", "fetch-all");
        let prefill = setup.prefill();
        setup.ucx = true;
        let mut decode = setup.decode(prefill.address(), TransferMode::Partial);
        let (_, said) = run(&mut decode, &requests(), |_, _, _| ());
        for said in said {
            let error = said.error.expect("no other transport is taken");
            assert!(error.contains("nodes.transport: expected blocks as messages (tcp)"), "{error}");
        }
        assert_idle(&prefill, decode.executor());
        // A node that lends memory still answers who asks for messages.
        let lends = setup.prefill();
        setup.ucx = false;
        let mut decode = setup.decode(lends.address(), TransferMode::Partial);
        assert_eq!(run(&mut decode, &requests(), |_, _, _| ()).1, alone(&setup, &requests()));
        assert_idle(&lends, decode.executor());
    });
}
