"""Options as fields of a frozen dataclass: declared once, then checked, parsed, shown.

::

    @dataclass(frozen=True)
    class MyOptions:
        longest: int = option(8, least=1, help="tokens of a match that are compared")
        mode: str = option("fast", choices=("fast", "good"), help="how to match")

The default says what kind of value an option takes: a switch, an integer, a number or a
text. The options of drafting are declared in this way, and a drafter's own as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from os import PathLike
from typing import Any

from .errors import InvalidOption

_SWITCH = {"true": True, "false": False}
_KINDS = (bool, int, float, str)


def option(
    default: Any,
    *,
    help: str,
    choices: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field that is an option.

    Args:
        default: A bool, int, float or str; values must be of its kind.
        help: A few words for ``--help``.
        choices: The texts that it can be; empty for any.
        least, most: The smallest and the largest number; None for no bound.
    """
    words = {"help": help, "choices": choices, "least": least, "most": most}
    return field(default=default, metadata=words)


def declares(options: Any) -> bool:
    """Whether this is a dataclass whose every field can be an option."""
    return (
        isinstance(options, type)
        and is_dataclass(options)
        and all(isinstance(f.default, _KINDS) for f in fields(options))
    )


def check(values: Any, prefix: str = "") -> None:
    """See that the fields of a dataclass that are options have values they can have.

    Args:
        values: An instance.
        prefix: Stands before the names in messages; with one, every field is an
            option, whether :func:`option` made it or not.

    Raises:
        InvalidOption: If one has not.
    """
    for declared in fields(values):
        if declared.metadata or prefix:
            _check(declared, getattr(values, declared.name), prefix)


def of(kind: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """The dataclass with these values, of which texts may be as users type them.

    Raises:
        InvalidOption: If a name is unknown, or a value cannot be.
    """
    known = {f.name: f for f in fields(kind)}
    check_known(values, [*known], prefix)
    made = kind(**{name: parsed(known[name], v) for name, v in values.items()})
    check(made, prefix)
    return made


def parsed(declared: Field[Any], value: Any) -> Any:
    """A text as the option's kind of value, if it is one; else as it is."""
    kind = type(declared.default)
    if not isinstance(value, str) or kind is str:
        return value
    if kind is bool:
        return _SWITCH.get(value.lower(), value)
    try:
        return kind(value)
    except ValueError:
        return value  # refused by the check that follows


def describe(kind: type, prefix: str = "") -> list[str]:
    """For each option its name, values, help and default, in a few words."""
    return [
        f"{prefix}{f.name}={_values(f)} ({_help(f)}default: {_shown(f.default)})"
        for f in fields(kind)
        if f.metadata or (prefix and f.default is not MISSING)
    ]


def check_known(names: Iterable[str], known: Sequence[str], prefix: str = "") -> None:
    """See that all names are among the known ones.

    Raises:
        InvalidOption: If one is not; the message lists those there are.
    """
    for name in names:
        if name not in known:
            listed = ", ".join(prefix + k for k in known) or "none"
            raise InvalidOption(
                f"unknown draft option {prefix + name!r}; the options are: {listed}."
            )


def _check(declared: Field[Any], value: Any, prefix: str) -> None:
    name, kind, rules = (
        prefix + declared.name,
        type(declared.default),
        declared.metadata,
    )
    if choices := rules.get("choices"):
        if value not in choices:
            listed = ", ".join(choices)
            raise InvalidOption(
                f"draft option {name} is {value!r}; choose one of: {listed}."
            )
    elif kind is str:
        if not isinstance(value, str | PathLike):
            raise InvalidOption(
                f"draft option {name} is {value!r}; give a path or a name."
            )
    elif kind is bool:
        if not isinstance(value, bool):
            raise InvalidOption(
                f"draft option {name} is {value!r}; give True or False."
            )
    else:
        _check_number(name, value, kind, rules.get("least"), rules.get("most"))


def _check_number(
    name: str, value: Any, kind: type, least: float | None, most: float | None
) -> None:
    kinds = (int,) if kind is int else (int, float)
    number = isinstance(value, kinds) and not isinstance(value, bool)
    low = number and least is not None and not value >= least
    high = number and most is not None and not value <= most
    if number and not low and not high:
        return
    bounds = [
        f"{word} {bound}"
        for word, bound in (("of at least", least), ("at most", most))
        if bound is not None
    ]
    article = "an integer" if kind is int else "a number"
    raise InvalidOption(
        f"draft option {name} is {value!r}; give "
        f"{' '.join([article, ' and '.join(bounds)]).strip()}."
    )


def _shown(default: Any) -> str:
    return str(default).lower() or "none"


def _values(declared: Field[Any]) -> str:
    if declared.metadata.get("choices"):
        return "|".join(declared.metadata["choices"])
    return {bool: "true|false", str: "TEXT"}.get(type(declared.default), "N")


def _help(declared: Field[Any]) -> str:
    words = declared.metadata.get("help")
    return f"{words}, " if words else ""
