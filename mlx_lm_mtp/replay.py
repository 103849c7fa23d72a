"""`mlx_lm_mtp replay`: a trace fed to the rules again, without the model.

What is accepted is derived anew from drafts and targets (:mod:`.accept`), how many
drafts were kept from confidences (:mod:`.propose`), how many were asked for from the
rounds before and their seconds (:mod:`.depth`), and the statistics from the rounds
(:mod:`.stats`); each is compared with what was recorded.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DraftError

if TYPE_CHECKING:
    from .depth import Throughput
    from .rounds import Round
    from .stats import DraftStats
    from .trace import Recorded

DESCRIPTION = (
    "Feed a trace, which --draft-trace has written, to the rules that accept drafts, "
    "choose how many, and count them, without the model. Exit code 0: they come to the "
    "same; 1: they do not; 2: it cannot be read. See docs/checking.md."
)
# What the rounds alone do not tell.
_NOT_DERIVED = {
    *("replays", "replayed_tokens", "recurrence", "capture", "capture_fault"),
    *("resident_tokens", "unseen_tokens", "seconds", "host_seconds", "profile"),
    *("audited", "audit_differences", "direct_commits", "drafter", "num_draft_tokens"),
    *("exactness", "forms", "strategy", "verify"),
    *("tokens_per_second", "tokens_per_second_without_replay"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of the subcommand its arguments."""
    parser.add_argument("trace", type=Path, metavar="FILE", help="the trace")
    parser.add_argument(
        "--depth",
        action="store_true",
        help="say what each number of drafts was taken to yield, at the end",
    )


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Replay every generation of a trace, and say what differs.

    Raises:
        SystemExit: Always, with the code of the description.
    """
    from .trace import read

    try:
        generations = read(args.trace)
    except DraftError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    found = 0
    for number, recorded in enumerate(generations, 1):
        differences = [*differing(recorded)]
        found += len(differences)
        print("\n".join([_title(number, recorded), *differences]))
        if args.depth:
            print(depths(recorded))
    print(f"replayed: {found or 'no'} difference{'' if found == 1 else 's'}")
    sys.exit(int(found > 0))


def differing(recorded: Recorded) -> Iterator[str]:
    """What comes out otherwise than it was recorded, a line each."""
    from .gaps import SHOWN
    from .options import DraftOptions

    options = DraftOptions.of(recorded.header["options"])
    for number, done in enumerate(recorded.rounds):
        if (accepted := accepted_of(done)) != done.accepted and not (
            done.stopped and accepted > done.accepted
        ):
            yield (
                f"verify {number}: {done.accepted} accepted, and the rule accepts "
                f"{accepted} of {[*map(list, done.paths)]} where the target chose "
                f"{list(done.targets)}"
            )
        if done.drafted != (done.accepted if done.stopped else len(done.paths[0])):
            yield f"verify {number}: {done.drafted} drafts do not count as drafted"
        if options.depth == "confidence" and done.confidences:
            yield from _too_deep(number, done, options.tau)
    yield from _chosen_otherwise(recorded)
    if recorded.stats is not None:
        yield from _miscounted(recorded, max(SHOWN, options.audit))


def accepted_of(done: Round) -> int:
    """How many drafts :mod:`.accept` accepts where the target chose these tokens.

    The target is one that is sure of them: its logits are 1 there and 0 elsewhere.
    """
    import mlx.core as mx
    from mlx_lm.sample_utils import greedy_sampler

    from .accept import AtOnce
    from .history import History

    known = sorted({token for path in (*done.paths, done.targets) for token in path})
    index = {token: i for i, token in enumerate(known)}
    width = min(len(done.paths[0]), len(done.targets))
    if width == 0:
        return 0
    drafts = [[index[token] for token in path[:width]] for path in done.paths]
    targets = mx.array([index[token] for token in done.targets[:width]])
    logits = (targets[:, None] == mx.arange(len(known))).astype(mx.float32)
    logits = mx.repeat(logits[None], len(drafts), axis=0)
    logits = mx.concatenate([logits, logits[:, -1:]], axis=1)  # behind the last draft
    chosen_by = (greedy_sampler, (), History(kept=False), mx.array([0]))
    judge = AtOnce(logits, mx.array(drafts, dtype=mx.uint32), *chosen_by)
    return next((i for i in range(width) if not judge.accepts(i)), width)


def rederived(recorded: Recorded, keep: int) -> DraftStats:
    """The statistics that its rounds come to."""
    from .stats import Tally

    tally = Tally()
    for done in recorded.rounds:
        tally.count(done, keep)
    return tally.stats


def _too_deep(number: int, done: Round, tau: float) -> Iterator[str]:
    import mlx.core as mx

    from .propose import confident

    drafts, kept = len(done.paths[0]), confident(mx.array([done.confidences]), tau)
    if drafts > kept:
        yield (
            f"verify {number}: {drafts} drafts were verified, and their confidences "
            f"allow {kept} at tau={tau:g}"
        )


def answers(recorded: Recorded, depth: Throughput) -> Iterator[list[tuple[int, str]]]:
    """What this depth answers if it is asked and told all of it in the same order.

    Yields:
        For each verify the choices that were recorded with it: k, and why it is parked.
    """
    for done, asked in zip(recorded.rounds, recorded.asked, strict=True):
        yield [(depth.choose(most), depth.parked) for most, _ in asked]
        depth.take(done)


def _chosen_otherwise(recorded: Recorded) -> Iterator[str]:
    from .depth import Throughput

    if recorded.known is None:
        return
    derived = answers(recorded, Throughput.of(recorded.known))
    lines = zip(recorded.rounds, recorded.asked, derived, strict=True)
    ahead: list[tuple[int, str]] = []  # the choice for a round that is yet to come
    for number, (done, asked, answered) in enumerate(lines):
        choices = ahead[:]
        for (most, k), (other, parked) in zip(asked, answered, strict=True):
            choices.append((k, parked))
            if k != other:
                yield f"verify {number}: k={k} chosen of {most}, and {other} derived"
        k, parked = choices[0] if choices else (0, "")
        ahead = [choice for choice in choices[1:] if choice[0]]
        if done.k != k and done.rescue is None:
            yield f"verify {number}: k={k} was chosen, and {done.k} asked for"
        if done.parked != parked:
            what = f"{done.parked!r} recorded, {parked!r} derived"
            yield f"verify {number}: parked, {what}"


def depths(recorded: Recorded) -> str:
    """What each k was taken to yield at the end, for people."""
    from .depth import Throughput
    from .stats import table

    if recorded.known is None:
        return "depth: was not chosen by what yields most"
    depth = Throughput.of(recorded.known)
    for _ in answers(recorded, depth):
        pass
    most = max((most for asked in recorded.asked for most, _ in asked), default=0)
    rounds = Counter(done.k for done in recorded.rounds if done.rescue is None)
    head = ("", "rounds", "tokens a round", "plain rounds' time", "speed")
    rows: list[tuple[str, ...]] = [head]
    for at in depth.estimates(most):
        guess = "" if at.measured else "~"
        told = f"{at.tokens:.2f}", f"{guess}{at.rounds:.2f}", f"{at.rate:.2f}"
        rows.append((str(at.k), str(rounds[at.k]), *told))
    if len(rows) == 1:
        return "depth: plain decoding was not measured yet"
    return table("k", rows)


def _miscounted(recorded: Recorded, keep: int) -> Iterator[str]:
    stats = recorded.stats or {}
    for name, value in rederived(recorded, keep).to_dict().items():
        if name not in _NOT_DERIVED and value != stats.get(name):
            yield f"{name}: {stats.get(name)} recorded, {value} derived"


def _title(number: int, recorded: Recorded) -> str:
    header, rounds = recorded.header, recorded.rounds
    told: list[Any] = [f"generation {number}: {header['drafter']}"]
    told += [f"k={header['num_draft_tokens']}", f"{len(rounds)} verifies"]
    told.append(f"{sum(len(done.tokens) for done in rounds)} tokens")
    if recorded.stats is None:
        told.append("broken off before its statistics")
    return ", ".join(told)
