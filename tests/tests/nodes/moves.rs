//! Requests that move from one executor to another, again and again, without nodes between them.

use crate::{LIMIT, setup};
use oasis_core::config::Bytes;
use oasis_core::executor::{Executor, Sequence};
use oasis_core::hand_over::HandsOver;
use oasis_core::ids::RequestId;
use oasis_core::memory::{KvStore, StoreSpec};
use oasis_core::sampling::SamplingParams;
use oasis_tests::drive::assert_nothing_held;
use oasis_tests::moves::Chain;
use oasis_tests::survivors::prompt;
use oasis_tests::within;
use oasis_transport::stores::Dram;
use std::sync::Arc;

fn dram() -> Arc<dyn KvStore> {
    Dram { capacity: Bytes(1 << 30) }.build().unwrap()
}

#[test]
fn requests_say_the_same_wherever_they_move() {
    within(LIMIT, || {
        for (predictor, selector, draft_blocks) in [
            ("draft-query", "capped-lru", "\"all\""),
            ("draft-query", "fetch-all", "2"),
            ("last-query", "lfu", "\"all\""),
            ("exact", "fetch-all", "\"all\""),
        ] {
            let mut setup = setup(predictor, selector);
            setup.settings.push(format!("kv.draft_blocks={draft_blocks}"));
            let sampling =
                [SamplingParams::default(), SamplingParams { temperature: 0.9, seed: 3, ..Default::default() }];
            let lengths = [35, 3, 16, 61];
            let sequences = lengths.map(|tokens| Sequence {
                request: RequestId(tokens as u64),
                prompt: prompt(tokens, tokens as u32),
                max_new_tokens: 40,
                sampling: sampling[tokens % 2],
            });
            let chain = |length| Chain::new(length, dram, |store| setup.executor(store));
            let expected = chain(1).say(&sequences, 40, &[]);
            for moves in [&[2][..], &[2, 19], &[5, 6, 7, 8], &[39]] {
                let mut chain = chain(moves.len() + 1);
                assert_eq!(chain.say(&sequences, 40, moves), expected, "{predictor}, {moves:?}");
                chain.executors().for_each(|executor| assert_nothing_held(executor));
            }
        }
    });
}

#[test]
fn a_request_is_not_handed_over_before_its_prompt_and_not_taken_over_twice() {
    within(LIMIT, || {
        let setup = setup("last-query", "lfu");
        let mut chain = Chain::new(2, dram, |store| setup.executor(store));
        let request = RequestId(4);
        let sampling = SamplingParams::default();
        let sequence = Sequence { request, prompt: prompt(35, 1), max_new_tokens: 9, sampling };
        let first = chain.executors().next().unwrap();
        first.admit(sequence.clone()).unwrap();
        let error = first.hand_over(request).unwrap_err().to_string();
        assert_eq!(error, "request 4: its prompt has not been read yet");
        first.release(request);
        chain.begin(&sequence);
        chain.hand_on(0, &sequence);
        let mut executors = chain.executors();
        let (first, second) = (executors.next().unwrap(), executors.next().unwrap());
        let error = first.hand_over(request).unwrap_err().to_string();
        assert_eq!(error, "request 4: expected an admitted request, found none");
        let state = second.hand_over(request).unwrap();
        let error = second.take_over(request, &state).unwrap_err().to_string();
        assert_eq!(error, "request 4: expected an admitted request, found none");
    });
}
