"""The examination: the head is read, drafts, and the parts of a round are timed.

Everything is measured on the model itself, on this machine, behind a short text.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from .. import anatomy, origin
from ..bench.costs import draft_seconds, verify_seconds
from ..bench.report import environment
from ..bench.subject import Prompt, Subject, of_checkpoint
from ..certificate import Certificate
from ..drafters.mtp import MTPDrafter
from ..errors import DraftError, HeadMismatch
from ..generate import draft_generate_step
from ..heads import head_of, hub, loaded_of
from ..heads.families import family_of
from ..heads.find import HeadWeights, find_head, head_files
from ..heads.head import MTPHead
from ..options import DraftOptions
from ..state.capture import Recording
from ..state.commit import flat
from ..state.limits import width_limit
from ..state.recurrence import Recurrence
from ..stats import NONE, Tally
from ..target import Target
from .findings import Findings, HeadFindings

HIDDEN = ("post_norm", "pre_norm")
WIDTHS = range(1, 9)
_PASSES = 3  # over all costs: one slow moment of the machine must not choose k


@dataclass(frozen=True)
class Plan:
    """What is examined, and how long.

    Args:
        model: As `mlx_lm.load` takes it.
        source: Where the head is; empty for the model's own.
        texts: Prompts, at least one.
        tokens: Decoded behind each of them, under each hidden state.
        max_k: The most drafts a round.
    """

    model: str
    source: str
    texts: Sequence[str]
    tokens: int
    max_k: int

    @property
    def steps(self) -> int:
        """How many findings :func:`examine` gives when all goes well."""
        decoded = (len(HIDDEN) + 1) * len(self.texts)
        return 2 + decoded + _PASSES + len(WIDTHS)


def examine(plan: Plan) -> Iterator[Findings]:
    """Findings that grow; the last ones are all there is to know.

    Whatever ends an examination early is in their `error`.
    """
    found = Findings(plan.model, environment())
    try:
        for found in _examined(plan, found):  # noqa: B020 (what is known so far)
            yield found
    except DraftError as error:
        yield replace(found, error=str(error))
    except RuntimeError as error:  # MLX's: out of memory, a kernel does not compile
        reason = " ".join(str(error).split()) or type(error).__name__
        yield replace(
            found,
            error=f"MODEL {plan.model} cannot be computed on this machine ({reason}); "
            "see whether mlx_lm.generate can without --mtp, or take a smaller one.",
        )


def _examined(plan: Plan, found: Findings) -> Iterator[Findings]:
    subject = of_checkpoint(plan.model, plan.texts)
    yield found
    try:
        head = head_of(subject.model, plan.source)
    except HeadMismatch:
        yield replace(found, head=misfit(subject.model, plan.source))
        raise
    found = replace(
        found,
        head=described(subject.model, head),
        family_hidden=head.family.hidden,
        rollback=rollback(subject.model, subject.prompts[0].tokens),
    )
    yield found
    said: list[int] = []
    tallies = {hidden: Tally() for hidden in HIDDEN}
    for prompt in subject.prompts:
        for hidden, tally in tallies.items():
            how = {"hidden": hidden, "depth": "fixed"}
            options = DraftOptions(num_draft_tokens=plan.max_k, **how)
            said = _decode(subject, prompt, head, options, tally, plan.tokens)
            found = _with_acceptance(found, tallies)
            yield found
    usual, chosen = DraftOptions(plan.max_k, head=plan.source), Tally()
    for prompt in subject.prompts:  # what it learns is there for the next process
        _decode(subject, prompt, head, usual, chosen, plan.tokens)
        found = replace(found, depth=tuple(chosen.stats.share_by_k))
        yield found
    following = (said * len(WIDTHS))[: len(WIDTHS)]
    context = subject.prompts[-1].tokens + said
    for costs in _costs(subject, head, context, following, plan.max_k):
        found = replace(found, verify=costs[0], draft=costs[1])
        yield found
    exact: dict[int, str | None] = {}
    for width, form in forms(subject.model, context):
        exact[width] = form
        found = replace(found, exact=dict(exact))
        yield found


def described(model: nn.Module, head: MTPHead) -> HeadFindings:
    """What there is to say of the model's head before it has drafted."""
    loaded = loaded_of(model)
    assert loaded is not None
    types = (dtype for _, dtype in loaded.tensors.values())
    packed = _counted(_packings(head))
    return _findings(model, str(loaded.place), loaded.weights, types, packed)


def misfit(model: nn.Module, source: str) -> HeadFindings:
    """What there is to say of a head that was found, and does not fit the model.

    Args:
        model: The model.
        source: Where the head is; empty for the model's own.

    Raises:
        HeadNotFound, HeadUnreadable: If none can be read any more.
    """
    family, args = family_of(model), anatomy.language_model(model).args
    path = source or origin.path_of(model) or ""
    place = hub.local(path, lambda names: head_files(names, family, args))
    weights = find_head(place, family, args)
    types = (value.dtype for value in weights.tensors.values())
    # In how many bits is told by the dimensions, which are what is wrong.
    scales = sum(name.endswith(".scales") for name in weights.tensors)
    packed = {"unknown bits": scales} if scales else {}
    return _findings(model, str(place), weights, types, packed)


def rollback(model: nn.Module, tokens: Sequence[int]) -> dict[str, int]:
    """How a rejected draft is taken back: ``KVCache trimmed`` -> how many caches.

    It is found out as drafting does, on one token.
    """
    caches = make_prompt_cache(model)
    with mx.stream(generation_stream), Recording() as recording:
        logits = Target(model)(mx.array([tokens[-1:]]), caches).logits
        mx.eval(logits, [cache.state for cache in caches])

    def way(cache: Any) -> str:
        if cache.is_trimmable():
            return "trimmed"
        recorded = recording.layer_of(cache) is not None
        return "recorded" if recorded else "put back and fed again"

    return _counted(f"{type(c).__name__} {way(c)}" for c in flat(caches))


def forms(model: nn.Module, context: Sequence[int]) -> Iterator[tuple[int, str | None]]:
    """The form in which a verify of each width has decoding's bits, as certified.

    Args:
        model: The model, whose gated-delta layers are computed as drafting does.
        context: Tokens in the caches before.

    Yields:
        A width, and a form, or that there is none; or None if drafting feeds fewer
        tokens at once behind this context, as it does where a rotating cache is full.
    """
    target = Target(model, recurrence=Recurrence("auto", "auto"))
    caches = make_prompt_cache(model)
    with mx.stream(generation_stream):
        target(mx.array([list(context)]), caches)
        mx.eval([cache.state for cache in caches])
        certificate = Certificate(target, caches)
        for width in WIDTHS:
            made = _fed_at_once(target, caches, width)
            form = certificate.form(1, width) if made else None
            yield width, (str(form or NONE) if made else None)


# --- the steps ----------------------------------------------------------------------


def _decode(
    subject: Subject,
    prompt: Prompt,
    head: MTPHead,
    options: DraftOptions,
    tally: Tally,
    tokens: int,
) -> list[int]:
    """Greedily; the text is decoded on behind its end."""
    steps = draft_generate_step(
        mx.array(prompt.tokens),
        subject.model,
        MTPDrafter(head),
        options=options,
        stats=tally,
        max_tokens=tokens,
    )
    return [token for token, *_ in steps]


def _with_acceptance(found: Findings, tallies: dict[str, Tally]) -> Findings:
    stats = {hidden: tally.stats for hidden, tally in tallies.items()}
    post = stats["post_norm"]
    return replace(
        found,
        acceptance={h: tuple(s.acceptance_per_position) for h, s in stats.items()},
        drafted=post.rounds,
        undrafted=dict(post.undrafted),
        recurrence=post.recurrence,
        capture=post.capture,
        capture_fault=post.capture_fault,
    )


def _costs(
    subject: Subject,
    head: MTPHead,
    context: list[int],
    following: list[int],
    k: int,
) -> Iterator[tuple[dict[int, float], float]]:
    """Seconds of a verify by width, and of a draft: the medians of more passes each
    time."""
    computing = Recurrence("auto", "auto")
    verify: list[dict[int, float]] = []
    draft: list[float] = []
    for _ in range(_PASSES):
        drafting = (MTPDrafter(head), k, "auto", context, following[0])
        draft.append(draft_seconds(subject.model, *drafting) / k)
        verify.append(
            verify_seconds(subject.model, context, following, WIDTHS, computing)
        )
        widths = {w: statistics.median(v[w] for v in verify) for w in WIDTHS}
        yield widths, statistics.median(draft)


# --- the parts ----------------------------------------------------------------------


def _findings(
    model: nn.Module,
    place: str,
    weights: HeadWeights,
    types: Iterator[mx.Dtype],
    quantization: dict[str, int],
) -> HeadFindings:
    form = "zero-centred" if weights.norms.raw else "as stock multiplies them"
    counted = _counted(map(_name, types))
    return HeadFindings(
        family=family_of(model).models,
        place=place,
        files=weights.source,
        layout=weights.layout,
        tensors=sum(counted.values()),
        types=counted,
        quantization=quantization,
        norms=f"{form}; {weights.norms.evidence}",
        passed_over=weights.passed_over,
    )


def _fed_at_once(target: Target, caches: Sequence[Any], width: int) -> bool:
    """Whether drafting would verify so many tokens in one forward."""
    limit, _ = width_limit(caches, quantized_kv_start=None, one_forward=True)
    limit = 1 if target.one_row else limit
    return limit is None or width <= limit


def _packings(head: MTPHead) -> Iterator[str]:
    for _, part in head.named_modules():
        if "scales" in part:
            mode = "" if part.mode == "affine" else f"{part.mode}, "
            yield f"{mode}{part.bits} bits in groups of {part.group_size}"


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _counted(words: Iterator[str]) -> dict[str, int]:
    return dict(Counter(words).most_common())
