"""What an examination has found: data, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class HeadFindings:
    """A head as it was found.

    Args:
        family: The models that have such heads.
        place: The folder or file that was looked in.
        files: The files that hold it.
        layout: See :mod:`mlx_lm_mtp.heads.find`.
        tensors: How many there are.
        types: Of its tensors, type -> how many.
        quantization: How its parts are packed, ``4 bits in groups of 64`` -> how many.
        norms: How its norms are written, and by what evidence.
        passed_over: Files with another head, which does not count.
    """

    family: tuple[str, ...]
    place: str
    files: str
    layout: str
    tensors: int
    types: Mapping[str, int]
    quantization: Mapping[str, int]
    norms: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """All that was found, as far as the examination came.

    Args:
        model: As it was named.
        environment: The machine and the versions.
        head: The head; None if there is none that can be used.
        error: Why the examination ended early.
        family_hidden: The hidden states that heads of this family were trained with.
        acceptance: Hidden states -> for each position of a draft the share of rounds in
            which it was accepted, and so were those before it.
        drafted: Rounds behind each of these figures.
        undrafted: Reason -> rounds that could not draft for it.
        depth: For each k from 0 on, the share of rounds in which drafting as deep as
            pays, which is the default, has drafted so many tokens.
        verify: w -> seconds of a verify forward of w tokens.
        draft: Seconds of one draft.
        exact: w -> the form in which a verify of w tokens has the bits, of logits and
            caches, that w forwards of one token give; ``none`` if no form has; None
            where drafting makes none so wide.
        rollback: How many caches of a kind are taken back in a way, ``KVCache trimmed``
            -> how many.
        recurrence, capture: What computes gated-delta layers, and how they are taken
            back; empty if there are none.
        capture_fault: Why a fused kernel is not used.
    """

    model: str
    environment: Mapping[str, Any]
    head: HeadFindings | None = None
    error: str = ""
    family_hidden: str = ""
    acceptance: Mapping[str, tuple[float, ...]] | None = None
    drafted: int = 0
    undrafted: Mapping[str, int] | None = None
    depth: tuple[float, ...] = ()
    verify: Mapping[int, float] | None = None
    draft: float | None = None
    exact: Mapping[int, str | None] | None = None
    rollback: Mapping[str, int] | None = None
    recurrence: str = ""
    capture: str = ""
    capture_fault: str = ""

    @property
    def self_check(self) -> str:
        """What comparing the recorded states with a loop's has shown; empty if none
        were to be recorded."""
        return self.capture_fault or ("passed" if self.capture else "")

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; seconds are seconds."""
        return asdict(self) | {"self_check": self.self_check}
