//! Weights of safetensors folders: every element where the executors expect it, and every fault named.

use std::path::Path;

use crate::common::{self, floats, values};

use oasis_models::checkpoint::{self, CheckpointError, Precision, Progress};
use oasis_models::weights::{DecoderWeights, MatrixData, Mlp};
use safetensors::SafeTensors;

fn joined(file: &SafeTensors<'_>, prefix: &str, names: &[&str]) -> Vec<f32> {
    names.iter().flat_map(|name| floats(file, &format!("{prefix}.{name}.weight"))).collect()
}

/// Compares every tensor of a loaded decoder with the file's own.
pub fn assert_same(weights: &DecoderWeights, path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(values(&weights.embed), floats(&file, "model.embed_tokens.weight"));
    assert_eq!(weights.norm, floats(&file, "model.norm.weight"));
    match &weights.lm_head {
        Some(head) => assert_eq!(values(head), floats(&file, "lm_head.weight")),
        None => assert!(file.tensor("lm_head.weight").is_err()),
    }
    for (index, layer) in weights.layers.iter().enumerate() {
        let prefix = format!("model.layers.{index}");
        let attention = &layer.attention;
        let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        assert_eq!(values(&attention.qkv), joined(&file, &prefix, &qkv));
        assert_eq!(values(&attention.o), joined(&file, &prefix, &["self_attn.o_proj"]));
        assert_eq!(layer.input_norm, joined(&file, &prefix, &["input_layernorm"]));
        assert_eq!(layer.post_attention_norm, joined(&file, &prefix, &["post_attention_layernorm"]));
        if let Some(norm) = &attention.q_norm {
            assert_eq!(norm, &joined(&file, &prefix, &["self_attn.q_norm"]));
            assert_eq!(attention.k_norm.as_ref().unwrap(), &joined(&file, &prefix, &["self_attn.k_norm"]));
        }
        match &layer.mlp {
            Mlp::Dense(mlp) => {
                assert_eq!(values(&mlp.gate_up), joined(&file, &prefix, &["mlp.gate_proj", "mlp.up_proj"]));
                assert_eq!(values(&mlp.down), joined(&file, &prefix, &["mlp.down_proj"]));
            }
            Mlp::Moe { router, experts } => {
                assert_eq!(values(router), joined(&file, &prefix, &["mlp.gate"]));
                for (expert, mlp) in experts.iter().enumerate() {
                    let prefix = format!("{prefix}.mlp.experts.{expert}");
                    assert_eq!(values(&mlp.gate_up), joined(&file, &prefix, &["gate_proj", "up_proj"]));
                    assert_eq!(values(&mlp.down), joined(&file, &prefix, &["down_proj"]));
                }
            }
        }
    }
}

#[test]
fn every_fixture_loads_exactly() {
    for name in common::FIXTURES {
        let Some(folder) = common::shared(&format!("models/fixtures/{name}")) else { return };
        let opened = checkpoint::open(folder.to_str().unwrap()).unwrap();
        let weights = opened.load_weights(Precision::Auto, &mut |_| {}).unwrap();
        assert_eq!(weights.layers.len(), 3);
        assert!(matches!(weights.embed.data, MatrixData::F32(_)));
        assert_same(&weights, &folder.join("model.safetensors"));
        let sparse = |layer: usize| matches!(weights.layers[layer].mlp, Mlp::Moe { .. });
        let expected = match name {
            "qwen3-moe" => [true; 3],
            "qwen3-moe-mixed" => [true, false, true],
            _ => [false; 3],
        };
        assert_eq!([0, 1, 2].map(sparse), expected);
        assert!(matches!(opened.tokenizer(), Err(CheckpointError::Tokenizer(_))));
    }
}

#[test]
fn the_embedded_model_stays_in_bf16_and_equals_its_file() {
    let embedded = checkpoint::open("oasis-tiny").unwrap();
    let mut seen = Vec::new();
    let weights = embedded.load_weights(Precision::Auto, &mut |progress| seen.push(progress)).unwrap();
    assert!(matches!(weights.layers[0].attention.qkv.data, MatrixData::Bf16(_)));
    assert_same(&weights, &common::asset("oasis-tiny").join("model.safetensors"));
    let total = embedded.check_weights().unwrap();
    assert_eq!(seen.last(), Some(&Progress { done: total, total }));
    assert!(seen.is_sorted_by_key(|progress| progress.done));
    let provenance = embedded.provenance();
    assert_eq!((provenance.dtype, provenance.file_bytes), ("BF16", 13_122_712));
    let wide = embedded.load_weights(Precision::F32, &mut |_| {}).unwrap();
    assert!(matches!(wide.embed.data, MatrixData::F32(_)));
    assert_same(&wide, &common::asset("oasis-tiny").join("model.safetensors"));
    assert_eq!(embedded.spec().eos, [2, 0]);
    assert_eq!(embedded.spec().bos, None);
}

/// A copy of the tiny model's files, to damage.
fn copy(files: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in files {
        std::fs::copy(common::asset("oasis-tiny").join(file), folder.path().join(file)).unwrap();
    }
    folder
}

fn open(folder: &tempfile::TempDir) -> checkpoint::Result<checkpoint::Checkpoint> {
    checkpoint::open(folder.path().to_str().unwrap())
}

fn edit_config(folder: &tempfile::TempDir, from: &str, to: &str) {
    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from));
    std::fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn a_truncated_file_is_refused_when_opened() {
    let folder = copy(&["config.json", "model.safetensors"]);
    let path = folder.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    for keep in [whole.len() - 1, 20_000, 100, 8, 7, 0] {
        std::fs::write(&path, &whole[..keep]).unwrap();
        let error = open(&folder).unwrap_err();
        let expected = matches!(error, CheckpointError::Truncated(_) | CheckpointError::Malformed(_));
        assert!(expected, "{keep}: {error}");
        assert!(error.to_string().contains("model.safetensors"), "{error}");
    }
}

#[test]
fn wrong_shapes_missing_and_extra_tensors_are_named() {
    let folder = copy(&["config.json", "model.safetensors"]);
    edit_config(&folder, "\"intermediate_size\": 768", "\"intermediate_size\": 512");
    let error = open(&folder).unwrap().check_weights().unwrap_err();
    assert!(matches!(error, CheckpointError::WrongShape(_)));
    let problem = error.problem();
    assert!(problem.what.contains("model.layers.0.mlp.gate_proj.weight"), "{error}");
    assert_eq!((problem.expected.as_str(), problem.found.as_str()), ("shape [512, 256]", "[768, 256]"));

    let folder = copy(&["config.json", "model.safetensors"]);
    edit_config(&folder, "\"num_hidden_layers\": 6", "\"num_hidden_layers\": 7");
    let error = open(&folder).unwrap().check_weights().unwrap_err();
    assert!(matches!(error, CheckpointError::MissingTensor(_)) && error.to_string().contains("layers.6"), "{error}");

    edit_config(&folder, "\"num_hidden_layers\": 7", "\"num_hidden_layers\": 5");
    let error = open(&folder).unwrap().load_weights(Precision::Auto, &mut |_| {}).unwrap_err();
    assert!(matches!(error, CheckpointError::UnexpectedTensor(_)) && error.to_string().contains("layers.5"), "{error}");

    edit_config(&folder, "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    edit_config(&folder, "\"num_hidden_layers\": 5", "\"num_hidden_layers\": 6");
    let error = open(&folder).unwrap().check_weights().unwrap_err();
    assert!(error.to_string().contains("lm_head.weight"), "{error}");
}

#[test]
fn shards_load_as_one_file_does() {
    let folder = copy(&["config.json"]);
    let bytes = std::fs::read(common::asset("oasis-tiny").join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut map = serde_json::Map::new();
    for shard in 0..2 {
        let name = format!("model-{shard}.safetensors");
        let part = file.tensors().into_iter().enumerate().filter(|(i, _)| i % 2 == shard).map(|(_, tensor)| tensor);
        let part: Vec<_> = part.collect();
        map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), name.clone().into())));
        safetensors::serialize_to_file(part, None, &folder.path().join(name)).unwrap();
    }
    let index = folder.path().join("model.safetensors.index.json");
    std::fs::write(&index, serde_json::json!({ "metadata": {}, "weight_map": map }).to_string()).unwrap();
    let weights = open(&folder).unwrap().load_weights(Precision::Auto, &mut |_| {}).unwrap();
    assert_same(&weights, &common::asset("oasis-tiny").join("model.safetensors"));

    for bad in ["../model.safetensors", "/etc/passwd", ""] {
        std::fs::write(&index, serde_json::json!({ "weight_map": { "a": bad } }).to_string()).unwrap();
        assert!(matches!(open(&folder), Err(CheckpointError::Malformed(_))), "{bad}");
    }
}

#[test]
fn absent_things_say_what_was_looked_for() {
    let error = checkpoint::open("no-such-model").unwrap_err();
    assert!(matches!(error, CheckpointError::NotFound(_)) && error.to_string().contains("oasis-tiny"), "{error}");
    let folder = copy(&["config.json"]);
    assert!(matches!(open(&folder), Err(CheckpointError::NotFound(_))));
    std::fs::write(folder.path().join("pytorch_model.bin"), "pickle").unwrap();
    let error = open(&folder).unwrap_err();
    assert!(error.problem().hint.contains("save_file"), "{error}");
}

/// The tiny model with an edited config, tensors converted to other element types, and extra ones added.
fn edited(
    config: &[(&str, &str)],
    edit: impl Fn(&str) -> Option<safetensors::Dtype>,
    extra: &[(&str, Vec<f32>)],
) -> checkpoint::Result<checkpoint::Checkpoint> {
    let folder = copy(&["config.json"]);
    config.iter().for_each(|(from, to)| edit_config(&folder, from, to));
    let bytes = std::fs::read(common::asset("oasis-tiny").join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let encode = |name: &str, dtype| -> Vec<u8> {
        let values = floats(&file, name).into_iter();
        match dtype {
            safetensors::Dtype::F16 => values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect(),
            safetensors::Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
            other => panic!("{other:?}"),
        }
    };
    let mut tensors = Vec::new();
    for (name, view) in file.tensors() {
        let (dtype, data) = match edit(&name) {
            Some(dtype) => (dtype, encode(&name, dtype)),
            None => (view.dtype(), view.data().to_vec()),
        };
        tensors.push((name, dtype, view.shape().to_vec(), data));
    }
    for (name, values) in extra {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        tensors.push(((*name).to_owned(), safetensors::Dtype::F32, vec![values.len()], data));
    }
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    open(&folder)
}

#[test]
fn a_fused_matrix_takes_the_wider_type_unless_told() {
    let wide = |name: &str| match name {
        "model.layers.0.self_attn.k_proj.weight" => Some(safetensors::Dtype::F32),
        "model.layers.1.mlp.up_proj.weight" => Some(safetensors::Dtype::F16),
        _ => None,
    };
    let opened = edited(&[], wide, &[]).unwrap();
    let weights = opened.load_weights(Precision::Auto, &mut |_| {}).unwrap();
    assert!(matches!(weights.layers[0].attention.qkv.data, MatrixData::F32(_)));
    let Mlp::Dense(mlp) = &weights.layers[1].mlp else { panic!("expected a dense MLP") };
    assert!(matches!((&mlp.gate_up.data, &mlp.down.data), (MatrixData::F32(_), MatrixData::Bf16(_))));
    assert!(matches!(weights.layers[1].attention.qkv.data, MatrixData::Bf16(_)));
    let path = common::asset("oasis-tiny").join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    // bf16 has a wider range than f16: small values were rounded when the test stored them.
    let halves =
        floats(&file, "model.layers.1.mlp.up_proj.weight").into_iter().map(|v| half::f16::from_f32(v).to_f32());
    assert_eq!(values(&mlp.gate_up)[768 * 256..], halves.collect::<Vec<_>>());

    let widened = edited(&[], |name| name.contains("k_proj").then_some(safetensors::Dtype::F32), &[]).unwrap();
    let narrow = widened.load_weights(Precision::Bf16, &mut |_| {}).unwrap();
    assert!(matches!(narrow.layers[0].attention.qkv.data, MatrixData::Bf16(_)));
    assert_same(&narrow, &path);
}

#[test]
fn attention_biases_load_and_one_on_the_output_must_be_zero() {
    let config = [("\"attention_bias\": false", "\"attention_bias\": true")];
    let names =
        |part: &str| (0..6).map(|layer| format!("model.layers.{layer}.self_attn.{part}_proj.bias")).collect::<Vec<_>>();
    let (q, k, v, o) = (names("q"), names("k"), names("v"), names("o"));
    let biases = |output: f32| {
        let mut extra = Vec::new();
        for layer in 0..6 {
            extra.push((q[layer].as_str(), (0..512).map(|i| i as f32).collect()));
            extra.push((k[layer].as_str(), vec![-1.0; 128]));
            extra.push((v[layer].as_str(), vec![-2.0; 128]));
            extra.push((o[layer].as_str(), vec![output; 256]));
        }
        extra
    };
    let opened = edited(&config, |_| None, &biases(0.0)).unwrap();
    let weights = opened.load_weights(Precision::Auto, &mut |_| {}).unwrap();
    let bias = weights.layers[3].attention.qkv_bias.as_ref().unwrap();
    assert_eq!((bias.len(), bias[511], bias[512], bias[767]), (768, 511.0, -1.0, -2.0));
    let refused = edited(&config, |_| None, &biases(0.5)).unwrap();
    let error = refused.load_weights(Precision::Auto, &mut |_| {}).unwrap_err();
    assert!(matches!(error, CheckpointError::Unsupported(_)) && error.to_string().contains("o_proj.bias"), "{error}");
    let unannounced = edited(&[], |_| None, &biases(0.0)).unwrap();
    assert!(matches!(unannounced.check_weights(), Err(CheckpointError::UnexpectedTensor(_))));
}

#[test]
fn integers_are_no_weights() {
    let folder = copy(&["config.json"]);
    let data = vec![0; 4096 * 256 * 4];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::I32, vec![4096, 256], &data).unwrap();
    let path = folder.path().join("model.safetensors");
    safetensors::serialize_to_file([("model.embed_tokens.weight", view)], None, &path).unwrap();
    let error = open(&folder).unwrap().check_weights().unwrap_err();
    assert!(matches!(error, CheckpointError::WrongDtype(_)) && error.to_string().contains("I32"), "{error}");
}
