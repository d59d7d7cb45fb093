//! The model and the draft heads inside the binary.

/// A file of an embedded folder.
pub(super) type File = (&'static str, &'static [u8]);

macro_rules! asset {
    ($folder:literal, $file:literal) => {
        ($file, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/", $folder, "/", $file)) as &[u8])
    };
}

pub(super) static OASIS_TINY: [File; 5] = [
    asset!("oasis-tiny", "config.json"),
    asset!("oasis-tiny", "generation_config.json"),
    asset!("oasis-tiny", "tokenizer.json"),
    asset!("oasis-tiny", "tokenizer_config.json"),
    asset!("oasis-tiny", "model.safetensors"),
];

pub(super) static OASIS_TINY_EAGLE3: [File; 2] =
    [asset!("oasis-tiny-eagle3", "config.json"), asset!("oasis-tiny-eagle3", "model.safetensors")];

pub(super) static SMOLLM2_EAGLE3: [File; 2] =
    [asset!("smollm2-135m-eagle3", "config.json"), asset!("smollm2-135m-eagle3", "model.safetensors")];
