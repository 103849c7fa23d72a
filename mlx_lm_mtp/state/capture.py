"""Record, while stock code runs, what a recurrent cache held after every token.

A gated-delta layer keeps a convolution window and a recurrent state in an
`ArraysCache`. Neither can be trimmed, but both can be had for any prefix of a forward:

- the window after token i is a slice of the convolution's input, which is the old
  window followed by the new tokens;
- the state after token i passes through stock's per-token step on its way; where a
  fused kernel hides it, stock's own kernel on the first i tokens gives it again.

So three names of `mlx_lm.models.gated_delta` and the call of `nn.Conv1d` are wrapped.
The wrappers call stock and return what it returns; they note down arrays only in a
thread that records, and only between `Recording.__enter__` and `__exit__`. A layer is
matched to its cache by the identity of the state array that it stores, so no model
code is copied and any model built on `gated_delta_update` is covered.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import ArraysCache

_RECURRENCES = ("gated_delta_ops", "gated_delta_kernel")
_STEP = "_gated_delta_step_ops"


class _PerThread(threading.local):
    recording: Recording | None = None


_thread = _PerThread()


@dataclass
class LayerRecord:
    """One gated-delta layer in one forward.

    Args:
        recurrence: Stock's function that ran.
        inputs: Its inputs q, k, v, g, beta `(B, T, ...)`, the state before
            `(B, Hv, Dv, Dk)` and the mask `(B, T)` or None.
        conv_inputs: A convolution's input each, `(B, window + T, C)`.
        states: The state after each token, where stock computes it token by token.
        final: The state that stock returned, and the layer stored in its cache.
    """

    recurrence: Callable[..., tuple[mx.array, mx.array]]
    inputs: tuple[Any, ...]
    conv_inputs: list[mx.array]
    states: list[mx.array] = field(default_factory=list)
    final: mx.array | None = None

    @property
    def width(self) -> int:
        """T, the number of tokens in the forward."""
        return self.inputs[0].shape[1]

    def window(self, conv: int, n: int) -> mx.array:
        """The window of one convolution after n tokens, `(B, window, C)`."""
        rows = self.conv_inputs[conv]
        return mx.contiguous(rows[:, n : n + rows.shape[1] - self.width])

    def state(self, n: int) -> mx.array:
        """The recurrent state after n tokens, `(B, Hv, Dv, Dk)`."""
        *per_token, before, mask = self.inputs
        if n == 0:
            return before
        if len(self.states) == self.width:
            return self.states[n - 1]
        mask = None if mask is None else mask[:, :n]
        prefix = (mx.contiguous(x[:, :n]) for x in per_token)
        return self.recurrence(*prefix, before, mask)[1]


class Recording:
    """Notes down every gated-delta layer that runs in this thread inside ``with``."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerRecord] = {}  # by the identity of `final`
        self._conv_inputs: list[mx.array] = []
        self._open: LayerRecord | None = None

    def __enter__(self) -> Recording:
        install()
        _thread.recording = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _thread.recording is self:
            _thread.recording = None

    def layer_of(self, cache: Any) -> LayerRecord | None:
        """The record of the layer that filled this cache; None if there is none."""
        if not isinstance(cache, ArraysCache) or cache.lengths is not None:
            return None
        for slot, array in enumerate(cache.cache):
            layer = self.layers.get(id(array))
            if layer is not None and _fits(layer, cache, slot):
                return layer
        return None

    def conv(self, conv_input: mx.array) -> None:
        """A convolution is about to run on this input."""
        self._conv_inputs.append(conv_input)

    def step(self, state: mx.array) -> None:
        """Stock computed the state after one more token."""
        if self._open is not None:
            self._open.states.append(state)

    def run(
        self, recurrence: Callable[..., Any], inputs: tuple[Any, ...]
    ) -> tuple[mx.array, mx.array]:
        """Run stock's recurrence and keep what it was given and returned."""
        layer = LayerRecord(recurrence, inputs, self._conv_inputs)
        self._conv_inputs, self._open = [], layer
        try:
            y, layer.final = recurrence(*inputs)
        finally:
            self._open = None
        self.layers[id(layer.final)] = layer
        return y, layer.final


def _fits(layer: LayerRecord, cache: ArraysCache, slot: int) -> bool:
    """Whether the convolutions recorded are the ones whose windows are in the cache."""
    windows = cache.cache[:slot]
    return len(layer.conv_inputs) == slot and all(
        rows.shape[1] - layer.width == window.shape[1]
        and rows.shape[2] == window.shape[2]
        for rows, window in zip(layer.conv_inputs, windows)
    )


def put(cache: ArraysCache, layer: LayerRecord, n: int) -> None:
    """Make the cache hold what it held after the first n tokens of the forward."""
    convs = range(len(layer.conv_inputs))
    cache.cache = [*(layer.window(i, n) for i in convs), layer.state(n)]


# --- the wrappers, and the names that they stand in for ---------------------------


def _recurrence(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def recurrence(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        recording = _thread.recording
        if recording is None or state is None:
            return stock(q, k, v, g, beta, state, mask)
        return recording.run(stock, (q, k, v, g, beta, state, mask))

    return recurrence


def _step(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def step(*inputs: Any) -> Any:
        y, state = stock(*inputs)
        if _thread.recording is not None:
            _thread.recording.step(state)
        return y, state

    return step


def _conv(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def conv(self: nn.Conv1d, x: mx.array) -> mx.array:
        if _thread.recording is not None:
            _thread.recording.conv(x)
        return stock(self, x)

    return conv


_stock: list[tuple[Any, str, Any]] = []
_lock = threading.Lock()


def install() -> None:
    """Put the wrappers in place (once); they cost nothing until a thread records."""
    with _lock:
        if not _stock:
            for name in _RECURRENCES:
                _wrap(gated_delta, name, _recurrence)
            _wrap(gated_delta, _STEP, _step)
            _wrap(nn.Conv1d, "__call__", _conv)


def uninstall() -> None:
    """Put the stock objects back."""
    with _lock:
        while _stock:
            setattr(*_stock.pop())


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    stock = vars(owner).get(name)
    if stock is not None:
        _stock.append((owner, name, stock))
        setattr(owner, name, wrapper(stock))
