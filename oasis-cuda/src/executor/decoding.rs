//! Running a step: which rows, as which graph, with which tokens.

use super::options::StepMode;
use super::parts::Parts;
use super::request::Phase;
use super::scope::Scope;
use super::step::PADDING;
use super::timeline::{self, Mark};
use super::{CudaExecutor, StepGraph};
use crate::device::{DeviceError, Range};
use crate::kernels::StepInput;
use oasis_core::executor::{DecodeRow, RequestError};
use oasis_core::ids::{RequestId, Step, TokenId};
use std::time::Instant;

impl CudaExecutor {
    /// Batch sizes that graphs are captured for: a step runs the next larger one.
    pub(super) fn bucket(&self, rows: usize) -> usize {
        let step = match rows {
            0..=4 => return rows.next_power_of_two().min(self.rows.len()),
            5..=32 => 8,
            33..=128 => 16,
            _ => 32,
        };
        rows.next_multiple_of(step).min(self.rows.len())
    }

    /// Queues a step of the rows whose inputs are set and waits for it.
    pub(super) fn run_batch(&mut self, rows: usize) -> Result<(), DeviceError> {
        let bucket = self.bucket(rows);
        let _range = Range::begin(format_args!("decode step, {bucket} rows"));
        if let Some(side) = &self.parts.host_side {
            let inputs = self.parts.memory.shared.inputs().iter().enumerate();
            let positions = inputs.filter_map(|(row, input)| Some((row, usize::try_from(input.position).ok()?)));
            side.borrow_mut().rows.begin(false, positions);
        }
        if let Some(link) = &self.parts.link_follower {
            let rows = self.parts.memory.shared.inputs().iter().filter(|input| input.position >= 0).count();
            link.borrow_mut().begin(rows);
        }
        let key = (bucket, self.parts.memory.shared.filters(0, bucket));
        if self.parts.options.mode == StepMode::Graph && !self.graphs.contains_key(&key) {
            let graph = self.capture(bucket)?;
            self.graphs.insert(key, graph);
        }
        let launched = Instant::now();
        let mut marks = Vec::new();
        match self.graphs.get(&key) {
            // SAFETY: the graph uses the memory of `parts`, which outlives the launch: it is waited for below.
            Some(step) => unsafe { step.graph.launch(&self.parts.streams.foreground)? },
            None => marks = self.traced(|parts| parts.queue_step(Scope::Batch(bucket)))?.1,
        }
        self.transfers_left = self.parts.rotation() < self.parts.layers();
        self.parts.streams.foreground.synchronize()?;
        if let Some(link) = &self.parts.link_follower {
            link.borrow_mut().end(Step(self.steps));
        }
        let marks = self.graphs.get(&key).map_or(&marks, |step| &step.marks);
        timeline::record(&self.tracer, marks, self.steps, launched)
    }

    /// Captures a step of `bucket` rows. A step of nothing but padding goes first: products choose their algorithms then,
    /// which a capture must not do.
    pub(super) fn capture(&mut self, bucket: usize) -> Result<StepGraph, DeviceError> {
        let inputs: Vec<StepInput> = self.parts.memory.shared.inputs().to_vec();
        self.parts.memory.shared.inputs().fill(PADDING);
        self.parts.queue_step(Scope::Batch(bucket))?;
        self.parts.device.synchronize()?;
        self.parts.gemms.end_planning();
        self.parts.memory.shared.inputs().copy_from_slice(&inputs);
        let capture = |parts: &Parts| parts.streams.foreground.capture(|| parts.queue_step(Scope::Batch(bucket)));
        let (graph, marks) = self.traced(capture)?;
        Ok(StepGraph { graph, marks })
    }

    /// Runs `queue` with events around the operations where steps are traced.
    pub(super) fn traced<T>(
        &self,
        queue: impl FnOnce(&Parts) -> Result<T, DeviceError>,
    ) -> Result<(T, Vec<Mark>), DeviceError> {
        *self.parts.marks.borrow_mut() = self.tracer.is_recording().then(Vec::new);
        let done = queue(&self.parts);
        let marks = self.parts.marks.borrow_mut().take().unwrap_or_default();
        Ok((done?, marks))
    }

    /// Finishes what the last step left to the next one, so that rows can be given to other requests.
    pub(super) fn settle(&mut self) -> Result<(), DeviceError> {
        if std::mem::take(&mut self.transfers_left) {
            self.parts.queue_left_transfers()?;
        }
        self.parts.streams.foreground.synchronize()
    }

    /// Checks a row of a step; gives its request's row on the device.
    pub(super) fn check_row(&self, row: &DecodeRow, seen: &mut [bool]) -> Result<usize, RequestError> {
        let DecodeRow { request: id, token } = *row;
        let refuse = |problem: &str| Err(RequestError(format!("request {id}: {problem}")));
        let Some(request) = self.requests.get(&id) else {
            return refuse("expected an admitted request, named once in the batch; found none");
        };
        match &request.phase {
            Phase::Failed(problem) => return Err(RequestError(problem.clone())),
            Phase::Expected | Phase::Prefill { .. } => return refuse("its prompt has not been read yet"),
            Phase::First | Phase::Decode => {}
        }
        if std::mem::replace(&mut seen[request.row], true) {
            return refuse("expected an admitted request, named once in the batch; found it twice");
        }
        if request.position >= self.info.max_context {
            return refuse("the context is full");
        }
        if request.position >= request.end {
            return refuse("expected no more steps than tokens were asked for; slots and store have room for no more");
        }
        if token.index() >= self.info.vocab {
            return refuse("the token is not in the vocabulary");
        }
        Ok(request.row)
    }

    pub(super) fn try_decode(&mut self, rows: &[DecodeRow]) -> Result<Vec<Result<TokenId, RequestError>>, DeviceError> {
        self.steps += 1;
        let mut seen = vec![false; self.rows.len()];
        let checked: Vec<Result<usize, RequestError>> = rows.iter().map(|row| self.check_row(row, &mut seen)).collect();
        self.parts.memory.shared.inputs().fill(PADDING);
        let mut batch = 0;
        let mut first = Vec::new();
        for (row, place) in rows.iter().zip(&checked) {
            let Ok(place) = *place else { continue };
            let request = &self.requests[&row.request];
            let input = StepInput { token: row.token.0 as i32, position: request.position as i32 };
            match request.phase {
                Phase::First => first.push((row.request, input)),
                _ => {
                    self.parts.memory.shared.inputs()[place] = input;
                    batch = batch.max(place + 1);
                }
            }
        }
        if batch > 0 {
            self.run_batch(batch)?;
        }
        for (id, input) in first {
            self.run_first(id, input)?;
        }
        let outputs = self.parts.memory.shared.outputs().to_vec();
        let mut failures =
            self.parts.host_side.as_ref().map(|side| side.borrow_mut().rows.take_failures()).unwrap_or_default();
        if let Some(link) = &self.parts.store_link {
            failures.extend(link.borrow_mut().take_failures());
        }
        let results = rows.iter().zip(checked).map(|(row, place)| {
            let place = place?;
            let request = self.requests.get_mut(&row.request).expect("checked above");
            if let Some(problem) = failures.get(&place) {
                let problem = format!("request {}: {problem}", row.request);
                request.phase = Phase::Failed(problem.clone());
                return Err(RequestError(problem));
            }
            request.position += 1;
            request.phase = Phase::Decode;
            self.tokens += 1;
            token_of(row.request, outputs[place])
        });
        Ok(results.collect())
    }
}

pub(super) fn token_of(id: RequestId, token: i32) -> Result<TokenId, RequestError> {
    u32::try_from(token).map(TokenId).map_err(|_| {
        RequestError(format!(
            "request {id}: logits: expected a number, found none\n  hint: the arithmetic overflowed, or the weights are damaged"
        ))
    })
}
