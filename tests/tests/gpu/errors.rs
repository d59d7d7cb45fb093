//! One request's failure is its own.

use crate::{NEAR, Scene};
use half::bf16;
use oasis_core::engine::{Engine, GenerateRequest};
use oasis_core::executor::{DecodeRow, Executor};
use oasis_core::ids::{RequestId, TokenId};
use oasis_core::policy::DeviceCode;
use oasis_cuda::executor::Residency;
use oasis_models::weights::MatrixData;
use oasis_tests::gpu::{self, Setup, Speech, Twin, assert_nothing_held, step_all};
use oasis_tests::models::start;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Set in the process of [`fault_in_a_step`].
pub const FAULT: &str = "OASIS_TEST_FAULT";

/// A prompt shorter than a block, so that the first summary is finished by a decode step, which traps.
const FAULTY: DeviceCode = DeviceCode::new(
    "faulty.cuh",
    "struct Summarizer {
    static constexpr int kRows = 1;
    static __device__ float init(int row) { return 0.0f; }
    static __device__ float update(int row, float value, float key) { return value + key; }
    static __device__ float finish(int row, float value, int tokens) { asm volatile(\"trap;\"); return value; }
    static __device__ float expand(int row, float q) { return q; }
};
",
);

/// A token whose embedding is not a number; the output projection is whole.
fn poisoned(tiny: &Twin) -> (Twin, TokenId) {
    let (mut spec, mut weights) = (tiny.spec.clone(), tiny.weights.clone());
    let poison = spec.vocab - 1;
    weights.lm_head = Some(weights.lm_head.clone().unwrap_or_else(|| weights.embed.clone()));
    spec.tied_embeddings = false;
    let row = poison * spec.hidden..(poison + 1) * spec.hidden;
    match &mut weights.embed.data {
        MatrixData::F32(data) => data[row].fill(f32::NAN),
        MatrixData::Bf16(data) => data[row].fill(bf16::NAN),
    }
    (Twin::new(spec, weights, tiny.head.clone()), TokenId::from(poison))
}

pub fn a_request_without_numbers_ends_alone_and_leaves_no_trace(scene: &Scene) {
    let (model, poison) = poisoned(&scene.tiny);
    let prompts = [200, 90].map(|tokens| scene.prompts.prose(tokens, 10));
    // Every place of a block holds something that is not a number.
    let bad: Vec<TokenId> = prompts[1].iter().copied().chain([poison; 37]).collect();
    let kinds = ["predictor.kind=draft-query", "predictor.kind=last-query", "predictor.kind=exact"];
    let sparse = kinds.map(|kind| Setup::sparse(6, &[kind, "selector.fetch_ratio=0.5"], 4, 400));
    for setup in sparse.into_iter().chain([Setup::dense(4, 400)]) {
        let mut executor = setup.start(&scene.device, &model);
        let want = prompts.each_ref().map(|prompt| Speech::alone(&mut executor, prompt, 40));

        // In a prompt, in row 0.
        let sequence = oasis_core::executor::Sequence {
            request: RequestId(0),
            prompt: bad.clone(),
            max_new_tokens: 20,
            sampling: Default::default(),
        };
        executor.admit(sequence).unwrap();
        let error = loop {
            if let Err(error) = executor.prefill(RequestId(0)) {
                break error.0;
            }
        };
        assert!(error.contains("request 0") && error.contains("logits"), "{error}");
        // It may be asked again, and is released later.
        let again = executor.decode(&[DecodeRow { request: RequestId(0), token: poison }]).unwrap().remove(0);
        assert!(again.is_err());

        // In a decode step, in row 2, beside one that goes on in row 1.
        let mut good = vec![(RequestId(1), vec![start(&mut executor, RequestId(1), &prompts[0], 40)])];
        start(&mut executor, RequestId(2), &prompts[1], 40);
        for _ in 0..20 {
            let rows = [
                DecodeRow { request: RequestId(2), token: poison },
                DecodeRow { request: RequestId(1), token: *good[0].1.last().unwrap() },
            ];
            let mut results = executor.decode(&rows).unwrap();
            good[0].1.push(results.remove(1).unwrap());
            let error = results.remove(0).unwrap_err().0;
            assert!(error.contains("request 2") && error.contains("logits"), "{error}");
        }
        executor.release(RequestId(0));
        executor.release(RequestId(2));
        (21..40).for_each(|_| step_all(&mut executor, &mut good));
        let parted = good[0].1.iter().zip(&want[0].tokens).position(|(got, want)| got != want);
        if let Some(place) = parted {
            let gap = want[0].gap(place, good[0].1[place]);
            assert!(gap < NEAR, "{setup:?}: parts at {place} with a gap of {gap}");
        }

        // Their rows serve others as if nothing had been.
        let rows = [(RequestId(5), 0), (RequestId(6), 1)];
        let mut later: Vec<_> =
            rows.map(|(id, which)| (id, vec![start(&mut executor, id, &prompts[which], 40)])).into();
        (1..40).for_each(|_| step_all(&mut executor, &mut later));
        for ((id, tokens), want) in later.iter().zip(&want) {
            if let Some(place) = tokens.iter().zip(&want.tokens).position(|(got, want)| got != want) {
                let gap = want.gap(place, tokens[place]);
                assert!(gap < NEAR, "{setup:?}: request {id} parts at {place} with a gap of {gap}");
            }
            executor.release(*id);
        }
        executor.release(RequestId(1));
        assert_nothing_held(&executor);
        for (prompt, want) in prompts.iter().zip(&want) {
            assert!(Speech::alone(&mut executor, prompt, 40) == *want, "{setup:?}");
        }
    }
}

pub fn device_code_that_does_not_compile_names_its_line(scene: &Scene) {
    let broken = DeviceCode::new("mine.cuh", "struct Summarizer {\n    static constexpr int kRows = one;\n};\n");
    let mut options = Setup::sparse(4, &[], 1, 100).options(&scene.tiny.spec);
    let Residency::Sparse(sparse) = &mut options.residency else { unreachable!("asked for above") };
    sparse.summarizer = Some(broken);
    let error = gpu::start(&scene.device, &scene.tiny, options).err().expect("it does not compile").to_string();
    assert!(error.contains("mine.cuh(2): error"), "{error}");
}

/// Two requests until the device faults; what the engine says of it goes to standard output.
pub fn fault_in_a_step(scene: &Scene) {
    let mut options = Setup::sparse(4, &["summarizer.kind=mean"], 2, 100).options(&scene.tiny.spec);
    let Residency::Sparse(sparse) = &mut options.residency else { unreachable!("asked for above") };
    sparse.summarizer = Some(FAULTY);
    let executor = gpu::start(&scene.device, &scene.tiny, options).unwrap();
    let mut engine = Engine::new(executor, 2);
    for _ in 0..2 {
        let prompt = scene.prompts.prose(10, 3);
        let stop_tokens = Vec::new();
        engine
            .submit(GenerateRequest { prompt, max_new_tokens: 40, stop_tokens, sampling: Default::default() })
            .unwrap();
    }
    let error = loop {
        if let Err(error) = engine.step() {
            break error;
        }
        assert!(!engine.is_idle(), "no step faulted");
    };
    println!("{error:#}");
    // Both requests have ended, and nothing waits for what will never end.
    assert!(engine.is_idle());
    drop(engine);
    println!("all is given back");
}

pub fn a_fault_of_the_device_names_its_step_and_hangs_nothing(_: &Scene) {
    // A fault takes everything of its process on the device with it.
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(FAULT, "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("the process hangs: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    let (said, complaints) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("  {}", said.trim_end().replace('\n', "\n  "));
    assert!(output.status.success(), "{}: {said}{complaints}", output.status);
    assert!(
        said.contains("decode step ") && said.contains("CUDA_ERROR_") && said.contains("all is given back"),
        "{said}"
    );
}
