"""Sections of a preset with all their keys; ``skip`` has its own file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Strict, model_validator

from dit_accel.constants import MOST_STEPS, TARGETS
from dit_accel.presets.section import Formed, Section, any_form

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
CUT = "max_seconds was too short to keep the target_error of target_psnr"  # note of a report
Calibrated = Annotated[tuple[Positive, Positive], Strict(False)]  # a target_error and a PSNR; YAML has lists


def clashing(*keys: str) -> str | None:
    """Return why keys of TARGETS can't go together, or None; a PSNR or a number of steps may have a time limit."""
    first, second = (*keys, None, None)[:2]
    fits = second is None or (second == "max_seconds" and first != "target_error")
    return None if fits else f"{first} and {second} both choose the computed steps"


def _no_number(value: Any) -> Any:
    """Refuse 0 and 1, which equal False and True."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"must be true, false or guided, got {value}")
    return value


class Schedule(Formed):
    """Choice of the computed steps."""

    chooser: ClassVar[str] = "control"
    measures: ClassVar[bool] = False  # the choice depends on measured forecast errors

    control: Literal["interval", "adaptive"] = "adaptive"
    """interval: every `interval`-th step is computed (the papers). adaptive: the closed loop, which measures the
    forecast error at every computed step and sets the distance to the next one by it."""
    warmup: int = Field(default=4, ge=0, le=MOST_STEPS)
    """Steps at the start that compute everything."""
    cooldown: int = Field(default=1, ge=0, le=MOST_STEPS)
    """Steps at the end that compute everything."""

    @property
    def rule(self) -> str:
        """Key of the rule that decides which steps compute, in ``dit_accel.loop.controller.RULES``."""
        return self.control


class AdaptiveSchedule(Schedule):
    """Choice of the computed steps by the closed loop, which bounds the errors of forecasts."""

    measures: ClassVar[bool] = True
    interval: ClassVar[int | None] = None

    control: Literal["adaptive"] = "adaptive"
    target_error: float = Field(gt=0.0, allow_inf_nan=False, examples=[0.05])
    """Bound on the sum of the relative L2 errors ‖F − F̂‖/‖F‖ of the forecasts between two computed steps. Each error is
    weighted by its effect on the result: by how far its step moves the latents, and how much that shift grows until
    the end. Lower is closer to the plain result and slower."""
    target_psnr: float | None = Field(default=None, gt=0.0, allow_inf_nan=False, examples=[35.0])
    """PSNR in dB, compared with the plain result, that at least 90% of the results should reach. It takes the largest
    `target_error` whose `calibration` has this PSNR; an error says the most that was reached. null = `target_error` as
    it is."""
    computed_steps: int | None = Field(default=None, ge=1, le=MOST_STEPS, examples=[8])
    """Number of steps that a run computes, exactly, instead of a bound on errors. They are placed where errors are
    largest. null = as many as `target_error` needs."""
    max_seconds: float | None = Field(default=None, gt=0.0, allow_inf_nan=False, examples=[1.2])
    """Seconds of a pipeline's call, text encoding and decoding included, instead of a bound on errors: as many steps
    compute as fit, with `target_psnr` or `computed_steps` no more than these need. The first three steps always
    compute. The time of decoding is that of the call before. null = as long as `target_error` needs."""
    calibration: list[Calibrated] = Field(default_factory=list, examples=[[[0.1, 35.0]]])
    """Pairs of a `target_error` and the PSNR in dB that 90% of the prompts reached with it. The shipped ones are the
    lowest of several small models; `dit-accel tune --coverage 0.9` writes those of your model."""
    cooldown: int = Field(default=0, ge=0, le=MOST_STEPS)
    """Steps at the end that compute everything, whatever their error. With 0 the loop computes the last step only if
    the forecast error there is too large."""
    max_interval: int = Field(default=16, ge=1, le=MOST_STEPS)
    """Largest number of steps from one computed step to the next."""
    per_prompt: bool = False
    """level output: the loop decides for each prompt of a batch separately, and the prompts that need a step are
    computed as a smaller batch. false = all prompts compute when one needs to."""

    @property
    def rule(self) -> str:
        return "budget" if self.computed_steps or self.max_seconds else self.control

    @property
    def bound(self) -> float:
        """The bound on the errors: ``target_error``, or the calibrated one of ``target_psnr``."""
        if self.target_psnr is None:
            return self.target_error
        return max(error for error, psnr in self.calibration if psnr >= self.target_psnr)

    @model_validator(mode="after")
    def _is_reachable(self) -> AdaptiveSchedule:
        if clash := clashing(*(key for key in TARGETS[1:] if getattr(self, key) is not None)):
            raise ValueError(f"{clash}: set one of them to null")
        if self.max_seconds is not None and self.per_prompt:
            raise ValueError("max_seconds is the time of a whole batch: remove per_prompt, or set computed_steps")
        most = max((psnr for _, psnr in self.calibration), default=None)
        if self.target_psnr is not None and (most is None or self.target_psnr > most):
            limit = "null, as the preset has no calibration" if most is None else f"at most {most:g} dB"
            fix = f"calibrate on your model with dit-accel tune --target-psnr {self.target_psnr:g} --coverage 0.9"
            raise ValueError(f"target_psnr must be {limit}, got {self.target_psnr:g}: {fix}, or set target_error")
        return self


class FixedSchedule(Schedule):
    """Choice of the computed steps that measures nothing: what the closed loop reads has no effect."""

    target_error: ClassVar[float | None] = None
    target_psnr: ClassVar[float | None] = None
    computed_steps: ClassVar[int | None] = None
    max_seconds: ClassVar[float | None] = None
    bound: ClassVar[float] = 0.0
    max_interval: ClassVar[int] = 16
    per_prompt: ClassVar[bool] = False


class IntervalSchedule(FixedSchedule):
    """Choice of the computed steps by a fixed interval, as in the papers."""

    control: Literal["interval"] = "interval"
    interval: int = Field(ge=1, le=MOST_STEPS, examples=[5])
    """One computed step, then interval − 1 forecast steps. The first step after the warm-up is computed; 1 computes
    every step."""


Schedule.forms = {"adaptive": AdaptiveSchedule, "interval": IntervalSchedule}


class Forecast(Formed):
    """Forecasts: of which tensors, and how."""

    chooser: ClassVar[str] = "level"

    level: Literal["output", "layer", "head"] = "output"
    """Tensors that are forecast. output: the transformer's output, for any model. layer: attention and MLP outputs of
    each block (TaylorSeer, FORA). head: rows of each head, chosen by the symbols (FlashOmni)."""
    method: Literal["newton", "taylor", "reuse"] = "newton"
    """newton: polynomial through the recorded values, exact on any spacing. taylor: TaylorSeer's finite differences.
    reuse: the last value."""
    order: int = Field(default=1, ge=0, le=4)
    """Degree D of the polynomial; order + 1 values are kept. With control adaptive it is the highest degree: each
    computed step chooses the degree whose forecasts reach farthest. reuse needs 0."""
    coordinate: Literal["step", "sigma", "log_odds", "auto"] = "step"
    """Variable of the polynomial. step: the step's index. sigma: the scheduler's noise level σ. log_odds:
    log((σ + 0.1) / (1.1 − σ)). auto: the index if the noise level falls evenly, otherwise the noise level."""

    @model_validator(mode="after")
    def _complete(self) -> Forecast:
        if self.method == "reuse" and self.order != 0:
            raise ValueError("method 'reuse' repeats the last value: set order to 0")
        return self


class OutputForecast(Forecast):
    """Forecasts of the transformer's output, for any model."""

    level: Literal["output"] = "output"
    corrector: bool = False
    """A computed step also corrects the errors of the forecasts before it, estimated by interpolation through its own
    output. This works for flow models and schedulers that add up outputs without noise (Euler, UniPC, DPM++); otherwise
    the report says that nothing is corrected."""
    beyond: float = Field(default=0.0, ge=0.0, le=1.0)
    """control adaptive: share of the next degree that is added to the chosen degree, up to order. 0.5 adds half of the
    next degree's term."""
    damping: Annotated[Literal[False, True, "guided"], BeforeValidator(_no_number)] = False
    """control adaptive: the loop also tries a degree between 0 and 1, the share of the slope that fitted best at the
    previous computed step. For outputs that do not keep their slope, such as video models'. guided: once a step has
    called the transformer several times, as classifier-free guidance does, which amplifies the errors of each call."""


class _InBlocks(Forecast):
    corrector: ClassVar[bool] = False
    beyond: ClassVar[float] = 0.0
    damping: ClassVar[bool] = False


class LayerForecast(_InBlocks):
    """Forecasts of each block's outputs."""

    level: Literal["layer"] = "layer"


class HeadForecast(_InBlocks):
    """Forecasts of single rows of each head."""

    level: Literal["head"] = "head"


Forecast.forms = {"output": OutputForecast, "layer": LayerForecast, "head": HeadForecast}
if TYPE_CHECKING:
    AnySchedule = AdaptiveSchedule | IntervalSchedule
    AnyForecast = OutputForecast | LayerForecast | HeadForecast
else:
    AnySchedule, AnyForecast = any_form(Schedule), any_form(Forecast)


class Reuse(Section):
    """Level head: choice of the rows that a forecast step takes from the cache."""

    policy: Literal["flashomni"] = "flashomni"
    """Score of row-blocks: FlashOmni, equation 1; without joint text (Wan), the attention that they receive."""
    tau_q: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the cumulative score, lowest first, that is reused (FlashOmni's τ_q)."""
    ramp: float = Field(default=0.1, gt=0.0)
    """τ_q and τ_kv start at 0 and grow as (step / steps) ** ramp; a smaller ramp grows sooner."""
    degrade_below: float = Field(default=0.0, ge=0.0, le=1.0)
    """If the rows without text compute less than this share of their scores, the layer is forecast whole until the next
    computed step (FlashOmni's S_q)."""


class Blocks(Section):
    """Blocks of tokens."""

    size: Literal[64, 128] = 128
    """Tokens in a block."""
    token_order: Literal["raster", "hilbert", "tiles"] = "raster"
    """Order of a video's tokens in the blocks. raster: frame by frame, row by row. hilbert: along a Hilbert curve
    (SpargeAttn, section 3.7). tiles: box by box, each of about `size` tokens. In the last two, neighbours in space and
    time share a block."""


class Kernels(Section):
    """Implementation of each op; auto chooses by device, any other choice raises if it can't run."""

    attention: Literal["auto", "reference", "triton", "cuda"] = "auto"
    """Sparse attention."""
    gemm: Literal["auto", "reference", "triton"] = "auto"
    """GEMM-Q and GEMM-O."""
    qk_dtype: Literal["auto", "int8", "int8+fp8"] | None = None
    """int8: sparse attention multiplies queries and keys in 8 bits. int8+fp8: probabilities and values too. auto: int8
    on RTX 30, 40 and 50. null = in their own dtype. Calls that leave no tile out keep the model's own attention."""
    graphs: Literal["auto", "always", "never"] = "auto"
    """Level output, on a GPU. always: computed steps are captured as CUDA graphs and replayed, which removes Python
    overhead; if capture is not possible, they run without graphs, and the report says why. auto: the same if the GPU
    waits for the host, its memory holds a step, and all code is torch's, diffusers' and peft's."""


class Linear(Section):
    """Linear layers of the blocks in 8 bits, on computed steps."""

    dtype: Literal["auto", "int8", "float8"] | None = None
    """8-bit dtype of rows and weights, with one scale each; null = no rounding. The error of int8 is a third of
    float8's (e4m3), which needs an RTX 4090, H100 or later. auto: float8 on a B300, otherwise int8."""
    exclude: list[str] = Field(default_factory=list, examples=[["*.to_out.0"]])
    """Layers that are not rounded, by their names in the transformer; `*` matches anything: `*.to_out.0`."""
    weights: Literal["auto", "device", "host"] = "auto"
    """Place of the original weights. host: only rounded weights are on the device, and stay there between runs. auto:
    host, if a run begins on a GPU of which rounded weights would leave less than a quarter free."""


class Memory(Section):
    """Memory of a run's caches, and their storage."""

    budget_gib: float | None = Field(default=None, gt=0.0)
    """Limit in GiB on the device memory of histories, symbols and cached biases of all branches together; null = no
    limit. To fit, these measures are taken in order, as few as needed: no attention outputs of text blocks, float8,
    host memory, lower orders. A run that still does not fit is an error."""
    history_dtype: Literal["float8"] | None = None
    """float8: blocks' histories are kept as e4m3 with a scale per 128 values; null = as computed."""
    offload: bool = False
    """Level head: attention outputs, which only computed steps read, are kept in pinned host memory."""


class Stages(Section):
    """Stages of a pipeline's call other than its steps."""

    decode: bool = True
    """On a GPU, decode latents with fused kernels, within the rounding of the autoencoder's dtype, and convert images
    there. The decoder's own code runs where its class is unknown or its output differs by more, as the report says."""
    share: bool = False
    """Where several GPUs make a large image or a video together, each decodes a band of its rows with fused kernels, if
    no process asks for latents. All processes must have the same value."""
    prompts: bool = True
    """Keep the outputs of the encoders of prompts and input images, bit for bit. An encoder that gets the same inputs
    again does not run, and is not moved to the GPU if it is offloaded."""
    prompts_mib: float = Field(default=512.0, gt=0.0, allow_inf_nan=False)
    """Most MiB of kept outputs, for each pipeline. The least recently used are dropped first."""
