"""Mistakes in `dit_accel/stages`: several inputs, encoders, images and ranks, and what stays after the end."""

from __future__ import annotations

from scripts.checks.changes.mutant import Mutant

STAGES = "dit_accel/stages"
TEST_STAGES = "tests/stages"

MUTANTS = [
    Mutant(
        "one-output-goes",
        f"{STAGES}/prompts.py",
        "            while self.size > self.most:",
        "            if self.size > self.most:",
        "one large output may replace several",
        f"{TEST_STAGES}/test_prompts.py",
    ),
    Mutant(
        "outputs-outlive-the-stage",
        f"{STAGES}/prompts.py",
        "        self.store.forget(self)\n        if encoder is not None",
        "        if encoder is not None",
        "a closed stage frees its outputs",
        f"{TEST_STAGES}/test_prompts.py",
    ),
    Mutant(
        "the-largest-input",
        f"{STAGES}/prompts.py",
        "sum(tensor.nbytes for tensor in self.tensors)",
        "max((tensor.nbytes for tensor in self.tensors), default=0)",
        "the bytes of all inputs are limited together",
        f"{TEST_STAGES}/test_prompts.py",
    ),
    Mutant(
        "an-encoder-that-writes",
        f"{STAGES}/prompts.py",
        '            self.store.forget(self)\n            reason = "it writes',
        '            reason = "it writes',
        "no output of an encoder that writes to its inputs is kept",
        f"{TEST_STAGES}/test_prompts.py",
    ),
    Mutant(
        "a-closed-stage-begins",
        f"{STAGES}/decode.py",
        "        self.parts.at_beginning.clear()\n",
        "",
        "a closed stage does nothing at the beginning of a call",
        f"{TEST_STAGES}/test_decoding_in_pipelines.py",
    ),
    Mutant(
        "a-closed-stage-shares",
        f"{STAGES}/decode.py",
        "            each.sharing = [other for other in each.sharing if other is not self]\n",
        "",
        "a closed stage's ranks share no decode",
        f"{TEST_STAGES}/test_decoding_in_pipelines.py",
    ),
    Mutant(
        "the-encoder-stays-fused",
        f"{STAGES}/decode.py",
        "        fused, self._fused = self._fused, []\n        for each in fused:",
        "        fused, self._fused = self._fused, []\n        for each in fused[:1]:",
        "both coders of an autoencoder are given back",
        f"{TEST_STAGES}/test_decoding_in_pipelines.py",
    ),
    Mutant(
        "the-first-image-counts",
        f"{STAGES}/decode.py",
        "error = ((made.float() - own.float()).norm() / own.float().norm()",
        "error = ((made[:1].float() - own[:1].float()).norm() / own[:1].float().norm()",
        "an error in any image of a batch is noticed",
        f"{TEST_STAGES}/test_decode.py",
    ),
    Mutant(
        "samples-of-one-column",
        f"{STAGES}/stamps.py",
        "(max(size // most - 1, 0) | 1,)",
        "(max(size // most - 1, 1),)",
        "a write to a single column of a weight is noticed",
        f"{TEST_STAGES}/test_stamps.py",
    ),
    Mutant(
        "the-first-buffer",
        f"{STAGES}/stamps.py",
        "_sampled(weights, [*buffers, *parts])",
        "_sampled(weights, buffers[:1] + parts)",
        "each buffer of an encoder is compared",
        f"{TEST_STAGES}/test_stamps.py",
    ),
]
