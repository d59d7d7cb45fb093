//! CUDA C++ to machine code, by NVIDIA's run-time compiler (NVRTC), with a cache on disk.
//!
//! Kernels and device code of policies include nothing but each other: no header of the CUDA toolkit is needed, and
//! neither is a GPU. What comes out is a CUBIN for one architecture, since a driver older than the compiler could not
//! read its PTX.

mod cache;
mod error;
mod nvrtc;
mod report;

pub use cache::CubinCache;
pub(crate) use cache::user_cache;
pub use error::CompileError;
pub use nvrtc::{NVRTC_DIR, Nvrtc};
pub use report::{KernelReport, parse_log};

use sha2::{Digest, Sha256};
use std::borrow::Cow;

/// A file of CUDA C++.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Name that other files include it by and that compile errors show.
    pub name: Cow<'static, str>,
    /// Text.
    pub text: &'static str,
}

/// One compilation: a source, the files that it may include and its `-D` definitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Source.
    pub source: SourceFile,
    /// Files that may be included by their names.
    pub headers: Vec<SourceFile>,
    /// `NAME=value` definitions.
    pub defines: Vec<String>,
}

/// Machine code and what the assembler said about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cubin {
    /// ELF image for the driver.
    pub image: Vec<u8>,
    /// One a kernel.
    pub reports: Vec<KernelReport>,
}

/// Compiles for one architecture.
pub struct Compiler {
    nvrtc: Nvrtc,
    cache: Option<CubinCache>,
    arch: String,
}

impl Compiler {
    /// A compiler for `arch`, such as `sm_90a`, that looks in `cache` first.
    pub fn new(nvrtc: Nvrtc, arch: impl Into<String>, cache: Option<CubinCache>) -> Self {
        Self { nvrtc, cache, arch: arch.into() }
    }

    /// Compiles `unit`, or takes what an earlier run compiled from the same source, options and compiler.
    ///
    /// # Errors
    /// [`CompileError::Rejected`] with the compiler's messages, which name the files and lines of the unit.
    pub fn compile(&self, unit: &Unit) -> Result<Cubin, CompileError> {
        let options = self.options(unit);
        let key = self.key(unit, &options);
        if let Some(cubin) = self.cache.as_ref().and_then(|cache| cache.get(&key)) {
            return Ok(cubin);
        }
        let (image, log) = self.nvrtc.compile(unit, &options)?;
        if let Some(cache) = &self.cache {
            // A cache that cannot be written costs time, not the run.
            let _ = cache.put(&key, &image, &log);
        }
        Ok(Cubin { image, reports: parse_log(&log) })
    }

    fn options(&self, unit: &Unit) -> Vec<String> {
        let mut options: Vec<String> = vec![
            format!("--gpu-architecture={}", self.arch),
            "--std=c++17".to_owned(),
            "-default-device".to_owned(),
            "-lineinfo".to_owned(),
            "--ptxas-options=-v".to_owned(),
            "--ptxas-options=-warn-spills".to_owned(),
        ];
        options.extend(unit.defines.iter().map(|define| format!("-D{define}")));
        options
    }

    fn key(&self, unit: &Unit, options: &[String]) -> String {
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        add(self.nvrtc.version());
        options.iter().for_each(|option| add(option));
        for file in std::iter::once(&unit.source).chain(&unit.headers) {
            add(&file.name);
            add(file.text);
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests;
