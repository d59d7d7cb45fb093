//! Numbers, texts and arrays as bytes; what comes from a peer is checked before anything is allocated.

/// A message that does not read as one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("damaged message: expected {expected}, found {found}")]
pub struct WireError {
    expected: String,
    found: String,
}

impl WireError {
    pub(super) fn new(expected: impl Into<String>, found: impl ToString) -> Self {
        Self { expected: expected.into(), found: found.to_string() }
    }
}

/// Appends values, little-endian.
#[derive(Default)]
pub(super) struct Writer(pub Vec<u8>);

impl Writer {
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn f32(&mut self, value: f32) {
        self.u32(value.to_bits());
    }

    pub fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// A length that a reader will check against what is left.
    ///
    /// # Panics
    /// When there are 4 Gi elements: no message may be that large.
    pub fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).expect("a message has fewer than 2^32 elements"));
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.raw(bytes);
    }

    pub fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub fn u32s(&mut self, values: impl ExactSizeIterator<Item = u32>) {
        self.count(values.len());
        self.0.reserve(values.len() * size_of::<u32>());
        values.for_each(|value| self.u32(value));
    }

    pub fn u64s(&mut self, values: &[u64]) {
        self.count(values.len());
        self.0.reserve(size_of_val(values));
        values.iter().for_each(|&value| self.u64(value));
    }

    pub fn f32s(&mut self, values: &[f32]) {
        self.u32s(values.iter().map(|value| value.to_bits()));
    }
}

/// Takes values off the front.
pub(super) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn raw(&mut self, count: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = (self.0.split_at_checked(count))
            .ok_or_else(|| WireError::new(format!("{count} more bytes"), self.0.len()))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        Ok(self.raw(N)?.try_into().expect("as many bytes as were asked for"))
    }

    pub fn u8(&mut self) -> Result<u8, WireError> {
        Ok(self.array::<1>()?[0])
    }

    pub fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn f32(&mut self) -> Result<f32, WireError> {
        Ok(f32::from_bits(self.u32()?))
    }

    pub fn nonce(&mut self) -> Result<[u8; 32], WireError> {
        self.array()
    }

    /// A number of elements of at least `size` bytes each: no more than can follow.
    pub fn count(&mut self, size: usize) -> Result<usize, WireError> {
        let count = self.u32()? as usize;
        match count.checked_mul(size) {
            Some(bytes) if bytes <= self.0.len() => Ok(count),
            _ => Err(WireError::new(format!("{count} elements of {size} bytes"), format!("{} bytes", self.0.len()))),
        }
    }

    pub fn bytes(&mut self) -> Result<&'a [u8], WireError> {
        let count = self.count(1)?;
        self.raw(count)
    }

    pub fn text(&mut self) -> Result<String, WireError> {
        let bytes = self.bytes()?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(WireError::new("UTF-8", "other bytes")),
        }
    }

    pub fn u32s(&mut self) -> Result<Vec<u32>, WireError> {
        let count = self.count(size_of::<u32>())?;
        let words = self.raw(count * size_of::<u32>())?.chunks_exact(size_of::<u32>());
        Ok(words.map(|word| u32::from_le_bytes(word.try_into().expect("four bytes"))).collect())
    }

    pub fn f32s(&mut self) -> Result<Vec<f32>, WireError> {
        Ok(self.u32s()?.into_iter().map(f32::from_bits).collect())
    }

    /// `count` elements that `read` takes one by one, each of at least `size` bytes.
    pub fn list<T>(
        &mut self,
        size: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.count(size)?;
        (0..count).map(|_| read(self)).collect()
    }

    pub fn end(self) -> Result<(), WireError> {
        match self.0 {
            [] => Ok(()),
            rest => Err(WireError::new("the end", format!("{} more bytes", rest.len()))),
        }
    }
}
