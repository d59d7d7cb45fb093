//! What nodes say to each other.

use super::codec::{Reader, WireError, Writer};
use super::one_sided::Places;
use oasis_core::hand_over::{DraftHandOver, HandOver, LayerHandOver};
use oasis_core::ids::{BlockId, LayerId, SlotId, Step};
use oasis_core::sampling::SamplingParams;
use oasis_core::working_set::HeldSlot;

/// Number of this protocol; both ends must speak the same.
pub const WIRE_VERSION: u32 = 2;

/// First bytes of a session.
const MAGIC: &[u8; 8] = b"OASISKV\n";

/// Which of a node's services a session is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Reading prompts, and lending their blocks.
    Prefill,
    /// Answering requests.
    Decode,
}

impl Service {
    /// Lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Something that both ends must agree on: a name and its value in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    /// Name, such as `kv.block_tokens`.
    pub name: String,
    /// Value, such as `16`.
    pub value: String,
}

impl Fact {
    /// A fact.
    pub fn new(name: impl Into<String>, value: impl ToString) -> Self {
        Self { name: name.into(), value: value.to_string() }
    }
}

/// Blocks of one layer of one request, all KV heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockRead {
    /// The request's number in the session that granted it.
    pub request: u64,
    /// Layer.
    pub layer: LayerId,
    /// Blocks.
    pub blocks: Vec<BlockId>,
}

/// Answer to one [`BlockRead`]: bytes `[blocks][kv_heads][entry]`, or why there are none.
pub type PartResult = Result<Vec<u8>, String>;

/// What a request cost on a decode node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeMetrics {
    /// Bytes of control messages at admission: summaries, tails, indices, draft state.
    pub state_bytes: u64,
    /// Bytes of blocks at admission.
    pub admission_bytes: u64,
    /// Bytes of blocks that later steps missed.
    pub miss_bytes: u64,
    /// Blocks of a layer that crossed.
    pub blocks: u64,
    /// Blocks of all layers that the prefill node had: those of the prompt that did not travel as its tail.
    pub prompt_blocks: u64,
    /// Bytes of one block of a layer.
    pub block_bytes: u64,
    /// Fetches of a layer that missed something.
    pub misses: u64,
    /// Bytes of KV in the decode node's store at the end.
    pub resident_bytes: u64,
}

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// Client: opens a session.
    Hello {
        /// [`WIRE_VERSION`].
        version: u32,
        /// What the session is for.
        service: Service,
        /// Random bytes.
        nonce: [u8; 32],
    },
    /// Server: its own random bytes, and the proof that it knows the secret.
    Challenge {
        /// Random bytes.
        nonce: [u8; 32],
        /// HMAC over both nonces.
        proof: [u8; 32],
    },
    /// Client: the proof that it knows the secret, and what it assumes.
    Proof {
        /// HMAC over both nonces.
        proof: [u8; 32],
        /// What must be the same at both ends.
        facts: Vec<Fact>,
    },
    /// Server: the session is open.
    Welcome,
    /// Either end: no, and why. The session or the request ends.
    Refused {
        /// Request, 0 for the session itself.
        request: u64,
        /// Why.
        reason: String,
    },
    /// To a prefill node: read a prompt.
    Prefill {
        /// Number of the request in this session.
        request: u64,
        /// Most tokens to generate.
        max_new_tokens: u32,
        /// How tokens are chosen.
        sampling: SamplingParams,
        /// Tokens.
        prompt: Vec<u32>,
    },
    /// From a node: how far a prompt has been read; also says that the node lives.
    Progress {
        /// Request.
        request: u64,
        /// Token-layers done.
        done: u64,
        /// Token-layers in all.
        total: u64,
    },
    /// From a prefill node: the request can be taken over; its layers follow, and from now on its blocks may be read.
    Admitted {
        /// Request.
        request: u64,
        /// First generated token.
        first: u32,
        /// Second generated token and the state after it; `None` where one token was asked for.
        second: Option<(u32, HandOver)>,
        /// How long blocks are kept without a sign of life, in milliseconds.
        lease_ms: u64,
    },
    /// From a prefill node: one layer's part of the state, after [`Message::Admitted`], in order.
    Layer {
        /// Request.
        request: u64,
        /// Its state.
        layer: LayerHandOver,
    },
    /// To a prefill node: send blocks, one answer for all parts.
    Read {
        /// Number of the read in this session.
        id: u64,
        /// What is wanted.
        parts: Vec<BlockRead>,
    },
    /// From a prefill node: blocks.
    Blocks {
        /// Number of the read.
        id: u64,
        /// One a part.
        parts: Vec<PartResult>,
    },
    /// To a prefill node: these requests still need their blocks.
    Renew {
        /// Requests.
        requests: Vec<u64>,
    },
    /// To a prefill node: the request has ended, in whatever state it is.
    Release {
        /// Request.
        request: u64,
    },
    /// To a decode node: answer a prompt. One request a session; closing the session cancels it.
    Generate {
        /// Most tokens to generate.
        max_new_tokens: u32,
        /// How tokens are chosen.
        sampling: SamplingParams,
        /// Tokens that end the answer.
        stop_tokens: Vec<u32>,
        /// Tokens.
        prompt: Vec<u32>,
    },
    /// From a decode node: the next token.
    Token {
        /// Token.
        token: u32,
    },
    /// From a decode node: the answer is complete.
    Finished {
        /// A stop token came.
        stopped: bool,
        /// What it cost.
        metrics: NodeMetrics,
    },
    /// To a prefill node: this session reads blocks from its memory, so it wants to know the pool, and where blocks lie.
    OpenPool,
    /// From a prefill node: its staging pool.
    Pool {
        /// What `oasis_ucx::Descriptor` encodes.
        descriptor: Vec<u8>,
    },
    /// From a prefill node, after [`Message::Admitted`] where the session has opened the pool: where the blocks lie.
    Places {
        /// Request.
        request: u64,
        /// Its blocks.
        places: Places,
    },
}

/// Takes the layers out of a state, to be sent one by one.
pub fn split_hand_over(mut state: HandOver) -> (HandOver, Vec<LayerHandOver>) {
    let layers = std::mem::take(&mut state.layers);
    (state, layers)
}

impl Message {
    /// What the message is, for errors.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "hello",
            Self::Challenge { .. } => "challenge",
            Self::Proof { .. } => "proof",
            Self::Welcome => "welcome",
            Self::Refused { .. } => "refused",
            Self::Prefill { .. } => "prefill",
            Self::Progress { .. } => "progress",
            Self::Admitted { .. } => "admitted",
            Self::Layer { .. } => "layer",
            Self::Read { .. } => "read",
            Self::Blocks { .. } => "blocks",
            Self::Renew { .. } => "renew",
            Self::Release { .. } => "release",
            Self::OpenPool => "open pool",
            Self::Pool { .. } => "pool",
            Self::Places { .. } => "places",
            Self::Generate { .. } => "generate",
            Self::Token { .. } => "token",
            Self::Finished { .. } => "finished",
        }
    }

    /// The message as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Self::Hello { version, service, nonce } => {
                w.u8(1);
                w.raw(MAGIC);
                w.u32(*version);
                w.u8(*service as u8);
                w.raw(nonce);
            }
            Self::Challenge { nonce, proof } => {
                w.u8(2);
                w.raw(nonce);
                w.raw(proof);
            }
            Self::Proof { proof, facts } => {
                w.u8(3);
                w.raw(proof);
                w.count(facts.len());
                for Fact { name, value } in facts {
                    w.text(name);
                    w.text(value);
                }
            }
            Self::Welcome => w.u8(4),
            Self::Refused { request, reason } => {
                w.u8(5);
                w.u64(*request);
                w.text(reason);
            }
            Self::Prefill { request, max_new_tokens, sampling, prompt } => {
                w.u8(6);
                w.u64(*request);
                w.u32(*max_new_tokens);
                write_sampling(&mut w, sampling);
                w.u32s(prompt.iter().copied());
            }
            Self::Progress { request, done, total } => {
                w.u8(7);
                [*request, *done, *total].into_iter().for_each(|value| w.u64(value));
            }
            Self::Admitted { request, first, second, lease_ms } => {
                w.u8(8);
                w.u64(*request);
                w.u32(*first);
                w.u64(*lease_ms);
                w.u8(u8::from(second.is_some()));
                if let Some((token, state)) = second {
                    w.u32(*token);
                    write_state(&mut w, state);
                }
            }
            Self::Layer { request, layer } => {
                w.u8(9);
                w.u64(*request);
                write_layer(&mut w, layer);
            }
            Self::Read { id, parts } => {
                w.u8(10);
                w.u64(*id);
                w.count(parts.len());
                for BlockRead { request, layer, blocks } in parts {
                    w.u64(*request);
                    w.u32(layer.0);
                    w.u32s(blocks.iter().map(|block| block.0));
                }
            }
            Self::Blocks { id, parts } => {
                let bytes: usize = parts.iter().map(|part| part.as_ref().map_or(0, Vec::len) + 8).sum();
                w.0.reserve(bytes);
                w.u8(11);
                w.u64(*id);
                w.count(parts.len());
                for part in parts {
                    match part {
                        Ok(bytes) => {
                            w.u8(1);
                            w.bytes(bytes);
                        }
                        Err(reason) => {
                            w.u8(0);
                            w.text(reason);
                        }
                    }
                }
            }
            Self::Renew { requests } => {
                w.u8(12);
                w.count(requests.len());
                requests.iter().for_each(|request| w.u64(*request));
            }
            Self::Release { request } => {
                w.u8(13);
                w.u64(*request);
            }
            Self::Generate { max_new_tokens, sampling, stop_tokens, prompt } => {
                w.u8(14);
                w.u32(*max_new_tokens);
                write_sampling(&mut w, sampling);
                w.u32s(stop_tokens.iter().copied());
                w.u32s(prompt.iter().copied());
            }
            Self::Token { token } => {
                w.u8(15);
                w.u32(*token);
            }
            Self::Finished { stopped, metrics } => {
                w.u8(16);
                w.u8(u8::from(*stopped));
                metrics.values().into_iter().for_each(|value| w.u64(value));
            }
            Self::OpenPool => w.u8(17),
            Self::Pool { descriptor } => {
                w.u8(18);
                w.bytes(descriptor);
            }
            Self::Places { request, places } => {
                w.u8(19);
                w.u64(*request);
                places.write(&mut w);
            }
        }
        w.0
    }

    /// Reads a message that [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`WireError`] for anything else; memory is taken only for elements that are there.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader(bytes);
        let message = match r.u8()? {
            1 => {
                if r.raw(MAGIC.len())? != MAGIC {
                    return Err(WireError::new("a session of OasisKV", "something else"));
                }
                let version = r.u32()?;
                let service = match r.u8()? {
                    0 => Service::Prefill,
                    1 => Service::Decode,
                    other => return Err(WireError::new("service 0 or 1", other)),
                };
                Self::Hello { version, service, nonce: r.nonce()? }
            }
            2 => Self::Challenge { nonce: r.nonce()?, proof: r.nonce()? },
            3 => {
                let proof = r.nonce()?;
                Self::Proof { proof, facts: r.list(8, |r| Ok(Fact { name: r.text()?, value: r.text()? }))? }
            }
            4 => Self::Welcome,
            5 => Self::Refused { request: r.u64()?, reason: r.text()? },
            6 => Self::Prefill {
                request: r.u64()?,
                max_new_tokens: r.u32()?,
                sampling: read_sampling(&mut r)?,
                prompt: r.u32s()?,
            },
            7 => Self::Progress { request: r.u64()?, done: r.u64()?, total: r.u64()? },
            8 => {
                let (request, first, lease_ms) = (r.u64()?, r.u32()?, r.u64()?);
                let second = if read_bool(&mut r)? { Some((r.u32()?, read_state(&mut r)?)) } else { None };
                Self::Admitted { request, first, second, lease_ms }
            }
            9 => Self::Layer { request: r.u64()?, layer: read_layer(&mut r)? },
            10 => {
                let id = r.u64()?;
                let part = |r: &mut Reader<'_>| {
                    let (request, layer) = (r.u64()?, LayerId(r.u32()?));
                    Ok(BlockRead { request, layer, blocks: r.u32s()?.into_iter().map(BlockId).collect() })
                };
                Self::Read { id, parts: r.list(16, part)? }
            }
            11 => {
                let id = r.u64()?;
                let part = |r: &mut Reader<'_>| match read_bool(r)? {
                    true => Ok(Ok(r.bytes()?.to_vec())),
                    false => Ok(Err(r.text()?)),
                };
                Self::Blocks { id, parts: r.list(5, part)? }
            }
            12 => Self::Renew { requests: r.list(8, Reader::u64)? },
            13 => Self::Release { request: r.u64()? },
            14 => Self::Generate {
                max_new_tokens: r.u32()?,
                sampling: read_sampling(&mut r)?,
                stop_tokens: r.u32s()?,
                prompt: r.u32s()?,
            },
            15 => Self::Token { token: r.u32()? },
            16 => {
                let stopped = read_bool(&mut r)?;
                let mut metrics = NodeMetrics::default();
                for value in metrics.values_mut() {
                    *value = r.u64()?;
                }
                Self::Finished { stopped, metrics }
            }
            17 => Self::OpenPool,
            18 => Self::Pool { descriptor: r.bytes()?.to_vec() },
            19 => Self::Places { request: r.u64()?, places: Places::read(&mut r)? },
            other => return Err(WireError::new("a kind of message from 1 to 19", other)),
        };
        r.end()?;
        Ok(message)
    }
}

impl NodeMetrics {
    fn values_mut(&mut self) -> [&mut u64; 8] {
        let Self {
            state_bytes,
            admission_bytes,
            miss_bytes,
            blocks,
            prompt_blocks,
            block_bytes,
            misses,
            resident_bytes,
        } = self;
        [state_bytes, admission_bytes, miss_bytes, blocks, prompt_blocks, block_bytes, misses, resident_bytes]
    }

    fn values(mut self) -> [u64; 8] {
        self.values_mut().map(|value| *value)
    }
}

fn read_bool(r: &mut Reader<'_>) -> Result<bool, WireError> {
    match r.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(WireError::new("0 or 1", other)),
    }
}

fn write_sampling(w: &mut Writer, sampling: &SamplingParams) {
    w.f32(sampling.temperature);
    w.f32(sampling.top_p);
    w.u64(sampling.top_k as u64);
    w.u64(sampling.seed);
}

fn read_sampling(r: &mut Reader<'_>) -> Result<SamplingParams, WireError> {
    let (temperature, top_p, top_k, seed) = (r.f32()?, r.f32()?, r.u64()?, r.u64()?);
    Ok(SamplingParams { temperature, top_p, top_k: usize::try_from(top_k).unwrap_or(usize::MAX), seed })
}

/// A state without its layers.
fn write_state(w: &mut Writer, state: &HandOver) {
    w.u64(state.prompt_tokens as u64);
    w.u64(state.steps);
    w.u64(state.last_step.0);
    w.u64(state.sampler_words);
    w.u8(u8::from(state.draft.is_some()));
    if let Some(DraftHandOver { keys, values, taps }) = &state.draft {
        [keys, values, taps].into_iter().for_each(|values| w.f32s(values));
    }
}

fn read_state(r: &mut Reader<'_>) -> Result<HandOver, WireError> {
    let prompt_tokens = r.u64()?;
    let prompt_tokens =
        usize::try_from(prompt_tokens).map_err(|_| WireError::new("a number of tokens", prompt_tokens))?;
    let (steps, last_step, sampler_words) = (r.u64()?, Step(r.u64()?), r.u64()?);
    let draft = match read_bool(r)? {
        true => Some(DraftHandOver { keys: r.f32s()?, values: r.f32s()?, taps: r.f32s()? }),
        false => None,
    };
    Ok(HandOver { prompt_tokens, steps, last_step, sampler_words, layers: Vec::new(), draft })
}

fn write_layer(w: &mut Writer, layer: &LayerHandOver) {
    w.u32s(layer.summaries.iter().copied());
    w.f32s(&layer.tail);
    w.f32s(&layer.query);
    w.count(layer.slots.len());
    for head in &layer.slots {
        w.count(head.len());
        for HeldSlot { slot, block, last_selected, times_selected } in head {
            [slot.0, block.0, *times_selected].into_iter().for_each(|value| w.u32(value));
            w.u64(last_selected.0);
        }
    }
}

fn read_layer(r: &mut Reader<'_>) -> Result<LayerHandOver, WireError> {
    let (summaries, tail, query) = (r.u32s()?, r.f32s()?, r.f32s()?);
    let held = |r: &mut Reader<'_>| {
        let (slot, block, times_selected) = (SlotId(r.u32()?), BlockId(r.u32()?), r.u32()?);
        Ok(HeldSlot { slot, block, times_selected, last_selected: Step(r.u64()?) })
    };
    let slots = r.list(4, |r| r.list(20, held))?;
    Ok(LayerHandOver { summaries, tail, query, slots })
}

#[cfg(test)]
mod tests;
