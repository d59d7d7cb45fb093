//! Who may connect, and what a peer may read.

use crate::{LIMIT, setup};
use oasis_core::executor::Executor;
use oasis_core::geometry::{KvDtype, KvGeometry};
use oasis_core::ids::{BlockId, LayerId};
use oasis_core::sampling::SamplingParams;
use oasis_nodes::{PrefillNode, PrefillOptions, TransferMode, node_facts};
use oasis_tests::nodes::{Setup, assert_idle, eventually, run};
use oasis_tests::survivors::{prompt, requests};
use oasis_tests::{synthetic, within};
use oasis_transport::remote::{BlockRead, Message, PartResult, Service, Session, Terms, connect};
use std::time::Duration;

/// The answers to reads of a session, one part each.
async fn read(session: &mut Session, parts: Vec<BlockRead>) -> Vec<PartResult> {
    session.post(&Message::Read { id: 77, parts }).unwrap();
    loop {
        if let Message::Blocks { id: 77, parts } = session.next().await.unwrap().message {
            return parts;
        }
    }
}

/// Asks for a prompt and waits for its state.
async fn ask(session: &mut Session, number: u64, tokens: usize, layers: usize) -> Message {
    let prompt = prompt(tokens, tokens as u32).into_iter().map(|token| token.0).collect();
    let sampling = SamplingParams::default();
    session.post(&Message::Prefill { request: number, max_new_tokens: 9, sampling, prompt }).unwrap();
    let mut left = layers;
    let mut admitted = None;
    while left > 0 {
        match session.next().await.unwrap().message {
            Message::Progress { .. } => {}
            Message::Layer { .. } => left -= 1,
            Message::Refused { request, reason } => return Message::Refused { request, reason },
            other => admitted = Some(other),
        }
    }
    admitted.expect("the state comes before its layers")
}

#[test]
fn a_peer_reads_what_it_was_granted_and_nothing_else() {
    within(LIMIT, || {
        let setup = setup("draft-query", "fetch-all");
        let prefill = setup.prefill();
        let layers = setup.model.spec().layers;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let open = || async { connect(prefill.address(), Service::Prefill, &setup.terms()).await.unwrap() };
            let (mut first, mut second) = (open().await, open().await);
            assert!(matches!(ask(&mut first, 1, 35, layers).await, Message::Admitted { request: 1, .. }));
            // The same number is another request in another session: 10 blocks of it, 9 of the first.
            assert!(matches!(ask(&mut second, 1, 43, layers).await, Message::Admitted { request: 1, .. }));
            let part = |request, layer, blocks: &[u32]| {
                let blocks = blocks.iter().copied().map(BlockId).collect();
                BlockRead { request, layer: LayerId(layer), blocks }
            };
            let parts =
                vec![part(1, 0, &[0, 8]), part(2, 0, &[0]), part(1, 2, &[0]), part(1, 1, &[9]), part(1, 1, &[])];
            let answers = read(&mut first, parts).await;
            let block_bytes = 2 * 2 * 4 * 16 * 4;
            assert_eq!(answers[0].as_ref().map(Vec::len), Ok(2 * block_bytes));
            let refused = |answer: &PartResult| answer.clone().unwrap_err();
            assert_eq!(refused(&answers[1]), "expected a request of this session, found none");
            assert_eq!(refused(&answers[2]), "expected a layer below 2, found 2");
            assert_eq!(refused(&answers[3]), "expected a block of the 9 that were granted, found 9");
            assert_eq!(answers[4], Ok(Vec::new()));
            let other = read(&mut second, vec![part(1, 0, &[0, 9])]).await;
            assert!(
                other[0].is_ok()
                    && other[0].as_ref().unwrap()[..block_bytes] != answers[0].as_ref().unwrap()[..block_bytes]
            );
            // The same block again and again: more than one answer may hold.
            let huge = read(&mut first, vec![part(1, 0, &[3; 20_000])]).await;
            assert!(refused(&huge[0]).contains("bytes a read"), "{huge:?}");

            let taken = ask(&mut first, 1, 8, layers).await;
            assert!(
                matches!(&taken, Message::Refused { request: 1, reason } if reason.contains("no other")),
                "{taken:?}"
            );
            let unknown = Message::Prefill {
                request: 9,
                max_new_tokens: 4,
                sampling: SamplingParams::default(),
                prompt: vec![64],
            };
            first.post(&unknown).unwrap();
            let refused = loop {
                match first.next().await.unwrap().message {
                    Message::Progress { .. } => {}
                    other => break other,
                }
            };
            assert!(matches!(&refused, Message::Refused { request: 9, reason } if reason.contains("vocabulary")));

            first.post(&Message::Release { request: 1 }).unwrap();
            let gone = read(&mut first, vec![part(1, 0, &[0])]).await;
            assert_eq!(gone[0].clone().unwrap_err(), "expected a request of this session, found none");
            assert_eq!(prefill.status().granted, 1);
            // What is out of place ends the session, and with it what it held.
            second.post(&Message::Welcome).unwrap();
            assert!(second.next().await.is_err());
        });
        eventually("nothing is held", || prefill.status().granted == 0 && prefill.status().store.used == 0);
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
        staging: None,
    };
    let error = PrefillNode::start(setup.executor(store.clone()), store, options).err().expect("a refusal");
    assert!(error.to_string().contains("expected a shared secret"), "{error}");
}

#[test]
fn a_node_of_a_cpu_refuses_one_of_a_gpu() {
    within(LIMIT, || {
        let setup = setup("draft-query", "fetch-all");
        let prefill = setup.prefill();
        let store = oasis_core::config::Resolved::new(&[]).unwrap().config.store.build().unwrap();
        let of_cpu = setup.executor(store).info().geometry;
        let geometry = KvGeometry { dtype: KvDtype::Bf16, ..of_cpu };
        let layout = oasis_cuda::layout::LAYOUT_VERSION;
        let facts = node_facts(setup.model.fingerprint(), &geometry, layout, setup.budget_blocks, &[]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let terms = Terms { facts, ..setup.terms() };
        let opened = runtime.block_on(connect(prefill.address(), Service::Prefill, &terms));
        let error = opened.err().expect("a refusal").to_string();
        assert!(error.contains("KV dtype: expected f32, found bf16; both nodes need the same"), "{error}");
    });
}
