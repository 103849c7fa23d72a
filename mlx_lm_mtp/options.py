"""The options of drafting: one frozen dataclass for the command line and the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .errors import InvalidOption


def _choice(default: str, *others: str, help: str) -> Any:
    return field(
        default=default, metadata={"choices": (default, *others), "help": help}
    )


@dataclass(frozen=True)
class DraftOptions:
    """How to draft and verify; every option changes only the speed.

    Args:
        num_draft_tokens: Tokens drafted in a round (k); 0 is plain decoding.
        verify: ``batch`` feeds the pending token and all drafts in one forward;
            ``step`` feeds them one by one with a snapshot before each.
        hidden: Which hidden states the drafter is given, those after the
            target's final norm (``post_norm``) or before it (``pre_norm``).

    Raises:
        InvalidOption: If a value is out of range.
    """

    num_draft_tokens: int = 3
    verify: str = _choice("batch", "step", help="how drafts are verified")
    hidden: str = _choice(
        "post_norm", "pre_norm", help="hidden states that the drafter is given"
    )

    def __post_init__(self) -> None:
        _check_count(self.num_draft_tokens)
        for option in fields(self):
            _check_choice(option.name, getattr(self, option.name), option.metadata)

    @classmethod
    def of(
        cls,
        options: DraftOptions | Mapping[str, Any] | None,
        num_draft_tokens: int | None = None,
    ) -> DraftOptions:
        """Options from a dataclass or a mapping, with k put on top when given."""
        if not isinstance(options, DraftOptions):
            options = cls(**_known(options or {}, [f.name for f in fields(cls)]))
        if num_draft_tokens is None:
            return options
        return replace(options, num_draft_tokens=num_draft_tokens)

    @classmethod
    def parse(cls, assignments: Iterable[str]) -> dict[str, str]:
        """``name=value`` strings of the command line as a checked mapping."""
        pairs = dict(_split(text) for text in assignments)
        cls(**_known(pairs, [f.name for f in fields(cls) if f.metadata]))
        return pairs

    @classmethod
    def describe(cls) -> str:
        """One help line a ``--draft-option``, with its choices and default."""
        return "; ".join(
            f"{f.name}={'|'.join(f.metadata['choices'])} ({f.metadata['help']}, "
            f"default: {f.default})"
            for f in fields(cls)
            if f.metadata
        )


def _check_count(k: Any) -> None:
    if not isinstance(k, int) or isinstance(k, bool) or k < 0:
        raise InvalidOption(
            f"num_draft_tokens must be an integer of at least 0, got {k!r}; "
            "0 is plain decoding."
        )


def _check_choice(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    choices = metadata.get("choices", (value,))
    if value not in choices:
        raise InvalidOption(
            f"draft option {name} is {value!r}; choose one of: {', '.join(choices)}."
        )


def _known(options: Any, names: list[str]) -> Mapping[str, Any]:
    if not isinstance(options, Mapping):
        raise InvalidOption(
            f"draft_options is {options!r}; give a DraftOptions or a dict of options."
        )
    for name in options:
        if name not in names:
            raise InvalidOption(
                f"unknown draft option {name!r}; the options are: {', '.join(names)}."
            )
    return options


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidOption(
            f"--draft-option takes name=value, got {text!r}; the options are: "
            f"{DraftOptions.describe()}."
        )
    return name.strip(), value.strip()
