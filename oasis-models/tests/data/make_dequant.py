"""Makes dequant.safetensors: blocks of every GGUF type and the floats that the PyPI package `gguf` decodes them to.

    pip install gguf numpy safetensors && python make_dequant.py
Plain types are quantised from random numbers; K types are random bytes with sane scales, as the package only decodes them.
"""
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

rng = np.random.default_rng(7)
out = {}
for kind in [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1]:
    raw = quantize(rng.standard_normal((6, 64)).astype(np.float32), kind)
    out[kind.name] = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
for kind, scales in [(T.Q4_K, [0, 2]), (T.Q5_K, [0, 2]), (T.Q6_K, [208])]:
    raw = rng.integers(0, 256, (6, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in scales:
        raw[:, at:at + 2] = rng.uniform(-0.02, 0.02, (6, 1)).astype(np.float16).view(np.uint8)
    out[kind.name] = raw.reshape(-1)
dtypes = {T.F32.name: np.float32, T.F16.name: np.float16}
for name, raw in list(out.items()):
    data = raw.view(dtypes[name]) if name in dtypes else raw
    out[f"{name}.values"] = np.ascontiguousarray(dequantize(data.reshape(1, -1), T[name]), np.float32).reshape(-1)
save_file(out, Path(__file__).with_name("dequant.safetensors"))
