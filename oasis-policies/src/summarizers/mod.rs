//! Summarizers: what a block of keys is represented by on the device.

mod arkvale;
mod linear;
mod mean;
mod quest;
mod quest_fp8;
mod quest_int4;
mod shadowkv;

pub use arkvale::{ArkVale, Volume};
pub use mean::Mean;
pub use quest::Quest;
pub use quest_fp8::QuestFp8;
pub use quest_int4::QuestInt4;
pub use shadowkv::ShadowKv;
