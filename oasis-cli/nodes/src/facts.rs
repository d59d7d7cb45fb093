//! What two nodes must agree on before one takes over a request of the other.

use oasis_core::geometry::KvGeometry;
use oasis_models::cpu::fingerprint_of;
use oasis_models::spec::DecoderSpec;
use oasis_transport::remote::Fact;

/// What a prefill and a decode node must have in common: weights, the layout of entries, how the cache is split, and the
/// policies of the first step, as pairs of key and value.
///
/// `weights` is their [fingerprint](oasis_models::cpu::fingerprint), `entry_layout` the number of the layout of entries and
/// summaries: that of [`oasis_core::geometry`] on a CPU, that of the kernels on a GPU.
pub fn node_facts(
    weights: u64,
    geometry: &KvGeometry,
    entry_layout: u32,
    budget_blocks: usize,
    policies: &[(String, String)],
) -> Vec<Fact> {
    let mut facts = vec![
        Fact::new("layers", geometry.layers),
        Fact::new("query heads", geometry.q_heads),
        Fact::new("KV heads", geometry.kv_heads),
        Fact::new("head_dim", geometry.head_dim),
        Fact::new("KV dtype", format!("{:?}", geometry.dtype).to_lowercase()),
        Fact::new("entry layout", entry_layout),
        Fact::new("tensor-parallel split", "1 of 1"),
        Fact::new("kv.block_tokens", geometry.block_tokens),
        Fact::new("kv.budget_blocks", budget_blocks),
        Fact::new("weights", format!("{weights:016x}")),
    ];
    facts.extend(policies.iter().map(|(key, value)| Fact::new(key, value)));
    facts
}

/// What a client and a decode node must have in common: a model of the same shape and vocabulary.
pub fn client_facts(spec: &DecoderSpec) -> Vec<Fact> {
    vec![Fact::new("model", format!("{} {:016x}", spec.family, fingerprint_of(spec)))]
}
