"""Which samplers and logits processors may be called once more than stock calls them.

Drafts are chosen by the target's own rules, and all positions of a verify in one graph.
Both call a sampler or a processor for positions that plain decoding may never reach,
which only a *pure* one allows: it depends on its arguments and on the state of
`mx.random` alone, and leaves nothing behind. Three kinds are known to be:

- those that stock makes;
- those that their author has marked with :func:`pure`;
- those that can be seen to be: functions, and objects of plain attributes, whose code
  writes nothing but its own variables and reads nothing that keeps a state.

Everything else is called exactly as often as stock calls it.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm import sample_utils

_MARK = "_mlx_lm_mtp_pure"
_CONSTANTS = (type(None), bool, int, float, str, bytes, mx.Dtype)
_BUILTINS = {
    *("abs", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list"),
    *("max", "min", "pow", "range", "reversed", "round", "sorted", "str", "sum"),
    *("tuple", "zip"),
}
_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME")
_CONSTRUCTION = ("__init__", "__new__", "__post_init__")

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
        setattr(function, _MARK, True)
    except AttributeError:
        raise TypeError(
            f"{function!r} cannot be marked as pure, for it takes no attributes; mark "
            "the function or the class that it comes from."
        ) from None
    return function


def is_pure(function: Any) -> bool:
    """Whether a sampler or a processor may be called more often than by stock."""
    return _Inspection().function(function)


class _Inspection:
    """Looks through all that a function can reach."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def function(self, function: Any) -> bool:
        """Whether calls of it leave nothing behind."""
        if id(function) in self._seen or getattr(function, _MARK, None) is True:
            return True
        self._seen.add(id(function))
        if _is_stock_s(function) or _is_mlx_s(function):
            return True
        if isinstance(function, functools.partial):
            parts = (function.func, *function.args, *function.keywords.values())
            return all(map(self._harmless, parts))
        if isinstance(function, MethodType):
            return self._object(function.__self__)
        if isinstance(function, FunctionType):
            return self._code(function)
        return isinstance(vars(type(function)).get("__call__"), FunctionType) and (
            self._object(function)
        )

    def _harmless(self, value: Any, arrays: bool = True) -> bool:
        """Whether a value that is read stays as it is; arrays may be written to."""
        if isinstance(value, _CONSTANTS):
            return True
        if isinstance(value, mx.array):
            return arrays
        if isinstance(value, (tuple, frozenset)):
            return all(self._harmless(item, arrays) for item in value)
        if isinstance(value, ModuleType):
            return value is math or value.__name__.partition(".")[0] == "mlx"
        if isinstance(value, type):
            return any(value is getattr(builtins, name) for name in _BUILTINS)
        return callable(value) and self.function(value)

    def _object(self, thing: Any) -> bool:
        """Whether its methods write to nothing, and its attributes are harmless."""
        if getattr(thing, _MARK, None) is True:
            return True
        owners = type(thing).__mro__[:-1]
        if not all(owner.__flags__ & _HEAP for owner in owners):
            return False  # a dict, say, has items besides its attributes
        if any("__slots__" in vars(owner) for owner in owners):
            return False
        members = [m for owner in owners for m in _members(owner)]
        functions = [m for m in members if isinstance(m, FunctionType)]
        values = [m for m in members if not isinstance(m, FunctionType)]
        values += vars(thing).values()
        arrays = not any(_writes_items(f.__code__) for f in functions)
        return all(map(self._code, functions)) and all(
            self._harmless(value, arrays) for value in values
        )

    def _code(self, function: FunctionType) -> bool:
        codes = list(_codes(function.__code__))
        if any(map(_writes, codes)):
            return False
        read = [*(function.__defaults__ or ()), *vars(function).values()]
        read += (function.__kwdefaults__ or {}).values()
        read += [cell.cell_contents for cell in function.__closure__ or ()]
        for name in set().union(*map(_globals, codes)):
            if name in function.__globals__:
                read.append(function.__globals__[name])
            elif name not in _BUILTINS:
                return False
        arrays = not any(map(_writes_items, codes))
        return all(self._harmless(value, arrays) for value in read)


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was written in Python


def _is_stock_s(function: Any) -> bool:
    # Its globals cannot be borrowed, as a name can.
    if getattr(function, "__globals__", None) is vars(sample_utils):
        return True
    return any(function is value for value in vars(sample_utils).values())


def _is_mlx_s(function: Any) -> bool:
    """Whether it is one of MLX's own functions; what it compiles may keep a state."""
    return isinstance(function, type(mx.argmax))


def _members(owner: type) -> Iterator[Any]:
    """What a class has that its instances may read or call."""
    for name, member in vars(owner).items():
        if isinstance(member, property):
            yield from (f for f in (member.fget, member.fset) if f is not None)
        elif isinstance(member, (staticmethod, classmethod)):
            yield member.__func__
        elif isinstance(member, FunctionType):
            if name not in _CONSTRUCTION:
                yield member
        elif not (name.startswith("__") and name.endswith("__")):
            yield member


# --- bytecode -------------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code, and those of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _writes(code: CodeType) -> bool:
    """Whether it writes to anything but its own variables and items."""
    return any(
        step.opname in _WRITES
        or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        or (step.opname in ("LOAD_ATTR", "LOAD_METHOD") and "__" in step.argval)
        for step in dis.get_instructions(code)
    )


def _writes_items(code: CodeType) -> bool:
    """Whether it assigns to items, or in place, which changes an array."""
    return any(
        step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
        or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))
        for step in dis.get_instructions(code)
    )


def _globals(code: CodeType) -> set[str]:
    return {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
