"""SpargeAttn's tile policy: in each row, skip tiles of low probability in the pooled map.

A mean represents the tokens of its block only if they are similar. With ``similarity`` (θ), blocks of queries or keys
whose mean pairwise cosine is below θ are *fix* blocks (section 3.2). A fix block of queries computes its whole row. A
fix block of keys computes its whole column and is removed from the compressed softmax, whose rows sum to 1 over the
other blocks. The cosine covers valid tokens that are not 0, because 0 has no direction.
"""

from typing import Any

from dit_accel.kernels.plans.selection import select_tiles
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.presets.skip import SpargeSkip
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.policies.policy import Policy, every_row

# Values that `dit-accel tune` tries.
SIMILARITIES = (0.7, 0.5, 0.3, 0.15)
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
MASSES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.55)


class Sparge(Policy):
    """Select the tiles that compute (SpargeAttn, sections 3.2 and 3.3); every row computes."""

    def draw(self, inputs: Inputs, config: SpargeSkip) -> SparseSymbols:
        """Return the tiles of highest probability in the pooled map (equations 4 and 5, with τ = 1 − tau_kv).

        Rows and columns with text are kept whole: text and vision guide each other (FlashOmni, observation 1).
        """
        pooled, whole = inputs.scored(), {"always": inputs.layout.text_blocks}
        if config.similarity is not None:
            whole["rows"] = pooled.q_similarity < config.similarity
            whole["columns"] = pooled.k_similarity < config.similarity
        tau = config.tau_kv if config.top_k is None else None
        skip_bits = select_tiles(pooled.probabilities, tau, top_k=config.top_k, **whole)
        if config.sinks:
            skip_bits[..., 0] |= 1
        return every_row(inputs.q, inputs.layout, skip_bits)

    def options(self, config: SpargeSkip) -> dict[str, Any]:
        return {"pv_threshold": config.pv_threshold, "tile_means": config.means}

    def ramped(self, config: SpargeSkip, growth: float) -> SpargeSkip:
        """Return the section with the left-out mass and share of tiles scaled by ``growth``."""
        if growth == 1:
            return config
        top_k = None if config.top_k is None else 1 - (1 - config.top_k) * growth
        return config.model_copy(update={"tau_kv": config.tau_kv * growth, "top_k": top_k})

    def thresholds(self, config: SpargeSkip) -> dict[str, tuple[float, ...]]:
        similarity = {} if config.similarity is None else {"similarity": SIMILARITIES}
        return similarity | ({"tau_kv": MASSES} if config.top_k is None else {"top_k": SHARES})
