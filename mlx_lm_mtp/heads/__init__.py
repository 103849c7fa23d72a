"""MTP heads: found, read, built, and kept beside the model that they belong to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import anatomy, origin, random_state
from ..errors import HeadMismatch, HeadNotFound, HeadUnreadable
from . import hub, quantized, shards
from .families import family_of
from .find import HeadWeights, find_head, head_files
from .head import MTPHead

_USE = "Use the head of the checkpoint that the model was made from."


@dataclass(frozen=True)
class Loaded:
    """A head that was built, and what is known of where it came from.

    Args:
        head: The head.
        place: The folder or file.
        weights: As it was found; its tensors are let go, for the head has its own.
        tensors: Name, as the head has it -> shape and type in the files.
    """

    head: MTPHead
    place: Path
    weights: HeadWeights
    tensors: dict[str, tuple[tuple[int, ...], mx.Dtype]]

    @classmethod
    def of(cls, head: MTPHead, place: Path, weights: HeadWeights) -> Loaded:
        """A head that has just been built."""
        tensors = {k: (v.shape, v.dtype) for k, v in weights.tensors.items()}
        return cls(head, place, replace(weights, tensors={}), tensors)


# Of each model its heads by the place that was asked for, the last one at the end; the
# one without a place is the model's own.
_loaded: origin.ByModel[dict[str, Loaded]] = origin.ByModel()


def head_of(model: nn.Module, source: str | Path | None = None) -> MTPHead:
    """The model's head.

    Args:
        model: The target.
        source: Where a head is, a path or a repository; by default the place that
            the model was loaded from, or the one that :func:`load_head` was given.

    Raises:
        HeadNotFound: If the place is not known or holds no head.
        HeadMismatch: If the head does not fit the model.
        HeadUnreadable: If a weight file is damaged.
    """
    loaded = (_loaded.get(model) or {}).get(str(source or ""))
    if loaded is not None:
        loaded.head.follow(model)
        return loaded.head
    if source:
        return _load(model, source, str(source))
    place = origin.path_of(model)
    if not place:
        raise HeadNotFound(
            "it is not known where this model was loaded from, so its MTP head cannot "
            "be found; load it with mlx_lm.load after mlx_lm_mtp.install(), or call "
            "mlx_lm_mtp.load_head(model, path)."
        )
    return load_head(model, place)


def load_head(model: nn.Module, path: str | Path) -> MTPHead:
    """Build a head and make it the model's.

    Args:
        model: The target, a stock model of a family whose heads are known.
        path: What holds the head: a checkpoint's folder, a head's own, one file, or a
            repository on the hub, of which only the files with the head are fetched.

    Raises:
        HeadNotFound, HeadMismatch, HeadUnreadable: See :func:`head_of`.
    """
    return _load(model, path, "")


def _load(model: nn.Module, path: str | Path, asked: str) -> MTPHead:
    """Build the head at a place, and keep it for whoever asks for it so."""
    family, trunk = family_of(model), anatomy.language_model(model)
    place = hub.local(path, lambda names: head_files(names, family, trunk.args))
    weights = find_head(place, family, trunk.args)
    if weights.passed_over:
        warnings.warn(
            f"{place} has {1 + len(weights.passed_over)} MTP heads: that in "
            f"{weights.source} is used, that in {', '.join(weights.passed_over)} is "
            "not, since a sidecar is put beside a model on purpose.",
            stacklevel=3,
        )
    config = _config(model, place)
    try:
        head = _built(model, weights, config)
    except (ValueError, TypeError) as error:
        raise HeadMismatch(
            f"the MTP head in {weights.source} does not fit this model: "
            f"{str(error).rstrip('.')}. {_USE}"
        ) from error
    _evaluate(head, weights.source)
    head.provenance = f"in {weights.source}, whose norms are {_written(weights)}"
    known = _loaded.get(model) or {}
    known.pop(asked, None)
    _loaded[model] = known | {asked: Loaded.of(head, place, weights)}
    return head


def loaded_of(model: nn.Module) -> Loaded | None:
    """What is known of the model's head that was loaded last, if one was."""
    return next(reversed((_loaded.get(model) or {}).values()), None)


def _config(model: nn.Module, place: Path) -> dict[str, Any]:
    """The configuration beside the head, or else the model's."""
    folder = place if place.is_dir() else place.parent
    found = shards.config(folder)
    path = origin.path_of(model)
    if path is not None and not _text(found):
        found = shards.config(path)
    return _text(found)


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **(config.get("text_config") or {})}


def _written(weights: HeadWeights) -> str:
    """How the norms are taken to be written, and by what evidence."""
    form = "zero-centred" if weights.norms.raw else "as stock multiplies them"
    return f"{form} ({weights.norms.evidence})"


def _built(model: nn.Module, weights: HeadWeights, config: dict[str, Any]) -> MTPHead:
    family, trunk = family_of(model), anatomy.language_model(model)
    tensors = family.sanitize(trunk, quantized.plain(weights.shifted()))
    with random_state.untouched():
        head = MTPHead(model, frozenset(tensors), config)
    quantized.quantize(head, tensors, weights.declared)
    _check_fit(head, tensors)
    head.load_weights(list(tensors.items()))
    head.eval()
    return head


def _evaluate(head: MTPHead, source: str) -> None:
    try:
        mx.eval(head.parameters())
    except RuntimeError as error:
        raise HeadUnreadable(
            f"the MTP head in {source} cannot be read ({error}); download it again."
        ) from error


def _check_fit(head: MTPHead, tensors: Mapping[str, mx.array]) -> None:
    wanted = dict(tree_flatten(head.parameters()))
    for name in sorted(wanted.keys() | tensors.keys()):
        shape = tensors[name].shape if name in tensors else "missing"
        needed = wanted[name].shape if name in wanted else "no such tensor"
        if shape != needed:
            raise HeadMismatch(f"{name} is {shape}, the model needs {needed}.")
        floats = mx.issubdtype(wanted[name].dtype, mx.floating)
        if floats != mx.issubdtype(tensors[name].dtype, mx.floating):
            raise HeadMismatch(
                f"{name} is of {tensors[name].dtype}, the model needs "
                f"{wanted[name].dtype}."
            )
