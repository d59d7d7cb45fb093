"""Makes smollm2_rows.safetensors: parts of SmolLM2-135M-Instruct's tensors, decoded by the PyPI package `gguf`.

    pip install gguf numpy safetensors && python make_smollm2_rows.py SmolLM2-135M-Instruct.Q4_1.gguf
Query and key rows are brought to Hugging Face's order as transformers does (modeling_gguf_pytorch_utils.py).
"""
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

tensors = {t.name: t for t in GGUFReader(sys.argv[1]).tensors}


def decode(name):
    t = tensors[name]
    return dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]).astype(np.float32)


def rotate_half(w, heads):
    dim = w.shape[0] // heads // 2
    return w.reshape(heads, dim, 2, w.shape[1]).swapaxes(2, 1).reshape(w.shape)


q = rotate_half(decode("blk.3.attn_q.weight"), 9)
k = rotate_half(decode("blk.3.attn_k.weight"), 3)
out = {
    "q": q[64:128, :16],
    "k": k[128:192, :16],
    "v": decode("blk.3.attn_v.weight")[100:104],
    "o": decode("blk.29.attn_output.weight")[571:576],
    "down": decode("blk.7.ffn_down.weight")[0:2],
    "up": decode("blk.7.ffn_up.weight")[1535:1536],
    "embed": decode("token_embd.weight")[49150:49152],
    "norm": decode("output_norm.weight"),
}
save_file({k: np.ascontiguousarray(v) for k, v in out.items()}, Path(__file__).with_name("smollm2_rows.safetensors"))
