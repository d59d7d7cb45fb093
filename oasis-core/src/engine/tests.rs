use super::*;
use crate::executor::{ExecutorInfo, ExecutorStats, RequestError};
use crate::geometry::{KvDtype, KvGeometry};
use crate::sampling::SamplingParams;
use std::collections::HashMap;

/// Each token is a function of the request's own prompt and the token before; prefill takes a chunk a prompt token.
struct Scripted {
    info: ExecutorInfo,
    /// Requests that fit at once.
    room: usize,
    /// Requests of longer prompts are refused.
    longest_prompt: usize,
    live: HashMap<RequestId, Live>,
    /// Prompts that are read in turn.
    at_once: usize,
    begins_alone: bool,
    /// Rows of each decode step.
    batches: Vec<usize>,
    released: Vec<RequestId>,
    fail_prefill_of: Option<TokenId>,
    /// A row with this input token fails.
    fail_token: Option<TokenId>,
    lost_at_step: Option<usize>,
}

struct Live {
    prompt: Vec<TokenId>,
    read: usize,
}

const VOCAB: usize = 1000;

fn next_token(prompt: &[TokenId], last: TokenId) -> TokenId {
    let sum: u32 = prompt.iter().map(|t| t.0).sum();
    TokenId((sum * 31 + last.0 * 7 + 1) % VOCAB as u32)
}

/// The tokens that a request gets, alone or not.
fn answer(prompt: &[u32], count: usize) -> Vec<TokenId> {
    let prompt: Vec<TokenId> = prompt.iter().copied().map(TokenId).collect();
    let first = next_token(&prompt, *prompt.last().unwrap());
    std::iter::successors(Some(first), |&last| Some(next_token(&prompt, last))).take(count).collect()
}

impl Scripted {
    fn new(room: usize) -> Self {
        let geometry =
            KvGeometry { layers: 1, q_heads: 1, kv_heads: 1, head_dim: 8, block_tokens: 16, dtype: KvDtype::F32 };
        let info = ExecutorInfo {
            device: "scripted".to_owned(),
            geometry,
            budget_blocks: None,
            cap: 0,
            vocab: VOCAB,
            max_context: 64,
        };
        Self {
            info,
            room,
            longest_prompt: 20,
            live: HashMap::new(),
            at_once: 1,
            begins_alone: false,
            batches: Vec::new(),
            released: Vec::new(),
            fail_prefill_of: None,
            fail_token: None,
            lost_at_step: None,
        }
    }
}

impl Executor for Scripted {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn admit(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        if sequence.prompt.len() > self.longest_prompt {
            return Ok(Admission::Refused { reason: "larger than the whole store".to_owned() });
        }
        if self.live.len() >= self.room {
            return Ok(Admission::Wait { reason: "no room now".to_owned() });
        }
        let former = self.live.insert(sequence.request, Live { prompt: sequence.prompt, read: 0 });
        assert!(former.is_none(), "admitted twice");
        Ok(Admission::Admitted)
    }

    fn prefill(&mut self, request: RequestId) -> Result<PrefillProgress, RequestError> {
        let live = self.live.get_mut(&request).expect("an admitted request");
        live.read += 1;
        if self.fail_prefill_of == Some(live.prompt[live.read - 1]) {
            return Err(RequestError("the prompt cannot be read".to_owned()));
        }
        let (done, total) = (live.read, live.prompt.len());
        Ok(match done == total {
            true => PrefillProgress::Done(next_token(&live.prompt, live.prompt[total - 1])),
            false => PrefillProgress::Running { done, total },
        })
    }

    fn prompts_at_once(&self) -> usize {
        self.at_once
    }

    fn begins_alone(&self) -> bool {
        self.begins_alone
    }

    fn decode(&mut self, rows: &[DecodeRow]) -> anyhow::Result<Vec<Result<TokenId, RequestError>>> {
        self.batches.push(rows.len());
        anyhow::ensure!(self.lost_at_step != Some(self.batches.len()), "the device is lost");
        let token = |row: &DecodeRow| match self.fail_token == Some(row.token) {
            true => Err(RequestError("a block is missing".to_owned())),
            false => Ok(next_token(&self.live[&row.request].prompt, row.token)),
        };
        Ok(rows.iter().map(token).collect())
    }

    fn release(&mut self, request: RequestId) {
        self.live.remove(&request);
        self.released.push(request);
    }

    fn stats(&self) -> ExecutorStats {
        ExecutorStats { steps: self.batches.len() as u64, ..ExecutorStats::default() }
    }
}

fn request(prompt: &[u32], max_new_tokens: usize) -> GenerateRequest {
    let prompt = prompt.iter().copied().map(TokenId).collect();
    GenerateRequest { prompt, max_new_tokens, stop_tokens: Vec::new(), sampling: SamplingParams::default() }
}

/// What became of a request.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    tokens: Vec<TokenId>,
    end: Option<Result<FinishReason, String>>,
}

#[derive(Default)]
struct Outcomes(HashMap<RequestId, Outcome>);

impl Outcomes {
    fn take(&mut self, events: Vec<Event>) {
        for event in events {
            let (Event::Prefill { request, .. }
            | Event::Token { request, .. }
            | Event::Finished { request, .. }
            | Event::Refused { request, .. }
            | Event::Failed { request, .. }) = event;
            let outcome = self.0.entry(request).or_default();
            assert_eq!(outcome.end, None, "an event after the end of request {request}");
            match event {
                Event::Prefill { .. } => assert!(outcome.tokens.is_empty(), "prefill after a token"),
                Event::Token { token, .. } => outcome.tokens.push(token),
                Event::Finished { reason, .. } => outcome.end = Some(Ok(reason)),
                Event::Refused { reason: error, .. } | Event::Failed { error, .. } => outcome.end = Some(Err(error)),
            }
        }
    }

    fn run(mut self, engine: &mut Engine<Scripted>) -> Self {
        for _ in 0..1000 {
            if engine.is_idle() {
                return self;
            }
            self.take(engine.step().unwrap());
        }
        panic!("the engine makes no progress");
    }

    fn finished(&self, id: RequestId, tokens: &[TokenId], reason: FinishReason) {
        assert_eq!(self.0[&id], Outcome { tokens: tokens.to_vec(), end: Some(Ok(reason)) }, "request {id}");
    }

    fn failed(&self, id: RequestId) -> &str {
        match &self.0[&id].end {
            Some(Err(error)) => error,
            other => panic!("request {id} did not fail: {other:?}"),
        }
    }
}

#[test]
fn requests_join_and_leave_while_others_decode() {
    let mut engine = Engine::new(Scripted::new(9), 3);
    let sizes = [(vec![1, 2, 3], 7), (vec![9], 2), (vec![4, 4, 4, 4], 5), (vec![7, 8], 9), (vec![100], 1)];
    let ids: Vec<RequestId> = sizes.iter().map(|(p, n)| engine.submit(request(p, *n)).unwrap()).collect();
    let outcomes = Outcomes::default().run(&mut engine);
    for (id, (prompt, count)) in ids.iter().zip(&sizes) {
        outcomes.finished(*id, &answer(prompt, *count), FinishReason::Length);
    }
    let executor = engine.executor();
    assert!(executor.live.is_empty());
    let most = executor.batches.iter().max().copied();
    assert!(most.is_some_and(|most| (2..=3).contains(&most)), "{:?}", executor.batches);
}

#[test]
fn prompts_are_read_in_turn_where_the_executor_wants_it() {
    // The second one's prompt is short: with one at a time it waits for the first one's.
    let prompts = [(0..12).collect::<Vec<u32>>(), vec![7, 8], vec![9, 9, 9], vec![1]];
    for (at_once, max_batch, order) in
        [(1, 4, [0, 1, 2, 3]), (2, 4, [1, 2, 3, 0]), (9, 4, [3, 1, 2, 0]), (9, 1, [0, 1, 2, 3])]
    {
        let mut engine = Engine::new(Scripted { at_once, ..Scripted::new(9) }, max_batch);
        let ids = prompts.each_ref().map(|prompt| engine.submit(request(prompt, 20)).unwrap());
        let (mut outcomes, mut first_tokens) = (Outcomes::default(), Vec::new());
        while !engine.is_idle() {
            assert!(ids.iter().filter(|id| engine.state(**id) == Some(RequestState::Prefilling)).count() <= at_once);
            assert!(engine.batch() <= max_batch);
            let events = engine.step().unwrap();
            for event in &events {
                let Event::Token { request, .. } = event else { continue };
                let index = ids.iter().position(|id| id == request).unwrap();
                if !first_tokens.contains(&index) {
                    first_tokens.push(index);
                }
            }
            outcomes.take(events);
        }
        assert_eq!(first_tokens, order, "{at_once} at once");
        for (id, prompt) in ids.iter().zip(&prompts) {
            outcomes.finished(*id, &answer(prompt, 20), FinishReason::Length);
        }
    }
}

#[test]
fn prompts_in_turn_end_in_every_way() {
    let mut engine = Engine::new(Scripted { at_once: 3, fail_prefill_of: Some(TokenId(13)), ..Scripted::new(2) }, 4);
    // The third has no room while the others are read: it waits, it is not refused.
    let ids = [vec![1, 2, 3, 4], vec![1, 13, 1], vec![5, 6]].map(|prompt| engine.submit(request(&prompt, 3)).unwrap());
    engine.step().unwrap();
    assert_eq!(
        ids.map(|id| engine.state(id).unwrap()),
        [RequestState::Prefilling, RequestState::Prefilling, RequestState::Waiting]
    );
    assert!(engine.cancel(ids[0]));
    let outcomes = Outcomes::default().run(&mut engine);
    assert_eq!(outcomes.failed(ids[1]), "the prompt cannot be read");
    outcomes.finished(ids[2], &answer(&[5, 6], 3), FinishReason::Length);
    assert!(engine.executor().live.is_empty());
}

#[test]
fn where_requests_begin_alone_the_next_prompt_does_not_wait_for_the_others() {
    for begins_alone in [false, true] {
        let mut engine = Engine::new(Scripted { begins_alone, ..Scripted::new(9) }, 9);
        let prompts: [&[u32]; 3] = [&[5], &[1, 2], &[3, 4, 5]];
        let ids = prompts.map(|prompt| engine.submit(request(prompt, 6)).unwrap());
        let mut outcomes = Outcomes::default();
        // The first prompt is read in the first step, the second begins in that very step or in the next one.
        let events = engine.step().unwrap();
        let begun =
            |events: &[Event], id| events.iter().any(|e| matches!(e, Event::Prefill { request, .. } if *request == id));
        assert_eq!(begun(&events, ids[1]), begins_alone);
        // Two steps of the first request in the one case, one in the other.
        assert_eq!(engine.executor().batches, if begins_alone { vec![1, 1] } else { vec![1] });
        outcomes.take(events);
        let events = engine.step().unwrap();
        assert_eq!(begun(&events, ids[2]), begins_alone);
        let so_far = if begins_alone { vec![1, 1, 1, 2] } else { vec![1, 1] };
        assert_eq!(engine.executor().batches, so_far, "the second begins alone, then both decode");
        outcomes.take(events);
        let outcomes = outcomes.run(&mut engine);
        for (id, prompt) in ids.iter().zip(prompts) {
            outcomes.finished(*id, &answer(prompt, 6), FinishReason::Length);
        }
    }
}

#[test]
fn a_single_token_needs_no_decode_step() {
    let mut engine = Engine::new(Scripted::new(1), 1);
    let id = engine.submit(request(&[5, 6], 1)).unwrap();
    let outcomes = Outcomes::default().run(&mut engine);
    outcomes.finished(id, &answer(&[5, 6], 1), FinishReason::Length);
    assert!(engine.executor().batches.is_empty());
    assert!(engine.executor().live.is_empty());
}

#[test]
fn a_stop_token_ends_the_answer_and_is_reported() {
    let tokens = answer(&[3, 1], 6);
    let mut engine = Engine::new(Scripted::new(2), 2);
    let later = engine.submit(GenerateRequest { stop_tokens: vec![tokens[3]], ..request(&[3, 1], 50) }).unwrap();
    let first = engine.submit(GenerateRequest { stop_tokens: vec![tokens[0]], ..request(&[3, 1], 50) }).unwrap();
    let last = engine.submit(GenerateRequest { stop_tokens: vec![tokens[5]], ..request(&[3, 1], 6) }).unwrap();
    let outcomes = Outcomes::default().run(&mut engine);
    outcomes.finished(later, &tokens[..4], FinishReason::Stop);
    outcomes.finished(first, &tokens[..1], FinishReason::Stop);
    outcomes.finished(last, &tokens, FinishReason::Stop);
}

#[test]
fn a_request_can_be_cancelled_in_every_state() {
    let mut engine = Engine::new(Scripted::new(2), 2);
    let survivor = engine.submit(request(&[1], 12)).unwrap();
    let decoding = engine.submit(request(&[2], 12)).unwrap();
    let mut outcomes = Outcomes::default();
    outcomes.take(engine.step().unwrap());
    outcomes.take(engine.step().unwrap());
    assert_eq!(engine.state(decoding), Some(RequestState::Decoding));
    assert!(engine.cancel(decoding));

    let prefilling = engine.submit(request(&[3, 3, 3, 3], 12)).unwrap();
    let waiting = engine.submit(request(&[4], 12)).unwrap();
    outcomes.take(engine.step().unwrap());
    assert_eq!(engine.state(prefilling), Some(RequestState::Prefilling));
    assert_eq!(engine.state(waiting), Some(RequestState::Waiting));
    assert!(engine.cancel(waiting) && engine.cancel(prefilling));
    assert!(!engine.cancel(waiting), "it has ended already");
    assert_eq!(engine.state(prefilling), None);
    assert_eq!(engine.batch(), 1);

    let outcomes = outcomes.run(&mut engine);
    outcomes.finished(survivor, &answer(&[1], 12), FinishReason::Length);
    assert!([decoding, prefilling].iter().all(|id| outcomes.0[id].end.is_none()), "a cancelled request ends silently");
    assert!(!engine.cancel(survivor));
    assert!(engine.executor().live.is_empty());
    assert!([decoding, prefilling, waiting].iter().all(|id| engine.executor().released.contains(id)));
}

#[test]
fn a_request_waits_for_room_and_runs_when_another_ends() {
    let mut engine = Engine::new(Scripted::new(1), 4);
    let first = engine.submit(request(&[1], 3)).unwrap();
    let second = engine.submit(request(&[2], 3)).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.state(second), Some(RequestState::Waiting));
    let mut outcomes = Outcomes::default();
    outcomes.0.insert(first, Outcome { tokens: answer(&[1], 2), end: None });
    let outcomes = outcomes.run(&mut engine);
    outcomes.finished(first, &answer(&[1], 3), FinishReason::Length);
    outcomes.finished(second, &answer(&[2], 3), FinishReason::Length);
}

#[test]
fn what_can_never_run_is_refused_and_the_next_one_runs() {
    let mut engine = Engine::new(Scripted::new(1), 2);
    let refused = engine.submit(request(&[1; 21], 2)).unwrap();
    let runs = engine.submit(request(&[2], 2)).unwrap();
    let outcomes = Outcomes::default().run(&mut engine);
    assert_eq!(outcomes.failed(refused), "larger than the whole store");
    outcomes.finished(runs, &answer(&[2], 2), FinishReason::Length);

    // Waiting while nothing runs that could make room would be forever.
    let mut engine = Engine::new(Scripted::new(0), 2);
    let stuck = engine.submit(request(&[2], 2)).unwrap();
    assert_eq!(Outcomes::default().run(&mut engine).failed(stuck), "no room now");
}

#[test]
fn an_error_of_one_request_leaves_the_others_alone() {
    let mut engine = Engine::new(Scripted::new(9), 3);
    engine.executor_mut().fail_prefill_of = Some(TokenId(77));
    engine.executor_mut().fail_token = Some(answer(&[5, 5], 4)[3]);
    let sound = engine.submit(request(&[1, 2], 9)).unwrap();
    let fails_late = engine.submit(request(&[5, 5], 9)).unwrap();
    let fails_early = engine.submit(request(&[1, 77, 3], 9)).unwrap();
    let sound_too = engine.submit(request(&[8], 9)).unwrap();
    let outcomes = Outcomes::default().run(&mut engine);
    outcomes.finished(sound, &answer(&[1, 2], 9), FinishReason::Length);
    outcomes.finished(sound_too, &answer(&[8], 9), FinishReason::Length);
    assert_eq!(outcomes.failed(fails_early), "the prompt cannot be read");
    assert_eq!(outcomes.failed(fails_late), "a block is missing");
    assert_eq!(outcomes.0[&fails_late].tokens, answer(&[5, 5], 4));
    assert!(engine.executor().live.is_empty());
}

#[test]
fn a_lost_device_ends_everything() {
    let mut engine = Engine::new(Scripted::new(9), 2);
    engine.executor_mut().lost_at_step = Some(3);
    let ids: Vec<RequestId> = (1..5).map(|p| engine.submit(request(&[p], 20)).unwrap()).collect();
    let error = (0..10).find_map(|_| engine.step().err()).expect("the device is lost");
    assert_eq!(error.to_string(), "the device is lost");
    assert!(engine.is_idle() && ids.iter().all(|id| engine.state(*id).is_none()));
    assert!(ids.iter().all(|id| engine.executor().released.contains(id)));
    // The engine itself goes on with a new device.
    engine.executor_mut().lost_at_step = None;
    let id = engine.submit(request(&[6], 2)).unwrap();
    Outcomes::default().run(&mut engine).finished(id, &answer(&[6], 2), FinishReason::Length);
}

#[test]
fn limits_are_checked_when_a_request_is_submitted() {
    let mut engine = Engine::new(Scripted::new(1), 0);
    assert_eq!(engine.submit(request(&[], 1)), Err(SubmitError::EmptyPrompt));
    assert_eq!(engine.submit(request(&[1], 0)), Err(SubmitError::NothingToGenerate));
    let unknown = SubmitError::UnknownToken { token: TokenId(1000), vocab: VOCAB };
    assert_eq!(engine.submit(request(&[999, 1000], 1)), Err(unknown));
    let error = engine.submit(request(&[1; 20], 46)).unwrap_err();
    assert_eq!(error, SubmitError::TooLong { prompt: 20, max_new_tokens: 46, max_context: 64 });
    // The last token is never run, so one more than the context fits; a batch of 0 means one of 1.
    let longest = engine.submit(request(&[1; 20], 45)).unwrap();
    let huge = engine.submit(request(&[1], usize::MAX));
    assert!(matches!(huge, Err(SubmitError::TooLong { .. })), "{huge:?}");
    Outcomes::default().run(&mut engine).finished(longest, &answer(&[1; 20], 45), FinishReason::Length);
}
