//! EAGLE-3 heads: loading, fitting, refusing.

use oasis_models::checkpoint::{self, CheckpointError, HeadCheckpoint, Precision};
use oasis_models::spec::RopeScaling;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use crate::common::{self, floats, values};

#[test]
fn the_tiny_head_loads_with_its_explicit_taps() {
    let target = checkpoint::open("oasis-tiny").unwrap();
    let head = checkpoint::open_head("oasis-tiny-eagle3").unwrap();
    assert_eq!(head.spec().taps, Some([1, 3, 5]));
    let loaded = head.load(target.spec(), Precision::Auto, &mut |_| {}).unwrap();
    let bytes = std::fs::read(common::asset("oasis-tiny-eagle3").join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let joined = |names: &[&str]| -> Vec<f32> {
        names.iter().flat_map(|name| floats(&file, &format!("midlayer.{name}.weight"))).collect()
    };
    let weights = &loaded.weights;
    assert_eq!(values(&weights.fc), floats(&file, "fc.weight"));
    assert_eq!(values(&weights.attention.qkv), joined(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]));
    assert_eq!((weights.attention.qkv.rows, weights.attention.qkv.cols), (768, 512));
    assert_eq!(values(&weights.mlp.gate_up), joined(&["mlp.gate_proj", "mlp.up_proj"]));
    assert_eq!(values(&weights.lm_head), floats(&file, "lm_head.weight"));
    assert_eq!(weights.input_norm, joined(&["input_layernorm"]));
    assert_eq!(weights.hidden_norm, joined(&["hidden_norm"]));
    assert_eq!(weights.target_ids, None, "a d2t of zeros over the whole vocabulary means nothing");
    assert!(weights.embed.is_none());
}

#[test]
fn offsets_become_target_ids() {
    let head = checkpoint::open_head("smollm2-135m-eagle3").unwrap();
    assert_eq!(
        (head.spec().taps, head.spec().draft_vocab, &head.spec().rope.scaling),
        (None, 8192, &RopeScaling::None)
    );
    let mut target = checkpoint::open("oasis-tiny").unwrap().spec().clone();
    (target.hidden, target.vocab, target.layers) = (576, 49_152, 30);
    let loaded = head.load(&target, Precision::Auto, &mut |_| {}).unwrap();
    let ids = loaded.weights.target_ids.unwrap();
    let bytes = std::fs::read(common::asset("smollm2-135m-eagle3").join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let in_draft = file.tensor("t2d").unwrap().data().to_vec();
    assert_eq!(ids.len(), 8192);
    assert!(ids.iter().all(|&id| in_draft[id as usize] == 1));
    assert!(ids.is_sorted_by(|a, b| a < b));
}

#[test]
fn the_fc_layer_reproduces_the_reference() {
    let Some(path) = common::shared("models/smollm2-135m/refs.safetensors") else { return };
    let head = checkpoint::open_head("smollm2-135m-eagle3").unwrap();
    let mut target = checkpoint::open("oasis-tiny").unwrap().spec().clone();
    (target.hidden, target.vocab, target.layers) = (576, 49_152, 30);
    let fc = values(&head.load(&target, Precision::F32, &mut |_| {}).unwrap().weights.fc);
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (taps, expected) = (floats(&file, "aux"), floats(&file, "fc_out"));
    for (row, expected) in taps.chunks_exact(1728).zip(expected.chunks_exact(576)) {
        for (weights, expected) in fc.chunks_exact(1728).zip(expected) {
            let sum: f64 = weights.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!((sum - f64::from(*expected)).abs() < 2e-3 * (1.0 + sum.abs()), "{sum} {expected}");
        }
    }
}

#[test]
fn a_head_of_another_model_is_refused_with_one_error() {
    let target = checkpoint::open("oasis-tiny").unwrap();
    let head = checkpoint::open_head("smollm2-135m-eagle3").unwrap();
    let error = head.check_fits(target.spec()).unwrap_err();
    assert!(matches!(error, CheckpointError::HeadMismatch(_)));
    assert!(error.to_string().contains("256") && error.to_string().contains("576"), "{error}");
    let own = checkpoint::open_head("oasis-tiny-eagle3").unwrap();
    let mut spec = target.spec().clone();
    spec.vocab = 5000;
    assert!(own.check_fits(&spec).unwrap_err().to_string().contains("vocab_size"));
    spec = target.spec().clone();
    spec.layers = 4;
    assert!(own.check_fits(&spec).unwrap_err().to_string().contains("tapped layers"));
}

/// The tiny head with an edited config and edited tensors.
fn edited(
    config: impl Fn(&mut serde_json::Value),
    tensors: impl Fn(&str) -> Option<(String, Option<Vec<u8>>)>,
) -> checkpoint::Result<HeadCheckpoint> {
    let folder = tempfile::tempdir().unwrap();
    let asset = common::asset("oasis-tiny-eagle3");
    let mut json = common::json(&asset.join("config.json"));
    config(&mut json);
    std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
    let bytes = std::fs::read(asset.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let kept: Vec<_> = file
        .tensors()
        .into_iter()
        .filter_map(|(name, view)| tensors(&name).map(|(name, data)| (name, view, data)))
        .collect();
    let views = kept.iter().map(|(name, view, data)| {
        let data = data.as_deref().unwrap_or(view.data());
        (name, TensorView::new(view.dtype(), view.shape().to_vec(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    checkpoint::open_head(folder.path().to_str().unwrap())
}

fn same(name: &str) -> Option<(String, Option<Vec<u8>>)> {
    Some((name.to_owned(), None))
}

#[test]
fn variants_are_refused_by_name() {
    let cases = [
        ("norm_before_residual", serde_json::json!(true)),
        ("norm_before_fc", serde_json::json!(true)),
        ("fc_norm", serde_json::json!(true)),
        ("norm_output", serde_json::json!(true)),
        ("attention_bias", serde_json::json!(true)),
        ("mask_hidden", serde_json::json!(true)),
        ("logit_scale", serde_json::json!(2.0)),
        ("num_hidden_layers", serde_json::json!(2)),
        ("transformer_layer_config", serde_json::json!({})),
        ("architectures", serde_json::json!(["LlamaForCausalLM"])),
        ("use_aux_hidden_state", serde_json::json!(false)),
    ];
    for (key, value) in cases {
        let error = edited(|config| config[key] = value.clone(), same).unwrap_err();
        assert!(matches!(error, CheckpointError::Unsupported(_)), "{error}");
        assert!(error.problem().what.contains(key), "{error}");
    }
    let inner = |config: &mut serde_json::Value| config["eagle_config"]["use_aux_hidden_state"] = false.into();
    assert!(matches!(edited(inner, same), Err(CheckpointError::Unsupported(_))));
}

#[test]
fn taps_are_inputs_whatever_the_spelling() {
    let key = "eagle_aux_hidden_state_layer_ids";
    let top = |config: &mut serde_json::Value| {
        config.as_object_mut().unwrap().remove("eagle_config");
        config[key] = serde_json::json!([2, 3, 4]);
    };
    assert_eq!(edited(top, same).unwrap().spec().taps, Some([2, 3, 4]));
    let none = |config: &mut serde_json::Value| drop(config.as_object_mut().unwrap().remove("eagle_config"));
    assert_eq!(edited(none, same).unwrap().spec().taps, None);
    for bad in [serde_json::json!([1, 2]), serde_json::json!([3, 2, 1]), serde_json::json!([1, 2, u64::MAX])] {
        let config = |config: &mut serde_json::Value| config["eagle_config"][key] = bad.clone();
        assert!(matches!(edited(config, same), Err(CheckpointError::InvalidConfig(_))), "{bad}");
    }
    let config = |config: &mut serde_json::Value| drop(config.as_object_mut().unwrap().remove("rope_theta"));
    assert_eq!(edited(config, same).unwrap().spec().rope.theta, 10_000.0);
}

#[test]
fn tensors_are_checked_and_the_other_layer_name_is_known() {
    let target = checkpoint::open("oasis-tiny").unwrap();
    let load = |head: HeadCheckpoint| head.load(target.spec(), Precision::Auto, &mut |_| {});
    let renamed = |name: &str| Some((name.replace("midlayer.", "layers.0."), None));
    assert!(load(edited(|_| {}, renamed).unwrap()).is_ok());
    let without = |name: &str| (name != "fc.weight").then(|| (name.to_owned(), None));
    let error = load(edited(|_| {}, without).unwrap()).unwrap_err();
    assert!(matches!(error, CheckpointError::MissingTensor(_)) && error.to_string().contains("fc.weight"), "{error}");
    let extra = |name: &str| Some((if name == "t2d" { "fc_norm.0.weight" } else { name }.to_owned(), None));
    assert!(matches!(load(edited(|_| {}, extra).unwrap()), Err(CheckpointError::UnexpectedTensor(_))));
    let outside = |name: &str| {
        let data = (name == "d2t").then(|| [0_i64.to_le_bytes().repeat(4095), 1_i64.to_le_bytes().to_vec()].concat());
        Some((name.to_owned(), data))
    };
    let error = load(edited(|_| {}, outside).unwrap()).unwrap_err();
    assert!(matches!(error, CheckpointError::HeadMismatch(_)) && error.to_string().contains("d2t[4095]"), "{error}");
}

#[test]
fn pickled_heads_are_refused_with_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(common::asset("oasis-tiny-eagle3").join("config.json"), folder.path().join("config.json")).unwrap();
    std::fs::write(folder.path().join("pytorch_model.bin"), "pickle").unwrap();
    let error = checkpoint::open_head(folder.path().to_str().unwrap()).unwrap_err();
    assert!(
        error.problem().found.contains("pytorch_model.bin") && error.problem().hint.contains("save_file"),
        "{error}"
    );
}
