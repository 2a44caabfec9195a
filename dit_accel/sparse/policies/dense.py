"""The policy that leaves nothing out."""

from typing import Any

from dit_accel.kernels.layout import TokenLayout
from dit_accel.kernels.symbols import SparseSymbols
from dit_accel.sparse.inputs import Inputs
from dit_accel.sparse.policies.policy import Policy, every_row


class Dense(Policy):
    """Compute every tile of every row."""

    leaves_out = False

    def draw(self, inputs: Inputs, config: Any) -> SparseSymbols:
        return every_row(inputs.q, inputs.layout, None)

    def row_bytes(self, layout: TokenLayout) -> int:
        return 0
