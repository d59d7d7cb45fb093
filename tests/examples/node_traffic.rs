//! What crosses between a prefill and a decode node on loopback: full against partial transfer, by fetch cap.
//!
//! `node_traffic MODEL DRAFT CONTEXT TOKENS`, such as `oasis-tiny oasis-tiny-eagle3 8000 128`.

use oasis_core::executor::Executor;
use oasis_nodes::TransferMode;
use oasis_tests::drive::request;
use oasis_tests::models::{load, options};
use oasis_tests::nodes::{Setup, run};
use oasis_tests::prompts::text_for;
use std::time::Instant;

/// Usual budget, 2,048 tokens.
const BUDGET: usize = 128;

fn mib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 20))
}

/// One decode step.
struct Step {
    bytes: u64,
    seconds: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, draft, context, tokens] = &args[..] else {
        eprintln!("usage: node_traffic MODEL DRAFT CONTEXT TOKENS");
        std::process::exit(2);
    };
    let (context, tokens): (usize, usize) = (context.parse().expect("a number"), tokens.parse().expect("a number"));
    let prompt = text_for(model, context);
    let weights = load(model, Some(draft));

    println!(
        "{model}, {draft}: {context} tokens of prompt, {tokens} generated, K = {BUDGET} blocks of 16 tokens, f32 KV\n"
    );
    println!(
        "transfer  cap    admission MiB  state MiB  misses MiB  crossed  store MiB  device MiB  MiB/step median  90%    most   \
         idle steps  ms/step  tokens"
    );
    let mut first_tokens = None;
    for (transfer, cap) in [
        (TransferMode::Full, "0.05"),
        (TransferMode::Partial, "0.05"),
        (TransferMode::Partial, "0.1"),
        (TransferMode::Partial, "none"),
    ] {
        let selector = match cap {
            "none" => "selector.kind=fetch-all".to_owned(),
            ratio => format!("selector.fetch_ratio={ratio}"),
        };
        let mut setup = Setup::new(weights.clone(), options(512), BUDGET, &[&selector]);
        setup.staging = 8 << 30;
        let prefill = setup.prefill();
        let mut decode = setup.decode(prefill.address(), transfer);
        let (mut steps, mut last): (Vec<Step>, Option<(u64, Instant)>) = (Vec::new(), None);
        let (mut said_before, mut device) = (0, 0);
        let (ids, said) = run(&mut decode, &[request(&prompt, tokens)], |engine, _, said| {
            let count = said[0].tokens.len();
            let id = oasis_core::ids::RequestId(1);
            let Some(metrics) = engine.executor().metrics(id).filter(|_| count > said_before) else { return };
            device = device.max(engine.executor().stats().device.total());
            if let Some((bytes, then)) = last {
                steps.push(Step { bytes: metrics.miss_bytes - bytes, seconds: then.elapsed().as_secs_f64() });
            }
            last = Some((metrics.miss_bytes, Instant::now()));
            said_before = count;
        });
        let said = &said[0];
        assert!(said.finished, "{said:?}");
        let metrics = decode.executor().metrics(ids[0]).expect("a request of ours");
        // The first pair of steps has the takeover in it.
        let steps = &steps[1.min(steps.len())..];
        let mut per_step: Vec<f64> = steps.iter().map(|step| step.bytes as f64 / f64::from(1 << 20)).collect();
        per_step.sort_by(f64::total_cmp);
        let at = |share: f64| per_step.get((per_step.len() as f64 * share) as usize).copied().unwrap_or(0.0);
        let idle = steps.iter().filter(|step| step.bytes == 0).count() as f64 * 100.0 / steps.len().max(1) as f64;
        let same = match &first_tokens {
            // Another cap, another answer; the same cap must say the same.
            _ if cap != "0.05" => "-",
            None => "first",
            Some(first) if *first == said.tokens => "same",
            Some(_) => "OTHER",
        };
        println!(
            "{:<8}  {cap:<5}  {:<13}  {:<9}  {:<10}  {:>6.1}%  {:<9}  {:<10}  {:<15.2}  {:<5.2}  {:<5.2}  {idle:>9.0}%  {:<7.1}  {same}",
            format!("{transfer:?}").to_lowercase(),
            mib(metrics.admission_bytes),
            mib(metrics.state_bytes),
            mib(metrics.miss_bytes),
            metrics.blocks as f64 * 100.0 / metrics.prompt_blocks as f64,
            mib(metrics.resident_bytes),
            mib(device),
            at(0.5),
            at(0.9),
            per_step.last().copied().unwrap_or(0.0),
            median(steps.iter().map(|step| step.seconds * 1e3).collect()),
        );
        if cap == "0.05" {
            first_tokens.get_or_insert_with(|| said.tokens.clone());
        }
    }
}
