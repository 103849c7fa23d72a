"""How the gated-delta layers of one generation are computed.

A verify must leave the recurrent state after each of its tokens within reach:

- ``states``: one kernel, or one compiled function, gives them all with the outputs;
- ``replay``: the inputs are kept, and the recurrence runs again on the accepted ones.
  That happens after a rejection only, and writes one state where the other writes K.

On Metal and on the CPU the arithmetic is stock's. For CUDA stock has no kernel and
loops over ops; a kernel is used instead, for every forward of a drafted generation
alike, unless ``recurrence=stock`` asks for stock's ops. Kernels are checked before they
are used (:mod:`.self_check`); one that fails is not, and a warning says so.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..errors import InvalidOption
from ..wrapping import Meanwhile
from .arithmetics import Arithmetic, Arrays, Run, Shapes, of_cuda, of_stock
from .self_check import fault_of_outputs, fault_of_states

Inputs = Sequence[mx.array]  # q, k, v, g, beta
After = Callable[[int], mx.array]  # n -> the state after n of the T tokens, 0 < n < T

_LONGEST = 16  # tokens beyond which their states would take too much memory
_LOOKED_AT = 16  # tokens on which CUDA's kernel is compared with stock's ops
_REJECTED = 0.5  # share of rounds with a rejection, as far as is known beforehand
_CALLS, _TIMES = 8, 5  # in a row, and how often they are timed


class Recurrence:
    """The ways that one generation takes.

    Args:
        capture: The draft option: ``auto``, ``states`` or ``replay``.
        recurrence: The draft option: ``auto``, ``kernel`` or ``stock``.
        note: Is told what was decided, as fields of the statistics.

    Attributes:
        asked: The options, for people.

    Raises:
        InvalidOption: If a kernel is asked for where there is none.
    """

    def __init__(
        self,
        capture: str = "auto",
        recurrence: str = "auto",
        note: Callable[..., None] = lambda **known: None,
    ) -> None:
        if recurrence == "kernel" and mx.default_device() == mx.cpu:
            raise InvalidOption(
                "draft option recurrence is 'kernel', and there is none for the CPU; "
                "leave it out."
            )
        self.asked = f"recurrence={recurrence}, capture={capture}"
        self._capture = capture
        self._recurrence = recurrence
        self._note = note
        self._decided: dict[tuple[Any, ...], tuple[Arithmetic, bool]] = {}

    def __call__(self) -> Meanwhile:
        """In the context, forwards of this thread compute as this generation does."""
        return Meanwhile(_thread, "recurrence", self)

    def run(
        self, stock: Run, inputs: Inputs, state: mx.array, mask: mx.array | None
    ) -> Arrays:
        """y and the state after the last token, where stock calls this function."""
        arithmetic, _ = self._decide(False, stock, inputs, state, mask)
        y, last = arithmetic.run(*inputs, state, mask)
        return y, last

    def recorded(
        self, stock: Run, inputs: Inputs, state: mx.array, mask: mx.array | None
    ) -> tuple[mx.array, mx.array, After]:
        """Besides, what gives the state after each token before the last."""
        arithmetic, keeps = self._decide(True, stock, inputs, state, mask)
        if keeps:
            y, last, earlier = arithmetic.with_states(*inputs, state, mask)
            return y, last, lambda n: earlier[n - 1]

        def replay(n: int) -> mx.array:
            prefix = (mx.contiguous(x[:, :n]) for x in inputs)
            seen = None if mask is None else mask[:, :n]
            return arithmetic.run(*prefix, state, seen)[1]

        return *arithmetic.run(*inputs, state, mask), replay

    def _decide(
        self,
        recorded: bool,
        stock: Run,
        inputs: Inputs,
        state: mx.array,
        mask: mx.array | None,
    ) -> tuple[Arithmetic, bool]:
        """The arithmetic, and whether it is to give the states."""
        q, k, v, g, beta = inputs
        # What may change from call to call: a layer asks in every forward.
        batch, tokens, *heads = q.shape
        length = min(tokens, _LONGEST + 1)  # longer ones are alike
        dtypes = q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype, state.dtype
        shapes_of = (batch, length, *heads, v.shape[2:], g.ndim, mask is None)
        key = (recorded, stock, *shapes_of, *dtypes)
        decided = self._decided.get(key)
        if decided is None:
            shapes = Shapes.of(inputs, state, mask)
            arithmetic = _arithmetic(stock, shapes, self._recurrence)
            self._note(recurrence=arithmetic.name)
            several = recorded and shapes.q[1] > 1
            keeps = several and self._keeps_states(arithmetic, shapes)
            decided = self._decided[key] = arithmetic, keeps
        return decided

    def _keeps_states(self, arithmetic: Arithmetic, shapes: Shapes) -> bool:
        if shapes.q[1] > _LONGEST or self._capture == "replay":
            keeps = False
        elif fault := fault_of_states(arithmetic, shapes):
            self._note(capture_fault=fault)
            keeps = False
        else:
            keeps = self._capture == "states" or _pays(arithmetic, shapes)
        self._note(capture="states" if keeps else "replay")
        return keeps


class _PerThread(threading.local):
    recurrence = Recurrence(recurrence="stock")


_thread = _PerThread()


def current() -> Recurrence:
    """How forwards of this thread compute; outside drafted generations as stock."""
    return _thread.recurrence


def on_cuda() -> bool:
    """Whether arrays are computed by MLX's CUDA backend."""
    return mx.cuda.is_available() and mx.default_device() == mx.gpu


def _arithmetic(stock: Run, shapes: Shapes, option: str) -> Arithmetic:
    """What computes these shapes where stock would call one of its functions."""
    usual = of_stock(stock)
    if option == "stock" or not on_cuda() or shapes.q[-1] % 32:
        return usual
    few = shapes.cut(_LOOKED_AT)  # the kernel loops over any number of tokens
    return usual if fault_of_outputs(of_cuda(), usual, few) else of_cuda()


@functools.cache
def _pays(arithmetic: Arithmetic, shapes: Shapes) -> bool:
    """Whether states cost less in every round than replays after rejections.

    Measured on this machine, with the tokens of a verify; half of them are replayed.
    """
    if not arithmetic.fused:
        return True
    inputs, state, mask = shapes.draw(0)
    half = shapes.q[1] // 2
    prefix = [mx.contiguous(x[:, :half]) for x in inputs]
    seen = None if mask is None else mask[:, :half]
    mx.eval(inputs, state, prefix)
    storing = _seconds(lambda: arithmetic.with_states(*inputs, state, mask))
    plain = _seconds(lambda: arithmetic.run(*inputs, state, mask))
    again = _seconds(lambda: arithmetic.run(*prefix, state, seen))
    return storing - plain <= _REJECTED * again


def _seconds(call: Callable[[], Any]) -> float:
    """Of one call, the median over several measurements."""
    times = []
    for _ in range(1 + _TIMES):
        start = time.perf_counter()
        mx.eval([call() for _ in range(_CALLS)])
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / _CALLS  # the first warms up
