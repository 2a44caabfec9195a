"""The sections of a preset but for ``skip``, which has a page of its own."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from dit_accel.presets.section import MOST_STEPS, Formed, Section


class Schedule(Formed):
    """When to compute."""

    chooser: ClassVar[str] = "control"

    control: Literal["interval", "adaptive"] = "adaptive"
    """interval: an UPDATE every `interval` steps (the papers). adaptive: the closed loop, which measures at every
    UPDATE how wrong the forecast would have been and sets the next gap by it."""
    warmup: int = Field(default=4, ge=0, le=MOST_STEPS)
    """Steps at the start that compute everything."""
    cooldown: int = Field(default=1, ge=0, le=MOST_STEPS)
    """Steps at the end that compute everything."""


class AdaptiveSchedule(Schedule):
    """When to compute: where the closed loop finds that forecasts would err too much."""

    interval: ClassVar[int | None] = None

    control: Literal["adaptive"] = "adaptive"
    """The closed loop, which measures at every UPDATE how wrong the forecast would have been and sets the next gap by
    it."""
    target_error: float = Field(gt=0.0, allow_inf_nan=False, examples=[0.05])
    """Relative L2 errors of the forecast outputs, ‖F − F̂‖/‖F‖, that the forecasts between two computed steps may come
    to together. Each counts by what it does to the result: by how far its step moves the latents, and how much that
    has grown by the end."""
    cooldown: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps at the end that compute everything whatever they would count; the loop computes the last one where it
    does."""
    max_interval: int = Field(default=16, ge=1, le=MOST_STEPS)
    """Most steps from one UPDATE to the next."""
    per_prompt: bool = False
    """level output: the loop runs for each prompt of a batch by itself, and those that need a step are computed as a
    smaller batch; false = all compute when one needs to."""


class IntervalSchedule(Schedule):
    """When to compute: on a fixed interval, as the papers."""

    target_error: ClassVar[float | None] = None
    max_interval: ClassVar[int] = 16
    per_prompt: ClassVar[bool] = False

    control: Literal["interval"] = "interval"
    """An UPDATE every `interval` steps (the papers)."""
    interval: int = Field(ge=1, le=MOST_STEPS, examples=[5])
    """One UPDATE and interval − 1 DISPATCH steps, from the step behind the warm-up on, which is an UPDATE; 1 computes
    every step in full."""


Schedule.forms = {"adaptive": AdaptiveSchedule, "interval": IntervalSchedule}
AnySchedule = Annotated[
    Annotated[AdaptiveSchedule, Tag("adaptive")] | Annotated[IntervalSchedule, Tag("interval")],
    Field(discriminator=Discriminator(Schedule.form_of)),
]


class Forecast(Formed):
    """What a DISPATCH step fills in, and how."""

    chooser: ClassVar[str] = "level"

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

    @model_validator(mode="after")
    def _complete(self) -> Forecast:
        if self.method == "reuse" and self.order != 0:
            raise ValueError("method 'reuse' repeats the last value: set order to 0")
        return self


class OutputForecast(Forecast):
    """What a DISPATCH step fills in: the transformer's output, for any model."""

    level: Literal["output"] = "output"
    """The transformer's output, for any model."""
    corrector: bool = False
    """A computed step also makes good what the forecasts before it missed, judged by interpolation through its own
    output. For flow models, under schedulers that add up outputs without noise (Euler, UniPC, DPM++); elsewhere the
    report says that nothing is corrected."""
    beyond: float = Field(default=0.0, ge=0.0, le=1.0)
    """control adaptive: forecasts go so far beyond the degree that would have reached farthest; 0.5 adds half of what
    the next degree adds, up to order."""
    damping: bool = False
    """control adaptive: a degree between 0 and 1 is tried too, which follows that share of the slope: the one that
    would have fitted best at the computed step before. For outputs that wander, as video models' do."""


class _InBlocks(Forecast):
    corrector: ClassVar[bool] = False
    beyond: ClassVar[float] = 0.0
    damping: ClassVar[bool] = False


class LayerForecast(_InBlocks):
    """What a DISPATCH step fills in: what each block computes."""

    level: Literal["layer"] = "layer"
    """Attention and MLP outputs of each block (TaylorSeer, FORA)."""


class HeadForecast(_InBlocks):
    """What a DISPATCH step fills in: single rows of each head."""

    level: Literal["head"] = "head"
    """Rows of each head, chosen by the symbols (FlashOmni)."""


Forecast.forms = {"output": OutputForecast, "layer": LayerForecast, "head": HeadForecast}
AnyForecast = Annotated[
    Annotated[OutputForecast, Tag("output")]
    | Annotated[LayerForecast, Tag("layer")]
    | Annotated[HeadForecast, Tag("head")],
    Field(discriminator=Discriminator(Forecast.form_of)),
]


class Reuse(Section):
    """Level head: which rows a DISPATCH step takes from the cache."""

    policy: Literal["flashomni"] = "flashomni"
    """How row-blocks are scored: FlashOmni, equation 1; without joint text (Wan), by the attention they receive."""
    tau_q: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the cumulative score, lowest first, that is reused (FlashOmni's τ_q)."""
    ramp: float = Field(default=0.1, gt=0.0)
    """τ_q and τ_kv start at 0 and grow as (step / steps) ** ramp, the sooner the smaller it is."""
    degrade_below: float = Field(default=0.0, ge=0.0, le=1.0)
    """A layer whose rows without text compute less than this share of their scores is forecast whole until the next
    UPDATE (FlashOmni's S_q)."""


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
    graphs: Literal["auto", "always", "never"] = "auto"
    """Level output, on a GPU. always: computed steps are captured as CUDA graphs and replayed, which takes the host's
    time out of them; where that can't be, they run as ever, and the report says why. auto: where the GPU waits for the
    host, a quarter of its memory is free, and all code is torch's, diffusers' and peft's."""


class Linear(Section):
    """Linear layers of the blocks in 8 bits, on computed steps."""

    dtype: Literal["int8", "float8"] | None = None
    """What rows and weights are rounded to, with a scale each; null = as they are. int8 errs by a third of what float8
    (e4m3) does where features are of a like size; float8 wants an RTX 4090, H100 or later."""
    exclude: list[str] = Field(default_factory=list, examples=[["*.to_out.0"]])
    """Layers that stay as they are, by their names in the transformer; `*` stands for anything: `*.to_out.0`."""

    @model_validator(mode="after")
    def _excludes_from_something(self) -> Linear:
        if self.exclude and self.dtype is None:
            raise ValueError("exclude has no effect without a dtype: set dtype to int8 or float8")
        return self


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


class Stages(Section):
    """Stages of a pipeline's call other than its steps."""

    decode: bool = True
    """On a GPU, decode latents with fused kernels, within the rounding of the autoencoder's dtype. The decoder's own
    code runs where its class is not known or its output differs by more; the report says which one ran."""
