//! What can be found wrong before anything is measured: files, device, model, policies.

use crate::assemble::{self, Model};
use crate::error::{CliError, CliResult};
use crate::eval::setting::Setting;
use crate::settings::resolve;
use crate::sweep::needs::{Needs, Work};
use crate::sweep::point::{Point, Ready};
use oasis_core::config::{Config, DeviceKind};
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::rc::Rc;

/// Checks of points; models are opened once for all of them.
#[derive(Default)]
pub struct Checks {
    /// By path of the model and of its draft head.
    models: HashMap<(String, String), Rc<Model>>,
}

impl Checks {
    /// Checks points that are to be measured.
    ///
    /// # Errors
    /// The first that cannot be measured, and how many others say the same.
    pub fn all(&mut self, points: &[(&Point, &Ready)]) -> CliResult {
        let check = |(point, ready): &(&Point, &Ready)| Some((point.describe(), self.one(ready).err()?));
        let failed: Vec<(String, CliError)> = points.iter().filter_map(check).collect();
        let Some((point, error)) = failed.first() else { return Ok(()) };
        let text = error.text().unwrap_or_default();
        let same = failed.iter().filter(|(_, other)| other.text() == Some(text)).count();
        Err(CliError::Input(match points.len() {
            all if same == all => text.to_owned(),
            all => format!("{same} of {all} points, the first {point}: {text}"),
        }))
    }

    fn one(&mut self, ready: &Ready) -> CliResult {
        let (global, Needs { files, settings, work }) = (ready.global(), &ready.needs);
        for (argument, file) in files {
            check_file(argument, file)?;
        }
        if matches!(work, Work::Recording) {
            return Ok(());
        }
        let resolved = resolve(global, settings.clone())?;
        assemble::check_device(&resolved.config)?;
        let Work::Model(policies) = work else { return Ok(()) };
        let model = self.model(&resolved.config)?;
        let setting = Setting::new(global, settings, &resolved, &model)?;
        for policy in policies {
            let built = || match resolved.config.device.kind {
                DeviceKind::Cpu => assemble::build_policies(&setting.of(policy)?, &model).map(drop),
                DeviceKind::Cuda => setting.cuda_options(policy).map(drop),
            };
            // One policy alone needs no name.
            built().map_err(|error| if policies.len() > 1 { error.of(policy.name()) } else { error })?;
        }
        Ok(())
    }

    fn model(&mut self, config: &Config) -> CliResult<Rc<Model>> {
        let key = (config.model.path.clone(), config.model.draft.clone());
        if let Some(model) = self.models.get(&key) {
            return Ok(model.clone());
        }
        let model = Rc::new(assemble::open_model(config)?);
        self.models.insert(key, model.clone());
        Ok(model)
    }
}

fn check_file(argument: &str, path: &Path) -> CliResult {
    let found = match File::open(path).and_then(|file| file.metadata()) {
        Ok(facts) if !facts.is_dir() => return Ok(()),
        Ok(_) => "a folder".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(CliError::input(
        format!("{argument} {}: expected a readable file, found: {found}", path.display()),
        "relative paths start at the current directory",
    ))
}
