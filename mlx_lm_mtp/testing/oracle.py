"""Stock mlx-lm as the oracle: its tokens, and the cache states that it leaves.

Everything is compared with stock decoding one token at a time, never with another path
of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ..drafters.base import Drafter
from ..errors import TakeBack
from ..generate import draft_generate_step
from ..options import DraftOptions
from ..state.bits import contents, same_bits


@dataclass
class Result:
    """What a generation gave, and what it left behind.

    Args:
        tokens: In the order in which they were yielded.
        logprobs: `(V,)` for each of them.
        caches: The model's.
        random_state: Of `mx.random`.
        entries: What the drafter has put behind the model's caches.
    """

    tokens: list[int]
    logprobs: list[mx.array]
    caches: list[Any]
    random_state: list[int] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)


def stock(
    model: nn.Module,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    seed: int | None = None,
    caches: list[Any] | None = None,
    **kwargs: Any,
) -> Result:
    """Stock's `generate_step`, run to its end."""
    if caches is None:
        caches = make_prompt_cache(model, max_kv_size=kwargs.get("max_kv_size"))
    if seed is not None:
        mx.random.seed(seed)
    steps = list(
        generate_step(
            mx.array(prompt),
            model,
            max_tokens=max_tokens,
            prompt_cache=caches,
            **kwargs,
        )
    )
    return Result([t for t, _ in steps], [p for _, p in steps], caches, random_state())


def drafted(
    model: nn.Module,
    prompt: Sequence[int],
    max_tokens: int,
    drafter: Drafter,
    *,
    options: DraftOptions | None = None,
    seed: int | None = None,
    stop: int | None = None,
    take_back: bool = False,
    caches: list[Any] | None = None,
    raises: type[Exception] | tuple[type[Exception], ...] = (),
    **kwargs: Any,
) -> Result:
    """A generation with drafts, run to its end or closed after `stop` tokens.

    Args:
        take_back: Where it is closed, take the last token back if it was drafted.
        raises: What may be raised on the way; the generation ends there.
    """
    if caches is None:
        caches = make_prompt_cache(model)
    models = len(make_prompt_cache(model))
    if seed is not None:
        mx.random.seed(seed)
    steps = draft_generate_step(
        mx.array(prompt),
        model,
        drafter,
        options=options,
        max_tokens=max_tokens,
        prompt_cache=caches,
        **kwargs,
    )
    taken: list[Any] = []
    with contextlib.suppress(raises):
        for step in _take(steps, stop):
            taken.append(step)
    if take_back and taken and taken[-1][2]:
        with contextlib.suppress(TakeBack):
            steps.throw(TakeBack())
        taken.pop()
    steps.close()
    return Result(
        [t for t, _, _ in taken],
        [p for _, p, _ in taken],
        caches[:models],
        random_state(),
        caches[models:],
    )


def _take(steps: Iterator[Any], n: int | None) -> Iterator[Any]:
    """The first n steps; the generator is not resumed after the last of them."""
    if n == 0:
        return
    for i, step in enumerate(steps, 1):
        yield step
        if i == n:
            return


def result_differences(ours: Result, theirs: Result) -> list[str]:
    """What differs between a generation with drafts and stock's; empty if nothing."""
    found = []
    if ours.tokens != theirs.tokens:
        found.append(f"tokens: {sequence_difference(ours.tokens, theirs.tokens)}")
    pairs = enumerate(zip(ours.logprobs, theirs.logprobs, strict=False))
    if wrong := [i for i, (a, b) in pairs if not same_bits(a, b)]:
        found.append(f"log-probabilities: of tokens at positions {wrong}")
    if wrong := differences(ours.caches, theirs.caches):
        more = f", and {len(wrong) - 2} more" if len(wrong) > 2 else ""
        found.append(f"caches: {'; '.join(wrong[:2])}{more}")
    if ours.random_state != theirs.random_state:
        found.append(
            f"random state: {theirs.random_state} was expected, and "
            f"{ours.random_state} found"
        )
    return found


def sequence_difference(seen: Sequence[int], expected: Sequence[int]) -> str:
    """Where two sequences of tokens part, in words."""
    pairs = enumerate(zip(seen, expected, strict=False))
    shorter = min(len(seen), len(expected))
    at = next((i for i, (a, b) in pairs if a != b), shorter)
    one, other = (_at(tokens, at) for tokens in (seen, expected))
    return (
        f"from position {at} on, {other} was expected, and {one} seen "
        f"(expected {list(expected)}, seen {list(seen)})"
    )


def _at(tokens: Sequence[int], i: int) -> str:
    return str(tokens[i]) if i < len(tokens) else "no more"


def random_state() -> list[int]:
    """The state of `mx.random`, as integers."""
    return mx.random.state[0].tolist()


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> list[str]:
    """What differs between two lists of caches, bit for bit; empty if nothing."""
    found = []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if type(a) is not type(b):
            found.append(f"cache {i}: {type(a).__name__} and {type(b).__name__}")
            continue
        left, right = contents(a), contents(b)
        if left.keys() != right.keys():
            found.append(f"cache {i}: {sorted(left)} and {sorted(right)}")
        found += [
            f"{type(a).__name__} {i}, {name}: {_unlike(left[name], right[name])}"
            for name in sorted(left.keys() & right.keys())
            if not same_bits(left[name], right[name])
        ]
    return found


def _unlike(a: mx.array, b: mx.array) -> str:
    """How two arrays differ, the expected one being the second."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{b.dtype} {b.shape} was expected, and {a.dtype} {a.shape} found"
    return f"{mx.sum(a != b).item()} of {a.size} numbers are not as expected"
