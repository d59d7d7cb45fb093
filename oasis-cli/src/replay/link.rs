//! A link that a replay imagines: how long transfers take, and who waits for them.

use crate::replay::recording::Recording;
use oasis_core::policy::{LinkRate, QuerySource};
use std::time::Duration;

/// A link and the pace of the foreground.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkModel {
    /// Bytes a second.
    pub bandwidth: f64,
    /// Seconds of a transfer before its first byte.
    pub latency: f64,
    /// Seconds that the foreground computes in a layer.
    pub layer: f64,
}

impl LinkModel {
    /// What a selector would measure of it.
    pub fn rate(&self, entry_bytes: usize) -> LinkRate {
        LinkRate {
            entry: Duration::from_secs_f64(entry_bytes as f64 / self.bandwidth),
            interval: Duration::from_secs_f64(self.layer),
        }
    }
}

/// The foreground and the link, layer by layer. One transfer is on the link at a time, in the order of the selections. A
/// layer's attention waits for the transfer that its last selection asked for.
#[derive(Debug, Clone)]
pub struct LinkClock {
    model: LinkModel,
    source: QuerySource,
    entry_bytes: usize,
    /// Seconds since the start.
    now: f64,
    /// When the link has carried all that it was given.
    free: f64,
    /// When the last transfer of each layer has arrived, `[layers]`.
    arrives: Vec<f64>,
    /// Seconds on the link.
    pub busy: f64,
    /// Seconds that the foreground waited.
    pub waited: f64,
}

impl LinkClock {
    /// At the start of a recording whose predictor used queries of `source`.
    pub fn new(model: LinkModel, source: QuerySource, recording: &Recording) -> Self {
        let arrives = vec![0.0; recording.geometry.layers];
        let entry_bytes = recording.geometry.entry_bytes();
        Self { model, source, entry_bytes, now: 0.0, free: 0.0, arrives, busy: 0.0, waited: 0.0 }
    }

    /// A layer's step, whose selection lets `entries` cross.
    pub fn layer(&mut self, layer: usize, entries: u64) {
        self.wait(self.arrives[layer]);
        // A choice by the layer before was made when that layer began.
        let lead = if self.source == QuerySource::PreviousLayer { self.model.layer } else { 0.0 };
        let time = match entries {
            0 => 0.0,
            _ => self.model.latency + (entries * self.entry_bytes as u64) as f64 / self.model.bandwidth,
        };
        self.free = self.free.max(self.now - lead) + time;
        self.busy += time;
        self.arrives[layer] = self.free;
        if matches!(self.source, QuerySource::Exact | QuerySource::PreviousLayer) {
            self.wait(self.free);
        }
        self.now += self.model.layer;
    }

    fn wait(&mut self, until: f64) {
        let wait = (until - self.now).max(0.0);
        self.waited += wait;
        self.now += wait;
    }
}
