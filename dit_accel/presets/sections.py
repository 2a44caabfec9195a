"""The sections of a preset whose keys all stand for themselves; ``skip`` has a page of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

CONTROL_KEYS = {
    "adaptive": ("target_error", "error_in", "max_interval", "per_prompt"),
    "interval": ("interval",),
}  # that it alone reads
OUTPUT_KEYS = ("corrector", "beyond", "damping")  # of section forecast, that level output alone reads
LOOP_KEYS = ("beyond", "damping")  # of these, that control adaptive alone reads


def idle_keys(level: str | None, control: str | None) -> tuple[str, ...]:
    """Keys of section forecast that have no effect under a level and a control; None = one that reads them all."""
    if level not in (None, "output"):
        return OUTPUT_KEYS
    return () if control in (None, "adaptive") else LOOP_KEYS


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Schedule(Section):
    """When to compute."""

    control: Literal["interval", "adaptive"] = "adaptive"
    """interval: an UPDATE every `interval` steps (the papers). adaptive: the closed loop, which measures at every
    UPDATE how wrong the forecast would have been and sets the next gap by it."""
    warmup: int = Field(default=4, ge=0)
    """Steps at the start that compute everything."""
    target_error: float | None = Field(default=None, gt=0.0, lt=1.0)
    """control adaptive: relative L2 error of the forecast output, ‖F − F̂‖/‖F‖, that the forecasts between two computed
    steps may come to together."""
    error_in: Literal["output", "latents"] = "output"
    """control adaptive: how errors add up. output: every step's alike. latents: each times how far its step moves in
    sigma, over the mean of all steps, for by so much it moves the latents; better where sigma falls unevenly."""
    max_interval: int = Field(default=16, ge=1)
    """control adaptive: most steps from one UPDATE to the next."""
    interval: int | None = Field(default=None, ge=1)
    """control interval: one UPDATE and interval − 1 DISPATCH steps; 1 computes every step in full."""
    cooldown: int = Field(default=1, ge=0)
    """Steps at the end that compute everything."""
    per_prompt: bool = False
    """control adaptive, level output: the loop runs for each prompt of a batch by itself, and those that need a step
    are computed as a smaller batch; false = all compute when one needs to."""

    @model_validator(mode="after")
    def _complete(self) -> Schedule:
        if self.control == "adaptive" and self.target_error is None:
            raise ValueError("control 'adaptive' needs target_error, e.g. 0.05")
        if self.control == "interval" and self.interval is None:
            raise ValueError("control 'interval' needs interval, e.g. 5")
        for other, keys in CONTROL_KEYS.items():
            for key in keys:
                if other != self.control and key in self.model_fields_set and getattr(self, key) is not None:
                    raise ValueError(f"{key} belongs to control '{other}', and control is '{self.control}': remove it")
        return self


class Forecast(Section):
    """What a DISPATCH step fills in, and how."""

    level: Literal["output", "layer", "head"] = "output"
    """output: the transformer's output, for any model. layer: attention and MLP outputs of each block (TaylorSeer,
    FORA). head: rows of each head, chosen by the symbols (FlashOmni)."""
    method: Literal["newton", "taylor", "reuse"] = "newton"
    """newton: polynomial through the recorded values, exact on any spacing. taylor: TaylorSeer's finite differences.
    reuse: the last value."""
    order: int = Field(default=1, ge=0, le=4)
    """Degree D of the polynomial; order + 1 values are remembered. With control adaptive the highest degree: every
    computed step goes on with the one that would have reached farthest. reuse wants 0."""
    coordinate: Literal["step", "sigma", "auto"] = "step"
    """What the polynomial runs over: the step's index; the scheduler's noise level; or auto, the index where the noise
    level falls evenly and the noise level where it does not."""
    corrector: bool = False
    """level output: a computed step also makes good what the forecasts before it missed, judged by interpolation
    through its own output. Where the scheduler takes plain Euler steps (FlowMatchEulerDiscreteScheduler); elsewhere the
    report says that nothing is corrected."""

    beyond: float = Field(default=0.0, ge=0.0, le=1.0)
    """level output, control adaptive: forecasts go so far beyond the degree that would have reached farthest; 0.5 adds
    half of what the next degree adds, up to order."""
    damping: bool = False
    """level output, control adaptive: a degree between 0 and 1 is tried too, which follows that share of the slope: the
    one that would have fitted best at the computed step before. For outputs that wander, as video models' do."""

    @model_validator(mode="after")
    def _complete(self) -> Forecast:
        if self.method == "reuse" and self.order != 0:
            raise ValueError("method 'reuse' repeats the last value: set order to 0")
        return self


class Reuse(Section):
    """Level head: which rows a DISPATCH step takes from the cache."""

    policy: Literal["flashomni"] = "flashomni"
    """How row-blocks are scored: FlashOmni, equation 1; without joint text (Wan), by the attention they receive."""
    tau_q: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the cumulative score, lowest first, that is reused (FlashOmni's τ_q)."""
    ramp: float = Field(default=2.0, gt=0.0)
    """τ_q and τ_kv start at 0 and grow as (step / steps) ** ramp; 2.0 for images, 1.7 for video."""
    degrade_below: float = Field(default=0.0, ge=0.0, le=1.0)
    """A layer whose computed fraction falls below this is forecast whole until the next UPDATE (FlashOmni's S_q)."""


class Blocks(Section):
    """How the sequence is cut."""

    size: Literal[64, 128] = 128
    """Tokens in a block."""
    token_order: Literal["raster", "hilbert", "tiles"] = "raster"
    """How a clip's tokens run through the blocks, so that neighbours share one. raster: frame by frame, row by row.
    hilbert: along a Hilbert curve (SpargeAttn, section 3.7). tiles: box by box, each of about `size` tokens."""


class Kernels(Section):
    """Which implementation runs each op; auto picks by device, anything else must be able to run."""

    attention: Literal["auto", "reference", "triton", "cuda"] = "auto"
    """Sparse attention."""
    gemm: Literal["auto", "reference", "triton", "cuda"] = "auto"
    """GEMM-Q and GEMM-O."""
    qk_dtype: Literal["int8", "int8+fp8"] | None = None
    """Sparse attention multiplies queries and keys in 8 bits (int8), and probabilities and values too (int8+fp8);
    null = in their own dtype. Calls that leave no tile out keep the model's own attention."""


class Memory(Section):
    """How much the caches of a run may hold, and how they are kept."""

    budget_gib: float | None = Field(default=None, gt=0.0)
    """Most GiB on the device for histories, symbols and cached biases of all branches together; null = no limit. What
    it takes is done, in this order and no more than needed: attention outputs of text blocks left out, float8, host
    memory, lower orders. A run that does not fit then is refused."""
    history_dtype: Literal["float8"] | None = None
    """float8: what blocks remember is kept as e4m3 with a scale per 128 values; null = as computed."""
    offload: bool = False
    """Level head: attention outputs, which only UPDATE steps read, wait in pinned host memory."""
