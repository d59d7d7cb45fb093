//! Agreement of the draft query's choice with the next step's own, layer by layer (paper, Fig. 6).

use crate::error::CliResult;
use crate::eval::device::Progress;
use crate::eval::meter::{AgreementMeter, Chooser, Source, Totals};
use crate::eval::observed::Observed;
use crate::eval::window::{Window, describe_contexts};
use crate::text::columns;
use oasis_core::policy::Aggregate;
use serde::Serialize;
use std::sync::PoisonError;

/// The queries that are compared, in the order of tables; the last one where the device runs probes.
const QUERIES: [(Source, &str); 3] =
    [(Source::Draft, "draft query"), (Source::Previous, "previous query"), (Source::Probe, "draft of the true token")];

/// Agreement of one query in one layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerAgreement {
    /// Layer.
    pub layer: usize,
    /// Whose choice is compared with the next query's.
    pub query: &'static str,
    /// Share of the next query's top-K that it chooses, mean over KV heads and steps, 0 to 1.
    pub agreement: f64,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AgreementReport {
    /// Blocks chosen per KV head, K.
    pub budget_blocks: usize,
    /// How a group's query heads are joined.
    pub aggregate: Aggregate,
    /// Contexts, tokens each.
    pub contexts: Vec<usize>,
    /// Steps compared.
    pub steps: usize,
    /// Share of steps in which the draft head guessed the next token.
    pub draft_right: f64,
    /// Layer by layer: draft query, previous query, and on the CPU a draft row fed the true next token.
    pub layers: Vec<LayerAgreement>,
    /// The same over all layers.
    pub mean: Vec<f64>,
    /// Mean of the draft query where the draft head guessed the next token, and where it did not; absent where there
    /// was no such step.
    pub draft_right_and_wrong: [Option<f64>; 2],
}

/// Measures over `windows`; `executor` decodes sparsely with `draft-query` and admits everything it predicts.
///
/// # Errors
/// When a request fails.
pub fn measure(
    executor: &mut Observed<'_>,
    windows: &[Window],
    budget: usize,
    aggregate: Aggregate,
    progress: &mut Progress<'_>,
) -> CliResult<AgreementReport> {
    let geometry = executor.info().geometry;
    let chooser = Chooser::of(executor, budget, aggregate);
    let (meter, totals) = AgreementMeter::new(chooser, geometry.layers);
    executor.set_observer(Some(Box::new(meter)))?;
    let (mut right, mut guesses) = (0, 0);
    for (index, window) in windows.iter().enumerate() {
        crate::interrupt::check()?;
        executor.follow_drafting(window, |guessed_right| {
            totals.lock().unwrap_or_else(PoisonError::into_inner).guessed_right = guessed_right;
            right += usize::from(guessed_right);
            guesses += 1;
        })?;
        progress(index + 1, windows.len());
    }
    executor.set_observer(None)?;
    let queries = if executor.runs_probes() { &QUERIES[..] } else { &QUERIES[..2] };
    let totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(AgreementReport {
        budget_blocks: budget,
        aggregate,
        contexts: windows.iter().map(|w| w.context.len()).collect(),
        steps: totals.steps(geometry.kv_heads),
        draft_right: right as f64 / guesses.max(1) as f64,
        layers: rows_of(&totals, queries),
        mean: queries.iter().map(|(source, _)| totals.mean(*source).unwrap_or(f64::NAN)).collect(),
        draft_right_and_wrong: [Source::DraftRight, Source::DraftWrong].map(|source| totals.mean(source)),
    })
}

fn rows_of(totals: &Totals, queries: &[(Source, &'static str)]) -> Vec<LayerAgreement> {
    let columns: Vec<_> =
        queries.iter().map(|(source, query)| (*query, totals.per_layer(*source).unwrap_or_default())).collect();
    let row = |layer: usize| {
        columns.iter().map(move |(query, shares)| LayerAgreement {
            layer,
            query,
            agreement: shares.get(layer).copied().unwrap_or(f64::NAN),
        })
    };
    (0..columns[0].1.len()).flat_map(row).collect()
}

/// The report as a table.
pub fn render(report: &AgreementReport) -> String {
    let share = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |share| format!("{share:.4}"));
    let [right, wrong] = report.draft_right_and_wrong;
    let mut text = format!(
        "top-{} agreement with the true next query ({:?} over the group), {}, {} steps\n\
         the draft head guessed the next token in {:.1}% of the steps; agreement {} there, {} elsewhere\n\n",
        report.budget_blocks,
        report.aggregate,
        describe_contexts(report.contexts.iter().copied()),
        report.steps,
        report.draft_right * 100.0,
        share(right),
        share(wrong),
    );
    let cells = |name: String, shares: &[f64]| -> Vec<String> {
        std::iter::once(name).chain(shares.iter().map(|share| format!("{share:.4}"))).collect()
    };
    let queries = &QUERIES[..report.mean.len()];
    let mut rows =
        vec![std::iter::once("layer").chain(queries.iter().map(|(_, query)| *query)).map(str::to_owned).collect()];
    let mut least = vec![f64::INFINITY; queries.len()];
    for (layer, row) in report.layers.chunks_exact(queries.len()).enumerate() {
        let shares: Vec<f64> = row.iter().map(|row| row.agreement).collect();
        least.iter_mut().zip(&shares).for_each(|(least, share)| *least = least.min(*share));
        rows.push(cells(layer.to_string(), &shares));
    }
    rows.push(cells("mean".to_owned(), &report.mean));
    rows.push(cells("least".to_owned(), &least));
    text.push_str(&columns(&rows).join("\n"));
    text.push('\n');
    text
}
