//! Finished points on disk: one file each, which appears only when it is complete.

use crate::error::{CliError, CliResult};
use crate::sweep::point::Finished;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Beginning of the names of files that are being written.
const UNFINISHED: &str = ".unfinished-";

/// The folder of one sweep.
pub struct State {
    folder: PathBuf,
}

impl State {
    /// The folder at this path, whether it is there yet or not.
    ///
    /// # Errors
    /// When something else is there.
    pub fn at(folder: PathBuf) -> CliResult<Self> {
        let state = Self { folder };
        let points = state.points();
        match points.ancestors().find(|ancestor| ancestor.exists()) {
            Some(there) if !there.is_dir() => Err(CliError::input(
                format!("{}: expected a folder for results, found a file", there.display()),
                "--output names another folder",
            )),
            _ => Ok(state),
        }
    }

    /// Makes the folder where it is not there yet, and removes what a killed run left half written.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn make(&self) -> CliResult {
        let points = self.points();
        std::fs::create_dir_all(&points).map_err(|error| refused(&points, &error))?;
        for folder in [&self.folder, &points] {
            for entry in std::fs::read_dir(folder).map_err(|error| refused(folder, &error))?.flatten() {
                if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                    std::fs::remove_file(entry.path()).map_err(|error| refused(&entry.path(), &error))?;
                }
            }
        }
        Ok(())
    }

    /// The point of this name, where it is finished. A file that is no finished point is as good as none.
    pub fn read(&self, id: &str) -> Option<Finished> {
        let text = std::fs::read(self.points().join(format!("{id}.json"))).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Removes the point of this name, where there is one.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn forget(&self, id: &str) -> CliResult {
        let path = self.points().join(format!("{id}.json"));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(refused(&path, &error)),
            _ => Ok(()),
        }
    }

    /// Keeps a finished point.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn keep(&self, id: &str, finished: &Finished) -> CliResult {
        let mut text = serde_json::to_vec_pretty(finished)?;
        text.push(b'\n');
        self.write_in(&self.points(), &format!("{id}.json"), &text)
    }

    /// Writes a file of the sweep's folder; readers see the old one or the new one.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, name: &str, text: &str) -> CliResult {
        self.write_in(&self.folder, name, text.as_bytes())
    }

    /// Where a file of the sweep's folder is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn points(&self) -> PathBuf {
        self.folder.join("points")
    }

    fn write_in(&self, folder: &Path, name: &str, text: &[u8]) -> CliResult {
        let target = folder.join(name);
        let write = || -> std::io::Result<()> {
            let mut file =
                tempfile::Builder::new().prefix(UNFINISHED).permissions(permissions()).tempfile_in(folder)?;
            file.write_all(text)?;
            // On the disk before the name is.
            file.as_file().sync_all()?;
            file.persist(&target)?;
            Ok(())
        };
        write().map_err(|error| refused(&target, &error))
    }
}

/// What any new file has; temporary ones are their owner's alone.
fn permissions() -> std::fs::Permissions {
    use std::os::unix::fs::PermissionsExt;
    std::fs::Permissions::from_mode(0o666)
}

fn refused(path: &Path, error: &std::io::Error) -> CliError {
    CliError::failure(
        format!("{}: expected a place to write results to, found: {error}", path.display()),
        "--output names another folder",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_left_is_removed_and_damage_is_no_result() {
        let folder = tempfile::tempdir().unwrap();
        let state = State::at(folder.path().join("a")).unwrap();
        assert!(!folder.path().join("a").exists());
        state.make().unwrap();
        let points = folder.path().join("a/points");
        std::fs::write(points.join(".unfinished-1"), "{").unwrap();
        std::fs::write(points.join("abc.json"), "{\"command\": ").unwrap();
        state.make().unwrap();
        assert!(!points.join(".unfinished-1").exists());
        assert!(points.join("abc.json").exists() && state.read("abc").is_none());
        state.forget("abc").unwrap();
        state.forget("abc").unwrap();
        assert!(!points.join("abc.json").exists());
    }

    #[test]
    fn a_file_is_no_folder_of_results() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let Err(error) = State::at(file.path().join("a")) else { panic!("a file became a folder") };
        assert!(matches!(error, CliError::Input(_)), "{error:?}");
        let expected = format!("{}: expected a folder for results, found a file\n", file.path().display());
        assert!(error.text().unwrap().starts_with(&expected), "{error:?}");
    }
}
