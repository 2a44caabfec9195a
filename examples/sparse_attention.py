"""Sparse attention on plain tensors, without a pipeline: a policy chooses the tiles, and a kernel computes them.

    python examples/sparse_attention.py --tokens 4096

Queries and keys lie along a curve, so that neighbouring tokens attend to each other, as in a video.
"""

import argparse
import time

import torch

from dit_accel.kernels import attention
from dit_accel.presets import Skip
from dit_accel.sparse.policies import plan

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tokens", type=int, default=4096)
options = parser.parse_args()

torch.manual_seed(0)
position = torch.linspace(0, 12, options.tokens)[:, None] * torch.linspace(0.2, 2, 32)
curve = 1.2 * torch.cat([position.sin(), position.cos()], -1)[None, :, None]
noise_q, noise_k, v = torch.randn(3, 1, options.tokens, 4, 64)  # [batch, tokens, heads, head_dim] each
q, k = curve + 0.5 * noise_q, curve + 0.5 * noise_k


def timed(call):
    started = time.perf_counter()
    return call(), 1000 * (time.perf_counter() - started)


dense, milliseconds = timed(lambda: attention(q, k, v, plan(q, k, Skip(policy="none"))))
print(f"all tiles        {milliseconds:6.0f} ms")
for lost in (0.01, 0.05, 0.2):  # estimated probability mass that the skipped tiles may hold
    sparse = plan(q, k, Skip(policy="sparge", tau_kv=lost))
    output, milliseconds = timed(lambda sparse=sparse: attention(q, k, v, sparse))
    density, error = sparse.kv_count.sum() / sparse.kv_index.numel(), (output - dense).norm() / dense.norm()
    print(f"{density:4.0%} of the tiles {milliseconds:6.0f} ms, relative error {error:.3f}")
