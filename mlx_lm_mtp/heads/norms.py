"""How the norms of a head are written: as they are, or less 1.

Original Qwen checkpoints keep RMSNorm weights around zero and add 1 when they compute;
conversions have added it. Wrong norms give no error, only drafts that are never
accepted, so the question is answered once for a head, by the best evidence there is,
and the answer is kept with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from .shards import Shard

DECLARED = "mtp_norms"  # in a sidecar's metadata: raw or shifted


class Encoding(NamedTuple):
    """How norm weights are written.

    Args:
        raw: Whether 1 must be added.
        evidence: What it was told by.
    """

    raw: bool
    evidence: str


def encoding(
    tensors: Mapping[str, mx.array], holding: Sequence[Shard], near: Sequence[Shard]
) -> Encoding:
    """Decide for a head.

    What a file declares of its head counts before all; then MLX's own format, which
    marks shifted norms; then a trunk whose convolutions are in MLX's layout, since
    stock shifts and transposes together. But only a trunk of the same format speaks for
    the head, which may have been put beside a conversion. Without these, the q/k norms
    tell: near 0.75 when raw, above 1.7 when shifted (on released Qwen3.5 heads). Norms
    around the projection do not: theirs are below 0.5 in both.

    Args:
        tensors: The head's.
        holding: The files that hold it.
        near: All files beside it, these included.
    """
    declared = {shard.metadata.get(DECLARED) for shard in holding} - {None}
    if len(declared) == 1:
        word = declared.pop()
        return Encoding(word == "raw", f"declared in the file: {word}")
    formats = {shard.format for shard in holding}
    if formats == {"mlx"}:
        return Encoding(False, "safetensors format: mlx")
    conv = _conv_shape(shard for shard in near if shard.format in formats)
    if conv is not None:
        raw = conv[-1] != 1
        layout = "raw" if raw else "MLX"
        return Encoding(raw, f"the trunk's conv1d is in {layout} layout {conv}")
    return _by_values(tensors)


def shifted(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Raw norm weights as stock's `nn.RMSNorm` multiplies them."""
    return {k: v + 1.0 if is_norm(k) else v for k, v in tensors.items()}


def is_norm(key: str) -> bool:
    """Whether a tensor of a Qwen head is a norm's weight."""
    return key.endswith("norm.weight") or ".pre_fc_norm_" in f".{key}"


def _conv_shape(shards: Iterable[Shard]) -> tuple[int, ...] | None:
    """The shape of the trunk's first convolution kernel, if it has any."""
    kernels = (
        array.shape
        for shard in shards
        for key, array in shard.arrays.items()
        if key.endswith("conv1d.weight")
    )
    return next(kernels, None)


def _by_values(tensors: Mapping[str, mx.array]) -> Encoding:
    qk = ("q_norm.weight", "k_norm.weight")
    means = [v.astype(mx.float32).mean() for k, v in tensors.items() if k.endswith(qk)]
    if means:
        mean = mx.stack(means).mean().item()
        return Encoding(mean < 1.25, f"mean of the q/k norms {mean:.2f}")
    norms = [v.reshape(-1) for k, v in tensors.items() if is_norm(k)]
    if not norms:
        return Encoding(False, "there are no norms")
    share = (mx.concatenate(norms) < 0).mean().item()
    return Encoding(share > 0.05, f"share of negative norm weights {share:.2f}")
