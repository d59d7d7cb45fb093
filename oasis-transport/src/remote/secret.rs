//! The shared secret: proved, never sent.

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Bytes of a SHA-256 block.
const BLOCK: usize = 64;

/// Bytes that both ends of a session know. Neither `Debug` nor any message shows them.
#[derive(Clone, Default)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Of these bytes; no bytes are no secret.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// HMAC-SHA256 (RFC 2104) of the parts, one after the other.
    pub(super) fn proof(&self, parts: &[&[u8]]) -> [u8; 32] {
        let mut key = [0; BLOCK];
        if self.0.len() > BLOCK {
            key[..32].copy_from_slice(&Sha256::digest(&self.0));
        } else {
            key[..self.0.len()].copy_from_slice(&self.0);
        }
        let keyed = |pad: u8| Sha256::new_with_prefix(key.map(|byte| byte ^ pad));
        let inner = parts.iter().fold(keyed(0x36), |hash, part| hash.chain_update(part)).finalize();
        keyed(0x5c).chain_update(inner).finalize().into()
    }

    /// Whether a peer's proof is ours, in a time that does not depend on where they differ.
    pub(super) fn verifies(&self, parts: &[&[u8]], proof: &[u8; 32]) -> bool {
        self.proof(parts).ct_eq(proof).into()
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_empty() { "Secret(none)" } else { "Secret(..)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Test cases 1, 2 and 6 of RFC 4231.
    #[test]
    fn proofs_are_hmac_sha256() {
        let cases: [(Vec<u8>, &[u8], &str); 3] = [
            (vec![0x0b; 20], b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
            (
                b"Jefe".to_vec(),
                b"what do ya want for nothing?",
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
            ),
            (
                vec![0xaa; 131],
                b"Test Using Larger Than Block-Size Key - Hash Key First",
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
            ),
        ];
        for (key, text, expected) in cases {
            let secret = Secret::new(key);
            let (first, second) = text.split_at(3);
            let proof = secret.proof(&[first, second]);
            assert_eq!(hex(&proof), expected);
            assert!(secret.verifies(&[text], &proof));
            assert!(!secret.verifies(&[first], &proof) && !Secret::default().verifies(&[text], &proof));
        }
    }

    #[test]
    fn a_secret_is_not_printed() {
        let secret = Secret::new("hunter2");
        assert_eq!(format!("{secret:?} {:?}", Secret::default()), "Secret(..) Secret(none)");
    }
}
