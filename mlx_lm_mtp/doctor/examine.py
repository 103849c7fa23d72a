"""The examination: the head is read, drafts, and the parts of a round are timed.

Everything is measured on the model itself, on this machine, behind a short text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..bench.costs import draft_seconds, verify_seconds
from ..bench.report import environment
from ..bench.subject import Prompt, Subject, of_checkpoint
from ..drafters.mtp import MTPDrafter
from ..errors import DraftError
from ..generate import draft_generate_step
from ..heads import Loaded, head_of, loaded_of
from ..heads.head import MTPHead
from ..options import DraftOptions
from ..state.capture import Recording
from ..state.recurrence import Recurrence
from ..state.snapshot import restore, snapshot
from ..stats import Tally
from ..target import Target
from .findings import Findings, HeadFindings

HIDDEN = ("post_norm", "pre_norm")
WIDTHS = range(1, 9)


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
        return 2 + len(HIDDEN) * len(self.texts) + 1 + len(WIDTHS)


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


def _examined(plan: Plan, found: Findings) -> Iterator[Findings]:
    subject = of_checkpoint(plan.model, plan.texts)
    yield found
    head = head_of(subject.model, plan.source)
    loaded = loaded_of(subject.model)
    assert loaded is not None
    found = replace(found, head=described(loaded), family_hidden=head.family.hidden)
    yield found
    said: list[int] = []
    tallies = {hidden: Tally() for hidden in HIDDEN}
    for prompt in subject.prompts:
        for hidden, tally in tallies.items():
            options = DraftOptions(num_draft_tokens=plan.max_k, hidden=hidden)
            said = _decode(subject, prompt, head, options, tally, plan.tokens)
            found = _with_acceptance(found, tallies)
            yield found
    following = (said * len(WIDTHS))[: len(WIDTHS)]
    context = subject.prompts[-1].tokens + said
    yield (found := _with_costs(found, subject, head, context, following, plan))
    for width in WIDTHS:
        same = is_exact(subject.model, context, following[:width])
        found = replace(found, exact={**(found.exact or {}), width: same})
        yield found


def described(loaded: Loaded) -> HeadFindings:
    """What there is to say of a head before it has drafted."""
    weights, head = loaded.weights, loaded.head
    form = "zero-centred" if weights.norms.raw else "as stock multiplies them"
    return HeadFindings(
        family=head.family.models,
        place=str(loaded.place),
        files=weights.source,
        layout=weights.layout,
        tensors=len(loaded.tensors),
        types=_counted(_name(dtype) for _, dtype in loaded.tensors.values()),
        quantization=_counted(_packings(head)),
        norms=f"{form}; {weights.norms.evidence}",
        passed_over=weights.passed_over,
    )


def is_exact(model: nn.Module, context: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether one forward gives the bits that as many of one token each give.

    Args:
        model: The model, whose gated-delta layers are computed as drafting does.
        context: Tokens in the caches before.
        tokens: What is fed, `(w,)`.

    Returns:
        Whether logits and cache contents are equal, bit for bit.
    """
    target = Target(model, recurrence=Recurrence("auto", "auto"))
    caches = make_prompt_cache(model)
    with mx.stream(generation_stream):
        target(mx.array([list(context)]), caches)
        mx.eval([cache.state for cache in caches])
        before = snapshot(caches)
        rows = [target(mx.array([[t]]), caches).logits for t in tokens]
        single = [mx.concatenate(rows, axis=1), *_contents(caches)]
        mx.eval(single)
        restore(caches, before)
        with Recording():
            logits = target(mx.array([list(tokens)]), caches, verify=True).logits
        wide = [logits, *_contents(caches)]
        return all(_same(a, b) for a, b in zip(single, wide, strict=True))


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
        recurrence=post.recurrence,
        capture=post.capture,
        capture_fault=post.capture_fault,
    )


def _with_costs(
    found: Findings,
    subject: Subject,
    head: MTPHead,
    context: list[int],
    following: list[int],
    plan: Plan,
) -> Findings:
    computing = Recurrence("auto", "auto")
    verify = verify_seconds(subject.model, context, following, WIDTHS, computing)
    drafting = (MTPDrafter(head), plan.max_k, "auto", context, following[0])
    draft = draft_seconds(subject.model, *drafting) / plan.max_k
    return replace(found, verify=verify, draft=draft)


# --- the parts ----------------------------------------------------------------------


def _contents(caches: Sequence[Any]) -> list[mx.array]:
    state = tree_flatten([cache.state for cache in caches])
    return [mx.array(value) for _, value in state if value is not None]


def _same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and mx.array_equal(a, b, equal_nan=True).item()


def _packings(head: MTPHead) -> Iterator[str]:
    for _, part in head.named_modules():
        if "scales" in part:
            mode = "" if part.mode == "affine" else f"{part.mode}, "
            yield f"{mode}{part.bits} bits in groups of {part.group_size}"


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _counted(words: Iterator[str]) -> dict[str, int]:
    return dict(Counter(words).most_common())
