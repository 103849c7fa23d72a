"""The options of drafting: one frozen dataclass for the command line and the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from . import declared
from .declared import option
from .errors import InvalidOption


@dataclass(frozen=True)
class DraftOptions:
    """How to draft and verify; every option changes only the speed.

    Args:
        num_draft_tokens: The most tokens drafted in a round (k); 0 is plain decoding.
        depth: ``throughput`` drafts, up to k, as many tokens as yield the most tokens
            a second, measured on the way, and none where drafting does not pay;
            ``fixed`` drafts k tokens every round; ``confidence`` drafts on while the
            drafter's confidence in its last token is at least `tau`.
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
        gaps: For each token, note how far the target's two likeliest tokens are apart.
        audit: Afterwards decode so many of the smallest gaps again, token by token,
            and count those that would have differed; 0 does not. It costs what plain
            decoding of the text costs, and a copy of the caches behind the prompt.
        profile: Measure the seconds spent in each stage. What a stage computes is
            then waited for, which is slower.
        verify: ``batch`` feeds the pending token and all drafts in one forward;
            ``step`` feeds them one by one with a snapshot before each.
        exactness: ``exact`` verifies in a form that was measured to give the bits of
            decoding on this device, the cheapest there is, and only as many tokens as
            one holds for; ``fast`` always verifies in one plain forward, after which
            tokens can differ from plain decoding's where two are nearly tied.
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
        of_drafters: Options that drafters declare, ``(drafter.option, value)`` each;
            in a mapping they stand under that name, like the others.

    Raises:
        InvalidOption: If a value is out of range, or two options cannot combine.
    """

    num_draft_tokens: int = 3
    depth: str = option(
        "throughput",
        choices=("throughput", "fixed", "confidence"),
        help="how many tokens are drafted",
    )
    tau: float = option(
        0.4, least=0, most=1, help="confidence below which drafting ends"
    )
    reads: str = option(
        "each", choices=("each", "once"), help="how confidences are read"
    )
    paths: int = option(1, least=1, help="paths verified side by side")
    rescue: int = option(
        0, least=0, most=2, help="positions at which second choices are tried"
    )
    draft_sampling: str = option(
        "shared",
        choices=("shared", "greedy"),
        help="how drafts are chosen when the target samples",
    )
    draft_head_bits: int = option(
        0,
        least=0,
        most=8,
        help="bits of a copy of the lm_head that drafts are read from, 0: none",
    )
    shortlist: int = option(
        0, least=0, help="most frequent tokens to draft out of, 0: all"
    )
    probe: int = option(
        0, least=0, help="best choices among which tokens are looked for"
    )
    gaps: bool = option(False, help="note how near to ties tokens are")
    audit: int = option(
        0, least=0, help="smallest gaps that are decoded again, token by token"
    )
    profile: bool = option(False, help="measure the seconds of each stage")
    verify: str = option(
        "batch", choices=("batch", "step"), help="how drafts are verified"
    )
    exactness: str = option(
        "exact",
        choices=("exact", "fast"),
        help="whether verifying must have the bits of decoding",
    )
    capture: str = option(
        "auto",
        choices=("auto", "states", "replay"),
        help="how recurrent states are taken back",
    )
    recurrence: str = option(
        "auto",
        choices=("auto", "kernel", "stock"),
        help="what computes gated-delta layers on CUDA",
    )
    head: str = option("", help="folder, file or repository of the MTP head")
    hidden: str = option(
        "auto",
        choices=("auto", "post_norm", "pre_norm"),
        help="hidden states that the drafter is given",
    )
    prefill_step_size: int = option(
        0, least=0, help="prompt tokens a forward, 0: as given"
    )
    of_drafters: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _check_count(self.num_draft_tokens)
        declared.check(self)
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
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata}
        changed = {n: v for n, v in values.items() if v != getattr(type(self), n)}
        return tuple(
            f"{name}={str(value).lower()}"
            for name, value in (changed | dict(self.of_drafters)).items()
        )

    def to_dict(self) -> dict[str, Any]:
        """All of them as :meth:`of` takes them, k and those of drafters included."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | dict(values.pop("of_drafters"))

    def of_drafter(self, name: str) -> dict[str, Any]:
        """The options of the drafter of that name, without it before theirs."""
        return {
            option.removeprefix(f"{name}."): value
            for option, value in self.of_drafters
            if option.startswith(f"{name}.")
        }

    @classmethod
    def of(
        cls,
        options: DraftOptions | Mapping[str, Any] | None,
        num_draft_tokens: int | None = None,
    ) -> DraftOptions:
        """Options from a dataclass or a mapping, with k put on top when given."""
        if not isinstance(options, DraftOptions):
            options = cls(**_split(options or {}, [f.name for f in fields(cls)]))
        if num_draft_tokens is None:
            return options
        return replace(options, num_draft_tokens=num_draft_tokens)

    @classmethod
    def parse(cls, assignments: Iterable[str]) -> dict[str, Any]:
        """``name=value`` strings of the command line as a checked mapping.

        The options of drafters are checked once these are known.
        """
        texts = dict(_assigned(text) for text in assignments)
        known = {f.name: f for f in fields(cls) if f.metadata}
        own = _split(texts, [*known])
        of_drafters = dict(own.pop("of_drafters"))
        values = {n: declared.parsed(known[n], text) for n, text in own.items()}
        cls(**values)
        return values | of_drafters

    @classmethod
    def describe(cls) -> str:
        """One help line a ``--draft-option``, with its values and default."""
        return "; ".join(declared.describe(cls))


def _check_count(k: Any) -> None:
    if not isinstance(k, int) or isinstance(k, bool) or k < 0:
        raise InvalidOption(
            f"num_draft_tokens must be an integer of at least 0, got {k!r}; "
            "0 is plain decoding."
        )


def _split(options: Any, known: list[str]) -> dict[str, Any]:
    """A mapping with what belongs to drafters put together."""
    if not isinstance(options, Mapping):
        raise InvalidOption(
            f"draft_options is {options!r}; give a DraftOptions or a dict of options."
        )
    ours = {name: value for name, value in options.items() if "." not in str(name)}
    declared.check_known(ours, known)
    theirs = tuple((n, value) for n, value in options.items() if n not in ours)
    return ours | {"of_drafters": (*ours.get("of_drafters", ()), *theirs)}


def _assigned(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidOption(
            f"--draft-option takes name=value, got {text!r}; the options are: "
            f"{DraftOptions.describe()}."
        )
    return name.strip(), value.strip()
