//! What the assembler says about a kernel.

/// Resources of one kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelReport {
    /// Kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes a thread keeps on a stack.
    pub stack: u32,
    /// Bytes of registers stored to memory for want of room.
    pub spill_stores: u32,
    /// Bytes of registers loaded back.
    pub spill_loads: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
    /// Whether products of warpgroups wait for each other, since the assembler could not keep their registers apart.
    pub serialized: bool,
}

impl KernelReport {
    /// Whether registers went to memory.
    pub fn spills(&self) -> bool {
        self.spill_stores + self.spill_loads > 0
    }
}

/// Reads the lines that `ptxas -v` prints for every kernel.
pub fn parse_log(log: &str) -> Vec<KernelReport> {
    let mut reports: Vec<KernelReport> = Vec::new();
    let mut serialized = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            reports.push(KernelReport { kernel, ..KernelReport::default() });
        }
        // Comes before the kernel's own lines.
        if line.contains("wgmma.mma_async instructions are serialized") {
            serialized.extend(line.rsplit('\'').nth(1));
        }
        let Some(report) = reports.last_mut() else { continue };
        let number = |suffix: &str| -> Option<u32> {
            let mut values = line.split([',', ':']).filter_map(|part| part.trim().strip_suffix(suffix));
            values.find_map(|value| value.split_whitespace().next_back()?.parse().ok())
        };
        let fields = [
            ("bytes stack frame", &mut report.stack),
            ("bytes spill stores", &mut report.spill_stores),
            ("bytes spill loads", &mut report.spill_loads),
            ("registers", &mut report.registers),
            ("bytes smem", &mut report.shared),
        ];
        for (suffix, field) in fields {
            if let Some(value) = number(suffix) {
                *field = value;
            }
        }
    }
    for report in &mut reports {
        report.serialized = serialized.contains(&report.kernel.as_str());
    }
    reports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_spills_shared_memory_and_serialized_products_are_read() {
        let log = "\
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the function 'second'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 175 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     136 bytes stack frame, 148 bytes spill stores, 236 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 136 bytes cumulative stack size, 9504 bytes smem
";
        let reports = parse_log(log);
        let first =
            KernelReport { kernel: "first".to_owned(), registers: 175, shared: 1024, ..KernelReport::default() };
        let second = KernelReport {
            kernel: "second".to_owned(),
            registers: 64,
            stack: 136,
            spill_stores: 148,
            spill_loads: 236,
            shared: 9504,
            serialized: true,
        };
        assert_eq!(reports, [first, second]);
        assert!(!reports[0].spills() && reports[1].spills());
        assert_eq!(parse_log("nothing of interest"), []);
    }
}
