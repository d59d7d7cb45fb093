//! Files that commands write for their user.

use crate::error::{CliError, CliResult};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// The error of a file that `argument` names.
pub fn refused(argument: &str, path: &Path, error: &io::Error) -> CliError {
    CliError::input(
        format!("{argument} {}: expected a file that can be written, found: {error}", path.display()),
        "name a file in a folder that exists and that you may write to",
    )
}

/// A file that appears under its name only when it is complete.
pub struct NewFile {
    argument: &'static str,
    path: PathBuf,
    file: NamedTempFile,
}

impl NewFile {
    /// Finds out that the file that `argument` names can be written, before there is anything to write.
    ///
    /// # Errors
    /// When it cannot.
    pub fn create(argument: &'static str, path: &Path) -> CliResult<Self> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The error itself has the name of the temporary file.
        let file =
            NamedTempFile::new_in(folder).map_err(|error| refused(argument, path, &io::Error::from(error.kind())))?;
        Ok(Self { argument, path: path.to_owned(), file })
    }

    /// Lets `fill` write the file and gives it its name; returns its bytes.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(self, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> CliResult<u64> {
        let Self { argument, path, mut file } = self;
        let write = || -> io::Result<u64> {
            let mut writer = BufWriter::new(&mut file);
            fill(&mut writer)?;
            writer.flush()?;
            drop(writer);
            let bytes = file.as_file().metadata()?.len();
            file.persist(&path)?;
            Ok(bytes)
        };
        write().map_err(|error| refused(argument, &path, &error))
    }
}
