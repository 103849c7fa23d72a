"""What turns the head's output into logits: the lm_head, or a cheaper copy of it.

Drafting costs one layer and the lm_head, which is the larger part where the vocabulary
is large. Drafts need not be exact, so they can be read from a copy of it: quantised to
fewer bits, or cut to the tokens that are likely to come. What is verified never passes
through here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import InvalidOption
from ..origin import ByModel
from .head import MTPHead

_GROUP_SIZES = (64, 32)


class Readout:
    """The lm_head as it is."""

    def __init__(self, head: MTPHead) -> None:
        self._head = head

    def begin(self) -> None:
        """A generation starts."""

    def see(self, tokens: mx.array) -> None:
        """These `(1, T)` tokens of the prompt may come again."""

    def logits(self, hidden: mx.array) -> mx.array:
        """`(1, T, V)` logits of `(1, T, H)` outputs of the head."""
        return self._head.logits(hidden)


class CheapReadout(Readout):
    """A copy of the lm_head, made once for each head and lm_head.

    Args:
        head: The head that drafts.
        bits: Of the copy; 0 leaves them as they are.
        shortlist: How many tokens can be drafted, the most frequent ones; those of the
            prompt, and special ones, come in addition. 0 is all.
        tokenizer: Tells which tokens are frequent; without one, ids are taken in order.

    Raises:
        InvalidOption: If the lm_head cannot be copied so.
    """

    def __init__(
        self, head: MTPHead, bits: int = 0, shortlist: int = 0, tokenizer: Any = None
    ) -> None:
        super().__init__(head)
        used = head.lm_head_used
        self._lm_head = _plain(used)
        self._bits = bits
        self._vocabulary = self._lm_head.weight.shape[0]
        self._cuts = 0 < shortlist < self._vocabulary
        source = [value for _, value in tree_flatten(used.parameters())]
        known, key = _copies_of(head), (bits, shortlist, id(tokenizer))
        copied, self._frequent, _ = known.get(key, ([], None, None))
        if not _same(copied, source):  # an adapter has replaced it since, say
            ids = None
            if self._cuts:
                ids = _likely(tokenizer, shortlist, self._vocabulary)
            self._frequent = Copy.of(self._lm_head, bits, ids)
            known[key] = source, self._frequent, tokenizer
        self.begin()

    def begin(self) -> None:
        """Only the frequent tokens are likely again."""
        self._copy = self._frequent
        self._seen: list[mx.array] = []

    def see(self, tokens: mx.array) -> None:
        """The tokens of the prompt are gathered when the first token is drafted."""
        if self._cuts:
            self._seen.append(tokens[0])

    def logits(self, hidden: mx.array) -> mx.array:
        """`(1, T, V)`; -inf for tokens that are not on the list."""
        if self._seen:
            self._gather()
        found = self._copy(self._head.readable(hidden))
        if self._copy.ids is None:
            return found
        shape = (*hidden.shape[:2], self._vocabulary)
        none = mx.full(shape, -mx.inf, dtype=found.dtype)
        ids = mx.broadcast_to(self._copy.ids, found.shape)
        return mx.put_along_axis(none, ids, found, axis=-1)

    def _gather(self) -> None:
        seen = {token for tokens in self._seen for token in tokens.tolist()}
        self._seen = []
        assert self._frequent.ids is not None
        rest = sorted(seen - set(self._frequent.ids.tolist()))
        if rest:
            self._copy = self._frequent.with_rows(
                Copy.of(self._lm_head, self._bits, rest)
            )


class Copy(NamedTuple):
    """Rows of an lm_head.

    Args:
        rows: `(N, H)` weights; or these packed, their scales and their biases.
        how: Group size, bits and mode of packed rows.
        bias: `(N,)`, or None.
        ids: `(N,)`, whose rows they are; None if all are there.
    """

    rows: tuple[mx.array, ...]
    how: dict[str, Any]
    bias: mx.array | None
    ids: mx.array | None

    @classmethod
    def of(cls, lm_head: Any, bits: int, ids: list[int] | None) -> Copy:
        """The rows of these ids, in at most so many bits; evaluated.

        Raises:
            InvalidOption: If they cannot be quantised.
        """
        kept = slice(None) if ids is None else mx.array(ids)
        how, rows = _stored(lm_head)
        rows = tuple(part[kept] for part in rows)
        if bits and bits < how.get("bits", 16):
            dense = mx.dequantize(*rows, **how) if how else rows[0]
            how = {"group_size": _group_size(dense.shape[-1]), "bits": bits}
            rows = tuple(mx.quantize(dense, **how))
        bias = lm_head.bias[kept] if "bias" in lm_head else None
        mx.eval(rows, bias)
        return cls(rows, how, bias, None if ids is None else mx.array(ids))

    def with_rows(self, more: Copy) -> Copy:
        """These rows, and others of the same kind behind them."""
        rows = tuple(map(_joined, self.rows, more.rows))
        bias = None if self.bias is None else _joined(self.bias, more.bias)
        mx.eval(rows, bias)
        return Copy(rows, self.how, bias, _joined(self.ids, more.ids))

    def __call__(self, hidden: mx.array) -> mx.array:
        """`(1, T, N)` logits of `(1, T, H)`."""
        if self.how:
            found = mx.quantized_matmul(hidden, *self.rows, transpose=True, **self.how)
        else:
            found = hidden @ self.rows[0].T
        return found if self.bias is None else found + self.bias


# (bits, shortlist, tokenizer) -> the arrays that were copied from, the copy, and the
# tokenizer, so that no other one takes its identity.
_Copies = dict[tuple[int, int, int], tuple[list[mx.array], Copy, Any]]
_copies: ByModel[_Copies] = ByModel()


def _copies_of(head: MTPHead) -> _Copies:
    """The copies that were made for a head; they go with it."""
    known = _copies.get(head)
    if known is None:
        known = _copies[head] = {}
    return known


def _same(copied: list[mx.array], source: list[mx.array]) -> bool:
    """Whether these are the very arrays."""
    pairs = zip(copied, source, strict=False)
    return len(copied) == len(source) and all(a is b for a, b in pairs)


def _plain(lm_head: Any) -> Any:
    """An lm_head, or an embedding in its place, without the adapter around it."""
    plain = lm_head.fuse() if hasattr(lm_head, "fuse") else lm_head
    kinds = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
    if not isinstance(plain, kinds):
        raise InvalidOption(
            f"the lm_head is {type(plain).__name__}, which cannot be copied for "
            "drafts; leave out draft options draft_head_bits and shortlist."
        )
    return plain


def _stored(lm_head: Any) -> tuple[dict[str, Any], tuple[mx.array, ...]]:
    """How an lm_head is quantised, if it is, and its arrays of V rows."""
    if "scales" not in lm_head:
        return {}, (lm_head.weight,)
    how = {name: getattr(lm_head, name) for name in ("group_size", "bits", "mode")}
    rows = [lm_head.weight, lm_head.scales]
    rows += [lm_head.biases] if lm_head.get("biases") is not None else []
    return how, tuple(rows)


def _joined(first: Any, second: Any) -> mx.array:
    return mx.concatenate([first, second])


def _group_size(size: int) -> int:
    for group in _GROUP_SIZES:
        if size % group == 0:
            return group
    raise InvalidOption(
        f"hidden states of {size} numbers cannot be quantised in groups of "
        f"{_GROUP_SIZES[-1]}; leave out draft option draft_head_bits."
    )


def _likely(tokenizer: Any, n: int, vocabulary: int) -> list[int]:
    """The n most frequent ids, and the special ones, in the order of ids."""
    special = set(getattr(tokenizer, "eos_token_ids", None) or ())
    special |= set(getattr(tokenizer, "all_special_ids", None) or ())
    frequent = dict.fromkeys((*by_frequency(tokenizer), *range(vocabulary)))
    ids = {*list(frequent)[:n], *special}
    return sorted(i for i in ids if 0 <= i < vocabulary)


def by_frequency(tokenizer: Any) -> Iterator[int]:
    """Ids as a byte-pair tokenizer has learnt them: letters, then merges in order.

    Which is the order of their frequency in what it was trained on. Of other
    tokenizers, and of none, nothing.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    model = json.loads(backend.to_str())["model"]
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocabulary, dict) or not merges:
        return
    pairs = (m.split(" ") if isinstance(m, str) else m for m in merges)
    merged = dict.fromkeys("".join(pair) for pair in pairs)
    yield from sorted(i for token, i in vocabulary.items() if token not in merged)
    yield from (vocabulary[token] for token in merged if token in vocabulary)
