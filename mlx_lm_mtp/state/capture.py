"""Record, while stock code runs, what a recurrent cache held after every token.

A gated-delta or state-space layer keeps a convolution window and a recurrent state in
an `ArraysCache`. Neither can be trimmed, but both can be had for any prefix of a
forward:

- the window after token i is a slice of the convolution's input, which is the old
  window followed by the new tokens;
- the state after token i is computed on the way to the last one, and given out by the
  same kernel or computed anew (:mod:`.recurrence`).

So a few names of `mlx_lm.models.gated_delta` and `mlx_lm.models.ssm` and the call of
`nn.Conv1d` are wrapped. The wrappers call stock and return what it returns; they note
down arrays only in a thread that records, and only between `Recording.__enter__` and
`__exit__`. A layer is matched to its cache by the identity of the state array that it
stores, so no model code is copied, and every model that is built on those functions is
covered.

State-space layers and lightning attention have one formula for a token and another for
several. While a recording lasts they compute token by token, which is both the
arithmetic of decoding and a state after each token.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import models
from mlx_lm.models import gated_delta, ssm
from mlx_lm.models.cache import ArraysCache

from ..wrapping import wrap
from .arithmetics import Arrays
from .recurrence import After, current

Recorded = tuple[mx.array, mx.array, After]
_MOST_CONVOLUTIONS = 8  # in one layer; three are the most that there are
_FEW = 16  # tokens of a verify, as they usually are


class _PerThread(threading.local):
    recording: Recording | None = None


_thread = _PerThread()


@dataclass
class LayerRecord:
    """One recurrent layer in one forward.

    Args:
        width: T, the number of tokens in the forward.
        before: The state before, `(B, ...)`; None in an empty cache.
        after: Gives the state after n tokens, 0 < n < T.
        conv_inputs: A convolution's input each, `(B, window + T, C)`.
        final: The state that the layer stored in its cache.
    """

    width: int
    before: mx.array | None
    after: After
    conv_inputs: list[mx.array]
    final: mx.array

    def window(self, conv: int, n: int) -> mx.array:
        """The window of one convolution after n tokens, `(B, window, C)`."""
        rows = self.conv_inputs[conv]
        window = rows[:, n : n + rows.shape[1] - self.width]
        # A view costs nothing, but keeps the rows of a long forward alive.
        return mx.contiguous(window) if self.width > _FEW else window

    def state(self, n: int) -> mx.array | None:
        """The recurrent state after n tokens, `(B, ...)`."""
        if n == self.width:
            return self.final
        return self.after(n) if n else self.before


class Recording:
    """Notes down every recurrent layer that runs in this thread inside ``with``."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerRecord] = {}  # by the identity of `final`
        # Bounded, for a convolution of another kind is never asked after.
        self._conv_inputs: deque[mx.array] = deque(maxlen=_MOST_CONVOLUTIONS)
        self._inside = False
        self._ended = False

    def __enter__(self) -> Recording:
        see_through()
        _thread.recording = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended = True  # for the thread that records, if another one ends it
        if _thread.recording is self:
            _thread.recording = None

    @property
    def ended(self) -> bool:
        """Whether nothing is to be noted down any more."""
        return self._ended

    @property
    def inside_layer(self) -> bool:
        """Whether a layer's recurrence is running."""
        return self._inside

    def layer_of(self, cache: Any) -> LayerRecord | None:
        """The record of the layer that filled this cache; None if there is none."""
        if not isinstance(cache, ArraysCache) or cache.lengths is not None:
            return None
        layer = self.layers.get(id(cache.cache[-1]))  # the windows come before it
        return layer if layer is not None and _fits(layer, cache) else None

    def conv(self, conv_input: mx.array) -> None:
        """A convolution is about to run on this input."""
        self._conv_inputs.append(conv_input)

    def layer(
        self, width: int, before: mx.array | None, run: Callable[[], Recorded]
    ) -> Arrays:
        """Run a layer's recurrence, and keep what leads to each of its states."""
        conv_inputs = list(self._conv_inputs)
        self._conv_inputs.clear()
        self._inside = True
        try:
            y, final, after = run()
        finally:
            self._inside = False
        self.layers.pop(id(before), None)  # of the forward before this one
        self.layers[id(final)] = LayerRecord(width, before, after, conv_inputs, final)
        return y, final


def _fits(layer: LayerRecord, cache: ArraysCache) -> bool:
    """Whether the convolutions recorded are the ones whose windows are in the cache."""
    windows = cache.cache[:-1]
    return len(layer.conv_inputs) == len(windows) and all(
        rows.shape[1] - layer.width == window.shape[1]
        and rows.shape[2] == window.shape[2]
        for rows, window in zip(layer.conv_inputs, windows, strict=True)
    )


def put(cache: ArraysCache, layer: LayerRecord, n: int) -> None:
    """Make the cache hold what it held after the first n tokens of the forward."""
    convs = range(len(layer.conv_inputs))
    cache.cache = [*(layer.window(i, n) for i in convs), layer.state(n)]


def _current() -> Recording | None:
    """What records in this thread."""
    recording = _thread.recording
    return None if recording is None or recording.ended else recording


# --- the wrappers, and the names that they stand in for ---------------------------


def _gated_delta(stock: Callable[..., Arrays]) -> Callable[..., Arrays]:
    @functools.wraps(stock)
    def recurrence(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> Arrays:
        inputs = (q, k, v, g, beta)
        if state is None:
            return stock(*inputs, state, mask)
        call = (stock, inputs, state, mask)
        recording = _current()
        if recording is None:
            return current().run(*call)
        record = functools.partial(current().recorded, *call)
        return recording.layer(q.shape[1], state, record)

    return recurrence


def _state_space(stock: Callable[..., Arrays]) -> Callable[..., Arrays]:
    @functools.wraps(stock)
    def recurrence(
        x: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        *limits: Any,
        **more: Any,
    ) -> Arrays:
        recording = _current()
        unmasked = all(more.get(name) is None for name in ("mask", "lengths"))
        if recording is None or recording.inside_layer or not unmasked:
            return stock(x, A_log, B, C, D, dt, dt_bias, state, *limits, **more)

        def by_token() -> Recorded:
            ys, states = [], [state]
            for t in range(x.shape[1]):
                row = slice(t, t + 1)
                parts = (x[:, row], A_log, B[:, row], C[:, row], D, dt[:, row])
                y, last = ssm.ssm_update(*parts, dt_bias, states[-1], *limits)
                ys.append(y)
                states.append(last)
            return mx.concatenate(ys, axis=1), last, states.__getitem__

        return recording.layer(x.shape[1], state, by_token)

    return recurrence


def _lightning(stock: Callable[..., Arrays]) -> Callable[..., Arrays]:
    @functools.wraps(stock)
    def recurrence(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        scale: float,
        h: mx.array | None = None,
        **more: Any,
    ) -> Arrays:
        recording = _current()
        if recording is None or more.get("mask") is not None:
            return stock(q, k, v, g, scale=scale, h=h, **more)

        def by_token() -> Recorded:
            ys, states = [], [h]
            for t in range(q.shape[2]):  # q, k and v are (B, H, T, D)
                token = (x[:, :, t : t + 1] for x in (q, k, v))
                y, last = stock(*token, g, scale=scale, h=states[-1])
                ys.append(y)
                states.append(last)
            return mx.concatenate(ys, axis=2), last, states.__getitem__

        return recording.layer(q.shape[2], h, by_token)

    return recurrence


def _conv(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(stock)
    def conv(self: nn.Conv1d, x: mx.array) -> mx.array:
        if recording := _current():
            recording.conv(x)
        return stock(self, x)

    return conv


_WRAPPERS: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (gated_delta, "gated_delta_ops", _gated_delta),
    (gated_delta, "gated_delta_kernel", _gated_delta),
    (ssm, "ssm_attn", _state_space),
    (ssm, "ssm_update_kernel", _state_space),
    (nn.Conv1d, "__call__", _conv),
]
_LIGHTNING = ("bailing_hybrid", "bailing_moe_linear")  # each has a function of its own


def see_through() -> None:
    """Put the wrappers in place; they do as stock does until a thread asks for more."""
    for owner, name, wrapper in _WRAPPERS:
        wrap(owner, name, wrapper)
    for name in _LIGHTNING:
        if (loaded := getattr(models, name, None)) is not None:
            wrap(loaded, "recurrent_gla", _lightning)
