"""Collection of one thread's warnings while other threads warn as usual.

``warnings.catch_warnings`` replaces filters of the whole process, and when its block ends it overwrites changes of
other threads. So warnings pass through a hook here instead. It is installed once, stays, and shows all warnings that
are not collected.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_LOCK = threading.Lock()
_TAKERS: list[_Taker] = []
_WANTED: Counter[str] = Counter()  # beginnings of messages, and the number of collectors


@dataclass
class Taken:
    """Collected warnings.

    Args:
        places: file and line of each warning.
        is_complete: True if no other thread has removed the hook or its filter, so that no warning was missed.
    """

    places: list[str] = field(default_factory=list)
    is_complete: bool = True


@dataclass(frozen=True)
class _Taker:
    beginning: str
    thread: int
    taken: Taken
    hides_others: bool


class _Hook:
    """Replacement of ``warnings.showwarning``."""

    def __init__(self, shown: Callable) -> None:
        self._shown = shown

    def __call__(self, message: Any, category: Any, filename: str, lineno: int, *others: Any, **more: Any) -> None:
        text, thread = str(message), threading.get_ident()
        takers = [item for item in _TAKERS if text.startswith(item.beginning)]
        of_thread = [item for item in takers if item.thread == thread]
        for item in of_thread:
            item.taken.places.append(f"{filename}, line {lineno}")
        if not of_thread and not any(item.hides_others for item in takers):
            self._shown(message, category, filename, lineno, *others, **more)


@contextmanager
def taken_aside(beginning: str, *, hides_others: bool = False) -> Iterator[Taken]:
    """Collect warnings of this thread whose message begins with ``beginning``, instead of showing them.

    Args:
        hides_others: also hide such warnings of other threads, for example if code here causes them.
    """
    taker = _Taker(beginning, threading.get_ident(), Taken(), hides_others)
    with _LOCK:
        if not isinstance(warnings.showwarning, _Hook):
            warnings.showwarning = _Hook(warnings.showwarning)
        hook = warnings.showwarning
        _TAKERS.append(taker)
        _WANTED[beginning] += 1
        warnings.filterwarnings("always", message=re.escape(beginning))
        entry = warnings.filters[0]
    try:
        yield taker.taken
    finally:
        with _LOCK:
            taker.taken.is_complete = warnings.showwarning is hook and entry in warnings.filters
            _TAKERS.remove(taker)
            _WANTED[beginning] -= 1
            if not _WANTED[beginning] and entry in warnings.filters:
                warnings.filters.remove(entry)
