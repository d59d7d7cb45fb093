//! The CUDA executor against the CPU's and against itself. Where there is no GPU every test is skipped, aloud, and counted
//! as ignored.
//!
//! Arguments choose the tests whose names contain one of them.

mod accounting;
mod adaptive;
mod batching;
mod errors;
mod experts;
mod nodes;
mod parity;
mod predictors;
mod selection;
mod stores;

// Links the crate, which registers its kinds.
use oasis_example_policy as _;

use oasis_cuda::device::Device;
use oasis_tests::gpu::Twin;
use oasis_tests::prompts::Prompts;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

/// What all tests use.
struct Scene {
    device: Device,
    tiny: Twin,
    prompts: Prompts,
}

/// Requests may part where a logit is as near to the largest as this, in parts of the distance between the largest and the
/// mean: the disturbed CPU (see `parity`) parts at gaps of up to 0.06 in dense and 0.49 in sparse decoding.
const NEAR: f32 = 0.15;

type Test = fn(&Scene);

/// Lists tests by their names.
macro_rules! tests {
    ($($module:ident::$test:ident),* $(,)?) => {
        [$((stringify!($test), $module::$test as Test)),*]
    };
}

const TESTS: &[(&str, Test)] = &tests![
    parity::oasis_tiny_says_what_it_says_on_the_cpu,
    parity::other_policies_say_what_they_say_on_the_cpu,
    parity::predictors_that_correct_or_look_ahead_say_what_they_say_on_the_cpu,
    parity::answers_are_those_of_the_cpu,
    parity::other_shapes_say_what_they_say_on_the_cpu,
    parity::smollm2_says_what_it_says_on_the_cpu,
    parity::a_budget_of_all_blocks_is_dense,
    batching::graphs_and_streams_say_the_same,
    batching::eight_requests_that_join_leave_and_are_cancelled_say_what_each_says_alone,
    batching::few_prefill_layers_change_nothing,
    batching::a_first_step_in_the_middle_of_another_prefill_changes_nothing,
    batching::a_seed_gives_the_same_tokens,
    batching::a_finished_prefill_keeps_its_token_while_others_decode,
    selection::every_selection_follows_the_rules_of_the_working_set,
    predictors::a_choice_that_is_never_corrected_is_that_of_last_query,
    predictors::a_choice_that_is_always_corrected_is_that_of_exact,
    predictors::policies_without_device_code_are_refused_beside_them,
    adaptive::a_cap_that_cannot_move_is_a_constant_one,
    adaptive::a_cap_follows_what_the_device_measures_of_the_link,
    accounting::a_release_in_any_phase_leaves_nothing_behind,
    accounting::entries_are_counted,
    accounting::a_draft_head_holds_its_window,
    accounting::requests_wait_for_rows_and_host_memory,
    accounting::impossible_requests_are_refused,
    accounting::a_context_is_used_to_its_end,
    errors::a_request_without_numbers_ends_alone_and_leaves_no_trace,
    errors::device_code_that_does_not_compile_names_its_line,
    errors::a_fault_of_the_device_names_its_step_and_hangs_nothing,
    stores::stores_that_the_device_does_not_address_say_what_pinned_memory_says,
    stores::requests_join_and_leave_while_entries_come_from_a_store,
    stores::a_store_that_fails_ends_its_request_alone,
    nodes::a_request_moves_between_two_gpu_executors,
    nodes::two_nodes_on_a_gpu_say_what_one_executor_says,
    nodes::what_cannot_be_handed_over_is_refused,
    experts::a_mixture_says_what_it_says_on_the_cpu,
    experts::bytes_of_a_step_count_the_experts_that_have_rows,
    experts::draws_stay_among_the_candidates_of_the_cpu,
    experts::experts_of_other_widths_are_refused_before_anything_is_copied,
];

fn main() -> ExitCode {
    let chosen: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|part| name.contains(part.as_str()));
    let (run, filtered): (Vec<_>, Vec<_>) = TESTS.iter().partition(|(name, _)| is_chosen(name));
    println!("\nrunning {} tests", run.len());
    let start = Instant::now();
    let (mut passed, mut failed, mut ignored) = (0, 0, 0);
    match Device::open(0) {
        Err(error) => {
            eprintln!("SKIPPED: {} tests need a GPU. {error}", run.len());
            run.iter().for_each(|(name, _)| println!("test {name} ... ignored"));
            ignored = run.len();
        }
        Ok(device) => {
            let tiny = Twin::load("oasis-tiny", "oasis-tiny-eagle3");
            let scene = Scene { device, tiny, prompts: Prompts::new() };
            if std::env::var_os(errors::FAULT).is_some() {
                errors::fault_in_a_step(&scene);
                return ExitCode::SUCCESS;
            }
            for (name, test) in run {
                let start = Instant::now();
                let result = catch_unwind(AssertUnwindSafe(|| test(&scene)));
                let verdict = if result.is_ok() { "ok" } else { "FAILED" };
                println!("test {name} ... {verdict} ({:.1} s)", start.elapsed().as_secs_f64());
                if result.is_ok() { passed += 1 } else { failed += 1 }
            }
        }
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; {} filtered out; \
         finished in {:.2}s\n",
        filtered.len(),
        start.elapsed().as_secs_f64()
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
