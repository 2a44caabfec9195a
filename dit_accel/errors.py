"""Error types. Every message names the argument, what was required, what came, and the fix."""

from numbers import Integral


class DitAccelError(Exception):
    """Base of all errors that dit-accel raises on purpose."""


class PresetError(DitAccelError, ValueError):
    """A preset, one of its keys or one of its values is not valid."""


class UnsupportedError(DitAccelError, ValueError):
    """A pipeline, module or device can't do what was asked of it."""


class OptionError(DitAccelError, ValueError):
    """An option can't be used as it was given; it is named as on the command line."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(option, message)

    def __str__(self) -> str:
        return ": ".join(self.args)


class OutOfMemoryError(DitAccelError):
    """A device's memory, or the host's, does not suffice."""


class BatchError(DitAccelError, RuntimeError):
    """Prompts of a batch could not be made."""


class MemoryBudgetError(DitAccelError, ValueError):
    """The caches of a run do not fit into the preset's ``memory.budget_gib``, whatever is done."""


class ShapeError(DitAccelError, ValueError):
    """A tensor argument has the wrong shape, dtype or device."""


class BackendError(DitAccelError, RuntimeError):
    """An explicitly requested kernel backend can't run here; explicit requests never fall back."""


class KernelError(DitAccelError, RuntimeError):
    """A kernel that should run here could not be compiled, loaded or launched: a fault, not a choice."""


class TuningError(DitAccelError, ValueError):
    """There is nothing to tune, or what a tuning has found so far belongs to another one."""


class ComparisonError(DitAccelError, ValueError):
    """What a comparison has measured so far belongs to another one."""


def shown(value: object) -> str:
    """A value that came, as messages show it: its ``repr``, shortened."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python writes no integers of more than 4,300 digits
        return f"a value too long to show ({type(value).__name__})"


def require_counts(**numbers: object) -> None:
    """Checks that arguments, given by their names, are whole numbers from 1 on.

    Raises:
        UnsupportedError: one is not.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
            raise UnsupportedError(f"{name} must be a whole number, at least 1, got {shown(number)}")


def shortened(text: str, most: int = 200) -> str:
    """A text as messages show it: its beginning where it is longer, and in one line."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= most else f"{text[: most // 2]}… ({len(text):,} characters)"
