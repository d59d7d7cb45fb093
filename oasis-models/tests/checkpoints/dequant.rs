//! Every GGUF type against the floats of the PyPI package `gguf` (tests/data/make_dequant.py).

use oasis_models::checkpoint::Dtype;
use safetensors::SafeTensors;

use crate::common::floats;

const TYPES: [Dtype; 11] = [
    Dtype::F32,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::Q8_0,
    Dtype::Q4_0,
    Dtype::Q4_1,
    Dtype::Q5_0,
    Dtype::Q5_1,
    Dtype::Q4_K,
    Dtype::Q5_K,
    Dtype::Q6_K,
];

#[test]
fn every_type_decodes_as_the_reference_does() {
    let bytes = include_bytes!("../data/dequant.safetensors");
    let file = SafeTensors::deserialize(bytes).unwrap();
    for dtype in TYPES {
        let name = dtype.name();
        let raw = file.tensor(name).unwrap();
        let expected = floats(&file, &format!("{name}.values"));
        assert!(expected.len() >= 384 && expected.iter().any(|&value| value != 0.0), "{name}");
        assert_eq!(dtype.bytes(expected.len()), Some(raw.data().len()), "{name}");
        let mut decoded = vec![f32::NAN; expected.len()];
        dtype.decode(raw.data(), &mut decoded);
        assert_eq!(decoded, expected, "{name}");
    }
}

#[test]
fn sizes_are_those_of_whole_blocks() {
    assert_eq!(Dtype::Q4_1.bytes(64), Some(40));
    assert_eq!(Dtype::Q4_1.bytes(63), None);
    assert_eq!(Dtype::Q6_K.bytes(256), Some(210));
    assert_eq!(Dtype::F32.bytes(usize::MAX), None);
}
