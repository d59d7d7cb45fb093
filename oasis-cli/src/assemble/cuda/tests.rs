//! What a GPU does not run is refused before anything is read.

use super::options;
use crate::args::GlobalArgs;
use crate::error::{CliError, CliResult};
use crate::settings::resolve;
use oasis_core::config::Layer;
use oasis_cuda::executor::CudaOptions;
use oasis_models::shapes;
use oasis_models::spec::DecoderSpec;

fn options_of(spec: &DecoderSpec, settings: &[&str]) -> CliResult<CudaOptions> {
    let layers = ["transport.kind=pcie-uva"].iter().chain(settings).map(|s| Layer::assignment(s, s).unwrap()).collect();
    options(&resolve(&GlobalArgs::default(), layers).unwrap(), spec, true)
}

#[test]
fn what_a_gpu_does_not_run_names_its_key_and_what_it_runs() {
    let llama = shapes::named("llama-3.1-8b").unwrap().0;
    let usual = options_of(&llama, &["kv.budget_blocks=128"]).unwrap();
    assert_eq!(usual.max_context, llama.max_positions);
    // As many slots as a short context has blocks.
    options_of(&llama, &["kv.budget_blocks=8192", "device.max_context=32768"]).unwrap();

    let odd = DecoderSpec { vocab: llama.vocab + 3, ..llama.clone() };
    let narrow = DecoderSpec { head_dim: 96, ..llama.clone() };
    let cases: [(&DecoderSpec, &[&str], [&str; 2]); 7] = [
        (&llama, &["kv.budget_blocks=8192"], ["kv.budget_blocks", "at most 5000 blocks"]),
        (&odd, &[], ["model.path", "found a vocabulary of 128259"]),
        (&narrow, &[], ["model.path", "found 96 and"]),
        (&llama, &["kv.block_tokens=32"], ["kv.block_tokens", "found 32"]),
        (&llama, &["device.max_context=131073"], ["device.max_context", "at most the model's 131072 tokens"]),
        (&llama, &["transport.depth=99"], ["transport.depth", "found 99"]),
        (&llama, &["transport.kind=memcpy"], ["transport.kind", "reaches GPU memory"]),
    ];
    for (spec, settings, expected) in cases {
        let Err(CliError::Input(text)) = options_of(spec, settings) else { panic!("{settings:?} was taken") };
        assert!(expected.iter().all(|part| text.contains(part)) && text.contains("hint: "), "{settings:?}: {text}");
    }
}
