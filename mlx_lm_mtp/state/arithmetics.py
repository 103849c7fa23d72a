"""The arithmetics of the gated-delta recurrence, and what they are made for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import gated_delta

from . import kernels

Arrays = tuple[mx.array, mx.array]
Run = Callable[..., Arrays]


class Arithmetic(NamedTuple):
    """One way to compute the recurrence.

    Args:
        name: For statistics.
        run: Of the arguments of stock's `gated_delta_ops`: y and the last state.
        with_states: The same, and then the states before the last, by token.
        fused: Whether `run` keeps the states to itself, so that they cost something.
    """

    name: str
    run: Run
    with_states: Callable[..., Any]
    fused: bool


class Shapes(NamedTuple):
    """What a kernel is made for. The inputs are `(B, T, …)`, see :mod:`.kernels`."""

    q: tuple[int, ...]
    v: tuple[int, ...]
    g: tuple[int, ...]
    dtypes: tuple[mx.Dtype, ...]  # of q, k, v, g, beta and the state
    masked: bool
    device: str

    @classmethod
    def of(
        cls, inputs: Sequence[mx.array], state: mx.array, mask: mx.array | None
    ) -> Shapes:
        """Those of one call."""
        q, _, v, g, _ = inputs
        dtypes = tuple(x.dtype for x in (*inputs, state))
        device = str(mx.default_device())
        return cls(q.shape, v.shape, g.shape, dtypes, mask is not None, device)

    def cut(self, width: int) -> Shapes:
        """The same for so many tokens at most."""
        B, T, *rest = self.q
        cut = (B, min(T, width))
        return self._replace(
            q=(*cut, *rest), v=(*cut, *self.v[2:]), g=(*cut, *self.g[2:])
        )

    def draw(self, seed: int) -> tuple[list[mx.array], mx.array, mx.array | None]:
        """Random inputs, state and mask of these shapes, as a layer might have them."""
        *rest, key = mx.random.split(mx.random.key(seed), 7)
        (B, T, _, Dk), (*_, Hv, Dv) = self.q, self.v
        q, k, v, state = (
            mx.random.normal(shape, key=key)
            for shape, key in zip(
                (self.q, self.q, self.v, (B, Hv, Dv, Dk)), rest, strict=False
            )
        )
        g = mx.random.uniform(0.3, 1, self.g, key=rest[4])
        beta = mx.random.uniform(0, 1, (B, T, Hv), key=rest[5])
        inputs = (q / Dk, k / math.sqrt(Dk), v, g, beta, state)
        *inputs, state = (x.astype(t) for x, t in zip(inputs, self.dtypes, strict=True))
        mask = mx.random.uniform(shape=(B, T), key=key) < 0.7 if self.masked else None
        return inputs, state, mask


def looped(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array, list[mx.array]]:
    """Stock's step for each token, and every state: the reference for what is fused.

    As in `mlx_lm.models.gated_delta.gated_delta_ops`, with the shapes of
    :func:`.kernels.launcher`; the states before the last are `(B, Hv, Dv, Dk)` each.
    """
    if (heads := v.shape[2] // q.shape[2]) > 1:
        q, k = (mx.repeat(x, heads, axis=-2) for x in (q, k))
    ys, states = [], [state]
    for t in range(q.shape[1]):
        token = (x[:, t] for x in (q, k, v, g, beta))
        seen = None if mask is None else mask[:, t]
        y, state = gated_delta._gated_delta_step_ops(*token, states[-1], seen)
        ys.append(y)
        states.append(state)
    return mx.stack(ys, axis=1), states[-1], states[1:-1]


compiled = mx.compile(looped)  # the whole block in one call


@functools.cache
def of_stock(stock: Run) -> Arithmetic:
    """Stock's `gated_delta_ops` or `gated_delta_kernel`, and its states beside it."""
    if stock.__name__ == "gated_delta_kernel":
        storing = _lazily(mx.fast.metal_kernel, states=True, packed=True)
        return Arithmetic("stock", stock, storing, fused=True)
    return Arithmetic("stock", stock, compiled, fused=False)


@functools.cache
def of_cuda() -> Arithmetic:
    """Stock's kernels on CUDA. Rows are not packed: that leaves too few warps."""
    run, storing = (
        _lazily(kernels.cuda_kernel, states=states, packed=False)
        for states in (False, True)
    )
    return Arithmetic("CUDA kernel", run, storing, fused=True)


def _lazily(make: kernels.Make, **how: bool) -> Callable[..., Any]:
    """A launcher that is made when it is first called, and may fail then."""
    made = functools.cache(lambda: kernels.launcher(make, **how))
    return lambda *inputs: made()(*inputs)
