//! Checks every kernel against float64 on the CPU, on fresh random inputs and poisoned outputs, then times each beside
//! the least time that its bytes or operations need. Needs a GPU of compute capability 9.0.
//!
//! `cargo run --release -p oasis-cuda --example kernel_check -- [--only NAME]... [results.json]`; NAME is a module of
//! this example. Exit code 1 when a check fails.

#![allow(unsafe_code, missing_docs)]

mod append;
mod append_prompt;
mod attention;
mod correct;
mod gather;
mod gemm;
mod linear;
mod moe;
mod prefill;
mod rig;
mod rowwise;
mod sample;
mod scan;
mod select;
mod summaries;

use oasis_cuda::measure::kernels::KernelBench;
use rig::{Outcome, Rig};

type Check = fn(&mut Rig) -> Outcome<()>;
type Time = fn(&mut Rig, &KernelBench) -> Outcome<()>;

/// Name, check and timing of each module.
const PARTS: [(&str, Check, Time); 13] = [
    ("rowwise", rowwise::check, rowwise::time),
    ("sample", sample::check, sample::time),
    ("append", append::check, append::time),
    ("append_prompt", append_prompt::check, append_prompt::time),
    ("attention", attention::check, attention::time),
    ("scan", scan::check, scan::time),
    ("select", select::check, select::time),
    ("correct", correct::check, correct::time),
    ("gather", gather::check, gather::time),
    ("gemm", gemm::check, gemm::time),
    ("linear", linear::check, linear::time),
    ("moe", moe::check, moe::time),
    ("prefill", prefill::check, prefill::time),
];

fn main() -> std::process::ExitCode {
    match run() {
        Ok(true) => std::process::ExitCode::SUCCESS,
        Ok(false) => std::process::ExitCode::from(1),
        Err(error) => {
            eprintln!("kernel_check: {error}");
            std::process::ExitCode::from(2)
        }
    }
}

fn run() -> Outcome<bool> {
    let (mut only, mut results) = (Vec::new(), None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--only" => only.push(arguments.next().ok_or("--only: expected the name of a module")?),
            _ => results = Some(argument),
        }
    }
    let names = PARTS.map(|(name, ..)| name);
    if let Some(unknown) = only.iter().find(|only| !names.contains(&only.as_str())) {
        return Err(format!("--only: expected one of {}, found {unknown:?}", names.join(", ")).into());
    }
    let parts = || PARTS.iter().filter(|(name, ..)| only.is_empty() || only.iter().any(|only| only == name));

    let mut rig = Rig::new()?;
    println!("{}, seed {}", rig.device.facts.name, rig.seed);
    parts().try_for_each(|(_, check, _)| check(&mut rig))?;
    rig.print_summary();
    if rig.passed() {
        let bench = rig.bench()?;
        parts().try_for_each(|(.., time)| time(&mut rig, &bench))?;
        rig.print_timings();
    }
    if let Some(path) = results {
        std::fs::write(path, serde_json::to_vec_pretty(&rig.results())?)?;
    }
    Ok(rig.passed())
}
