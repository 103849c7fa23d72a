"""Whether a kernel does what stock does: looked at before it is used, bit for bit.

A kernel may be miscompiled, or fused otherwise, on a device that nobody has tried. So
before one is used on a device and on shapes that it was not used on yet, its outputs
and every state are compared with the recurrence run token by token, on random inputs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import mlx.core as mx

from .arithmetics import Arithmetic, Shapes
from .bits import same_bits

_INPUTS = 3  # random ones, to compare on
# How far CUDA's kernel may be from stock's ops, which add up in another order: y, which
# is rounded to 8 bits of mantissa at worst, and the state.
_CLOSE = (1e-2, 1e-3)


@functools.cache
def fault_of_states(arithmetic: Arithmetic, shapes: Shapes) -> str:
    """What is wrong with the states that an arithmetic gives; empty if nothing is."""
    found = _faults(lambda: _compare(arithmetic, shapes))
    if found:
        _warn(f"states are not captured in one kernel: {found}; they are replayed")
    return found


@functools.cache
def fault_of_outputs(cuda: Arithmetic, stock: Arithmetic, shapes: Shapes) -> str:
    """What is wrong with the outputs of CUDA's kernel; empty if nothing is."""
    found = _faults(lambda: _compare_outputs(cuda, stock, shapes))
    if found:
        _warn(f"CUDA's gated-delta kernel is not used: {found}; stock's ops are")
    return found


def _compare_outputs(cuda: Arithmetic, stock: Arithmetic, shapes: Shapes) -> None:
    """Compare y and the last state; y of a masked token is nobody's concern.

    Raises:
        ValueError: If they are far from stock's.
    """
    inputs, state, mask = shapes.draw(0)
    ours, theirs = (a.run(*inputs, state, mask) for a in (cuda, stock))
    seen = (True if mask is None else mask[..., None, None], True)
    for a, b, where, close in zip(ours, theirs, seen, _CLOSE, strict=True):
        near = mx.abs(a - b) <= close * (1 + mx.abs(b))
        if not mx.all(near | mx.logical_not(where)).item():
            raise ValueError("it is not close to stock's ops")


def _compare(arithmetic: Arithmetic, shapes: Shapes) -> None:
    """Compare the states and outputs with the recurrence run token by token.

    Raises:
        ValueError: If a bit differs.
    """
    last = shapes.q[1] - 1
    for seed in range(_INPUTS):
        inputs, state, mask = shapes.draw(seed)
        y, final, earlier = arithmetic.with_states(*inputs, state, mask)
        for t in range(last + 1):
            row = slice(t, t + 1)
            token = (mx.contiguous(x[:, row]) for x in inputs)
            seen = None if mask is None else mask[:, row]
            expected, state = arithmetic.run(*token, state, seen)
            found = final if t == last else earlier[t]
            if not (same_bits(y[:, row], expected) and same_bits(found, state)):
                raise ValueError(
                    f"it differs from token {t + 1} of a loop on {shapes.device}"
                )


def _faults(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:  # whatever a compiler may say
        return (str(error) or type(error).__name__).strip().partition("\n")[0]
    return ""


def _warn(text: str) -> None:
    warnings.warn(f"mlx-lm-mtp: {text}.", RuntimeWarning, stacklevel=2)
