//! Checks every kernel against float64 on the CPU, on fresh random inputs and poisoned outputs, then times each beside
//! the least time that its bytes need. Needs a GPU of compute capability 9.0.
//!
//! `cargo run --release -p oasis-cuda --example kernel_check [results.json]`; exit code 1 when a check fails.

#![allow(unsafe_code, missing_docs)]

mod append;
mod attention;
mod gather;
mod gemm;
mod rig;
mod rowwise;
mod scan;
mod select;

use rig::{Outcome, Rig};

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
    let mut rig = Rig::new()?;
    println!("{}, seed {}", rig.device.facts.name, rig.seed);
    rowwise::check(&mut rig)?;
    append::check(&mut rig)?;
    attention::check(&mut rig)?;
    scan::check(&mut rig)?;
    select::check(&mut rig)?;
    gather::check(&mut rig)?;
    gemm::check(&mut rig)?;
    rig.print_summary();
    if rig.passed() {
        rig.measure_ceiling()?;
        attention::time(&mut rig)?;
        scan::time(&mut rig)?;
        select::time(&mut rig)?;
        gather::time(&mut rig)?;
        rowwise::time(&mut rig)?;
        append::time(&mut rig)?;
        gemm::time(&mut rig)?;
        rig.print_timings();
    }
    if let Some(path) = std::env::args().nth(1) {
        std::fs::write(path, serde_json::to_vec_pretty(&rig.results())?)?;
    }
    Ok(rig.passed())
}
