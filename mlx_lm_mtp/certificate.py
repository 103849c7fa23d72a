"""The exactness certificate: which forms of verify have the bits of decoding here.

Whether one forward over w tokens gives, row by row, the bits of w forwards over one is
a matter of the device, the version of MLX, the dtypes, the shapes and the caches. So it
is measured on the model itself, before a form is used, for each number of rows and each
band of context lengths.

1. Every op that a form can name is tried with so many rows at once, one call of each
   shape, against as many calls with one row (:mod:`.state.row_check`). Those that
   differ run by row.
2. A whole verify in that form is compared with decoding: all logits, and all that is in
   the caches afterwards. If a bit differs, it is tried with every op by row; and if one
   differs even then, no form holds, and so many rows are not verified at once.

What was found is kept on disk, under the device, the versions and the structure of the
model (:func:`fingerprint`): if one of them changes, it is measured anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from . import anatomy, random_state, store
from ._version import __version__
from .origin import ByModel
from .profile import Stopwatch
from .state import row_check
from .state.bits import contents, same_bits
from .state.commit import flat
from .state.forms import ATTENTION, BATCHED, Call, Form, noting
from .stats import NONE, Tally
from .target import Target
from .verify import Verifier

KIND = "certificates"
NO_FORM = "no form of verify has the bits of decoding here (exactness=fast drafts on)"
_CONTEXT = 20  # tokens in the caches when whole verifies are compared
_DRAWS = 2  # texts that they are compared on
_RING = 256  # of a rotating cache, if it is smaller: it must not be full
# Numbers of cached tokens at which a device may go over to another kernel.
_BANDS = (256, 1024, 4096, 16384, 65536)
_PLAIN = (bool, int, float, str)
_known: dict[str, dict[str, Any]] = {}  # fingerprint -> what was found in this process
_structures: ByModel[tuple[Any, str]] = ByModel()  # what it looked like, and the digest
version = functools.cache(metadata.version)  # which reads a file


class Certificate:
    """What holds for one model with one kind of caches; measured when it is asked for.

    Args:
        target: The model, computed as a generation computes it.
        caches: The generation's; they are looked at, and left alone.
        note: Is told the paths, the width and the form, when it is known.
    """

    def __init__(
        self,
        target: Target,
        caches: Sequence[Any],
        note: Callable[[int, int, str], None] = lambda paths, width, form: None,
    ) -> None:
        self._target = Target(target.model, recurrence=target.recurrence)
        self._caches = caches
        self._note = note
        self._ranks = anatomy.pipeline_ranks(target.model)
        self._types: tuple[type, ...] = ()
        self._name = ""
        self._found: dict[str, Any] = {}
        self._forms: dict[tuple[int, int, int], Form | None] = {}
        self._widest: dict[tuple[int, int, int], int] = {}
        self._calls: list[Call] | None = None

    def form(self, paths: int, width: int) -> Form | None:
        """The cheapest form that holds for `(P, S)` inputs behind what is cached now.

        None if there is none.
        """
        if paths * width == 1:
            return BATCHED
        key = (paths, width, self._band())
        if key not in self._forms:
            form = self._forms[key] = self._recall(*key)
            self._note(paths, width, NONE if form is None else str(form))
        return self._forms[key]

    def widest(self, paths: int, most: int) -> int:
        """How many inputs of each path may be verified, of `most`; 1 at least."""
        key = (paths, most, self._band())
        if key not in self._widest:
            held = (w for w in range(2, most + 1) if self.form(paths, w) is None)
            self._widest[key] = max(next(held, most + 1) - 1, 1)
        return self._widest[key]

    def _band(self) -> int:
        """Which band of lengths the caches are in; begins anew if their kinds changed.

        They do when they are quantised.
        """
        types = tuple(map(type, self._caches))
        if types != self._types:
            self._types, self._calls = types, None
            self._forms, self._widest = {}, {}
            self._name = fingerprint(self._target, self._caches)
            if self._name not in _known:
                # What is on disk may differ from rank to rank.
                alone = self._ranks == 1
                _known[self._name] = store.read(KIND, self._name) if alone else {}
            self._found = _known[self._name]
        return _band(max((getattr(c, "offset", 0) for c in self._caches), default=0))

    def _recall(self, paths: int, width: int, band: int) -> Form | None:
        """As found earlier, or now."""
        name = f"{paths}x{width} to {_BANDS[band] if band < len(_BANDS) else 'any'}"
        if name not in self._found:
            with random_state.untouched():
                form = self._find(paths, width, band)
            self._found[name] = None if form is None else sorted(form.by_row)
            if self._ranks == 1:
                store.write(KIND, self._name, self._found)
        by_row = self._found[name]
        return None if by_row is None else Form(frozenset(by_row))

    def _find(self, paths: int, width: int, band: int) -> Form | None:
        calls = self._noted()
        lengths = _lengths(band, width)
        differing = {
            call.op
            for call in calls
            if not (call.op == ATTENTION and not lengths)
            and not row_check.keeps_bits(call, paths, width, lengths)
        }
        if not lengths:  # too long to be tried
            differing.add(ATTENTION)
        forms = [Form(frozenset(differing)), Form(frozenset(c.op for c in calls))]
        return next((f for f in forms if self._holds(f, paths, width)), None)

    def _noted(self) -> list[Call]:
        """The ops that decoding a token calls."""
        if self._calls is None:
            caches = self._prefilled(mx.array([[0, 1]]))
            with noting() as calls:
                self._feed(mx.array([[2]]), caches)
            self._calls = row_check.distinct(calls)
        return self._calls

    def _holds(self, form: Form, paths: int, width: int) -> bool:
        """Whether whole verifies in this form have decoding's bits."""
        return all(
            self._agrees(form, paths, width, mx.random.key(seed))
            for seed in range(_DRAWS)
        )

    def _agrees(self, form: Form, paths: int, width: int, key: mx.array) -> bool:
        vocabulary = self._feed(mx.array([[0]]), self._fresh()).shape[-1]
        drawn = mx.random.randint(0, vocabulary, (paths, _CONTEXT + width), key=key)
        context, last = drawn[:1, : _CONTEXT - 1], drawn[:1, _CONTEXT - 1 : _CONTEXT]
        inputs = drawn[:, _CONTEXT:]
        logits, caches = self._verified(form, context, last, inputs)
        decoded = [
            self._decoded(context, last, path) for path in mx.split(inputs, paths)
        ]
        expected = mx.concatenate([logits for logits, _ in decoded])
        same = same_bits(logits, expected) and _same(caches, decoded[0][1])
        return self._agreed(same)

    def _verified(
        self, form: Form, context: mx.array, last: mx.array, inputs: mx.array
    ) -> tuple[mx.array, list[Any]]:
        """Logits `(P, S, V)` of a verify, and the caches if all of path 0 is kept."""
        caches = self._prefilled(context)
        verifier = Verifier(
            self._target, caches, "batch", Tally(), Stopwatch(), lambda *rows: form
        )
        _computed(verifier.first(last).logits, caches)
        forward, verified = verifier(inputs)
        mx.eval(forward.logits)
        verified.commit(inputs.shape[1], 0)
        return _computed(forward.logits, caches), caches

    def _decoded(
        self, context: mx.array, last: mx.array, path: mx.array
    ) -> tuple[mx.array, list[Any]]:
        """Logits `(1, S, V)` of a path's tokens fed one by one, and the caches."""
        caches = self._prefilled(context)
        self._feed(last, caches)
        tokens = mx.split(path, path.shape[1], axis=1)
        rows = [self._feed(token, caches) for token in tokens]
        return mx.concatenate(rows, axis=1), caches

    def _feed(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Logits of a forward."""
        return _computed(self._target(tokens, caches).logits, caches)

    def _agreed(self, found: bool) -> bool:
        """What all ranks of a pipeline have found: they must verify alike."""
        if self._ranks == 1:
            return found
        yes = mx.distributed.all_sum(mx.array(int(found)), stream=mx.cpu).item()
        return bool(yes == self._ranks)

    def _prefilled(self, tokens: mx.array) -> list[Any]:
        caches = self._fresh()
        self._feed(tokens, caches)
        quantized = next(
            (c for c in flat(self._caches) if isinstance(c, QuantizedKVCache)), None
        )
        if quantized is None:
            return caches
        how = {"group_size": quantized.group_size, "bits": quantized.bits}
        return [
            c.to_quantized(**how) if hasattr(c, "to_quantized") else c for c in caches
        ]

    def _fresh(self) -> list[Any]:
        """Empty caches of the generation's kinds."""
        made = make_prompt_cache(self._target.model)
        return [_like(*pair) for pair in zip(made, self._caches, strict=True)]


def fingerprint(target: Target, caches: Sequence[Any]) -> str:
    """What a certificate hangs on: the machine, versions, the model's structure.

    Not the values of its weights, for kernels are chosen by shapes and dtypes.
    """
    device = mx.default_device()
    model = target.model
    known = [
        (str(device), mx.device_info(device).get("device_name")),
        (mx.device_info(device).get("architecture"), platform.platform()),
        [version(name) for name in ("mlx", "mlx-lm")],
        __version__,
        sorted((k, v) for k, v in os.environ.items() if k.startswith("MLX_")),
        target.recurrence.asked,
        sorted(set(map(_kind, flat(caches)))),
        repr(getattr(model, "args", "")),
        _structure(model),
    ]
    return _digest(known)[:32]


def _digest(known: Any) -> str:
    text = json.dumps(known, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _structure(model: nn.Module) -> str:
    """The digest of what a model is built of.

    To look at all of it takes far less time than to digest it. So a model is looked at
    for every generation, and its digest kept for as long as it looks the same.
    """
    look = _look(model)
    known = _structures.get(model)
    if known is None or known[0] != look:
        known = _structures[model] = look, _digest(look)
    return known[1]


def _look(part: Any) -> Any:
    """Of modules the classes and plain attributes, of weights the shapes and dtypes."""
    if isinstance(part, mx.array):
        return part.shape, part.dtype
    if isinstance(part, nn.Module):
        own = {k: v for k, v in vars(part).items() if isinstance(v, _PLAIN)}
        return type(part), own, {name: _look(inner) for name, inner in part.items()}
    if isinstance(part, dict):  # whose keys may be anything
        return {str(name): _look(inner) for name, inner in part.items()}
    if isinstance(part, list | tuple):
        return [_look(inner) for inner in part]
    return None


def _kind(cache: Any) -> str:
    """A cache's class, and how it is quantised."""
    bits = [str(getattr(cache, n)) for n in ("bits", "group_size") if hasattr(cache, n)]
    return "/".join([type(cache).__name__, *bits])


def _computed(logits: mx.array, caches: Sequence[Any]) -> mx.array:
    """Compute one forward whole: ranks of a pipeline wait for each other in each."""
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def _like(made: Any, given: Any) -> Any:
    if type(made) is KVCache and isinstance(given, RotatingKVCache):
        return RotatingKVCache(max(given.max_size, _RING), given.keep)
    if isinstance(made, RotatingKVCache):
        return RotatingKVCache(max(made.max_size, _RING), made.keep)
    return made


def _band(cached: int) -> int:
    """The band of so many cached tokens, which a few more do not leave."""
    return next((i for i, end in enumerate(_BANDS) if cached < end), len(_BANDS))


def _lengths(band: int, width: int) -> list[int]:
    """Numbers of keys to try in a band: at its ends, and between them."""
    if band == len(_BANDS):
        return []
    start, end = (_BANDS[band - 1] if band else 0), _BANDS[band]
    middle = (start + end) // 2
    return [start + width, start + width + 1, middle - 1, middle, end - 1, end + width]


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    pairs = zip(map(contents, a), map(contents, b), strict=True)
    return all(
        x.keys() == y.keys() and all(same_bits(x[name], y[name]) for name in x)
        for x, y in pairs
    )
