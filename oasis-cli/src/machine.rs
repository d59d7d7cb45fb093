//! The processors and memory of this machine.

use serde::{Deserialize, Serialize};
use std::fs;

/// What computes here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Product name, where the system says.
    pub cpu: Option<String>,
    /// Threads that this process may run at once.
    pub threads: usize,
    /// Vector extensions that were found.
    pub cpu_features: Vec<String>,
    /// Product names of GPUs, where there is a driver.
    #[serde(default)]
    pub gpus: Vec<String>,
    /// Physical memory in bytes.
    pub memory: Option<u64>,
    /// Limit of the control group in bytes, where one is set.
    pub memory_limit: Option<u64>,
}

/// Looks at the machine.
pub fn examine() -> Machine {
    Machine {
        cpu: (fs::read_to_string("/proc/cpuinfo").ok()).and_then(|text| field(&text, "model name").map(str::to_owned)),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        cpu_features: cpu_features(),
        gpus: oasis_cuda::device::names(),
        memory: fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory_total(&text)),
        memory_limit: memory_limit(),
    }
}

/// The value of the first `name : value` line.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// `MemTotal` of `/proc/meminfo`, in bytes.
fn memory_total(text: &str) -> Option<u64> {
    let kibibytes: u64 = field(text, "MemTotal")?.strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// The smallest limit from this process's control group (version 2) to the root; version 1 has one file.
fn memory_limit() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let groups = std::path::Path::new(path).ancestors();
    groups
        .map(|group| format!("/sys/fs/cgroup/{}/memory.max", group.display().to_string().trim_matches('/')))
        .chain(["/sys/fs/cgroup/memory/memory.limit_in_bytes".to_owned()])
        .filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())
        // Version 1 says "no limit" with a number close to 2^63.
        .filter(|&limit: &u64| limit < 1 << 60)
        .min()
}

/// How much a process may lock in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LockLimit {
    /// At most so many bytes.
    Bytes(u64),
    /// As much as there is.
    Unlimited,
}

/// This process's limit of locked memory (`ulimit -l`), where the system says.
pub fn lock_limit() -> Option<LockLimit> {
    lock_limit_of(&fs::read_to_string("/proc/self/limits").ok()?)
}

/// The soft limit in a text such as `/proc/self/limits`.
fn lock_limit_of(text: &str) -> Option<LockLimit> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(LockLimit::Unlimited),
        bytes => bytes.parse().ok().map(LockLimit::Bytes),
    }
}

macro_rules! detected {
    ($detect:ident: $($feature:tt),*) => {
        [$(($feature, std::arch::$detect!($feature))),*]
    };
}

fn cpu_features() -> Vec<String> {
    #[cfg(target_arch = "x86_64")]
    let features = detected!(is_x86_feature_detected: "sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw",
        "avx512vnni", "avx512bf16");
    #[cfg(target_arch = "aarch64")]
    let features = detected!(is_aarch64_feature_detected: "neon", "fp16", "bf16", "dotprod", "i8mm", "sve");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let features: [(&str, bool); 0] = [];
    features.into_iter().filter(|(_, there)| *there).map(|(name, _)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read() {
        assert_eq!(memory_total("MemTotal:       24000000 kB\nMemFree: 1 kB\n"), Some(24_576_000_000));
        assert_eq!(memory_total("nonsense"), None);
        assert_eq!(field("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n", "model name"), Some("Some CPU @ 2 GHz"));
    }

    #[test]
    fn the_limit_of_locked_memory_is_the_soft_one() {
        let limits = |soft: &str| {
            let rows = [["Max processes", "9", "9", "processes"], ["Max locked memory", soft, "unlimited", "bytes"]];
            rows.map(|[name, soft, hard, unit]| format!("{name:<26}{soft:<21}{hard:<21}{unit:<10}\n")).concat()
        };
        assert_eq!(lock_limit_of(&limits("8388608")), Some(LockLimit::Bytes(8 << 20)));
        assert_eq!(lock_limit_of(&limits("unlimited")), Some(LockLimit::Unlimited));
        assert_eq!(lock_limit_of("Max processes 9 9 processes\n"), None);
    }

    #[test]
    fn this_machine_has_a_thread() {
        assert!(examine().threads >= 1);
    }
}
