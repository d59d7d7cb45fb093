//! CUDA executor of OasisKV.
