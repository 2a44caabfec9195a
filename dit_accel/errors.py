"""Error types. Every message names the argument, the requirement, the given value and the fix."""

from numbers import Integral


class DitAccelError(Exception):
    """Base class of all errors that dit-accel raises on purpose."""


class PresetError(DitAccelError, ValueError):
    """Error of an invalid preset, key or value."""


class UnsupportedError(DitAccelError, ValueError):
    """Error of a pipeline, module or device that does not support a request."""


class ArgumentError(DitAccelError, ValueError):
    """Error of an argument that breaks a rule. Each interface has its own word for the argument, such as an option.

    Args:
        field: name of the argument, such as "num_frames".
        rule: the requirement, the given value and the fix.
    """

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(field, rule)
        self.field, self.rule = field, rule

    def __str__(self) -> str:
        return f"{self.field}: {self.rule}"


class OutOfMemoryError(DitAccelError):
    """Error of too little memory on the device or the host."""


class OutputError(DitAccelError, OSError):
    """Error of a file that can't be written, for example because the disk is full."""


class BatchError(DitAccelError, RuntimeError):
    """Error of a batch whose prompts could not all be generated."""


class MemoryBudgetError(DitAccelError, ValueError):
    """Error of caches that exceed the preset's ``memory.budget_gib`` with all measures taken."""


class ShapeError(DitAccelError, ValueError):
    """Error of a tensor argument with the wrong shape, dtype or device."""


class BackendError(DitAccelError, RuntimeError):
    """Error of an explicitly requested kernel backend that can't run here; explicit requests never fall back."""


class KernelError(DitAccelError, RuntimeError):
    """Error of a kernel that should run here, but could not be compiled, loaded or launched."""


class TuningError(DitAccelError, ValueError):
    """Error of a tuning without anything to tune, or with saved results of another tuning."""


class ComparisonError(DitAccelError, ValueError):
    """Error of a comparison with saved results of another comparison."""


def shown(value: object) -> str:
    """Return a given value as messages show it: its ``repr``, shortened."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python writes no integers of more than 4,300 digits
        return f"a value too long to show ({type(value).__name__})"


def require_counts(**numbers: object) -> None:
    """Check that arguments, passed by their names, are whole numbers of at least 1.

    Raises:
        UnsupportedError: an argument is not.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
            raise UnsupportedError(f"{name} must be a whole number, at least 1, got {shown(number)}")


def shortened(text: str, most: int = 200) -> str:
    """Return a text as messages show it: in one line, and at most ``most`` characters of it."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= most else f"{text[: most // 2]}… ({len(text):,} characters)"


def headline(error: BaseException) -> str:
    """Return the type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
