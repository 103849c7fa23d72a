"""Whether two models mean the same text by the same tokens."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidOption


def check_same_vocabulary(target: Any, drafter: Any, name: Any) -> None:
    """See that a draft model's tokens are the target's.

    Either may have some more of them, as models of one family do; tokens that both
    have must be the same text.

    Args:
        target, drafter: Tokenizers, as stock wraps them.
        name: How the user has named the draft model.

    Raises:
        InvalidOption: If they are not.
    """
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    common = ours.keys() & theirs.keys()
    moved = [text for text in common if ours[text] != theirs[text]]
    if not moved and len(common) >= 0.9 * min(len(ours), len(theirs)):
        return
    if moved:
        text = min(moved)
        reason = f"{text!r} is token {theirs[text]} there and {ours[text]} here"
    else:
        reason = f"only {len(common)} of {len(ours)} tokens are in both"
    raise InvalidOption(
        f"draft model {name} has another vocabulary than the model ({reason}); choose "
        "one of the same family."
    )
