//! Finding and opening UCX.

use crate::error::Unavailable;
use crate::sys::Ucp;
use libloading::Library;
use std::ffi::c_uint;
use std::path::PathBuf;

/// Name that the dynamic linker searches for.
pub const LIBRARY: &str = "libucp.so.0";

/// What UCX reads from the environment while it is loaded. Its handler of SIGSEGV would stand before the program's own;
/// its module for AWS's EFA adapters crashes at exit beside some releases of the verbs providers.
const ENVIRONMENT: [(&str, &str); 2] = [("UCX_HANDLE_ERRORS", "none"), ("UCX_MODULES", "^efa")];

/// Prepares the process for UCX: sets `UCX_HANDLE_ERRORS` and `UCX_MODULES` where they are not set. To be called at the
/// start of a program: once there are threads, the environment is left as it is, and `false` says so.
pub fn prepare_environment() -> bool {
    let missing: Vec<_> = ENVIRONMENT.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect();
    if missing.is_empty() {
        return true;
    }
    if threads() != Some(1) {
        return false;
    }
    for (name, value) in missing {
        // SAFETY: this is the only thread, so nobody reads the environment meanwhile.
        unsafe { std::env::set_var(name, value) };
    }
    true
}

/// Threads of this process, where the system tells.
fn threads() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("Threads:"))?.trim().parse().ok()
}

/// What the dynamic linker says, which the error itself leaves to its source.
fn details(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// Where UCX is looked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Search {
    /// The library itself; without it, the linker searches for `libucp.so.0`.
    pub path: Option<PathBuf>,
}

impl Search {
    fn name(&self) -> String {
        self.path.as_ref().map_or_else(|| LIBRARY.to_owned(), |path| path.display().to_string())
    }

    /// The release that would be used, such as `1.13.1`.
    ///
    /// # Errors
    /// When there is no library, or it is not UCX.
    pub fn version(&self) -> Result<String, Unavailable> {
        let (_, [major, minor, release]) = self.open()?;
        Ok(format!("{major}.{minor}.{release}"))
    }

    pub(crate) fn open(&self) -> Result<(Ucp, [u32; 3]), Unavailable> {
        let unavailable = |found: String| Unavailable {
            what: "RDMA transport unavailable".to_owned(),
            expected: format!("UCX's library {}", self.name()),
            found,
            hint: "install UCX 1.13 or newer (Debian and Ubuntu: apt-get install libucx0), or name the library in \
                   nodes.ucx_library; nodes.transport = \"tcp\" needs none"
                .to_owned(),
        };
        if !prepare_environment() {
            tracing::debug!("UCX is opened beside other threads: UCX_HANDLE_ERRORS and UCX_MODULES stay as they are");
        }
        let name = self.path.as_ref().map_or_else(|| LIBRARY.into(), |path| path.clone().into_os_string());
        // SAFETY: loading runs the constructors of UCX, which expect nothing of us; a file that the operator names is
        // trusted as the program itself is.
        let library = unsafe { Library::new(name) }.map_err(|error| unavailable(details(&error)))?;
        // SAFETY: the library goes by libucp's name or was named as such, and `Ucp` refuses what lacks a function of it.
        let ucp = unsafe { Ucp::new(library) }.map_err(|error| unavailable(details(&error)))?;
        let mut version: [c_uint; 3] = [0; 3];
        let [major, minor, release] = &mut version;
        // SAFETY: three numbers to be written.
        unsafe { (ucp.ucp_get_version)(major, minor, release) };
        if (version[0], version[1]) < (crate::sys::API_MAJOR, crate::sys::API_MINOR) || version[0] != 1 {
            return Err(unavailable(format!("release {}.{}.{}", version[0], version[1], version[2])));
        }
        Ok((ucp, version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_said_to_be() {
        let search = Search { path: Some("/nowhere/libucp.so.0".into()) };
        let error = search.version().unwrap_err().to_string();
        assert!(
            error
                .starts_with("RDMA transport unavailable: expected UCX's library /nowhere/libucp.so.0, found /nowhere"),
            "{error}"
        );
        assert!(error.contains("\n  hint: install UCX"), "{error}");
    }

    #[test]
    fn another_library_is_refused() {
        // Rust programs on Linux with glibc have it; elsewhere nothing is found, which is refused as well.
        let search = Search { path: Some("libc.so.6".into()) };
        let found = search.version().unwrap_err().found;
        assert!(found.contains("ucs_status_string") || cfg!(not(target_env = "gnu")), "{found}");
    }
}
