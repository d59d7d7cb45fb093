//! Kernels of the CPU executor.
