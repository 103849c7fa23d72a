"""Options that are declared as fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from mlx_lm_mtp import DraftOptions, declared
from mlx_lm_mtp.declared import option
from mlx_lm_mtp.errors import InvalidOption


@dataclass(frozen=True)
class Options:
    count: int = option(3, least=1, most=9, help="how many")
    share: float = option(0.5, least=0, help="which part")
    fast: bool = option(False, help="whether at once")
    mode: str = option("a", choices=("a", "b"), help="in which way")
    path: str = option("", help="where")
    plain: int = 4


def test_values_are_taken_as_they_are_or_typed() -> None:
    typed = {"count": "7", "share": "0.25", "fast": "True", "mode": "b", "path": "x"}
    same = Options(7, 0.25, True, "b", "x", 5)
    assert declared.of(Options, typed | {"plain": "5"}, "d.") == same
    assert declared.of(Options, vars(same), "d.") == same
    assert declared.of(Options, {}, "d.") == Options()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("count", 0, "d.count is 0; give an integer of at least 1 and at most 9."),
        ("count", "10", "d.count is 10; give an integer of at least 1 and at most 9."),
        ("count", 1.5, "d.count is 1.5; give an integer of at least 1 and at most 9."),
        ("count", True, "d.count is True; give an integer of at least"),
        ("count", "many", "d.count is 'many'; give an integer of at least"),
        ("share", "-1", "d.share is -1.0; give a number of at least 0."),
        ("share", float("nan"), "d.share is nan; give a number of at least 0."),
        ("fast", "yes", "d.fast is 'yes'; give True or False."),
        ("mode", "c", "d.mode is 'c'; choose one of: a, b."),
        ("path", 3, "d.path is 3; give a path or a name."),
        ("plain", "x", "d.plain is 'x'; give an integer."),
        ("colour", 1, "unknown draft option 'd.colour'; the options are: d.count, d."),
    ],
)
def test_other_values_are_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidOption) as error:
        declared.of(Options, {name: value}, "d.")
    assert said in str(error.value)


def test_options_are_described() -> None:
    assert declared.describe(Options, "d.") == [
        "d.count=N (how many, default: 3)",
        "d.share=N (which part, default: 0.5)",
        "d.fast=true|false (whether at once, default: false)",
        "d.mode=a|b (in which way, default: a)",
        "d.path=TEXT (where, default: none)",
        "d.plain=N (default: 4)",
    ]


@dataclass
class NoDefault:
    count: int


@dataclass
class Nested:
    counts: list[int] = field(default_factory=list)


@pytest.mark.parametrize("kind", [NoDefault, Nested, dict, 3, Options()])
def test_not_everything_declares_options(kind: Any) -> None:
    assert declared.declares(Options)
    assert not declared.declares(kind)


# --- among the options of drafting ------------------------------------------------


def test_a_dotted_name_is_an_option_of_a_drafter() -> None:
    options = DraftOptions.of({"tau": 0.2, "mine.count": 4, "other.count": 5}, 2)
    assert options.of_drafter("mine") == {"count": 4}
    assert options.of_drafter("min") == {}
    assert options.unusual == ("tau=0.2", "mine.count=4", "other.count=5")
    assert DraftOptions.of(options) == options
    assert hash(options) == hash(DraftOptions.of(options, 2))


def test_a_command_line_gives_the_same() -> None:
    parsed = DraftOptions.parse(["tau=0.2", "mine.count=4", "mine.path=a=b"])
    assert parsed == {"tau": 0.2, "mine.count": "4", "mine.path": "a=b"}
    assert DraftOptions.of(parsed).of_drafter("mine") == {"count": "4", "path": "a=b"}


@pytest.mark.parametrize("name", ["tua", "num", "of_drafters_"])
def test_other_names_are_unknown(name: str) -> None:
    with pytest.raises(InvalidOption, match=f"unknown draft option '{name}'"):
        DraftOptions.of({name: 1})
