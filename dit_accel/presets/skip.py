"""Section ``skip``: one policy for all blocks, with its own keys, and changes for single blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from dit_accel.constants import MOST_STEPS
from dit_accel.errors import shortened
from dit_accel.presets.complaints import explained
from dit_accel.presets.section import MOST_TOKENS, Formed, any_form

_WHOLE_RUN = ("steps", "layers")  # can't differ from block to block
_COMPUTED_STEPS = {  # keys of steps 'all', with their effect
    "refresh": "says how long computed steps keep their masks",
    "residual": "corrects computed steps that leave tiles out",
    "probe_blocks": "measures the error of computed steps that leave tiles out",
    "probe_error": "bounds the error of computed steps that leave tiles out",
}


class Skip(Formed):
    """Attention tiles that are left out of rows that compute."""

    chooser: ClassVar[str] = "policy"

    policy: Literal["none", "sparge", "sla", "fg_attn", "static", "vsa"] = "none"
    """none: nothing is left out. sparge: in each row, the tiles of least probability in the pooled map (SpargeAttn).
    sla: critical tiles attend, marginal tiles go through linear attention, negligible tiles are left out (SLA).
    fg_attn: single keys for each row of tiles (FG-Attn). static: a fixed pattern (OmniAttention). vsa: cubes of a
    video's tokens, and attention between cubes (VSA)."""
    steps: Literal["dispatch", "all"] = "dispatch"
    """dispatch: only forecast steps leave tiles out; they attend at level head alone. all: every step after the warm-up
    does, at any level; a computed step chooses its tiles by its own queries and keys."""
    refresh: int = Field(default=1, ge=1, le=MOST_STEPS)
    """steps all: number of steps for which computed masks are kept; 1 = each computed step computes new masks."""
    residual: bool = False
    """steps all, refresh > 1: a step that computes masks uses dense attention. The difference to its sparse output is
    added to the outputs of the steps that keep the masks (DiTFastAttn's residual sharing). It takes the memory of one
    attention output for each block and branch."""
    probe_blocks: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """steps all: number of row-blocks for which each computed step that leaves tiles out also computes dense attention;
    the report has the difference. The row-blocks are spread over the sequence and change from step to step."""
    layers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Changes for single blocks: from the block's name, as in the report, to changed keys of this section."""

    _by_layer: dict[str, Skip] = PrivateAttr(default_factory=dict)

    def at(self, name: str) -> Skip:
        """Return the section for one block; ``name`` is the block's name in the report."""
        return self._by_layer.get(name, self)

    @property
    def variants(self) -> tuple[Skip, ...]:
        """The section itself, and its variant for each block that changes something."""
        return (self, *self._by_layer.values())

    @property
    def skips(self) -> bool:
        """Return True if any block leaves something out."""
        return any(variant.policy != "none" for variant in self.variants)

    @property
    def keeps_residuals(self) -> bool:
        """True if any block keeps a residual."""
        return any(variant.residual for variant in self.variants)

    def idle_keys(self) -> list[str]:
        """Return the keys of the policy that have no effect with its other keys."""
        return [] if self.steps == "all" else [key for key in _COMPUTED_STEPS if key in type(self).model_fields]

    @model_validator(mode="after")
    def _complete(self) -> Skip:
        for key in Skip.idle_keys(self):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} {_COMPUTED_STEPS[key]}: set steps to all, or remove it")
        if self.residual and self.refresh == 1:
            raise ValueError("residual corrects steps that keep their masks, and refresh is 1: set refresh, e.g. to 4")
        self._by_layer = {name: self._changed(name, changes) for name, changes in self.layers.items()}
        if self.steps == "all" and not self.skips:
            raise ValueError("steps 'all' has no effect with policy 'none': set policy to sparge, or steps to dispatch")
        return self

    def _changed(self, name: str, changes: dict[str, Any]) -> Skip:
        """Return the section with one block's changes."""
        for key in _WHOLE_RUN:
            if key in changes:
                raise ValueError(f"layers.{shortened(name)}: {key} is the same for all blocks: set skip.{key}")
        values = self.model_dump(exclude_unset=True, exclude={"layers"})
        drop_foreign_keys(values, changes)
        values |= changes
        if values.get("policy", "none") == "none":  # such a block has no masks, whatever the others do
            values = {key: value for key, value in values.items() if key not in ("steps", *_COMPUTED_STEPS)}
        form = Skip.forms.get(str(values.get("policy", "none")), Skip)
        try:
            return form.model_validate(values)
        except ValidationError as failure:
            raise ValueError(f"layers.{shortened(name)}: {explained(failure, form)}") from None


class NoSkip(Skip):
    """Nothing is left out, except in blocks with their own policy."""

    policy: Literal["none"] = "none"


class SpargeSkip(Skip):
    """Leaves out the attention tiles of least probability in the pooled map (SpargeAttn)."""

    policy: Literal["sparge"] = "sparge"
    tau_kv: float = Field(default=0.15, ge=0.0, le=1.0)
    """Probability mass of the pooled map that a row may lose (FlashOmni's τ_kv; SpargeAttn's τ is 1 − tau_kv). At level
    head it grows with reuse.ramp."""
    top_k: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of a row's tiles that is kept, instead of tau_kv. At level head the rest grows with reuse.ramp."""
    similarity: float | None = Field(default=None, ge=0.0, le=1.0)
    """Blocks whose tokens have a lower mean pairwise cosine compute whole, as queries and as keys, because their mean
    does not represent them (SpargeAttn's θ); null = no block is tested."""
    sinks: bool = False
    """The first block of keys is always attended to."""
    pv_threshold: float | None = Field(default=None, lt=0.0)
    """Within attention, 64 queries leave out a tile whose highest score lies further than this below their highest
    score so far, in units of the scaled scores (SpargeAttn's λ); null = no tile is left out this way."""
    means: bool = False
    """Each tile that is left out still counts as one key: the means of its block's keys and values."""
    probe_error: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Bound on the relative L2 error ‖O' − O‖/‖O‖ of a block's attention on the probe's rows. A block with a larger
    error leaves less out; with a smaller error it leaves more out again, up to tau_kv or top_k. null = no bound."""

    def idle_keys(self) -> list[str]:
        return [*super().idle_keys(), *(["tau_kv"] if self.top_k is not None else [])]

    @model_validator(mode="after")
    def _consistent(self) -> SpargeSkip:
        if self.top_k is not None and "tau_kv" in self.model_fields_set:
            raise ValueError("top_k replaces tau_kv: remove one of them")
        if self.probe_error is not None and not self.probe_blocks:
            raise ValueError("probe_error bounds an error that is measured on probe_blocks: set probe_blocks, e.g. 4")
        return self


class SlaSkip(Skip):
    """Critical tiles attend, marginal tiles go through linear attention, negligible tiles are left out (SLA)."""

    policy: Literal["sla"] = "sla"
    critical: float = Field(default=0.05, gt=0.0, le=1.0)
    """Share of a row's tiles, of highest probability, that attend."""
    negligible: float = Field(default=0.10, ge=0.0, lt=1.0)
    """Share of a row's tiles, of lowest probability, that are left out."""
    feature_map: Literal["softmax", "elu", "relu"] = "softmax"
    """Feature map of linear attention, for queries and keys."""
    linear: Literal["marginal", "all"] = "marginal"
    """Tiles of linear attention; all, critical ones too, is how TurboWan was trained."""
    projection: str | None = None
    """safetensors file, or folder of a checkpoint, with projections of linear attention, a matrix ``[D, D]`` a block;
    null = without linear attention. In a preset file the path is relative to the file's folder."""

    @model_validator(mode="after")
    def _consistent(self) -> SlaSkip:
        if self.critical + self.negligible > 1:
            raise ValueError(f"critical + negligible must be at most 1, got {self.critical} + {self.negligible}")
        return self


class VsaSkip(Skip):
    """Cubes of a video's tokens attend to the likeliest cubes, and through a gate to the means of all cubes (VSA)."""

    policy: Literal["vsa"] = "vsa"
    steps: Literal["all"] = "all"
    residual: Literal[False] = False
    probe_blocks: Literal[0] = 0
    sparsity: float = Field(default=0.8, ge=0.0, lt=1.0)
    """Share of a row's cubes that is left out."""
    projection: str | None = None
    """safetensors file, or folder of a checkpoint, with the gates; null = without attention to means."""


class FgAttnSkip(Skip):
    """Leaves out single keys for each row of tiles (FG-Attn)."""

    policy: Literal["fg_attn"] = "fg_attn"
    mask: Literal["exact", "average_query"] = "exact"
    """exact: a key's scores with all queries of a row decide whether it stays. average_query: its score with their mean
    does, which is cheaper and less accurate."""
    key_threshold: float | None = Field(default=None, gt=0.0)
    """Least probability of a key that stays, in units of 1 / N, the mean over N keys; null = the paper's 0.5 for exact,
    and 0.1 for average_query."""


class StaticSkip(Skip):
    """A fixed pattern, which does not depend on queries and keys (OmniAttention)."""

    policy: Literal["static"] = "static"
    pattern: Literal["causal", "sliding"] = "sliding"
    """causal: keys up to the query. sliding: keys within half a window on either side."""
    window: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Width of the sliding window in tokens."""

    def idle_keys(self) -> list[str]:
        return [*super().idle_keys(), *(["window"] if self.pattern != "sliding" else [])]

    @model_validator(mode="after")
    def _consistent(self) -> StaticSkip:
        if (self.window is None) != (self.pattern != "sliding"):
            raise ValueError(f"pattern '{self.pattern}' {'needs' if self.window is None else 'takes no'} window")
        return self


Skip.forms = {
    form.model_fields["policy"].default: form for form in (NoSkip, SpargeSkip, SlaSkip, FgAttnSkip, StaticSkip, VsaSkip)
}
if TYPE_CHECKING:
    AnySkip = Skip
else:
    AnySkip = any_form(Skip)


def drop_foreign_keys(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Drop the values that changes exclude: keys of other policies, and alternatives."""
    for key in Skip.foreign_keys(changes.get("policy")):
        values.pop(key, None)
    for key, other in (("tau_kv", "top_k"), ("top_k", "tau_kv")):  # naming one of them replaces the other
        if changes.get(key) is not None and other not in changes:
            values.pop(other, None)
    if changes.get("pattern") not in (None, "sliding"):
        values.pop("window", None)
