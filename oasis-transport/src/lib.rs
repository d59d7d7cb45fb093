//! Built-in transports and KV stores of OasisKV.
