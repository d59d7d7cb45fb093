use super::*;
use oasis_core::executor::{
    Admission, DecodeRow, ExecutorInfo, ExecutorStats, PrefillProgress, RequestError, Sequence,
};
use oasis_core::geometry::{KvDtype, KvGeometry};
use oasis_core::ids::RequestId;
use std::cell::Cell;

/// Counts up from the prompt's length; fails where it is told to.
struct Counting {
    info: ExecutorInfo,
    left: usize,
    fail_at: Option<u32>,
    held: bool,
}

impl Counting {
    fn new(fail_at: Option<u32>) -> Self {
        let geometry =
            KvGeometry { layers: 1, q_heads: 1, kv_heads: 1, head_dim: 4, block_tokens: 4, dtype: KvDtype::F32 };
        let device = "counting".to_owned();
        let info = ExecutorInfo { device, geometry, budget_blocks: Some(2), cap: 1, vocab: 128, max_context: 64 };
        Self { info, left: 0, fail_at, held: false }
    }
}

impl Executor for Counting {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn admit(&mut self, sequence: Sequence) -> anyhow::Result<Admission> {
        self.left = sequence.prompt.len();
        self.held = true;
        Ok(Admission::Admitted)
    }

    fn prefill(&mut self, _: RequestId) -> Result<PrefillProgress, RequestError> {
        self.left -= 1;
        Ok(match self.left {
            0 => PrefillProgress::Done(TokenId(65)),
            left => PrefillProgress::Running { done: 1, total: 1 + left },
        })
    }

    fn decode(&mut self, rows: &[DecodeRow]) -> anyhow::Result<Vec<Result<TokenId, RequestError>>> {
        Ok(rows
            .iter()
            .map(|row| match self.fail_at {
                Some(token) if token == row.token.0 => Err(RequestError("the store is gone".to_owned())),
                _ => Ok(TokenId(row.token.0 + 1)),
            })
            .collect())
    }

    fn release(&mut self, _: RequestId) {
        self.held = false;
    }

    fn stats(&self) -> ExecutorStats {
        let working_set = if self.held { 7 } else { 0 };
        ExecutorStats { device: KvFootprint { working_set, ..KvFootprint::default() }, ..ExecutorStats::default() }
    }
}

/// Letters by their code; `C` stays pending until the next token.
#[derive(Default)]
struct Letters(String);

impl Decode for Letters {
    fn push(&mut self, token: TokenId) -> CliResult<String> {
        self.0.push(char::from_u32(token.0).unwrap());
        Ok(if self.0.ends_with('C') { String::new() } else { std::mem::take(&mut self.0) })
    }

    fn finish(&mut self) -> CliResult<String> {
        Ok(std::mem::take(&mut self.0))
    }
}

fn request(max_new_tokens: usize, stop: &[u32]) -> GenerateRequest {
    GenerateRequest {
        prompt: vec![TokenId(1); 3],
        max_new_tokens,
        stop_tokens: stop.iter().map(|&t| TokenId(t)).collect(),
        sampling: Default::default(),
    }
}

fn run(request: GenerateRequest, fail_at: Option<u32>, polls: usize) -> (CliResult<Generation>, Vec<String>, bool) {
    let mut engine = Engine::new(Counting::new(fail_at), 1);
    let mut pieces = Vec::new();
    let left = Cell::new(polls);
    let interrupted = || left.replace(left.get().saturating_sub(1)) == 0;
    let result = generate(&mut engine, &mut Letters::default(), request, &interrupted, &mut |piece| {
        pieces.push(piece.to_owned());
        Ok(())
    });
    let idle = engine.is_idle() && !engine.executor().held;
    (result, pieces, idle)
}

#[test]
fn text_streams_as_it_becomes_certain() {
    let (result, pieces, _) = run(request(5, &[]), None, 100);
    let generation = result.unwrap();
    assert_eq!(pieces, ["A", "B", "CD", "E"]);
    assert_eq!(generation.text, "ABCDE");
    assert_eq!(generation.finish, Finish::Length);
    assert_eq!(generation.facts.generated_tokens, 5);
    assert_eq!(generation.facts.prompt_tokens, 3);
    assert_eq!(generation.facts.device.working_set, 7);
}

#[test]
fn the_stop_token_is_counted_but_not_shown() {
    let (result, pieces, idle) = run(request(9, &[68]), None, 100);
    let generation = result.unwrap();
    // What was pending comes out at the end.
    assert_eq!(pieces, ["A", "B", "C"]);
    assert_eq!((generation.tokens.len(), generation.finish, idle), (4, Finish::Stop, true));
}

#[test]
fn an_interrupt_keeps_what_is_there_and_frees_the_device() {
    let (result, _, idle) = run(request(50, &[]), None, 4);
    let generation = result.unwrap();
    assert_eq!(generation.finish, Finish::Interrupted);
    assert!(!generation.text.is_empty() && generation.text.len() < 50);
    assert!(idle);
}

#[test]
fn a_failing_request_is_a_failure() {
    let (result, pieces, idle) = run(request(9, &[]), Some(66), 100);
    assert!(matches!(result, Err(CliError::Failure(text)) if text == "the store is gone"));
    assert_eq!((pieces.concat().as_str(), idle), ("AB", true));
}

#[test]
fn a_request_that_never_fits_is_wrong_input() {
    let (result, ..) = run(request(100, &[]), None, 100);
    assert!(matches!(result, Err(CliError::Input(text)) if text.contains("64 tokens")));
}

#[test]
fn a_reader_that_leaves_frees_the_device() {
    let mut engine = Engine::new(Counting::new(None), 1);
    let mut sink = |_: &str| Err(io::ErrorKind::BrokenPipe.into());
    let result = generate(&mut engine, &mut Letters::default(), request(9, &[]), &|| false, &mut sink);
    assert!(matches!(result, Err(CliError::ClosedPipe)));
    assert!(engine.is_idle() && !engine.executor().held);
}
