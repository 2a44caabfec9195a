"""Triton's interpreter without what it repeats: the kernels compute the same, and their tests take half the time."""

import functools
from collections.abc import Callable


def spare_repetition() -> None:
    """Of triton 3.6's interpreter; another release, or none, is left as it is.

    Every call of a device function replaces all of ``triton.language`` by numpy's counterparts, though the kernel that
    calls it has done so, and every sum and product of integers is computed once more in 64 bits to assert that it did
    not overflow, though the interpreter's asserts are off. Each takes a quarter of the time.
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
