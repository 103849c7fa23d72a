"""What the heads of one family of models have in common: names, order, layers.

All heads of the DeepSeek kind compute the same thing (DeepSeek-V3 report,
arXiv:2412.19437, section 2.2): the embedding of a token and the hidden state before it,
each normalised, side by side through a projection, then a decoder layer or two, a norm,
and an lm_head. Families differ in what they call the parts, in which half comes first,
in the layer, and in what stands in for the hidden state at the next depth. A
:class:`Family` says so, and nothing else has to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Tensors = Mapping[str, mx.array]
Renames = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Plan:
    """What a head's layers are built from.

    Args:
        trunk: Stock's language model.
        config: The checkpoint's ``config.json``, for what stock's arguments drop.
        names: The head's tensors, as :class:`.head.MTPHead` calls them.
    """

    trunk: Any
    config: Mapping[str, Any]
    names: frozenset[str]

    @property
    def args(self) -> Any:
        """Stock's arguments of the trunk."""
        return self.trunk.args

    @property
    def layer(self) -> type[nn.Module]:
        """Stock's class of a decoder layer."""
        inner = getattr(self.trunk, "model", None) or self.trunk.backbone
        return type(inner.layers[-1])


def as_they_are(trunk: Any, tensors: Tensors) -> dict[str, mx.array]:
    """The tensors of a head whose layers are named as stock's."""
    return dict(tensors)


@dataclass(frozen=True)
class Family:
    """How the heads of some model types are written, and what they compute.

    Args:
        models: The stock modules whose models have such heads.
        names: For an architecture's arguments, the beginnings of tensor names and what
            :class:`.head.MTPHead` has instead; the first that fits counts.
        layers: Builds the head's layers out of stock's classes.
        sanitize: Brings the layers' tensors into stock's form: experts stacked, say.
        hidden_first: Whether the projection takes the hidden state before the
            embedding.
        last_norm: The norm before the lm_head: the head's ``own``, or the ``trunk``'s.
        hidden: The target's hidden state that the head was trained with, ``post_norm``
            or ``pre_norm``.
        recycles: Which output of the head stands in for it at the next depth.
        zero_centred: Whether original checkpoints store norm weights less 1.
        array_mask: Whether attention takes an array for a mask, and no word.
        window: Gives how many tokens attention looks back on; None for all.
        source: Where this is known from.
    """

    models: tuple[str, ...]
    names: Callable[[Any], Renames]
    layers: Callable[[Plan], list[nn.Module]]
    sanitize: Callable[[Any, Tensors], dict[str, mx.array]] = as_they_are
    hidden_first: bool = False
    last_norm: str = "own"
    hidden: str = "post_norm"
    recycles: str = "post_norm"
    zero_centred: bool = False
    array_mask: bool = False
    window: Callable[[Plan], int | None] = lambda plan: None
    source: str = ""


def through_stock(trunk: Any, tensors: Tensors, before: str) -> dict[str, mx.array]:
    """Stock's own `sanitize` over the layers of a head, as if they were all it has.

    Args:
        trunk: Stock's language model.
        tensors: ``layers.{i}.*`` of the head; other names stay as they are.
        before: What stock puts before ``layers.``, as in ``model.``.
    """
    ours = {k: v for k, v in tensors.items() if k.startswith("layers.")}
    count = 1 + max((int(k.split(".")[1]) for k in ours), default=0)
    shim = SimpleNamespace(args=dataclasses.replace(trunk.args))
    shim.args.num_hidden_layers = count
    found = type(trunk).sanitize(shim, {before + k: v for k, v in ours.items()})
    rest = {k: v for k, v in tensors.items() if k not in ours}
    return rest | {k.removeprefix(before): v for k, v in found.items()}
