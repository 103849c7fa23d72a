"""`check_drafter`: all checks of a drafter, and what they come to."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import random_state
from ..drafters.base import Drafter, DrafterFactory
from ..options import DraftOptions
from .generations import GENERATIONS
from .models import TinyModel, tiny_models
from .offers import OFFERED
from .played import PLAYED
from .report import DrafterFault, Finding, Report
from .table import Check
from .trial import PROMPT, Maker, Trial

CHECKS: Mapping[str, Check] = {
    check.name: check for check in (*GENERATIONS, *PLAYED, *OFFERED)
}
"""Every check by its name; `contract` says what it tests."""

_ENOUGH = 5  # findings of one check on one model; more say the same


def check_drafter(
    factory: DrafterFactory | Callable[[], Drafter] | str,
    *,
    options: DraftOptions | Mapping[str, Any] | None = None,
    own: Any = None,
    models: Sequence[TinyModel] | None = None,
    prompt: Sequence[int] = PROMPT,
    only: Collection[str] = (),
    without: Collection[str] = (),
) -> Report:
    """Run a drafter through its contract, on tiny models with every kind of cache.

    Everything is computed on the CPU, where drafting is exact, and compared bit for
    bit with stock mlx-lm. The state of `mx.random` stays as it is.

    Args:
        factory: What makes the drafter: a factory as a plugin registers it, which is
            called with a `DraftContext`; its class or a function, if they can be
            called without arguments; or the name under which it is registered.
        options: What it is built with. Depth, paths, rescue, probe and
            `num_draft_tokens` are set by the checks.
        own: The drafter's own options, for a factory that reads ``context.own``; one
            that is named gets them from the options.
        models: The targets; by default :func:`.models.tiny_models`.
        prompt: Token ids that every generation begins with.
        only: Names of checks, out of `CHECKS`; by default all.
        without: Names of checks to leave out.

    Returns:
        What was checked, and what the drafter's acceptance was.

    Raises:
        DrafterFault: If anything is wrong; it lists all that was found.
        ValueError: If a check that is named is none, or there are no models.
        DraftError: If what the factory makes is no drafter.
    """
    started = time.perf_counter()
    _check_names([*only, *without])
    with _exactly():
        maker = Maker(factory, DraftOptions.of(options), own)
        trials, unsuited = _trials(maker, models, prompt)
        reasons = {name: _reason(name, trials[0], only, without) for name in CHECKS}
        checks = [CHECKS[name] for name, reason in reasons.items() if not reason]
        findings = [f for check in checks for f in _findings(check, trials)]
        name = trials[0].drafter().name
    own = sum((trial.counts for trial in trials), Counter())
    report = Report(
        drafter=name,
        checks=tuple(check.name for check in checks),
        skipped=(*((n, r) for n, r in reasons.items() if r), *_unknown(trials[0])),
        models=tuple(trial.tiny.name for trial in trials),
        drafted=own["own drafted"],
        accepted=own["own accepted"],
        findings=tuple(findings),
        notes=(*_notes(own), *unsuited),
        seconds=time.perf_counter() - started,
    )
    if findings:
        raise DrafterFault(report)
    return report


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in CHECKS:
            raise ValueError(
                f"there is no check {name!r}; the checks are: {', '.join(CHECKS)}."
            )


@contextmanager
def _exactly() -> Iterator[None]:
    """On the CPU, and with the random state put back at the end."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        with random_state.untouched():
            yield
    finally:
        mx.set_default_device(device)


def _reason(
    name: str, trial: Trial, only: Collection[str], without: Collection[str]
) -> str:
    """Why a check is left out, or ""."""
    if name in without or (only and name not in only):
        return "the caller leaves it out"
    lacking = sorted(CHECKS[name].needs - trial.gives)
    return f"the drafter gives no {' and no '.join(lacking)}" if lacking else ""


def _trials(
    maker: Maker, models: Sequence[TinyModel] | None, prompt: Sequence[int]
) -> tuple[list[Trial], list[str]]:
    """A trial for every model, and notes on those that do not suit the drafter.

    Models of the caller's own have to.
    """
    if models is not None and not models:
        raise ValueError("models is empty; leave it out for the kit's own.")
    if models is not None:
        return [Trial(maker, tiny, prompt) for tiny in models], []
    trials = [Trial(maker, tiny, prompt) for tiny in tiny_models()]
    reasons = {trial.tiny.name: trial.unsuited() for trial in trials}
    notes = [
        f"note: model {name} was left out: {reason}"
        for name, reason in reasons.items()
        if reason
    ]
    return [trial for trial in trials if not reasons[trial.tiny.name]], notes


def _unknown(trial: Trial) -> Iterator[tuple[str, str]]:
    """What the drafter gives and no check is about."""
    known = frozenset().union(*(check.needs for check in CHECKS.values()))
    for offer in sorted(trial.gives - known):
        yield offer, "the drafter gives it, and the kit has no check of it"


def _findings(check: Check, trials: Sequence[Trial]) -> list[Finding]:
    """What one check finds, on as many models as it asks for."""
    found: list[Finding] = []
    counts: Counter[str] = Counter()
    for trial in trials[: check.models or None]:
        before = Counter(trial.counts)
        texts = _texts(check, trial)
        counts += trial.counts - before
        found += [Finding(check.name, trial.tiny.name, text) for text in texts]
    unmet = [claim for claim in check.claims if not counts[claim]]
    if unmet and not found:
        text = f"nothing was {' or '.join(unmet)}, so that the check means nothing"
        found.append(Finding(check.name, "", text))
    return found


def _texts(check: Check, trial: Trial) -> list[str]:
    """The first findings on one model; an exception is one, too."""
    texts: list[str] = []
    try:
        for text in check.run(trial):
            texts.append(text)
            if len(texts) == _ENOUGH:
                break
    except Exception as error:
        texts.append(f"{type(error).__name__} was raised in {_place(error)}: {error}")
    return texts


def _place(error: Exception) -> str:
    """Where an exception was raised: the innermost function."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name}() ({Path(frame.filename).name}, line {frame.lineno})"


def _notes(counts: Counter[str]) -> Iterator[str]:
    if not counts["own drafted"]:
        yield (
            "note: the drafter proposed nothing of its own on these models; what it "
            "proposes was not checked. Give a prompt with which it does."
        )
    elif not counts["own accepted"]:
        yield (
            "note: none of its own drafts was accepted on these models; it was made "
            "to say what a script says in the checks that need it."
        )
