//! Mutated files of every kind: an error or a model, never a panic or a hang.
//!
//! `OASIS_FUZZ_CASES` is the number of cases for each kind.

use std::path::Path;

use oasis_models::checkpoint::{self, CheckpointError, Precision};
use quickcheck::{Arbitrary, Gen};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::{common, gguf_files};

/// A few edits to a file.
#[derive(Debug, Clone)]
struct Mutation(Vec<Edit>);

#[derive(Debug, Clone)]
enum Edit {
    /// Sets a byte; the place is a share of the file.
    Set(u32, u8),
    /// Flips a bit.
    Flip(u32, u8),
    /// Writes eight bytes that mean a large or odd number.
    Number(u32, u64),
    /// Removes bytes.
    Cut(u32, u8),
    /// Repeats bytes.
    Repeat(u32, u8),
    /// Keeps only the beginning.
    Truncate(u32),
    /// Changes an ASCII digit.
    Digit(u32, u8),
}

impl Arbitrary for Edit {
    fn arbitrary(g: &mut Gen) -> Self {
        let at = u32::arbitrary(g);
        let numbers = [u64::MAX, 1 << 63, 1 << 40, u64::from(u32::MAX), 0, 1, 1 << 32, u64::MAX / 2];
        match u8::arbitrary(g) % 8 {
            0 => Self::Set(at, u8::arbitrary(g)),
            1 => Self::Flip(at, u8::arbitrary(g) % 8),
            2 => Self::Number(at, *g.choose(&numbers).unwrap()),
            3 => Self::Cut(at, u8::arbitrary(g)),
            4 => Self::Repeat(at, u8::arbitrary(g)),
            5 => Self::Truncate(at),
            _ => Self::Digit(at, u8::arbitrary(g) % 10),
        }
    }
}

impl Arbitrary for Mutation {
    fn arbitrary(g: &mut Gen) -> Self {
        let count = usize::arbitrary(g) % 4 + 1;
        Self((0..count).map(|_| Edit::arbitrary(g)).collect())
    }
}

impl Mutation {
    /// The edited file; places fall within its first `range` bytes, where the structure is.
    fn apply(&self, original: &[u8], range: usize) -> Vec<u8> {
        let mut out = original.to_vec();
        for edit in &self.0 {
            let limit = range.min(out.len());
            if limit == 0 {
                break;
            }
            let place = |share: u32| ((u64::from(share) * limit as u64) >> 32) as usize;
            match *edit {
                Edit::Set(at, byte) => out[place(at)] = byte,
                Edit::Flip(at, bit) => out[place(at)] ^= 1 << bit,
                Edit::Number(at, number) => {
                    let at = place(at);
                    let end = (at + 8).min(out.len());
                    out[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
                }
                Edit::Cut(at, count) => {
                    let at = place(at);
                    let end = (at + usize::from(count)).min(out.len());
                    out.drain(at..end);
                }
                Edit::Repeat(at, count) => {
                    let at = place(at);
                    let end = (at + usize::from(count)).min(out.len());
                    out.extend_from_within(at..end);
                    out[at..].rotate_right(end - at);
                }
                Edit::Truncate(at) => out.truncate(place(at)),
                Edit::Digit(at, digit) => {
                    let at = place(at);
                    if let Some(byte) = out[at..limit].iter_mut().find(|byte| byte.is_ascii_digit()) {
                        *byte = b'0' + digit;
                    }
                }
            }
        }
        out
    }
}

/// A Llama of one layer, hidden width 32, with that vocabulary: config.json and model.safetensors.
fn small_model(vocab: usize) -> (Vec<u8>, Vec<u8>) {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": vocab, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048, "tie_word_embeddings": true, "eos_token_id": [2, 3], "head_dim": 16,
        "rope_scaling": { "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1 }
    });
    let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![vocab, 32])];
    shapes.push(("model.norm.weight".to_owned(), vec![32]));
    let layer: [(&str, &[usize]); 9] = [
        ("input_layernorm", &[32]),
        ("post_attention_layernorm", &[32]),
        ("self_attn.q_proj", &[32, 32]),
        ("self_attn.k_proj", &[16, 32]),
        ("self_attn.v_proj", &[16, 32]),
        ("self_attn.o_proj", &[32, 32]),
        ("mlp.gate_proj", &[32, 32]),
        ("mlp.up_proj", &[32, 32]),
        ("mlp.down_proj", &[32, 32]),
    ];
    shapes.extend(layer.map(|(name, shape)| (format!("model.layers.0.{name}.weight"), shape.to_vec())));
    let zeros = vec![0; vocab.max(32) * 64];
    let views = shapes.iter().map(|(name, shape)| {
        let bytes = 2 * shape.iter().product::<usize>();
        (name, TensorView::new(Dtype::BF16, shape.clone(), &zeros[..bytes]).unwrap())
    });
    (config.to_string().into_bytes(), safetensors::serialize(views, None).unwrap())
}

/// Opens and, where that works, loads and uses everything.
fn exercise(path: &Path) -> Result<(), CheckpointError> {
    let opened = checkpoint::open(path.to_str().unwrap())?;
    if let Ok(tokenizer) = opened.tokenizer() {
        let ids = tokenizer.encode_prompt("Hello ab, naïve 日本 <|im_end|> 12345")?;
        tokenizer.decode(&ids, true)?;
        let mut stream = tokenizer.stream();
        ids.iter().try_for_each(|&id| stream.push(id).map(drop))?;
    }
    if let Some(template) = opened.chat_template() {
        template.render(&[oasis_models::tokenizer::ChatMessage::new("user", "hi")], true)?;
    }
    opened.load_weights(Precision::Auto, &mut |_| {}).map(drop)
}

/// Runs the cases of one kind: `files` make a folder (or are one GGUF file), `mutated` names the one that is damaged.
fn run(
    files: &[(&str, Vec<u8>)],
    mutated: &str,
    range: usize,
    open: &str,
    exercise: fn(&Path) -> Result<(), CheckpointError>,
) {
    let cases = std::env::var("OASIS_FUZZ_CASES").map_or(300, |cases| cases.parse().expect("OASIS_FUZZ_CASES"));
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let path = folder.path().join(open);
    exercise(&path).expect("the undamaged files");
    let original = &files.iter().find(|(name, _)| *name == mutated).unwrap().1;
    let outcomes = std::cell::Cell::new((0_u64, 0_u64));
    for case in 0..cases {
        // A seed of its own for each case: a failure names it, and every run tries the same ones.
        let mut g = Gen::from_size_and_seed(64, case);
        let mutation = Mutation::arbitrary(&mut g);
        std::fs::write(folder.path().join(mutated), mutation.apply(original, range)).unwrap();
        let outcome = std::panic::catch_unwind(|| exercise(&path));
        let (fine, refused) = outcomes.get();
        match outcome {
            Ok(Ok(())) => outcomes.set((fine + 1, refused)),
            Ok(Err(error)) => {
                let problem = error.problem();
                let parts = [&problem.what, &problem.expected, &problem.found, &problem.hint];
                assert!(parts.iter().all(|part| !part.is_empty()), "case {case}: {error}");
                outcomes.set((fine, refused + 1));
            }
            Err(_) => panic!("case {case} panicked: {mutation:?}"),
        }
    }
    let (fine, refused) = outcomes.get();
    eprintln!("{mutated}: {cases} cases, {refused} refused, {fine} still usable");
    assert!(refused > cases / 20, "mutations must do damage");
}

#[test]
fn safetensors_headers() {
    let (config, weights) = small_model(8);
    let header = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize + 8;
    let files = [("config.json", config), ("model.safetensors", weights)];
    run(&files, "model.safetensors", header, ".", exercise);
}

#[test]
fn safetensors_indices() {
    let (config, weights) = small_model(8);
    let names = safetensors::SafeTensors::deserialize(&weights).unwrap();
    let map: serde_json::Map<_, _> =
        names.names().into_iter().map(|name| (name.to_owned(), "part.safetensors".into())).collect();
    let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map }).to_string().into_bytes();
    let range = index.len();
    let files = [("config.json", config), ("part.safetensors", weights), ("model.safetensors.index.json", index)];
    run(&files, "model.safetensors.index.json", range, ".", exercise);
}

#[test]
fn configs() {
    let (config, weights) = small_model(8);
    let range = config.len();
    run(&[("config.json", config), ("model.safetensors", weights)], "config.json", range, ".", exercise);
}

#[test]
fn tokenizer_files() {
    let (config, weights) = small_model(4096);
    let read = |name: &str| std::fs::read(common::asset("oasis-tiny").join(name)).unwrap();
    let tokenizer = read("tokenizer.json");
    let range = tokenizer.len();
    let files = [
        ("config.json", config),
        ("model.safetensors", weights),
        ("tokenizer_config.json", read("tokenizer_config.json")),
        ("tokenizer.json", tokenizer),
    ];
    run(&files, "tokenizer.json", range, ".", exercise);
    // The first part holds the settings rather than the vocabulary.
    run(&files, "tokenizer.json", 1800, ".", exercise);
}

#[test]
fn tokenizer_settings() {
    let (config, weights) = small_model(4096);
    let read = |name: &str| std::fs::read(common::asset("oasis-tiny").join(name)).unwrap();
    let settings = read("tokenizer_config.json");
    let range = settings.len();
    let files = [
        ("config.json", config),
        ("model.safetensors", weights),
        ("tokenizer.json", read("tokenizer.json")),
        ("tokenizer_config.json", settings),
    ];
    run(&files, "tokenizer_config.json", range, ".", exercise);
}

#[test]
fn gguf_headers() {
    let model = gguf_files::tiny();
    let (file, range) = (model.bytes(), model.header_len());
    run(&[("model.gguf", file)], "model.gguf", range, "model.gguf", exercise);
}

/// Opens a head and, where that works, loads it for the embedded model.
fn exercise_head(path: &Path) -> Result<(), CheckpointError> {
    let target = checkpoint::open("oasis-tiny")?;
    let head = checkpoint::open_head(path.to_str().unwrap())?;
    head.check_fits(target.spec())?;
    head.load(target.spec(), Precision::Auto, &mut |_| {}).map(drop)
}

#[test]
fn head_configs() {
    let read = |name: &str| std::fs::read(common::asset("oasis-tiny-eagle3").join(name)).unwrap();
    let config = read("config.json");
    let range = config.len();
    let files = [("config.json", config), ("model.safetensors", read("model.safetensors"))];
    run(&files, "config.json", range, ".", exercise_head);
}
