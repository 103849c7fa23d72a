"""Which samplers and logits processors may be called when stock would not call them.

Drafts are chosen by the target's own rules, and all positions of a verify in one graph.
Both call a sampler or a processor for positions that plain decoding may never reach.

- A *pure* one allows both: it depends on its arguments and on the state of `mx.random`
  alone, and leaves nothing behind. Pure are those that stock makes, and those that
  their author has marked with :func:`pure`.
- One that can be seen to *leave nothing behind* may be asked about drafts: a function,
  or an object of plain attributes, whose code writes to nothing but its own variables
  and reads nothing that its calls could change. What it reads may still be changed by
  somebody else between two tokens (a temperature, say), so it is not asked ahead.

Everything else is called exactly as often as stock calls it.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm import sample_utils

_MARK = "_mlx_lm_mtp_pure"
_CONSTANTS = (type(None), bool, int, float, str, bytes, mx.Dtype, mx.array)
_BUILTINS = {
    *("abs", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list"),
    *("max", "min", "pow", "range", "reversed", "round", "sorted", "str", "sum"),
    *("tuple", "zip"),
}
# In place is in place of an array, too, whatever name it has here.
_WRITES = {
    *("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME"),
    *("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"),
}
_EFFECTS = ("__", "save", "set_", "export", "reset_", "clear_")  # of names after a dot
# Called at other times than a call of the object, or not to be reached from one.
_ELSEWHERE = {
    *("__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__"),
    *("__eq__", "__hash__", "__replace__", "__setattr__", "__delattr__"),
}
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was written in Python

Marked = TypeVar("Marked", bound=Callable[..., Any])


def pure(function: Marked) -> Marked:
    """Mark a sampler or a logits processor as pure; can be used as a decorator.

    It must depend on its arguments and on the state of `mx.random` alone, and keep
    nothing from one call to the next: it is then called for drafted tokens as well.

    Args:
        function: A function, a class whose instances are called, or such an instance.

    Raises:
        TypeError: If it takes no attributes, as a bound method.
    """
    try:
        # Itself, for wrappers copy attributes, and subclasses inherit them.
        setattr(function, _MARK, function)
    except AttributeError:
        raise TypeError(
            f"{function!r} cannot be marked as pure, for it takes no attributes; mark "
            "the function or the class that it comes from."
        ) from None
    return function


def is_pure(function: Any) -> bool:
    """Whether stock made it, or its author has marked it."""
    return _is_stock_s(function) or _is_marked(function)


def leaves_nothing(function: Any) -> bool:
    """Whether it may be called more often than stock calls it."""
    return _Inspection().function(function)


def _is_stock_s(function: Any) -> bool:
    # Its globals cannot be borrowed, as a name can.
    if type(function) is FunctionType and function.__globals__ is vars(sample_utils):
        return True
    return any(function is value for value in vars(sample_utils).values())


def _is_marked(thing: Any) -> bool:
    if type(thing) is MethodType:
        return _is_marked(thing.__func__) or _is_marked(thing.__self__)
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        own = {}
    return own.get(_MARK) is thing or vars(type(thing)).get(_MARK) is type(thing)


class _Inspection:
    """Looks through all that a function can reach."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def function(self, function: Any) -> bool:
        """Whether calls of it leave nothing behind."""
        if id(function) in self._seen or is_pure(function) or _is_mlx_s(function):
            return True
        self._seen.add(id(function))
        if type(function) is functools.partial:
            parts = (function.func, *function.args, *function.keywords.values())
            return all(map(self._harmless, parts))
        if type(function) is MethodType:
            return self.function(function.__func__) and self._object(function.__self__)
        if type(function) is FunctionType:
            return self._code(function)
        call = inspect.getattr_static(type(function), "__call__", None)
        return type(call) is FunctionType and self._object(function)

    def _harmless(self, value: Any) -> bool:
        """Whether a value that is read stays as it is."""
        if type(value) in _CONSTANTS:
            return True
        if type(value) in (tuple, frozenset):
            return all(map(self._harmless, value))
        if type(value) is ModuleType:
            return value is math or value.__name__.partition(".")[0] == "mlx"
        if isinstance(value, type):
            return any(value is getattr(builtins, name) for name in _BUILTINS)
        return callable(value) and self.function(value)

    def _object(self, thing: Any) -> bool:
        """Whether its methods write to nothing, and its attributes are harmless."""
        if _is_marked(thing):
            return True
        owners = type(thing).__mro__[:-1]
        if not all(owner.__flags__ & _HEAP for owner in owners):
            return False  # a dict, say, has items besides its attributes
        if any("__slots__" in vars(owner) for owner in owners):
            return False
        members = [m for owner in owners for m in _members(owner)]
        return all(map(self._harmless, [*members, *vars(thing).values()]))

    def _code(self, function: FunctionType) -> bool:
        codes = list(_codes(function.__code__))
        if any(map(_writes, codes)):
            return False
        read = [*(function.__defaults__ or ()), *vars(function).values()]
        read += (function.__kwdefaults__ or {}).values()
        for cell in function.__closure__ or ():
            try:
                read.append(cell.cell_contents)
            except ValueError:  # not bound yet: it will be written
                return False
        for name in set().union(*map(_globals, codes)):
            if name in function.__globals__:
                read.append(function.__globals__[name])
            elif name not in _BUILTINS:
                return False
        return all(map(self._harmless, read))


def _is_mlx_s(function: Any) -> bool:
    """Whether it is one of MLX's own functions; what it compiles may keep a state."""
    return type(function) is type(mx.argmax) and function.__module__.startswith("mlx")


def _members(owner: type) -> Iterator[Any]:
    """What a class has that its instances may read or call."""
    for name, member in vars(owner).items():
        if name in _ELSEWHERE:
            continue
        if type(member) is property:
            yield from (f for f in (member.fget, member.fset) if f is not None)
        elif type(member) in (staticmethod, classmethod):
            yield member.__func__
        elif type(member) is FunctionType or not name.startswith("__"):
            yield member


# --- bytecode -------------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code, and those of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _writes(code: CodeType) -> bool:
    """Whether it may write to anything but its own variables."""
    return any(
        step.opname in _WRITES
        or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))
        or (
            step.opname in ("LOAD_ATTR", "LOAD_METHOD")
            and step.argval.startswith(_EFFECTS)
        )
        for step in dis.get_instructions(code)
    )


def _globals(code: CodeType) -> set[str]:
    return {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
