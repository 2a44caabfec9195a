"""Time 8-bit linear layers, including the rounding of their inputs, against ``F.linear``."""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from dit_accel import kernels
from dit_accel.kernels.blocks.quantized_linear import LINEAR_DTYPES
from scripts.bench.kernels.cases import Projection, make_inputs
from scripts.bench.kernels.clock import median_ms
from scripts.bench.kernels.recorder import Recorder
from scripts.bench.kernels.sizes import Sizes
from scripts.bench.kernels.verify import Verdict

MOST_ERROR = {"int8": 0.02, "float8": 0.05}  # ‖y − ŷ‖ / ‖y‖ on normal inputs
SAMPLES = 64  # rows compared with float64


def bench_linear(recorder: Recorder, projection: Projection, sizes: Sizes) -> None:
    """Time one layer on normal inputs, with the product that models use on this device."""
    inputs, width, features = make_inputs(projection, recorder.device), projection.width, projection.features
    x, bias = inputs.normal(1, projection.tokens, width), inputs.normal(features)
    weight = inputs.normal(features, width, scale=width**-0.5)
    figures = {"density": 1.0, "work": projection.flops}
    figures["baselines"] = {"linear": median_ms(partial(F.linear, x, weight, bias), recorder.device)}

    def layer(dtype: str, backend: str, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows = kernels.quantize_rows(x, dtype=dtype, backend=backend)
        chosen = "auto" if backend == "triton" else backend
        name = str(x.dtype).removeprefix("torch.")
        return kernels.quantized_linear(*rows, *weights, bias, out_dtype=name, backend=chosen)

    def judge(dtype: str, out: torch.Tensor) -> Verdict:
        exact = F.linear(x[:, :SAMPLES].double(), weight.double(), bias.double())
        error = (out[:, :SAMPLES].double() - exact).norm() / exact.norm()
        return Verdict(error.item(), MOST_ERROR[dtype])

    for dtype, backend in product(LINEAR_DTYPES, recorder.backends):
        call = partial(layer, dtype, backend, kernels.quantize_rows(weight, dtype=dtype))
        recorder.time("quantized_linear", backend, dtype, projection, call, partial(judge, dtype), **figures)
