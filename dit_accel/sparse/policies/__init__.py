"""Policies turn scores of token blocks into masks; every threshold comes from the preset.

Each policy is one object in its own file; :mod:`~dit_accel.sparse.policies.policy` has the interface.

>>> from dit_accel.kernels import attention
>>> from dit_accel.sparse.policies import plan
>>> from dit_accel.presets import Skip
>>> o = attention(q, k, v, plan(q, k, Skip(policy="sparge", tau_kv=0.06)))
"""

from typing import Any

import torch

from dit_accel.errors import UnsupportedError, shown
from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.plans.lowering import lower
from dit_accel.kernels.symbols import AttentionPlan, SparseSymbols
from dit_accel.presets import Skip
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.policies import dense, fg_attn, sla, sparge, static, vsa
from dit_accel.sparse.policies.policy import Policy

POLICIES: dict[str, Policy] = {  # by the value of `skip.policy`
    "none": dense.Dense(),
    "sparge": sparge.Sparge(),
    "sla": sla.Sla(),
    "fg_attn": fg_attn.FgAttn(),
    "static": static.Static(),
    "vsa": vsa.Vsa(),
}


def policy_of(config: Skip) -> Policy:
    """Return the policy that a section ``skip`` names.

    Raises:
        UnsupportedError: ``config`` is no section ``skip``.
    """
    if getattr(config, "policy", None) not in POLICIES:
        raise UnsupportedError(f"config must be a section skip, such as Skip(policy='sparge'), got {shown(config)}")
    return POLICIES[config.policy]


def drawn(
    q: torch.Tensor,
    k: torch.Tensor,
    config: Skip,
    *,
    layout: TokenLayout | None = None,
    kv_len: torch.Tensor | None = None,
) -> SparseSymbols:
    """Return the symbols of one attention, of the policy that ``config`` names; every row computes.

    Args:
        q, k: ``[B, S, H, D]``, the inputs of attention.
        config: section ``skip`` of a preset, for one block (:meth:`~dit_accel.presets.Skip.at`).
        layout: layout of the S tokens; None = no token is text, and blocks have 128 tokens.
        kv_len: int32 ``[B]``, valid keys of each sample; None = all.

    Raises:
        UnsupportedError: ``config`` is no section ``skip``.
    """
    layout = TokenLayout(0, q.shape[1]) if layout is None else layout
    return policy_of(config).draw(Inputs(q, k, k, layout, q.clone, kv_len), config)  # values choose no tile


def plan(q: torch.Tensor, k: torch.Tensor, config: Skip, **options: Any) -> AttentionPlan:
    """Return the plan of one attention, the lowered symbols of :func:`drawn`, which has the arguments and errors."""
    return lower(drawn(q, k, config, **options))
