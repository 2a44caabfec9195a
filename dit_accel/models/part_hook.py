"""Level ``layer`` for families without hand-written blocks: a block's attention and MLP are computed or forecast.

The block's own forward runs in every step, so that norms, modulation and gates are fresh.
"""

from typing import Any

import torch
from torch import nn

from dit_accel.errors import UnsupportedError
from dit_accel.loop.branch import Call
from dit_accel.loop.forecast import forecast
from dit_accel.loop.tracker import StepMode
from dit_accel.models.hooks import Hook
from dit_accel.models.session import Session
from dit_accel.sparse.site_state import SiteState


class FeedHook(Hook):
    """Skips a module that only feeds a forecast part; it returns zeros for each stream, which nothing reads."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self._session.call
        if call is None or call.mode is not StepMode.DISPATCH:
            return self.fn_ref.original_forward(*args, **kwargs)
        tensors = (item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor))
        streams = [item for item in tensors if item.ndim == 3]  # [B, S, C]; a mask has other dimensions
        zeros = [x.new_zeros(1).expand(*x.shape[:-1], getattr(module, "out_features", x.shape[-1])) for x in streams]
        return tuple(zeros) if len(zeros) > 1 else zeros[0]


class PartHook(Hook):
    """Remembers or forecasts the output of one part of a block, a tensor or a tuple of tensors."""

    def __init__(self, session: Session, block: str, part: str, calls: int = 1) -> None:
        super().__init__()
        self._session = session
        self._block = block
        self._part = part
        self._calls = calls  # of the part in a call of the block, each with a history of its own

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (call := self._session.call) is None:
            return self.fn_ref.original_forward(*args, **kwargs)
        history = call.site(self._block, SiteState).history(self._next(call), call.branch.memory)
        if call.mode is StepMode.DISPATCH:
            output = forecast(self._session.driver.preset.forecast.method, history, call.coordinate, call.branch.order)
            return output if self._is_tuple else output[0]
        output = self.fn_ref.original_forward(*args, **kwargs)
        if call.records:
            if history.coordinates[:1] == (call.coordinate,):
                fix = "call transformer.disable_forward_chunking(), or set forecast.level to output"
                raise UnsupportedError(f"{self._part} of {self._block} runs in chunks, which can't be forecast: {fix}")
            self._is_tuple = not isinstance(output, torch.Tensor)
            history.record(call.coordinate, output if self._is_tuple else (output,))
        return output

    def _next(self, call: Call) -> str:
        """Name of the history of the part's next output in a transformer call."""
        turn = call.blocks.turns[self._block, self._part] % self._calls
        call.blocks.turns[self._block, self._part] += 1
        return f"{self._part}, call {turn + 1}" if turn else self._part
