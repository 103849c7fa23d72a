"""What all requests since the start have come to."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from .asked import Asked

_COUNTS = ("requests", "rounds", "tokens", "drafted", "accepted", "batched")


class Totals:
    """Adds up requests, for each drafter and each k.

    `tokens` came from rounds of drafts, `batched` from stock's batch; with the tokens
    of plain requests they are all that requests were told.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drafted: dict[tuple[str, int], Counter[str]] = {}
        self._depths: dict[tuple[str, int], Counter[int]] = {}
        self._plain: Counter[str] = Counter()
        self._plain_tokens = 0

    def add(self, asked: Asked) -> None:
        """Add one request that has been answered, or broken off."""
        stats = asked.stats
        with self._lock:
            if not stats.drafted:
                self._plain[asked.why or "no drafter was asked for"] += 1
                self._plain_tokens += asked.told
                return
            key = (stats.drafter, stats.num_draft_tokens)
            self._drafted.setdefault(key, Counter()).update(
                requests=1,
                rounds=stats.rounds,
                tokens=stats.tokens,
                drafted=stats.drafted.total(),
                accepted=stats.accepted.total(),
                batched=asked.batched,
            )
            self._depths.setdefault(key, Counter()).update(stats.rounds_by_k)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        with self._lock:
            rows = [
                {"drafter": name, "num_draft_tokens": k}
                | {count: counts[count] for count in _COUNTS}
                | {
                    "rounds_by_k": [self._depths[name, k][i] for i in range(k + 1)],
                    "tokens_a_round": counts["tokens"] / counts["rounds"],
                    "acceptance_rate": counts["accepted"] / counts["drafted"],
                }
                for (name, k), counts in sorted(self._drafted.items())
            ]
            reasons, tokens = dict(self._plain), self._plain_tokens
        requests = sum(reasons.values())
        plain = {"requests": requests, "tokens": tokens, "reasons": reasons}
        return {"drafted": rows, "plain": plain}
