"""Triton's interpreter without repeated work: the kernels compute the same, and their tests take half the time."""

import functools
from collections.abc import Callable


def spare_repetition() -> None:
    """Patch triton 3.6's interpreter; other releases, or none, stay unchanged.

    Every call of a device function replaces all of ``triton.language`` with numpy's counterparts, although the calling
    kernel has done so already. Every integer sum and product is computed again in 64 bits for an overflow assertion,
    although the interpreter's asserts are off. Each takes a quarter of the time.
    """
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return
    if not triton.__version__.startswith("3.6."):
        return
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    @functools.cache
    def languages(function: Callable) -> list:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def replace_once(function: Callable) -> interpreter._LangPatchScope:
        todo = any(tl.core.is_builtin(language.load) for language in languages(function))
        return replace(function) if todo else interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
