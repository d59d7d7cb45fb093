//! The oasis command: run, evaluate and inspect lookahead sparse decoding.
