//! What a pool's owner tells who may read it.

use crate::error::ReadError;
use twox_hash::XxHash3_64;

const MAGIC: &[u8; 4] = b"OUCX";
/// Longest worker address and key: UCX's are some hundred bytes.
const MAX_PART: usize = 64 << 10;

/// A pool as its readers see it. Whoever has it can read the whole pool: it goes to authenticated peers only.
///
/// UCX interprets address and key without bounds of its own, so the bytes carry a checksum: damage is found before
/// they get there. A peer that lies on purpose is not kept from anything by that.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// Major and minor release of the owner's UCX.
    pub version: (u32, u32),
    /// Where the owner's worker is reached; UCX's format.
    pub worker_address: Vec<u8>,
    /// Key of the memory; UCX's format.
    pub remote_key: Vec<u8>,
    /// Address of its first byte in the owner's memory.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

impl Descriptor {
    /// Bytes that [`decode`](Self::decode) reads.
    pub fn encode(&self) -> Vec<u8> {
        let Self { version, worker_address, remote_key, base, len } = self;
        let mut bytes = MAGIC.to_vec();
        [version.0, version.1].iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        [base, len].iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        for part in [worker_address, remote_key] {
            // Parts of UCX are far shorter; a longer one is refused when it is read.
            bytes.extend_from_slice(&u32::try_from(part.len()).unwrap_or(u32::MAX).to_le_bytes());
            bytes.extend_from_slice(part);
        }
        bytes.extend_from_slice(&XxHash3_64::oneshot(&bytes).to_le_bytes());
        bytes
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`ReadError::Descriptor`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, ReadError> {
        let bad = |expected: &str, found: String| ReadError::Descriptor { expected: expected.to_owned(), found };
        let (mut rest, sum) = (bytes.split_last_chunk::<8>())
            .filter(|(rest, _)| rest.starts_with(MAGIC))
            .ok_or_else(|| bad("one of OasisKV", format!("{} other bytes", bytes.len())))?;
        let (expected, found) = (u64::from_le_bytes(*sum), XxHash3_64::oneshot(rest));
        if expected != found {
            return Err(bad(&format!("the checksum {expected:016x}"), format!("{found:016x}")));
        }
        rest = &rest[MAGIC.len()..];
        let short = || bad("all of its fields", "fewer bytes".to_owned());
        let version = (number::<4>(&mut rest).ok_or_else(short)?, number::<4>(&mut rest).ok_or_else(short)?);
        let (base, len) = (number::<8>(&mut rest).ok_or_else(short)?, number::<8>(&mut rest).ok_or_else(short)?);
        if base.checked_add(len).is_none() {
            return Err(bad("memory below 2^64", format!("{len} bytes at {base:#x}")));
        }
        let mut part = || {
            let len = usize::try_from(number::<4>(&mut rest).ok_or_else(short)?).unwrap_or(usize::MAX);
            if len == 0 || len > MAX_PART {
                return Err(bad(&format!("an address or key of 1 to {MAX_PART} bytes"), format!("{len} bytes")));
            }
            let (part, tail) = rest.split_at_checked(len).ok_or_else(short)?;
            rest = tail;
            Ok(part.to_vec())
        };
        let (worker_address, remote_key) = (part()?, part()?);
        if !rest.is_empty() {
            return Err(bad("its end", format!("{} more bytes", rest.len())));
        }
        // Both were read from four bytes.
        let version = (version.0 as u32, version.1 as u32);
        Ok(Self { version, worker_address, remote_key, base, len })
    }
}

/// A little-endian number of `N` bytes, at most eight, off the front.
fn number<const N: usize>(rest: &mut &[u8]) -> Option<u64> {
    let (number, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(number);
    Some(u64::from_le_bytes(wide))
}

#[cfg(test)]
mod tests {
    use super::*;
    use quickcheck::quickcheck;

    fn descriptor() -> Descriptor {
        let (worker_address, remote_key) = ((0..83).collect(), vec![7; 10]);
        Descriptor { version: (1, 13), worker_address, remote_key, base: 0x7f00_0000_1000, len: 1 << 30 }
    }

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let bytes = descriptor().encode();
        assert_eq!(Descriptor::decode(&bytes), Ok(descriptor()));
        for len in 0..bytes.len() {
            Descriptor::decode(&bytes[..len]).expect_err("a truncated one");
        }
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            Descriptor::decode(&damaged).expect_err("one with a bit turned");
        }
    }

    #[test]
    fn lengths_are_checked_even_where_the_checksum_fits() {
        for change in [
            |d: &mut Descriptor| d.len = u64::MAX,
            |d: &mut Descriptor| d.remote_key.clear(),
            |d: &mut Descriptor| d.worker_address = vec![0; MAX_PART + 1],
        ] {
            let mut other = descriptor();
            change(&mut other);
            let error = Descriptor::decode(&other.encode()).unwrap_err().to_string();
            assert!(error.starts_with("description of a peer's memory: expected "), "{error}");
        }
    }

    quickcheck! {
        fn garbage_is_refused(bytes: Vec<u8>) -> bool {
            let sealed = |mut bytes: Vec<u8>| {
                bytes.splice(0..0, *MAGIC);
                bytes.extend_from_slice(&XxHash3_64::oneshot(&bytes).to_le_bytes());
                bytes
            };
            Descriptor::decode(&bytes).is_err()
                && Descriptor::decode(&sealed(bytes)).map_or(true, |d| d.base.checked_add(d.len).is_some())
        }
    }
}
