"""Find a head's tensors in a checkpoint, and tell how its norms are written.

The head is recognised by its tensors, never by the config: converted checkpoints often
declare a head that they no longer have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..errors import HeadNotFound, HeadUnreadable

PREFIXES = ("mtp.", "language_model.mtp.", "model.mtp.", "model.language_model.mtp.")
_FILES = "model*.safetensors"
_MARK = "fc.weight"  # every head has it, bare of prefix


@dataclass(frozen=True)
class HeadWeights:
    """A head as the checkpoint has it.

    Args:
        tensors: Name below the prefix -> lazily loaded array.
        source: The file, or files, for people.
        raw_norms: Whether norm weights are zero-centred, so that 1 must be added.
        evidence: What `raw_norms` was told by.
    """

    tensors: dict[str, mx.array]
    source: str
    raw_norms: bool
    evidence: str

    def shifted(self) -> dict[str, mx.array]:
        """The tensors with norm weights as stock's `nn.RMSNorm` multiplies them."""
        if not self.raw_norms:
            return self.tensors
        return {k: v + 1.0 if _is_norm(k) else v for k, v in self.tensors.items()}


def find_head(path: Path) -> HeadWeights:
    """The head in a checkpoint directory.

    Raises:
        HeadNotFound: If no file holds one.
        HeadUnreadable: If a weight file is cut short or damaged.
    """
    shards = [_load(file) for file in sorted(path.glob(_FILES))]
    for prefix in PREFIXES:
        holding = [s for s in shards if any(k.startswith(prefix) for k in s.arrays)]
        tensors = {
            key.removeprefix(prefix): array
            for shard in holding
            for key, array in shard.arrays.items()
            if key.startswith(prefix)
        }
        if _MARK in tensors:
            formats = {shard.format for shard in holding}
            raw, evidence = _norm_encoding(tensors, formats, shards)
            return HeadWeights(
                tensors, ", ".join(s.name for s in holding), raw, evidence
            )
    raise HeadNotFound(
        f"no MTP head in {path}: looked for tensors named "
        f"{', '.join(p + '*' for p in PREFIXES)} in {_FILES} ({len(shards)} files). "
        "Converted checkpoints often lack it; use the original checkpoint, or a "
        "conversion that kept its head."
    )


def check_readable(path: Path) -> None:
    """Look into every weight file of a checkpoint directory.

    Raises:
        HeadUnreadable: Naming the first file that is cut short or damaged.
    """
    for file in sorted(path.glob(_FILES)):
        _load(file)


@dataclass(frozen=True)
class _Shard:
    """One weight file, its arrays not read yet."""

    name: str
    arrays: Mapping[str, mx.array]
    format: str | None


def _load(file: Path) -> _Shard:
    try:
        arrays, metadata = mx.load(str(file), return_metadata=True)
        return _Shard(file.name, arrays, metadata.get("format"))
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise HeadUnreadable(
            f"{file} is damaged or cut short ({reason}); download it again."
        ) from error


def _is_norm(key: str) -> bool:
    return key.endswith("norm.weight") or ".pre_fc_norm_" in f".{key}"


def _conv_shape(shards: Iterable[_Shard]) -> tuple[int, ...] | None:
    """The shape of the trunk's first convolution kernel, if it has any."""
    kernels = (
        array.shape
        for shard in shards
        for key, array in shard.arrays.items()
        if key.endswith("conv1d.weight")
    )
    return next(kernels, None)


def _norm_encoding(
    tensors: Mapping[str, mx.array],
    formats: set[str | None],
    shards: Sequence[_Shard],
) -> tuple[bool, str]:
    """Whether norms are raw, decided once for the head, by the best evidence there is.

    MLX's own format marks shifted norms, and so does a trunk whose convolutions are
    in MLX's layout, since stock shifts and transposes together; but only a trunk of
    the same format speaks for the head, which may have been put beside a conversion.
    Without either, the q/k norms tell: near 0.75 when raw, above 1.7 when shifted (on
    released Qwen3.5 heads). Norms around the projection do not: theirs are below 0.5
    in both.
    """
    if formats == {"mlx"}:
        return False, "safetensors format: mlx"
    conv = _conv_shape(shard for shard in shards if shard.format in formats)
    if conv is not None:
        raw = conv[-1] != 1
        return raw, f"the trunk's conv1d is in {'raw' if raw else 'MLX'} layout {conv}"
    means = [v.astype(mx.float32).mean() for k, v in tensors.items() if _is_qk(k)]
    if means:
        mean = mx.stack(means).mean().item()
        return mean < 1.25, f"mean of the q/k norms {mean:.2f}"
    norms = [v.reshape(-1) for k, v in tensors.items() if _is_norm(k)]
    share = (mx.concatenate(norms) < 0).mean().item()
    return share > 0.05, f"share of negative norm weights {share:.2f}"


def _is_qk(key: str) -> bool:
    return key.endswith(("q_norm.weight", "k_norm.weight"))
