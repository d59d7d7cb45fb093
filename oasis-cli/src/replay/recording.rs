//! The file of recorded selections.
//!
//! A line of text, `oasis-selections 1`, then a DEFLATE stream (RFC 1951) of one [`Recording`] in the postcard wire format
//! (version 1): fields in order, integers as variable-length ones, floats as 4 bytes, lists after their length.

use crate::error::{CliError, CliResult};
use crate::output::NewFile;
use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use oasis_core::geometry::KvGeometry;
use oasis_core::ids::BlockId;
use oasis_core::working_set::BlockSet;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::Path;

/// Name and version of the format.
const MAGIC: &[u8] = b"oasis-selections 1\n";

/// Of any size of a shape: what is beyond it is damage.
const LARGEST_SIZE: usize = 1 << 16;

/// Of K, likewise.
const LARGEST_BUDGET: u32 = 1 << 20;

/// What a run wanted at every step, and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    /// The run's whole configuration, as TOML.
    pub config: String,
    /// Shape of the cache.
    pub geometry: KvGeometry,
    /// Blocks wanted per KV head, K.
    pub budget: u32,
    /// Decode steps of the run.
    pub steps: u64,
    /// Requests.
    pub requests: Vec<Request>,
    /// Selections in the order in which they were made.
    pub selections: Vec<Selection>,
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Tokens of the whole context: those whose keys and values are kept.
    pub tokens: u32,
}

/// One layer's selection of a whole batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Selection {
    /// Layer.
    pub layer: u32,
    /// Step.
    pub step: u64,
    /// What the selector was told of the link: nanoseconds an entry and from layer to layer.
    pub link: Option<(u64, u64)>,
    /// Requests of the batch.
    pub members: Vec<Member>,
}

/// One request's part of a selection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Index of the request.
    pub request: u32,
    /// The tail block that the step completed, which is promoted without crossing the link.
    pub completed: Option<u32>,
    /// Wanted blocks and their scores, best first, for each KV head.
    pub heads: Vec<Vec<(u32, f32)>>,
    /// What the run's own selector made of it.
    pub live: Counts,
}

/// Entries (one block of one KV head) of one selection, or of many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Of a first working set, over the link.
    pub filled: u64,
    /// Admitted by the selector, over the link.
    pub admitted: u64,
    /// Wanted but left outside.
    pub deferred: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.filled += other.filled;
        self.admitted += other.admitted;
        self.deferred += other.deferred;
    }
}

impl Recording {
    /// Writes the file; gives its bytes.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, file: NewFile) -> CliResult<u64> {
        let plain = postcard::to_stdvec(self).map_err(|error| CliError::Failure(error.to_string()))?;
        file.write(|file| {
            file.write_all(MAGIC)?;
            let mut stream = DeflateEncoder::new(file, Compression::default());
            stream.write_all(&plain)?;
            stream.finish()?;
            Ok(())
        })
    }

    /// Reads a file and checks that it can be replayed.
    ///
    /// # Errors
    /// When it cannot be read, is something else or damaged.
    pub fn read(path: &Path) -> CliResult<Self> {
        let wrong = |found: String| {
            CliError::input(
                format!("{}: expected selections that `oasis trace record` wrote, found {found}", path.display()),
                "oasis trace record --output run.selections",
            )
        };
        let bytes = std::fs::read(path).map_err(|error| wrong(format!("none: {error}")))?;
        let stream = bytes.strip_prefix(MAGIC).ok_or_else(|| wrong("another format or version".to_owned()))?;
        let mut plain = Vec::new();
        DeflateDecoder::new(stream).read_to_end(&mut plain).map_err(|error| wrong(format!("damage: {error}")))?;
        let recording: Self = postcard::from_bytes(&plain).map_err(|error| wrong(format!("damage: {error}")))?;
        recording.check().map_err(|problem| wrong(format!("damage: {problem}")))?;
        Ok(recording)
    }

    /// Blocks that a request's whole context fills.
    pub fn max_blocks(&self, request: u32) -> usize {
        self.geometry.full_blocks(self.requests[request as usize].tokens as usize)
    }

    /// Whether the rules of selection can be applied to every selection.
    fn check(&self) -> Result<(), String> {
        let KvGeometry { layers, q_heads, kv_heads, head_dim, block_tokens, .. } = self.geometry;
        if [layers, q_heads, kv_heads, head_dim, block_tokens].iter().any(|&size| size == 0 || size > LARGEST_SIZE) {
            return Err(format!("an impossible shape, {:?}", self.geometry));
        }
        if self.budget > LARGEST_BUDGET {
            return Err(format!("K = {}", self.budget));
        }
        if self.requests.iter().any(|request| request.prompt > request.tokens) {
            return Err("a prompt that is longer than its context".to_owned());
        }
        for selection in &self.selections {
            let place = format!("layer {} of step {}", selection.layer, selection.step);
            if selection.layer as usize >= layers {
                return Err(format!("{place}, of {layers} layers"));
            }
            for member in &selection.members {
                self.check_member(member).map_err(|problem| format!("{problem} in {place}"))?;
            }
        }
        Ok(())
    }

    fn check_member(&self, member: &Member) -> Result<(), String> {
        if member.request as usize >= self.requests.len() {
            return Err(format!("request {} of {}", member.request, self.requests.len()));
        }
        if member.heads.len() != self.geometry.kv_heads {
            return Err(format!("{} KV heads, not {}", member.heads.len(), self.geometry.kv_heads));
        }
        let wanted: usize = member.heads.iter().map(Vec::len).sum();
        if member.live.admitted.saturating_add(member.live.deferred) > wanted as u64 {
            return Err(format!("{:?} of {wanted} wanted entries", member.live));
        }
        let blocks = self.max_blocks(member.request);
        if member.completed.is_some_and(|block| block as usize >= blocks) {
            return Err(format!("block {:?} of {blocks} completed", member.completed));
        }
        for wanted in &member.heads {
            let mut seen = BlockSet::default();
            if wanted.len() > self.budget as usize {
                return Err(format!("{} wanted blocks, more than K = {}", wanted.len(), self.budget));
            }
            if let Some((block, _)) = wanted.iter().find(|(b, _)| *b as usize >= blocks || !seen.insert(BlockId(*b))) {
                return Err(format!("block {block}, wanted twice or not among {blocks}"));
            }
        }
        Ok(())
    }
}
