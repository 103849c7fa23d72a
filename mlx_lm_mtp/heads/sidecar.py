"""Write a head into a file of its own beside the model that it belongs to.

Stock reads ``model*.safetensors`` and nothing else, so a sidecar changes no trunk.
Its tensors are as :class:`.head.MTPHead` has them, below ``mtp.``: experts stacked,
norms as `nn.RMSNorm` multiplies them. Its metadata declare that, the quantisation and
the family.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from ..errors import InvalidOption
from .find import QUANTIZED, SIDECARS
from .norms import DECLARED

if TYPE_CHECKING:
    from .head import MTPHead

FILE = "mtp.safetensors"
FAMILY = "mtp_family"  # in the metadata
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
_GROUP = 64
_PREFIX = "mtp."
# Heads that were quantised by others keep the projection plain: it is small, and what
# the head knows of the target goes through it.
_PLAIN = ("fc",)


@dataclass(frozen=True)
class Packing:
    """How to quantise a head.

    Args:
        bits: Of each weight.
        group_size: Weights that share a scale.
        option: What the user calls the bits.
    """

    bits: int
    group_size: int = _GROUP
    option: str = "bits"

    @classmethod
    def of(
        cls, bits: int | None, group_size: int | None, options: tuple[str, str]
    ) -> Packing | None:
        """What was asked for; None is full precision.

        Args:
            bits: Of each weight, if it is to be quantised.
            group_size: Weights that share a scale; 64 by default.
            options: What the user calls the two.

        Raises:
            InvalidOption: If MLX has no such quantisation.
        """
        if bits is None:
            if group_size is not None:
                raise InvalidOption(
                    f"{options[1]} is of no use without {options[0]}; give both."
                )
            return None
        group_size = _GROUP if group_size is None else group_size
        values = zip(options, (bits, group_size), (BITS, GROUPS), strict=True)
        for option, value, known in values:
            if value not in known:
                choices = ", ".join(map(str, known))
                raise InvalidOption(f"{option} is {value!r}; choose one of {choices}.")
        return cls(bits, group_size, options[0])


@dataclass(frozen=True)
class Sidecar:
    """A sidecar that was written.

    Args:
        file: The file.
        tensors: How many it holds.
        nbytes: Their size.
        dtype: Of the tensors that are not packed.
        quantization: As in the metadata, or None.
    """

    file: Path
    tensors: int
    nbytes: int
    dtype: str
    quantization: dict[str, Any] | None

    def __str__(self) -> str:
        size = f"{self.tensors} tensors, {self.nbytes / 1e6:.1f} MB, {self.dtype}"
        return f"{size}, {self._packed()}"

    def _packed(self) -> str:
        said = self.quantization
        if said is None:
            return "not quantised"
        text = f"quantised to {said['bits']} bits in groups of {said['group_size']}"
        others = sum(isinstance(value, dict) for value in said.values())
        return f"{text} ({others} parts otherwise)" if others else text


def cast(head: MTPHead, dtype: mx.Dtype, casts: Callable[[str], bool]) -> None:
    """Give the tensors that are floating another type.

    Args:
        head: Changed in place.
        dtype: Wanted.
        casts: Whether to cast the tensor of a name; stock keeps some in fp32.
    """

    def as_wanted(name: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floating and casts(name) else value

    head.update(tree_map_with_path(as_wanted, head.parameters()))


def quantize(head: MTPHead, model: nn.Module, packing: Packing) -> None:
    """Quantise what MLX quantises, but for `fc` and what the groups do not divide.

    Args:
        head: Changed in place.
        model: Its trunk, whose routers may want more bits than the rest.
        packing: How.

    Raises:
        InvalidOption: If the head is quantised already, or no part of it can be.
    """
    found = quantization(head)
    if found is not None:
        raise InvalidOption(
            f"{packing.option} is {packing.bits}, but the head is quantised to "
            f"{found['bits']} bits already; leave it out to keep the head as it is."
        )
    trunk = getattr(model, "quant_predicate", None)

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path in _PLAIN or not hasattr(module, "to_quantized"):
            return False
        wanted = trunk(path, module) if trunk else True
        groups = [packing.group_size]
        groups += [wanted["group_size"]] if isinstance(wanted, dict) else []
        divided = all(module.weight.shape[-1] % group == 0 for group in groups)
        return wanted if divided else False

    nn.quantize(head, packing.group_size, packing.bits, class_predicate=how)
    if quantization(head) is None:
        raise InvalidOption(
            f"the group size is {packing.group_size}, which divides no part of this "
            "head; choose a smaller one."
        )


def quantization(head: MTPHead) -> dict[str, Any] | None:
    """How a head is quantised: most of it, then by path the parts that differ."""
    parts = {
        path: {"bits": m.bits, "group_size": m.group_size, "mode": m.mode}
        for path, m in head.named_modules()
        if hasattr(m, "bits")
    }
    if not parts:
        return None
    usual = json.loads(Counter(map(json.dumps, parts.values())).most_common(1)[0][0])
    return usual | {path: how for path, how in parts.items() if how != usual}


def check_free(folder: Path, force: bool) -> None:
    """See that a sidecar can be written, and will be the only one of the folder.

    Raises:
        InvalidOption: If there is one already; of our name, unless it may be replaced.
    """
    for file in sorted(folder.glob(SIDECARS[0])):
        if file.name != FILE:  # it would be read together with ours
            raise InvalidOption(f"{file} is a head already; move it away first.")
        if not force:
            raise InvalidOption(f"{file} is there already; --force replaces it.")


def write(head: MTPHead, folder: Path, family: str) -> Sidecar:
    """Write a head as ``mtp.safetensors``; an interrupted write leaves nothing.

    Args:
        head: As it is to be read again.
        folder: The model's.
        family: The name of the stock module that the trunk comes from.

    Raises:
        InvalidOption: If the folder cannot be written to.
    """
    tensors = {_PREFIX + k: v for k, v in tree_flatten(head.parameters())}
    said = quantization(head)
    metadata = {"format": "mlx", DECLARED: "shifted", FAMILY: family}
    if said is not None:
        metadata[QUANTIZED] = json.dumps(said)
    file = folder / FILE
    try:
        with _replacing(file) as temporary:
            mx.save_safetensors(str(temporary), tensors, metadata=metadata)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InvalidOption(
            f"{file} cannot be written ({reason}); make room, or name another folder."
        ) from error
    dtypes = Counter(v.dtype for v in tensors.values() if v.dtype != mx.uint32)
    dtype = str(dtypes.most_common(1)[0][0]).removeprefix("mlx.core.")
    nbytes = sum(v.nbytes for v in tensors.values())
    return Sidecar(file, len(tensors), nbytes, dtype, said)


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of another once it is whole."""
    # No pattern of stock's or ours finds it, should the process be killed.
    own = f".mtp-{os.getpid()}-{secrets.token_hex(4)}.safetensors"
    temporary = file.with_name(own)
    try:
        yield temporary
        _flush(temporary)  # or a power cut may leave the name without the contents
        os.replace(temporary, file)
        _flush(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
