//! config.json to specs: both spellings, every refusal.

use crate::common;
use oasis_models::checkpoint::{CheckpointError, parse_config};
use oasis_models::spec::{MoeSpec, RopeScaling};
use serde_json::{Value, json};

fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 320, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048, "eos_token_id": 2, "hidden_act": "silu"
    })
}

fn with(mut config: Value, key: &str, value: Value) -> Value {
    config[key] = value;
    config
}

fn parse(config: &Value) -> Result<oasis_models::spec::DecoderSpec, CheckpointError> {
    parse_config(&config.to_string(), "config.json")
}

#[test]
fn both_spellings_of_every_fixture_agree() {
    for name in common::FIXTURES {
        let Some(folder) = common::shared(&format!("models/fixtures/{name}")) else { return };
        let read = |file: &str| parse_config(&std::fs::read_to_string(folder.join(file)).unwrap(), file).unwrap();
        let spec = read("config.json");
        assert_eq!(spec, read("config.v4.json"), "{name}");
        assert_eq!((spec.hidden, spec.layers, spec.q_heads, spec.kv_heads, spec.head_dim), (64, 3, 4, 2, 32));
        assert_eq!((spec.intermediate, spec.vocab, spec.norm_eps), (160, 320, 1e-6));
        assert_eq!(spec.max_positions, 2048);
        assert_eq!(spec.qk_norm, name.starts_with("qwen3"));
        assert_eq!(spec.tied_embeddings, name == "qwen3-tied");
        let theta = if name.starts_with("qwen3") { 1e6 } else { [1e4, 5e5][usize::from(name == "llama3-rope")] };
        assert_eq!(spec.rope.theta, theta);
        match name {
            "llama3-rope" => assert_eq!(
                spec.rope.scaling,
                RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_max_positions: 128
                }
            ),
            "yarn-rope" => assert_eq!(spec.rope.scaling, yarn(0.1 * 8_f32.ln() + 1.0)),
            _ => assert_eq!(spec.rope.scaling, RopeScaling::None),
        }
        let moe = |per_token, normalize, middle| MoeSpec {
            experts: 8,
            experts_per_token: per_token,
            intermediate: 48,
            normalize,
            sparse_layers: vec![true, middle, true],
        };
        match name {
            "qwen3-moe" => assert_eq!(spec.moe, Some(moe(2, true, true))),
            "qwen3-moe-mixed" => assert_eq!(spec.moe, Some(moe(3, false, false))),
            _ => assert_eq!(spec.moe, None),
        }
    }
}

fn yarn(attention_factor: f32) -> RopeScaling {
    RopeScaling::Yarn { factor: 8.0, beta_fast: 32.0, beta_slow: 1.0, original_max_positions: 128, attention_factor }
}

#[test]
fn yarn_follows_transformers() {
    let base = json!({ "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128 });
    let scaling = |rope: Value| parse(&with(llama(), "rope_scaling", rope)).unwrap().rope.scaling;
    assert_eq!(scaling(with(base.clone(), "attention_factor", json!(0.5))), yarn(0.5));
    let both = with(with(base.clone(), "mscale", json!(0.707)), "mscale_all_dim", json!(0.5));
    let RopeScaling::Yarn { attention_factor, .. } = scaling(both) else { panic!() };
    // get_mscale(8, 0.707) / get_mscale(8, 0.5)
    assert!((attention_factor - 1.147_016_7 / 1.103_972_1).abs() < 1e-6, "{attention_factor}");
    let one = scaling(with(base.clone(), "mscale", json!(0.707)));
    assert_eq!(one, yarn(0.1 * 8_f32.ln() + 1.0));
    let absent = parse(&with(llama(), "rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0 }))).unwrap();
    assert!(matches!(absent.rope.scaling, RopeScaling::Yarn { original_max_positions: 2048, .. }));
    assert_eq!(absent.max_positions, 8192);
    let betas = with(with(base.clone(), "beta_fast", json!(16)), "beta_slow", json!(2));
    assert!(matches!(scaling(betas), RopeScaling::Yarn { beta_fast: 16.0, beta_slow: 2.0, .. }));
    let truncate = with(llama(), "rope_scaling", with(base, "truncate", json!(false)));
    assert!(matches!(parse(&truncate), Err(CheckpointError::Unsupported(_))));
}

#[test]
fn defaults_are_those_of_the_families() {
    let spec = parse(&llama()).unwrap();
    assert_eq!((spec.head_dim, spec.rope.theta, spec.eos.as_slice()), (16, 10_000.0, [2].as_slice()));
    let mut config = llama();
    config.as_object_mut().unwrap().remove("num_key_value_heads");
    assert_eq!(parse(&config).unwrap().kv_heads, 4);
    let linear = with(llama(), "rope_scaling", json!({ "type": "linear", "factor": 2.0 }));
    let spec = parse(&linear).unwrap();
    assert_eq!((spec.rope.scaling, spec.max_positions), (RopeScaling::Linear { factor: 2.0 }, 4096));
    let qwen = with(with(llama(), "model_type", json!("qwen3")), "rope_theta", json!(1e6));
    assert_eq!(parse(&qwen).unwrap().head_dim, 128);
    let bias = parse(&with(llama(), "attention_bias", json!(true))).unwrap();
    assert!(bias.attention_bias);
    assert_eq!(parse(&with(llama(), "eos_token_id", json!([5, 7]))).unwrap().eos, [5, 7]);
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let qwen = || with(with(llama(), "model_type", json!("qwen3")), "rope_theta", json!(1e6));
    let cases = [
        (llama(), "model_type", json!("mistral")),
        (llama(), "hidden_act", json!("gelu")),
        (llama(), "mlp_bias", json!(true)),
        (llama(), "sliding_window", json!(4096)),
        (llama(), "logits_scaling", json!(8.0)),
        (llama(), "final_logit_softcapping", json!(30.0)),
        (llama(), "partial_rotary_factor", json!(0.5)),
        (llama(), "quantization_config", json!({ "quant_method": "awq" })),
        (llama(), "layer_types", json!(["full_attention", "sliding_attention", "full_attention"])),
        (llama(), "rope_scaling", json!({ "type": "dynamic", "factor": 2.0 })),
        (llama(), "rope_scaling", json!({ "rope_type": "longrope", "factor": 2.0 })),
        (llama(), "rope_scaling", json!({ "factor": 2.0 })),
        (llama(), "rope_parameters", json!({ "full_attention": { "rope_type": "default" } })),
        (
            with(with(qwen(), "use_sliding_window", json!(true)), "max_window_layers", json!(1)),
            "sliding_window",
            json!(8),
        ),
    ];
    for (config, key, value) in cases {
        let error = parse(&with(config, key, value.clone())).unwrap_err();
        assert!(matches!(error, CheckpointError::Unsupported(_)), "{key} {value}: {error}");
        let leaf = if key.starts_with("rope_") { "type" } else { key };
        assert!(error.problem().what.contains(leaf), "{key}: {error}");
    }
    for (key, value) in [("use_sliding_window", json!(false)), ("max_window_layers", json!(28))] {
        let config = with(with(qwen(), "sliding_window", json!(4096)), key, value);
        assert!(parse(&config).is_ok(), "{key}");
    }
}

#[test]
fn impossible_values_are_refused_by_name() {
    let cases = [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!(1u64 << 60)),
        ("hidden_size", json!("64")),
        ("num_hidden_layers", json!(1_000_000_000)),
        ("rms_norm_eps", json!(0.0)),
        ("rms_norm_eps", json!(null)),
        ("vocab_size", json!(2.5)),
        ("eos_token_id", json!(320)),
        ("rope_theta", json!(-1.0)),
        ("rope_scaling", json!({ "type": "linear", "factor": 0.5 })),
        ("rope_scaling", json!({ "type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0 })),
        ("rope_scaling", json!({ "type": "linear" })),
    ];
    for (key, value) in cases {
        let error = parse(&with(llama(), key, value.clone())).unwrap_err();
        assert!(matches!(error, CheckpointError::InvalidConfig(_)), "{key} {value}: {error}");
        assert!(error.to_string().contains(key), "{error}");
    }
    for (key, value) in [("num_key_value_heads", json!(3)), ("head_dim", json!(15))] {
        assert!(matches!(parse(&with(llama(), key, value)), Err(CheckpointError::InvalidConfig(_))), "{key}");
    }
}
