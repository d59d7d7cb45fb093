//! End-to-end tests of OasisKV.
