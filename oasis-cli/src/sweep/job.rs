//! One sweep at work: which points are finished, which are measured, and what is written of them.

use crate::args::GlobalArgs;
use crate::error::{CliError, CliResult};
use crate::sweep::check::Checks;
use crate::sweep::failures::Failures;
use crate::sweep::file::SweepFile;
use crate::sweep::inputs::Digests;
use crate::sweep::plots::Unseen;
use crate::sweep::point::{Finished, Point, Ready};
use crate::sweep::program::Program;
use crate::sweep::report::{pictures, render};
use crate::sweep::state::State;
use crate::sweep::table::Table;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

/// A sweep whose points are ready to be measured.
pub struct Job {
    /// Its file's path, for messages.
    file: String,
    sweep: SweepFile,
    /// Text of the file.
    source: String,
    points: Vec<Point>,
    /// One a point.
    ready: Vec<Ready>,
    state: State,
    /// Points measured before, by name; none where all are to be measured anew.
    finished: BTreeMap<String, Finished>,
    fresh: bool,
}

impl Job {
    /// Prepares every point: an hour is a long time to wait for a misspelt key. With `fresh`, no point counts as
    /// finished.
    ///
    /// # Errors
    /// When a point is wrong, or there is no place for its results.
    pub fn new(
        file: &Path,
        (sweep, source): (SweepFile, String),
        output: &Path,
        fresh: bool,
        global: &GlobalArgs,
        digests: &mut Digests,
    ) -> CliResult<Self> {
        let points = sweep.points()?;
        let ready: Vec<Ready> = points.iter().map(|point| point.prepare(global, digests)).collect::<CliResult<_>>()?;
        let state = State::at(output.join(file.file_stem().unwrap_or_default()))?;
        let before = |ready: &Ready| Some((ready.id.clone(), state.read(&ready.id)?));
        let finished = if fresh { BTreeMap::new() } else { ready.iter().filter_map(before).collect() };
        Ok(Self { file: file.display().to_string(), sweep, source, points, ready, state, finished, fresh })
    }

    /// Keys of `--set` that the sweep sets itself.
    pub fn overridden<'a>(&self, global: &'a GlobalArgs) -> Vec<&'a str> {
        let keys: BTreeSet<&String> =
            self.points.iter().flat_map(|point| &point.settings).map(|(key, _)| key).collect();
        let assignments = global.set.iter();
        assignments
            .filter(|set| keys.iter().any(|key| set.split('=').next().map(str::trim) == Some(key)))
            .map(String::as_str)
            .collect()
    }

    /// Checks all points that are to be measured, and the plots by those that are finished.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self, checks: &mut Checks) -> CliResult {
        self.unseen()?;
        let pairs = self.points.iter().zip(&self.ready);
        checks.all(&pairs.filter(|(_, ready)| !self.finished.contains_key(&ready.id)).collect::<Vec<_>>())
    }

    /// Plots whose figures no finished point has shown.
    fn unseen(&self) -> CliResult<Unseen<'_>> {
        let mut unseen = Unseen::new(&self.file, &self.sweep, &self.points);
        for (point, ready) in self.points.iter().zip(&self.ready) {
            if let Some(finished) = self.finished.get(&ready.id) {
                unseen.see(point, finished)?;
            }
        }
        Ok(unseen)
    }

    /// Says how many points there are, how many of them are finished, and whether another program measured them.
    ///
    /// # Errors
    /// The writer's.
    pub fn announce(&self, out: &mut dyn Write) -> CliResult {
        let done = self.ready.iter().filter(|ready| self.finished.contains_key(&ready.id)).count();
        writeln!(out, "{}: {} points, {done} of them finished before", self.sweep.title, self.points.len())?;
        let programs = self.ready.iter().filter_map(|ready| Some(&self.finished.get(&ready.id)?.provenance.program));
        let others: Vec<&Program> = programs.filter(|program| *program != Program::this()).collect();
        if !others.is_empty() {
            let names: BTreeSet<String> = others.iter().map(|program| program.describe()).collect();
            let names = names.into_iter().collect::<Vec<_>>().join("; ");
            writeln!(out, "  {} of them by another program ({names}); --fresh measures all anew", others.len())?;
        }
        Ok(out.flush()?)
    }

    /// Prints every point and whether it is finished.
    ///
    /// # Errors
    /// The writer's.
    pub fn list(&self, out: &mut dyn Write) -> CliResult {
        for (index, (point, ready)) in self.points.iter().zip(&self.ready).enumerate() {
            let state = if self.finished.contains_key(&ready.id) { "finished" } else { "to do" };
            writeln!(out, "{}  {state:<8}  {}", self.place(index), point.describe())?;
        }
        Ok(())
    }

    fn place(&self, index: usize) -> String {
        format!("{:>4}/{}", index + 1, self.points.len())
    }

    /// Measures what is not finished, and writes results and report, those of the finished points after Ctrl-C too.
    ///
    /// # Errors
    /// When results cannot be written, a plot asks for figures that a measurement does not have, or on Ctrl-C. What
    /// fails at a point goes to `failures`.
    pub fn run(&mut self, failures: &mut Failures, out: &mut dyn Write) -> CliResult {
        self.state.make()?;
        if self.fresh {
            // An interrupted run goes on without --fresh, so what it has not measured must not be there.
            self.ready.iter().try_for_each(|ready| self.state.forget(&ready.id))?;
        }
        let mut measured = Vec::new();
        let outcome = self.measure(&mut measured, failures, out);
        self.finished.extend(measured);
        match outcome {
            Ok(()) => self.write_results(out),
            Err(CliError::Interrupted) => self.write_results(out).and(Err(CliError::Interrupted)),
            other => other,
        }
    }

    fn measure(
        &self,
        measured: &mut Vec<(String, Finished)>,
        failures: &mut Failures,
        out: &mut dyn Write,
    ) -> CliResult {
        let mut unseen = self.unseen()?;
        for (index, (point, ready)) in self.points.iter().zip(&self.ready).enumerate() {
            if self.finished.contains_key(&ready.id) {
                continue;
            }
            let (place, what) = (self.place(index), point.describe());
            match ready.run(point) {
                Ok(result) => {
                    self.state.keep(&ready.id, &result)?;
                    writeln!(out, "{place}  {:>7.1} s  {what}", result.provenance.seconds)?;
                    unseen.see(point, &result)?;
                    measured.push((ready.id.clone(), result));
                }
                Err(CliError::Interrupted) => return Err(CliError::Interrupted),
                Err(error) => {
                    let text = error.text().unwrap_or_default();
                    writeln!(out, "{place}  failed     {what}: {}", text.lines().next().unwrap_or_default())?;
                    failures.add(what, text);
                }
            }
            out.flush()?;
        }
        Ok(())
    }

    /// Writes tables, pictures and report; nothing where no point is finished.
    fn write_results(&self, out: &mut dyn Write) -> CliResult {
        let results = self.points.iter().zip(&self.ready);
        let results = results.filter_map(|(point, ready)| Some((point.clone(), self.finished.get(&ready.id)?.clone())));
        let results: Vec<(Point, Finished)> = results.collect();
        if results.is_empty() {
            return Ok(());
        }
        let Self { sweep, source, state, .. } = self;
        let table = Table::new(&results);
        state.write("results.csv", &table.csv())?;
        let place = |point: &Point| BTreeMap::from_iter(point.axes.iter().cloned());
        let points = results
            .iter()
            .map(|(point, finished)| json!({"case": point.case, "axes": place(point), "measured": finished}));
        let points: Vec<_> = points.collect();
        let all = json!({"title": sweep.title, "about": sweep.about, "sweep": source, "points": points});
        state.write("results.json", &(serde_json::to_string_pretty(&all)? + "\n"))?;
        let pictures = pictures(sweep, &table);
        for (name, svg) in &pictures {
            state.write(&format!("{name}.svg"), svg)?;
        }
        state.write("report.html", &render(sweep, source, self.points.len(), &results))?;
        writeln!(
            out,
            "{} of {} points in {}, beside it results.csv, results.json and {} pictures",
            results.len(),
            self.points.len(),
            state.path("report.html").display(),
            pictures.len()
        )?;
        for plot in sweep.plot.iter().filter(|plot| pictures.iter().all(|(name, _)| *name != plot.name)) {
            writeln!(out, "  no picture {}: no finished point has its figures", plot.name)?;
        }
        Ok(())
    }
}
