"""Which samplers and processors may be called more often than stock calls them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import (
    apply_top_p,
    categorical_sampling,
    greedy_sampler,
    make_logits_processors,
    make_sampler,
)

from mlx_lm_mtp import pure
from mlx_lm_mtp.purity import is_pure, leaves_nothing

TEMPERATURE = 0.7
CALLS: list[int] = []
COUNT = mx.zeros(1)
BANNED = mx.array([3, 5])
GENERATOR = np.random.default_rng(0)


def draws(x: mx.array) -> mx.array:
    return mx.random.categorical(x / TEMPERATURE)


def nested(x: mx.array) -> mx.array:
    return draws(categorical_sampling(apply_top_p(x, 0.9), math.sqrt(2)))


def bans(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits.at[:, 5].add(-mx.inf)


def loops(x: mx.array) -> mx.array:
    scales = [0.5 * i for i in range(1, 4)]
    return mx.argmax(sum(x / scale for scale in scales), axis=-1)


def with_default(x: mx.array, temperature: float = 0.4) -> mx.array:
    return mx.random.categorical(x / temperature)


@dataclass(frozen=True)
class Frozen:
    temperature: float = 0.5

    def __call__(self, x: mx.array) -> mx.array:
        return mx.random.categorical(x / self.temperature)


class Plain:
    def __init__(self, temperature: Any) -> None:
        self.temperature = temperature

    def __call__(self, x: mx.array) -> mx.array:
        return self.draw(x)

    def draw(self, x: mx.array) -> mx.array:
        return mx.random.categorical(x / self.temperature)


class Inherits(Plain):
    """Has its call from above."""


def closure(temperature: float) -> Callable[[mx.array], mx.array]:
    return lambda x: mx.random.categorical(x * (1 / temperature))


STOCK = {
    "stock's greedy": greedy_sampler,
    "stock's": make_sampler(0.7, top_p=0.9, top_k=5, xtc_probability=0.5),
    "stock's part": categorical_sampling,
    **{
        f"stock's processor {i}": processor
        for i, processor in enumerate(
            make_logits_processors({3: 1.0}, 1.2, 20, 0.5, 20, 0.5, 20)
        )
    },
}
LEAVES_NOTHING = {
    "partial of stock's": functools.partial(categorical_sampling, temp=0.7),
    "function": draws,
    "calls others": nested,
    "writes its argument": bans,
    "has variables": loops,
    "default": with_default,
    "lambda": lambda x: mx.argmax(x, axis=-1),
    "reads an array": lambda tokens, x: mx.put_along_axis(x, BANNED[None], 0.0, -1),
    "closure": closure(0.3),
    "object": Plain(0.5),
    "method": Plain(0.5).draw,
    "partial": functools.partial(Plain(0.5)),
    "mlx's": mx.argmax,
    "dataclass": Frozen(0.3),
    "inherits": Inherits(0.3),
}


@pytest.mark.parametrize("function", STOCK.values(), ids=STOCK)
def test_what_stock_makes_is_pure(function: Any) -> None:
    assert is_pure(function) and leaves_nothing(function)


@pytest.mark.parametrize("function", LEAVES_NOTHING.values(), ids=LEAVES_NOTHING)
def test_leaves_nothing_but_what_it_reads_may_change(function: Any) -> None:
    assert leaves_nothing(function) and not is_pure(function)


# --- what keeps a state -------------------------------------------------------------


def notes(x: mx.array) -> mx.array:
    CALLS.append(1)
    return draws(x)


def own_generator(x: mx.array) -> mx.array:
    return mx.array([GENERATOR.integers(3)])


def other_random(x: mx.array) -> mx.array:
    return draws(x * random.random())


def rebinds(x: mx.array) -> mx.array:
    global TEMPERATURE
    TEMPERATURE = 0.7
    return draws(x)


def writes_an_array(x: mx.array) -> mx.array:
    COUNT[0] += 1
    return draws(x)


def adds_in_place(x: mx.array) -> mx.array:
    count = COUNT
    count += 1
    return draws(x)


def sets_by_dunder(x: mx.array) -> mx.array:
    COUNT.__setitem__(0, 1)
    return draws(x)


def own_attribute(x: mx.array) -> mx.array:
    own_attribute.calls = 1  # type: ignore[attr-defined]
    return draws(x)


def own_list(x: mx.array) -> mx.array:
    own_list.calls.append(1)  # type: ignore[attr-defined]
    return draws(x)


own_list.calls = []  # type: ignore[attr-defined]


def imports(x: mx.array) -> mx.array:
    import time

    return draws(x * time.time())


def prints(x: mx.array) -> mx.array:
    print(x)
    return draws(x)


def defaults_list(x: mx.array, seen: list[int] = []) -> mx.array:  # noqa: B006
    seen.append(1)
    return draws(x)


def calls_one_that_notes(x: mx.array) -> mx.array:
    return notes(x)


def counting_closure() -> Callable[[mx.array], mx.array]:
    n = 0

    def sampler(x: mx.array) -> mx.array:
        nonlocal n
        n += 1
        return mx.random.categorical(x / n)

    return sampler


class Counts(Plain):
    calls = 0

    def __call__(self, x: mx.array) -> mx.array:
        self.calls += 1
        return self.draw(x)


class ClassList(Plain):
    calls: list[int] = []

    def __call__(self, x: mx.array) -> mx.array:
        self.calls.append(1)
        return self.draw(x)


class Items(dict[str, int]):
    def __call__(self, x: mx.array) -> mx.array:
        self["calls"] = 1
        return draws(x)


class Slots:
    __slots__ = ("calls",)

    def __call__(self, x: mx.array) -> mx.array:
        return draws(x)


class Property(Plain):
    @property
    def hot(self) -> float:
        self.calls = 1
        return 0.5

    def __call__(self, x: mx.array) -> mx.array:
        return mx.random.categorical(x / self.hot)


class OwnKey:
    def __init__(self) -> None:
        self.key = mx.random.key(0)

    def __call__(self, x: mx.array) -> mx.array:
        self.key, key = mx.random.split(self.key)
        return mx.random.categorical(x, key=key)


def bump(count: mx.array) -> None:
    count[0] += 1


def writes_through_another(x: mx.array) -> mx.array:
    bump(COUNT)
    return draws(x)


def writes_its_argument(tokens: mx.array, logits: mx.array) -> mx.array:
    tokens[-1] = 3
    return logits


def saves(x: mx.array) -> mx.array:
    mx.save("file", x)
    return draws(x)


def moves(x: mx.array) -> mx.array:
    mx.set_default_device(mx.cpu)
    return draws(x)


def unbound() -> Callable[[mx.array], mx.array]:
    def sampler(x: mx.array) -> mx.array:
        return draws(x / later)

    if CALLS:
        later = 1.0
    return sampler


class Delegates:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __call__(self, x: mx.array) -> mx.array:
        CALLS.append(1)
        return self.function(x)


class SaysYes(Plain):
    def __getattr__(self, name: str) -> Any:
        CALLS.append(1)
        return True


class Hot(float):
    def __rtruediv__(self, x: mx.array) -> mx.array:
        CALLS.append(1)
        return x


class Pair(tuple[int, ...]):
    def __getitem__(self, i: Any) -> Any:
        CALLS.append(i)
        return 1.0


class Part(functools.partial[mx.array]):
    def __call__(self, x: mx.array) -> mx.array:
        CALLS.append(1)
        return draws(x)


class Buffer(Plain):
    def __call__(self, x: mx.array) -> mx.array:
        self.temperature[0] = 1.0
        return draws(x)


IMPURE = {
    f.__name__: f
    for f in (notes, own_generator, other_random, rebinds, writes_an_array)
} | {
    f.__name__: f
    for f in (adds_in_place, sets_by_dunder, own_attribute, own_list, imports)
}
IMPURE |= {
    "prints": prints,
    "defaults_list": defaults_list,
    "calls_one_that_notes": calls_one_that_notes,
    "counting_closure": counting_closure(),
    "counts": Counts(0.5),
    "its method": Counts(0.5).draw,
    "class list": ClassList(0.5),
    "dict": Items(),
    "slots": Slots(),
    "property": Property(0.5),
    "own key": OwnKey(),
    "buffer": Buffer(mx.zeros(1)),
    "writes through another": writes_through_another,
    "partial of one that writes": functools.partial(bump, mx.zeros(1)),
    "writes its argument": writes_its_argument,
    "saves": saves,
    "moves": moves,
    "unbound": unbound(),
    "delegates": Delegates(make_sampler(1.0)),
    "says yes": SaysYes(0.5),
    "float": Plain(Hot(0.5)),
    "tuple": Plain(Pair((1, 2))),
    "subclass of partial": Part(draws),
    "method of another": MethodType(notes, Plain(0.5)),
    "partial": functools.partial(Counts(0.5)),
    "holds a list": Plain([0.5]),
    "compiled": mx.compile(notes),
    "class": Plain,
}


@pytest.mark.parametrize("function", IMPURE.values(), ids=IMPURE)
def test_may_leave_something(function: Any) -> None:
    assert not leaves_nothing(function) and not is_pure(function)


# --- marked -------------------------------------------------------------------------


def test_marked_functions_and_classes() -> None:
    @pure
    def marked(x: mx.array) -> mx.array:
        return notes(x)

    @pure
    class Marked(Counts):
        pass

    assert is_pure(marked) and is_pure(Marked(0.5)) and is_pure(Marked(0.5).draw)
    assert not is_pure(Counts(0.5)) and is_pure(pure(Counts(0.5)))


def test_a_mark_is_not_copied_or_inherited() -> None:
    @pure
    def marked(x: mx.array) -> mx.array:
        return draws(x)

    @functools.wraps(marked)
    def wrapper(x: mx.array) -> mx.array:
        CALLS.append(1)
        return marked(x)

    @pure
    class Marked(Plain):
        pass

    class Counting(Marked):
        def __call__(self, x: mx.array) -> mx.array:
            CALLS.append(1)
            return draws(x)

    assert is_pure(marked) and not is_pure(wrapper) and not leaves_nothing(wrapper)
    assert is_pure(Marked(1)) and not leaves_nothing(Counting(1))


def test_the_inspection_calls_nothing() -> None:
    before = len(CALLS)
    for function in IMPURE.values():
        leaves_nothing(function)
    assert len(CALLS) == before


def test_a_method_cannot_be_marked() -> None:
    with pytest.raises(TypeError, match="takes no attributes; mark the function or"):
        pure(Counts(0.5).draw)
