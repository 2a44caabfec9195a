#!/usr/bin/env python3
"""Times the text stage of FLUX.1 for a prompt that was encoded before, with random weights, kept and encoded again.

    python -m scripts.bench.prompts --output docs/results/prompts.json
    python -m scripts.bench.prompts --tiny                        # the same paths on the CPU, in seconds

The text stage is CLIP-L over 77 tokens, T5-XXL over 512 tokens, and the first call of the next model, which moves T5
away where models are offloaded. Both sides run in one process with the same weights, and their embeddings are compared
bit by bit. The first call encodes and keeps; the seconds of the other calls are medians.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from dit_accel.loop.timing import CallParts
from dit_accel.stages.prompts import KeptPrompts
from dit_accel.stages.stamps import read_stamp
from dit_accel.tools.measure.origin import describe_run
from scripts.tables import write_result

CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
T5 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
TINY_CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12, "num_attention_heads": 2}
TINY_T5 = {**T5, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}
WAYS = ("on the device", "model offload", "sequential offload")
MOST = 512 * 2**20  # bytes of kept embeddings, as by default
RUNS = 5


class Text:
    """Text encoders of FLUX.1 and the model after them, as its pipeline calls them in one of the `WAYS`."""

    def __init__(self, way: str, device: str, dtype: torch.dtype, *, tiny: bool) -> None:
        torch.manual_seed(0)
        clip, t5 = CLIPTextConfig(**(TINY_CLIP if tiny else CLIP)), T5Config(**(TINY_T5 if tiny else T5))
        with torch.device(device):
            self.text_encoder = CLIPTextModel(clip).to(dtype).eval()
            self.text_encoder_2 = T5EncoderModel(t5).to(dtype).eval()
            self.next = nn.Linear(8, 8, dtype=dtype)
        self._ids = [torch.randint(3, 1000, (1, tokens)) for tokens in (77, 512)]
        self._device, self._x, self._hooks = device, torch.zeros(1, 8, device=device, dtype=dtype), []
        for model in (self.text_encoder, self.text_encoder_2, self.next):
            if way == "model offload":
                _, hook = cpu_offload_with_hook(model, torch.device(device), self._hooks[-1] if self._hooks else None)
                self._hooks.append(hook)
            elif way == "sequential offload" and model is not self.next:
                cpu_offload(model.cpu(), torch.device(device))

    @torch.no_grad()
    def encode(self) -> tuple[float, list[torch.Tensor]]:
        """Return the seconds of the text stage and its embeddings; models are then offloaded as before the call."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        pooled = self.text_encoder(self._ids[0].to(self._device), output_hidden_states=False).pooler_output
        embeddings = self.text_encoder_2(self._ids[1].to(self._device), output_hidden_states=False)[0]
        self.next(self._x)
        if self._device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        for hook in self._hooks:
            hook.offload()
        return seconds, [pooled, embeddings]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    rows: list[dict[str, Any]] = []
    for way in WAYS[:2] if options.tiny else WAYS:  # accelerate offloads T5's tied weights one by one on a GPU only
        rows.append({"weights": way, **measure(way, device, tiny=options.tiny)})
        print(json.dumps(rows[-1]), flush=True)
        write_result(options.output, {**describe_run(device), "rows": rows})
    return 0 if all(row["identical"] and row["report"].startswith("2 of 2 kept") for row in rows) else 1


def measure(way: str, device: str, *, tiny: bool) -> dict[str, Any]:
    """Return the seconds of the text stage on both sides, the bytes that are kept and the cost of a stamp."""
    text = Text(way, device, torch.float32 if tiny else torch.bfloat16, tiny=tiny)
    text.encode()  # warms up
    plain = [text.encode() for _ in range(RUNS)]
    stage = KeptPrompts(text, parts := CallParts(), MOST)
    first = text.encode()
    kept = []
    for _ in range(RUNS):
        parts.begin(torch.device(device))
        kept.append(text.encode())
    seconds = {
        "plain": statistics.median(item for item, _ in plain),
        "kept": statistics.median(item for item, _ in kept),
    }
    row = {
        "seconds": {**seconds, "first": first[0]},
        "speed_up": seconds["plain"] / seconds["kept"],
        "identical": all(torch.equal(a, b) for _, output in kept for a, b in zip(output, plain[0][1], strict=True)),
        "mib": stage.size / 2**20,
        "stamp_ms": _stamp_ms(text),
        "report": stage.remark,
    }
    stage.close()
    return row


def _stamp_ms(text: Text) -> float:
    """Return the milliseconds of reading the stamps of both encoders."""
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        read_stamp(text.text_encoder), read_stamp(text.text_encoder_2)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
