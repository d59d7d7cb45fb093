//! Distinct index types, so that a block is never used as a slot.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($int:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $int);

        impl $name {
            /// The value as an array index.
            #[inline]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl From<usize> for $name {
            /// # Panics
            /// When `index` does not fit: every caller counts things that fit in memory many times over.
            #[inline]
            fn from(index: usize) -> Self {
                Self(<$int>::try_from(index).expect(concat!(stringify!($name), " out of range")))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// A decoder layer, counted from the embedding.
    LayerId(u32)
);
id!(
    /// A key/value head within a layer.
    KvHead(u32)
);
id!(
    /// A block of consecutive tokens within a request: block `b` holds positions `b * block_tokens ..`.
    BlockId(u32)
);
id!(
    /// A place for one entry in device memory, within one (request, layer, KV head).
    SlotId(u32)
);
id!(
    /// A request, unique for the lifetime of an engine.
    RequestId(u64)
);
id!(
    /// A decode step of an executor, counted from 1; 0 means "before the first step".
    Step(u64)
);
id!(
    /// A token of the target's vocabulary.
    TokenId(u32)
);
