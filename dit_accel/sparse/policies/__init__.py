"""Policies turn scores of token blocks into masks; every threshold comes from the preset.

Each is one object in a file of its own, and :mod:`~dit_accel.sparse.policies.policy` has all that is asked of it.

>>> from dit_accel.kernels import attention
>>> from dit_accel.sparse.policies import plan
>>> from dit_accel.presets import Skip
>>> o = attention(q, k, v, plan(q, k, Skip(policy="sparge", tau_kv=0.06)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dit_accel.errors import UnsupportedError, shown
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.lowering import lower
from dit_accel.kernels.pooling import PooledMap
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.sparse.policies import dense, fg_attn, sla, sparge, static
from dit_accel.sparse.policies.policy import Policy

if TYPE_CHECKING:
    from dit_accel.presets import Skip

POLICIES: dict[str, Policy] = {  # by what `skip.policy` calls them
    "none": dense.Dense(),
    "sparge": sparge.Sparge(),
    "sla": sla.Sla(),
    "fg_attn": fg_attn.FgAttn(),
    "static": static.Static(),
}


def policy_of(config: Skip) -> Policy:
    """Return the policy that a section ``skip`` names.

    Raises:
        UnsupportedError: ``config`` is something else.
    """
    if getattr(config, "policy", None) not in POLICIES:
        raise UnsupportedError(f"config must be a section skip, such as Skip(policy='sparge'), got {shown(config)}")
    return POLICIES[config.policy]


def draw(
    q: torch.Tensor,
    k: torch.Tensor,
    layout: TokenLayout,
    config: Skip,
    *,
    kv_len: torch.Tensor | None = None,
    pooled: PooledMap | None = None,
    **options: Any,
) -> SparseSymbols:
    """Symbols of one attention by the policy that ``config`` names; every row computes.

    Args:
        q, k: ``[B, S, H, D]`` as attention gets them.
        layout: of the S tokens.
        config: section ``skip`` of a preset, as it is for one block (:meth:`~dit_accel.presets.Skip.at`).
        kv_len: int32 ``[B]``, valid keys of each sample; None = all.
        pooled: the pooled map of these q and k, where the caller has it; a policy that needs it makes it otherwise.
        options: what the policy's own ``draw`` takes beyond these.

    Raises:
        UnsupportedError: ``config`` is something else.
    """
    return policy_of(config).draw(q, k, layout, config, kv_len=kv_len, pooled=pooled, **options)


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    config: Skip,
    *,
    layout: TokenLayout | None = None,
    kv_len: torch.Tensor | None = None,
    **options: Any,
) -> AttentionPlan:
    """The plan of one attention: :func:`draw`, lowered.

    Args:
        q, k, config, kv_len, options: as for :func:`draw`.
        layout: None = no token is text, and blocks have 128 tokens.
    """
    layout = TokenLayout(0, q.shape[1]) if layout is None else layout
    return lower(draw(q, k, layout, config, kv_len=kv_len, **options))
