"""Triton's interpreter without repeated work: the kernels compute the same, and their tests run three times as fast."""

import functools
from collections.abc import Callable


def spare_repetition() -> None:
    """Patch triton 3.6's interpreter; other releases, or none, stay unchanged.

    Every call of a device function replaces all of ``triton.language`` with numpy's counterparts, although the calling
    kernel has done so already. Every integer sum and product is computed again in 64 bits for an overflow assertion,
    although the interpreter's asserts are off. Every tensor builds the type of its shape, although a kernel has few.
    Each takes a quarter of the time.
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
    _keep_types(tl.core)
    _keep_numpy_types(interpreter)
    _leave_equal_shapes(interpreter.TritonSemantic)
    _convert_indices_without_a_warning(interpreter)


def _keep_types(core) -> None:
    """Build the type of a shape once, and a tuple's type when it is read."""
    make_block, make_tuple, equals = core.block_type.__init__, core.tuple.__init__, core.dtype.__eq__
    blocks: dict[tuple, dict] = {}
    shapes = {(): (core.constexpr(1), core.tuple([]))}

    def block(self, element_ty, shape):
        values = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = (element_ty.name, values)
        if key not in blocks:
            make_block(self, element_ty, shape)
            if values not in shapes:
                shapes[values] = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in values])
            blocks[key] = vars(self) | {"_of_tensors": shapes[values]}
        vars(self).update(blocks[key])

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type._of_tensors if type.is_block() else shapes[()]

    def tuple_(self, args, type=None):
        if type is None:
            self.values = [*args]
        else:
            make_tuple(self, args, type)

    def type_of_tuple(self):
        if "_type" not in vars(self):
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    core.block_type.__init__, core.tensor.__init__, core.tuple.__init__ = block, tensor, tuple_
    core.tuple.type = property(type_of_tuple, lambda self, type: vars(self).update(_type=type))
    core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)


def _keep_numpy_types(interpreter) -> None:
    """Look numpy's type of a type up by its name."""
    find, kept = interpreter._get_np_dtype, {}

    def numpy_type(type):
        name = type.scalar.name
        if name not in kept:
            kept[name] = find(type.scalar)
        return kept[name]

    interpreter._get_np_dtype = numpy_type


def _leave_equal_shapes(semantic) -> None:
    """Return operands of equal shapes, which `_keep_types` makes one object, without a comparison of their sizes."""
    broadcast = semantic.broadcast_impl_value

    def operands(self, left, right):
        if left.shape is right.shape:
            return left, right
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = operands


def _convert_indices_without_a_warning(interpreter) -> None:
    """Read a scalar as an index without numpy's warning, of which pytest would keep thousands."""
    replace = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        replace(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch
