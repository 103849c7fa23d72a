"""The options of drafting: one frozen dataclass for the command line and the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any

from .errors import InvalidOption

_SWITCH = {"true": True, "false": False}


def _choice(default: str, *others: str, help: str) -> Any:
    return field(
        default=default, metadata={"choices": (default, *others), "help": help}
    )


def _number(
    default: float, least: float, most: float | None = None, *, help: str
) -> Any:
    """An integer or a float, whichever the default is."""
    return field(default=default, metadata={"least": least, "most": most, "help": help})


def _text(help: str) -> Any:
    return field(default="", metadata={"text": True, "help": help})


def _switch(help: str) -> Any:
    return field(default=False, metadata={"switch": True, "help": help})


@dataclass(frozen=True)
class DraftOptions:
    """How to draft and verify; every option changes only the speed.

    Args:
        num_draft_tokens: The most tokens drafted in a round (k); 0 is plain decoding.
        depth: ``fixed`` drafts k tokens every round; ``confidence`` drafts on while
            the drafter's confidence in its last token is at least `tau`.
        tau: That least confidence, a probability.
        reads: How ``depth=confidence`` reads confidences: ``each`` waits for every
            draft before it goes on; ``once`` drafts k tokens and cuts them.
        paths: Candidate paths verified side by side in one forward (P).
        rescue: Positions, from the first, at which a rejected draft is rescued: if
            the drafter's second choice there is the target's token, the path that
            goes on from it is verified in the same round.
        draft_sampling: ``shared`` chooses drafts as the target will choose its tokens,
            with its sampler and its noise, if the drafter gives log-probabilities;
            ``greedy`` drafts the likeliest token. Logits processors apply to both.
        draft_head_bits: Draft with a copy of the lm_head quantised to so many bits, 2,
            3, 4, 5, 6 or 8; 0 drafts with the lm_head itself.
        shortlist: Draft only out of so many most frequent tokens, and those of the
            prompt; 0 is all.
        probe: For each draft position, count how often the target's token was among
            the drafter's best 1, 2, … `probe` choices; 0 does not.
        profile: Measure the seconds spent in each stage. What a stage computes is
            then waited for, which is slower.
        verify: ``batch`` feeds the pending token and all drafts in one forward;
            ``step`` feeds them one by one with a snapshot before each.
        capture: How a rejected draft is taken back from a gated-delta layer:
            ``states`` stores the state after every token of a verify, ``replay``
            computes it anew after a rejection, ``auto`` takes what costs less on
            this machine.
        recurrence: What computes gated-delta layers: ``stock`` is what stock runs;
            ``kernel`` and ``auto`` are a fused kernel on CUDA, where stock loops over
            ops, and stock elsewhere.
        head: Where the MTP head is: a folder, a file, or a repository on the hub; by
            default with the model.
        hidden: Which hidden states the drafter is given, those after the
            target's final norm (``post_norm``) or before it (``pre_norm``); ``auto``
            leaves it to the drafter.
        prefill_step_size: Prompt tokens in one forward; 0 leaves it to the argument
            of that name.

    Raises:
        InvalidOption: If a value is out of range, or two options cannot combine.
    """

    num_draft_tokens: int = 3
    depth: str = _choice("fixed", "confidence", help="how many tokens are drafted")
    tau: float = _number(0.4, 0, 1, help="confidence below which drafting ends")
    reads: str = _choice("each", "once", help="how confidences are read")
    paths: int = _number(1, 1, help="paths verified side by side")
    rescue: int = _number(0, 0, 2, help="positions at which second choices are tried")
    draft_sampling: str = _choice(
        "shared", "greedy", help="how drafts are chosen when the target samples"
    )
    draft_head_bits: int = _number(
        0, 0, 8, help="bits of a copy of the lm_head that drafts are read from, 0: none"
    )
    shortlist: int = _number(0, 0, help="most frequent tokens to draft out of, 0: all")
    probe: int = _number(0, 0, help="best choices among which tokens are looked for")
    profile: bool = _switch("measure the seconds of each stage")
    verify: str = _choice("batch", "step", help="how drafts are verified")
    capture: str = _choice(
        "auto", "states", "replay", help="how recurrent states are taken back"
    )
    recurrence: str = _choice(
        "auto", "kernel", "stock", help="what computes gated-delta layers on CUDA"
    )
    head: str = _text("folder, file or repository of the MTP head")
    hidden: str = _choice(
        "auto", "post_norm", "pre_norm", help="hidden states that the drafter is given"
    )
    prefill_step_size: int = _number(0, 0, help="prompt tokens a forward, 0: as given")

    def __post_init__(self) -> None:
        _check_count(self.num_draft_tokens)
        for option in fields(self):
            _check(option.name, getattr(self, option.name), option.metadata)
        if self.paths > 1:
            self._check_paths()
        if self.draft_head_bits in (1, 7):
            raise InvalidOption(
                f"draft option draft_head_bits is {self.draft_head_bits}; MLX "
                "quantises to 2, 3, 4, 5, 6 or 8 bits, and 0 takes no copy."
            )

    def _check_paths(self) -> None:
        against = {
            f"rescue={self.rescue}": self.rescue > 0,
            f"probe={self.probe}": self.probe > 0,
            "verify=step": self.verify == "step",
        }
        for other, given in against.items():
            if given:
                raise InvalidOption(
                    f"draft options paths={self.paths} and {other} cannot combine: "
                    "paths are verified side by side in one forward; leave out one."
                )

    @property
    def needs(self) -> frozenset[str]:
        """What a drafter must give beyond a chain of tokens."""
        needed = {
            "confidence": self.depth == "confidence",
            "branches": self.paths > 1 or self.rescue > 0,
            "candidates": self.probe > 0,
            "readout": self.draft_head_bits > 0 or self.shortlist > 0,
            "head": bool(self.head),
        }
        return frozenset(name for name, wanted in needed.items() if wanted)

    @property
    def unusual(self) -> tuple[str, ...]:
        """The options that have another value than their default, ``name=value``."""
        return tuple(
            f"{f.name}={str(getattr(self, f.name)).lower()}"
            for f in fields(self)
            if f.metadata and getattr(self, f.name) != f.default
        )

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
    def parse(cls, assignments: Iterable[str]) -> dict[str, Any]:
        """``name=value`` strings of the command line as a checked mapping."""
        texts = dict(_split(text) for text in assignments)
        known = {f.name: f for f in fields(cls) if f.metadata}
        _known(texts, list(known))
        pairs = {name: _value(text, known[name]) for name, text in texts.items()}
        cls(**pairs)
        return pairs

    @classmethod
    def describe(cls) -> str:
        """One help line a ``--draft-option``, with its values and default."""
        return "; ".join(
            f"{f.name}={_values(f)} ({f.metadata['help']}, default: "
            f"{str(f.default).lower()})"
            for f in fields(cls)
            if f.metadata
        )


def _check_count(k: Any) -> None:
    if not isinstance(k, int) or isinstance(k, bool) or k < 0:
        raise InvalidOption(
            f"num_draft_tokens must be an integer of at least 0, got {k!r}; "
            "0 is plain decoding."
        )


def _check(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    if "choices" in metadata and value not in metadata["choices"]:
        choices = ", ".join(metadata["choices"])
        raise InvalidOption(
            f"draft option {name} is {value!r}; choose one of: {choices}."
        )
    if "text" in metadata and not isinstance(value, str | PathLike):
        raise InvalidOption(f"draft option {name} is {value!r}; give a path or a name.")
    if "switch" in metadata and not isinstance(value, bool):
        raise InvalidOption(f"draft option {name} is {value!r}; give True or False.")
    if "least" in metadata:
        _check_number(name, value, metadata["least"], metadata["most"])


def _check_number(name: str, value: Any, least: float, most: float | None) -> None:
    whole = isinstance(getattr(DraftOptions, name), int)
    kinds = (int,) if whole else (int, float)
    number = isinstance(value, kinds) and not isinstance(value, bool)
    if not number or not least <= value <= (value if most is None else most):
        kind = "an integer" if whole else "a number"
        upto = "" if most is None else f" and at most {most}"
        raise InvalidOption(
            f"draft option {name} is {value!r}; give {kind} of at least {least}{upto}."
        )


def _value(text: str, option: Any) -> Any:
    """The text of a command line as the option's kind of value, if it is one."""
    if "choices" in option.metadata or "text" in option.metadata:
        return text
    if "switch" in option.metadata:
        return _SWITCH.get(text.lower(), text)
    try:
        return type(option.default)(text)
    except ValueError:
        return text  # refused by the check that follows


def _values(option: Any) -> str:
    if "choices" in option.metadata:
        return "|".join(option.metadata["choices"])
    if "text" in option.metadata:
        return "PATH"
    return "true|false" if "switch" in option.metadata else "N"


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
