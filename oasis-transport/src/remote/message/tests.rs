use super::*;
use oasis_core::testkit::{Random, for_all, fuzz_cases};

fn text(random: &mut Random) -> String {
    (0..random.below(12)).map(|_| random.any::<char>()).collect()
}

fn words(random: &mut Random) -> Vec<u32> {
    (0..random.below(9)).map(|_| random.any()).collect()
}

fn nonce(random: &mut Random) -> [u8; 32] {
    std::array::from_fn(|_| random.any())
}

fn floats(random: &mut Random) -> Vec<f32> {
    let count = random.below(9);
    random.floats(count)
}

fn sampling(random: &mut Random) -> SamplingParams {
    SamplingParams { temperature: random.float(), top_p: random.float(), top_k: random.below(100), seed: random.any() }
}

fn layer(random: &mut Random) -> LayerHandOver {
    let slots = (0..random.below(4)).map(|_| {
        let held = |random: &mut Random| HeldSlot {
            slot: SlotId(random.any()),
            block: BlockId(random.any()),
            last_selected: Step(random.any()),
            times_selected: random.any(),
        };
        (0..random.below(4)).map(|_| held(random)).collect()
    });
    let slots = slots.collect();
    LayerHandOver { summaries: words(random), tail: floats(random), query: floats(random), slots }
}

fn state(random: &mut Random) -> HandOver {
    let draft = random.any::<bool>().then(|| DraftHandOver {
        keys: floats(random),
        values: floats(random),
        taps: floats(random),
    });
    HandOver {
        prompt_tokens: random.below(1 << 30),
        steps: random.any(),
        last_step: Step(random.any()),
        sampler_words: random.any(),
        layers: Vec::new(),
        draft,
    }
}

/// A message of the given kind, 1 to 19.
fn message(random: &mut Random, kind: usize) -> Message {
    let request = random.any();
    match kind {
        1 => Message::Hello {
            version: random.any(),
            service: random.pick(&[Service::Prefill, Service::Decode]),
            nonce: nonce(random),
        },
        2 => Message::Challenge { nonce: nonce(random), proof: nonce(random) },
        3 => {
            let facts = (0..random.below(4)).map(|_| Fact { name: text(random), value: text(random) });
            let facts = facts.collect();
            Message::Proof { proof: nonce(random), facts }
        }
        4 => Message::Welcome,
        5 => Message::Refused { request, reason: text(random) },
        6 => Message::Prefill {
            request,
            max_new_tokens: random.any(),
            sampling: sampling(random),
            prompt: words(random),
        },
        7 => Message::Progress { request, done: random.any(), total: random.any() },
        8 => {
            let second = random.any::<bool>().then(|| (random.any(), state(random)));
            Message::Admitted { request, first: random.any(), second, lease_ms: random.any() }
        }
        9 => Message::Layer { request, layer: layer(random) },
        10 => {
            let parts = (0..random.below(4)).map(|_| BlockRead {
                request: random.any(),
                layer: LayerId(random.any()),
                blocks: words(random).into_iter().map(BlockId).collect(),
            });
            Message::Read { id: request, parts: parts.collect() }
        }
        11 => {
            let parts = (0..random.below(4)).map(|_| match random.any() {
                true => Ok((0..random.below(20)).map(|_| random.any()).collect()),
                false => Err(text(random)),
            });
            Message::Blocks { id: request, parts: parts.collect() }
        }
        12 => Message::Renew { requests: (0..random.below(5)).map(|_| random.any()).collect() },
        13 => Message::Release { request },
        14 => Message::Generate {
            max_new_tokens: random.any(),
            sampling: sampling(random),
            stop_tokens: words(random),
            prompt: words(random),
        },
        15 => Message::Token { token: random.any() },
        16 => {
            let mut metrics = NodeMetrics::default();
            metrics.values_mut().into_iter().for_each(|value| *value = random.any());
            Message::Finished { stopped: random.any(), metrics }
        }
        17 => Message::OpenPool,
        18 => Message::Pool { descriptor: (0..random.below(90)).map(|_| random.any()).collect() },
        19 => {
            let layers = (0..random.below(4)).map(|_| (0..random.below(9)).map(|_| random.any()).collect());
            let layers = layers.collect();
            Message::Places { request, places: Places { epoch: random.any(), epoch_at: random.any(), layers } }
        }
        _ => unreachable!("nineteen kinds"),
    }
}

#[test]
fn every_message_reads_as_it_was_written() {
    for_all(300, |random| {
        for kind in 1..=19 {
            let message = message(random, kind);
            let bytes = message.encode();
            assert_eq!(bytes[0] as usize, kind, "{}", message.name());
            assert_eq!(Message::decode(&bytes), Ok(message));
        }
    });
}

#[test]
fn a_message_that_is_cut_anywhere_or_goes_on_is_refused() {
    for_all(40, |random| {
        for kind in 1..=19 {
            let mut bytes = message(random, kind).encode();
            for end in 0..bytes.len() {
                Message::decode(&bytes[..end]).expect_err("a message without its end");
            }
            bytes.push(0);
            Message::decode(&bytes).expect_err("a message with something after it");
        }
    });
}

#[test]
fn changed_and_random_bytes_are_read_or_refused_and_nothing_else() {
    for_all(fuzz_cases(500), |random| {
        for kind in 1..=19 {
            let mut bytes = message(random, kind).encode();
            for _ in 0..random.within(1, 4) {
                let at = random.below(bytes.len());
                let any = random.any();
                bytes[at] = random.pick(&[0, 1, 0x7f, 0xff, any]);
            }
            if let Ok(read) = Message::decode(&bytes) {
                // Whatever it is now, it is that message: the same bytes again, but for NaN, which equals nothing.
                assert_eq!(read.encode(), bytes);
            }
        }
        let garbage: Vec<u8> = (0..random.below(200)).map(|_| random.any()).collect();
        if let Ok(read) = Message::decode(&garbage) {
            assert_eq!(read.encode(), garbage);
        }
    });
}

#[test]
fn a_count_beyond_the_message_takes_no_memory() {
    // 4 Gi - 1 tokens of a prompt that has none.
    let mut bytes =
        Message::Prefill { request: 1, max_new_tokens: 1, sampling: SamplingParams::default(), prompt: Vec::new() }
            .encode();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&[0xff; 4]);
    let error = Message::decode(&bytes).unwrap_err();
    assert_eq!(error.to_string(), "damaged message: expected 4294967295 elements of 4 bytes, found 0 bytes");
}

#[test]
fn a_state_is_sent_layer_by_layer() {
    let mut random = Random::new(1);
    let whole = HandOver { layers: vec![layer(&mut random), layer(&mut random)], ..state(&mut random) };
    let (head, layers) = split_hand_over(whole.clone());
    assert!(head.layers.is_empty());
    assert_eq!(HandOver { layers, ..head }, whole);
}
