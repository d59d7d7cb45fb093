//! Built-in summarizers, predictors and selectors of OasisKV.
