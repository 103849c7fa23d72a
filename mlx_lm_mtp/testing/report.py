"""What a check of a drafter came to, and the error that says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One contract that was broken.

    Args:
        check: Which check found it; `mlx_lm_mtp.testing.CHECKS` says what it tests.
        model: On which tiny model, empty if on none of them alone.
        text: What was expected, and what was seen.
    """

    check: str
    model: str
    text: str

    def __str__(self) -> str:
        where = f" on {self.model}" if self.model else ""
        return f"{self.check}{where}: {self.text}"


@dataclass(frozen=True)
class Report:
    """What was checked.

    Args:
        drafter: Its name.
        checks: The checks that were run.
        skipped: The others, and why each was left out.
        models: The tiny models.
        drafted: Tokens that the drafter proposed for itself, and that were verified.
        accepted: Of those, the ones that were accepted.
        findings: What is wrong; empty if nothing is.
        notes: What was not wrong, but is worth knowing.
        seconds: How long all of it took.
    """

    drafter: str
    checks: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    models: tuple[str, ...]
    drafted: int
    accepted: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens, its own alone; 0.0 if it proposed nothing."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def summary(self) -> str:
        """All of it for people, a line each."""
        head = (
            f"drafter {self.drafter!r}: {len(self.checks)} checks on "
            f"{len(self.models)} models in {self.seconds:.1f} s, {len(self.findings)} "
            f"findings; {self.accepted} of its own {self.drafted} drafts were accepted"
        )
        skipped = [f"not checked: {name}: {reason}" for name, reason in self.skipped]
        return "\n".join([head, *map(str, self.findings), *skipped, *self.notes])


class DrafterFault(AssertionError):
    """A drafter breaks its contract; the message lists everything that was found.

    Attributes:
        report: The whole of it.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(
            f"drafter {report.drafter!r} breaks its contract in "
            f"{len({f.check for f in report.findings})} of {len(report.checks)} "
            f"checks:\n{_listed(report.findings)}"
        )


def _listed(findings: Sequence[Finding]) -> str:
    return "\n".join(f"  {finding}" for finding in findings)
