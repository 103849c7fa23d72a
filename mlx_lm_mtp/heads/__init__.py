"""MTP heads: where a model's head is, and the head itself, built at first use."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from .. import origin, random_state
from ..errors import HeadMismatch, HeadNotFound, HeadUnreadable
from .qwen import MODULES, MTPHead, renamed
from .weights import HeadWeights, find_head

_USE = "Use the head of the checkpoint that the model was made from."

_heads: origin.ByModel[MTPHead] = origin.ByModel()


def head_of(model: nn.Module) -> MTPHead:
    """The model's head, from the directory that the model was loaded from.

    Raises:
        HeadNotFound: If the directory is not known or holds no head.
        HeadMismatch: If the head does not fit the model.
        HeadUnreadable: If a weight file is damaged.
    """
    head = _heads.get(model)
    if head is not None:
        head.follow(model)
        return head
    path = origin.path_of(model)
    if path is None:
        raise HeadNotFound(
            "it is not known where this model was loaded from, so its MTP head cannot "
            "be found; load it with mlx_lm.load after mlx_lm_mtp.install(), or call "
            "mlx_lm_mtp.load_head(model, path)."
        )
    return load_head(model, path)


def load_head(model: nn.Module, path: str | Path) -> MTPHead:
    """Build a head from a checkpoint directory and make it the model's head.

    Args:
        model: The target, a stock Qwen3-Next or Qwen3.5 model.
        path: The directory with the head's tensors.

    Raises:
        HeadNotFound, HeadMismatch, HeadUnreadable: See :func:`head_of`.
    """
    check_family(model)
    weights = find_head(Path(path))
    try:
        head = _built(model, weights)
    except ValueError as error:
        if isinstance(error, HeadMismatch):
            raise
        raise HeadMismatch(
            f"the MTP head in {weights.source} does not fit this model: {error} {_USE}"
        ) from error
    _load(head, weights.source)
    _heads[model] = head
    return head


def check_family(model: nn.Module) -> None:
    """See that heads of such models are known.

    Raises:
        HeadNotFound: If they are not.
    """
    family = type(model).__module__.rpartition(".")[2]
    if family not in MODULES:
        raise HeadNotFound(
            f"no MTP head is known for models of type {family!r}; known are: "
            f"{', '.join(MODULES)}. Use another drafter, or plain decoding."
        )


def _built(model: nn.Module, weights: HeadWeights) -> MTPHead:
    tensors = renamed(weights.shifted())
    own = frozenset(n for n in ("embed_tokens", "lm_head") if f"{n}.weight" in tensors)
    with random_state.untouched():
        head = MTPHead(model, own)
    _quantize(head, tensors)
    _check_fit(head, tensors, weights.source)
    head.load_weights(list(tensors.items()))
    head.eval()
    return head


def _load(head: MTPHead, source: str) -> None:
    try:
        mx.eval(head.parameters())
    except RuntimeError as error:
        raise HeadUnreadable(
            f"the MTP head in {source} cannot be read ({error}); download it again."
        ) from error


def _quantize(head: MTPHead, tensors: dict[str, mx.array]) -> None:
    def params(path: str, module: nn.Module) -> bool | dict:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in tensors:
            return False
        return infer_quant_config(path, module, tensors)

    nn.quantize(head, class_predicate=params)


def _check_fit(head: MTPHead, tensors: dict[str, mx.array], source: str) -> None:
    wanted = {k: v.shape for k, v in tree_flatten(head.parameters())}
    given = {k: v.shape for k, v in tensors.items()}
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise HeadMismatch(
                f"the MTP head in {source} does not fit this model: {name} is "
                f"{given.get(name, 'missing')}, the model needs "
                f"{wanted.get(name, 'no such tensor')}. {_USE}"
            )
