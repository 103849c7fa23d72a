"""Forms of a verify: what runs row by row, so that each row has the bits of decoding.

Decoding feeds one token at a time. A verify feeds several, and a device may compute
them by another kernel, which adds up in another order. What does so differs from device
to device, so a form names the ops that are to run on one row at a time; everything else
still sees all rows at once. Which form is right is found out by measurement
(:mod:`..certificate`), not here.

The ops are named after what computes them: ``attention`` is the scaled dot product, the
others are classes of layers. Stock's functions run, on rows that are cut out of their
arguments; only a matrix product on CUDA has a kernel of its own (:mod:`.cuda_rows`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base, switch_layers

from ..wrapping import Meanwhile, wrap
from .cuda_rows import product_by_row

Op = Callable[..., mx.array]
ATTENTION = "attention"


@dataclass(frozen=True)
class Form:
    """One form of verify.

    Args:
        by_row: Names of the ops that run on one row at a time.
    """

    by_row: frozenset[str] = frozenset()

    def __str__(self) -> str:
        if not self.by_row:
            return "batched"
        return f"{', '.join(sorted(self.by_row))} by row"


BATCHED = Form()


@dataclass(frozen=True)
class Call:
    """One call of an op on one row, as a forward has made it.

    Args:
        op: Its name.
        stock: Stock's function.
        args, named: What it was called with; the first are arrays with rows.
    """

    op: str
    stock: Op
    args: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True)
class _Asked:
    """What a thread asks of the wrappers."""

    by_row: frozenset[str] = frozenset()
    rows: tuple[int, int] = (1, 1)  # paths, and inputs of each
    noted: list[Call] | None = None


_NOTHING = _Asked()


class _PerThread(threading.local):
    asked = _NOTHING


_thread = _PerThread()


def computed(form: Form, paths: int, width: int) -> Meanwhile:
    """Compute what runs in the context, a verify of so many inputs, in a form."""
    if form.by_row:
        see_through()
    return Meanwhile(_thread, "asked", _Asked(form.by_row, (paths, width)))


@contextlib.contextmanager
def noting() -> Iterator[list[Call]]:
    """Note down the calls of every op that a form can name, in this thread."""
    see_through()
    noted: list[Call] = []
    with Meanwhile(_thread, "asked", _Asked(noted=noted)):
        yield noted


def see_through() -> None:
    """Put the wrappers in place; they do as stock does until a thread asks for more."""
    for owner, name, wrapper in _WRAPPERS:
        wrap(owner, name, wrapper)


# --- rows -----------------------------------------------------------------------------


def one_by_one(call: Call) -> mx.array:
    """The op of a call by row, for the rows that are :func:`computed` now."""
    if call.op == ATTENTION:
        return _attention_by_row(call.stock, *call.args, **call.named)
    return _layer_by_row(call.stock, *call.args)


def _layer_by_row(stock: Op, layer: nn.Module, *args: mx.array) -> mx.array:
    """A layer whose arguments all have rows, `(P, S, …)` or `(P S, …)`."""
    paths, width = _thread.asked.rows
    if args[0].ndim == 2:
        ones = (slice(i, i + 1) for i in range(paths * width))
        return mx.concatenate([stock(layer, *(a[one] for a in args)) for one in ones])

    def row(p: int, t: int) -> mx.array:
        return stock(layer, *(a[p : p + 1, t : t + 1] for a in args))

    return _joined(row, axis=1)


def _attention_by_row(
    stock: Op, queries: mx.array, keys: Any, values: Any, *, mask: Any, **named: Any
) -> mx.array:
    """Attention of `(P, H, S, D)` queries; each sees what decoding would have."""
    _, width = _thread.asked.rows
    length = (keys if isinstance(keys, mx.array) else keys[0]).shape[-2]

    def row(p: int, t: int) -> mx.array:
        seen = length - width + t + 1 if mask == "causal" else length
        k, v = (_first(x, p, seen) for x in (keys, values))
        return stock(queries[p : p + 1, :, t : t + 1], k, v, mask=None, **named)

    return _joined(row, axis=2)


def _first(x: Any, path: int, n: int) -> Any:
    """The first n keys or values `(P, H, N, D)` of a path, which may be quantised."""
    if isinstance(x, mx.array):
        return x[path : path + 1, :, :n]
    return type(x)(_first(part, path, n) for part in x)


def _joined(row: Callable[[int, int], mx.array], axis: int) -> mx.array:
    paths, width = _thread.asked.rows
    side_by_side = ([row(p, t) for t in range(width)] for p in range(paths))
    return mx.concatenate([mx.concatenate(rows, axis) for rows in side_by_side])


# --- the wrappers, and the names that they stand in for -------------------------------


def _by_row(op: str, queries: mx.array, axis: int) -> bool:
    """Whether an op is to run by row on an array that has the rows on these axes."""
    if op not in _thread.asked.by_row or queries.ndim < 2:
        return False
    paths, width = _thread.asked.rows
    if queries.ndim == 2:
        return queries.shape[0] == paths * width
    return (queries.shape[0], queries.shape[axis]) == (paths, width)


def _note(op: str, stock: Op, *args: Any, **named: Any) -> None:
    if _thread.asked.noted is not None:
        _thread.asked.noted.append(Call(op, stock, args, named))


# These are called some hundred times in a forward, whoever runs it: a thread that asks
# for nothing gets stock at the first line.


def _layer(name: str) -> Callable[[Op], Op]:
    def wrapper(stock: Op) -> Op:
        @functools.wraps(stock)
        def call(self: nn.Module, x: mx.array) -> mx.array:
            if _thread.asked is _NOTHING:
                return stock(self, x)
            _note(name, stock, self, x)
            if not _by_row(name, x, axis=1):
                return stock(self, x)
            product = product_by_row(self, x)
            return _layer_by_row(stock, self, x) if product is None else product

        return call

    return wrapper


def _experts(name: str) -> Callable[[Op], Op]:
    def wrapper(stock: Op) -> Op:
        @functools.wraps(stock)
        def call(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
            if _thread.asked is _NOTHING:
                return stock(self, x, indices)
            _note(name, stock, self, x, indices)
            if not _by_row(name, x, axis=1):
                return stock(self, x, indices)
            return _layer_by_row(stock, self, x, indices)

        return call

    return wrapper


def _attention(stock: Op) -> Op:
    @functools.wraps(stock)
    def call(
        queries: mx.array, keys: Any, values: Any, *, mask: Any = None, **named: Any
    ) -> mx.array:
        if _thread.asked is _NOTHING:
            return stock(queries, keys, values, mask=mask, **named)
        _note(ATTENTION, stock, queries, keys, values, mask=mask, **named)
        # A mask that is an array may hide what decoding would not have had.
        known = mask is None or isinstance(mask, str)
        if known and _by_row(ATTENTION, queries, axis=2):
            return _attention_by_row(stock, queries, keys, values, mask=mask, **named)
        return stock(queries, keys, values, mask=mask, **named)

    return call


_WRAPPERS: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (mx.fast, "scaled_dot_product_attention", _attention),
    (base, "quantized_scaled_dot_product_attention", _attention),
    (nn.Linear, "__call__", _layer("Linear")),
    (nn.QuantizedLinear, "__call__", _layer("QuantizedLinear")),
    (nn.Embedding, "as_linear", _layer("Embedding")),
    (nn.QuantizedEmbedding, "as_linear", _layer("QuantizedEmbedding")),
    (switch_layers.SwitchGLU, "__call__", _experts("SwitchGLU")),
    (switch_layers.SwitchMLP, "__call__", _experts("SwitchMLP")),
]
