//! Sizes in bytes, written as people write them.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A size in bytes: `"8GiB"`, `"512 MB"` or a plain number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        bytesize::ByteSize(self.0).display().iec().fmt(f)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // The display form rounds; a size that it would change is written as a number.
        let text = self.to_string();
        match text.parse::<bytesize::ByteSize>() {
            Ok(size) if size.0 == self.0 && self.0 >= 1024 => serializer.serialize_str(&text),
            _ => serializer.serialize_u64(self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a size such as \"8GiB\" or a number of bytes")]
        enum Size {
            Number(u64),
            Text(String),
        }
        match Size::deserialize(deserializer)? {
            Size::Number(bytes) => Ok(Self(bytes)),
            Size::Text(text) => text
                .parse::<bytesize::ByteSize>()
                .map(|size| Self(size.0))
                .map_err(|_| serde::de::Error::custom(format!("expected a size such as \"8GiB\", found \"{text}\""))),
        }
    }
}
