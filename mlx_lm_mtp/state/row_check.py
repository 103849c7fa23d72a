"""Whether an op that is fed several rows gives each the bits that it has alone.

An op is tried as a model has called it in decoding: with the model's own weights, the
same shapes and dtypes, and random numbers in place of what went through it. What a
kernel is chosen by are shapes and dtypes, not numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .bits import same_bits
from .forms import ATTENTION, BATCHED, Call, computed, one_by_one

_DRAWS = 2  # random inputs of each op
_PERIOD = 1021  # keys that are drawn; a longer context repeats them


def distinct(calls: Iterable[Call]) -> list[Call]:
    """One call of each op, shape and dtype, of those with one row, as in decoding."""
    found: dict[Any, Call] = {}
    for call in calls:
        if _rows(call) == 1:
            found.setdefault(_signature(call), call)
    return list(found.values())


def keeps_bits(call: Call, paths: int, width: int, lengths: Iterable[int]) -> bool:
    """Whether `(P, S)` rows at once have the bits of one row after the other.

    Args:
        call: What decoding has called.
        paths: P.
        width: S.
        lengths: Numbers of cached tokens to try attention at, the rows included.
    """
    with computed(BATCHED, paths, width):
        return all(
            same_bits(drawn.stock(*drawn.args, **drawn.named), one_by_one(drawn))
            for seed in range(_DRAWS)
            for drawn in _drawn(call, paths, width, lengths, mx.random.key(seed))
        )


def _rows(call: Call) -> int:
    """How many rows it was called with; 0 for a row that is no part of an array, as a
    model has it that feeds its experts one by one."""
    x = call.args[0] if call.op == ATTENTION else call.args[1]
    if call.op == ATTENTION:
        return x.shape[0] * x.shape[2]
    return 0 if x.ndim < 2 else math.prod(x.shape[: min(x.ndim - 1, 2)])


def _signature(call: Call) -> tuple[Any, ...]:
    arrays = [(a.shape, str(a.dtype)) for a in _arrays(call.args)]
    if call.op == ATTENTION:  # but for the number of keys
        arrays = [(*s[:-2], s[-1], t) for s, t in arrays]
    plain = [f"{n}={v}" for n, v in call.named.items() if not _arrays(v)]
    layer = call.args[0]
    form = [getattr(layer, name, None) for name in ("bits", "group_size", "mode")]
    return call.op, str(arrays), str(plain), str(form)


def _arrays(value: Any) -> list[mx.array]:
    """The arrays in arguments, those of layers included."""
    return [a for _, a in tree_flatten(value) if isinstance(a, mx.array)]


def _drawn(
    call: Call, paths: int, width: int, lengths: Iterable[int], key: mx.array
) -> Iterator[Call]:
    """The call with random numbers in so many rows."""
    if call.op != ATTENTION:
        layer, *args = call.args
        drawn = [_rows_like(x, layer, paths, width, key) for x in args]
        yield dataclasses.replace(call, args=(layer, *drawn))
        return
    queries, keys, values = call.args
    heads, depth = queries.shape[1], queries.shape[3]
    q = mx.random.normal((paths, heads, width, depth), key=key).astype(queries.dtype)
    named = {**call.named, "mask": "causal"}
    for length in lengths:
        k, v = (_cached(x, paths, length, key, call.named) for x in (keys, values))
        yield dataclasses.replace(call, args=(q, k, v), named=named)


def _rows_like(
    x: mx.array, layer: nn.Module, paths: int, width: int, key: mx.array
) -> mx.array:
    rest = x.shape[1:] if x.ndim == 2 else x.shape[2:]
    shape = ((paths * width,) if x.ndim == 2 else (paths, width)) + tuple(rest)
    if not mx.issubdtype(x.dtype, mx.floating):  # experts
        return mx.random.randint(0, _experts(layer), shape, key=key).astype(x.dtype)
    return mx.random.normal(shape, key=key).astype(x.dtype)


def _experts(layer: nn.Module) -> int:
    weights = (a for _, a in tree_flatten(layer.parameters()))
    return next(w.shape[0] for w in weights if w.ndim == 3)


def _cached(x: Any, paths: int, length: int, key: mx.array, named: Any) -> Any:
    """`(P, H, N, D)` keys or values as a cache hands them out: a part of a longer one.

    It is written in the same graph, for what a device chooses may hang on that too.
    """
    if not isinstance(x, mx.array):
        depth = x[1].shape[-1] * named["group_size"]
        like = mx.zeros((1, x[0].shape[1], 1, depth), x[1].dtype)
        whole = _cached(like, paths, length, key, named)
        return mx.quantize(whole, named["group_size"], named["bits"])
    _, heads, _, depth = x.shape
    period = mx.random.normal((paths, heads, _PERIOD, depth), key=key).astype(x.dtype)
    rows = mx.tile(period, (1, 1, -(-length // _PERIOD), 1))[:, :, :length]
    room = mx.zeros((paths, heads, -(-(length + 1) // 256) * 256, depth), x.dtype)
    room[:, :, :length] = rows
    return room[:, :, :length]
