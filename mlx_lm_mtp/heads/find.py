"""Find a head's tensors, in whatever layout they are.

A head is recognised by its tensors, never by a configuration: converted checkpoints
often declare a head that they no longer have. The layouts:

==============  =====================================================================
in the shards   original repositories (``mtp.*``), conversions that kept their head
                (``language_model.mtp.*``), the layer behind the last (DeepSeek, GLM)
sidecar         ``mtp.safetensors`` beside the model, or in a folder below it
folder          a head of its own, with names bare of any prefix
file            one file, named by the user
==============  =====================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import HeadNotFound, HeadUnreadable
from .family import Family, Renames
from .norms import Encoding, encoding, shifted
from .shards import TRUNK, Shard, config, index, load

# Where a checkpoint may put all its names below.
ROOTS = ("", "language_model.", "model.", "model.language_model.")
# The first of these that is there counts.
SIDECARS = (
    "mtp*.safetensors",
    "optiq/mtp*.safetensors",
    "mtp/*.safetensors",
)
OURS: Renames = (("mtp.", ""),)
BARE: Renames = (("", ""),)
_MARK = frozenset({"fc.weight"})  # every head has it
# Bare names might be anybody's.
_BARE_MARK = _MARK | {"pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"}
QUANTIZED = "mtp_quantization"  # in a sidecar's metadata


@dataclass(frozen=True)
class HeadWeights:
    """A head as it was found.

    Args:
        tensors: Name, as :class:`.head.MTPHead` has it -> lazily loaded array.
        source: The file, or files, for people.
        layout: One of those above.
        norms: How its norms are written.
        declared: The quantisation that its file declares, a JSON text, if any.
        passed_over: Other places with a head, which do not count.
    """

    tensors: dict[str, mx.array]
    source: str
    layout: str
    norms: Encoding
    declared: str | None = None
    passed_over: tuple[str, ...] = ()

    def shifted(self) -> dict[str, mx.array]:
        """The tensors with norm weights as stock's `nn.RMSNorm` multiplies them."""
        return shifted(self.tensors) if self.norms.raw else self.tensors


def find_head(path: Path, family: Family, args: Any) -> HeadWeights:
    """The head at a path: a model's folder, a head's own, or one file.

    A sidecar counts before a head in the model's shards, for somebody has put it there
    on purpose.

    Args:
        path: The folder or file.
        family: How the names of such heads begin.
        args: Stock's arguments of the trunk.

    Raises:
        HeadNotFound: If no file holds one.
        HeadUnreadable: If a weight file is cut short, damaged, or missing.
    """
    tables = _tables(family.names(args))
    found = list(_candidates(path, tables, family))
    if not found:
        raise HeadNotFound(_nothing(path, family, args))
    first, *others = found
    return HeadWeights(
        **{**vars(first), "passed_over": tuple(o.source for o in others)}
    )


def head_files(names: Mapping[str, str], family: Family, args: Any) -> set[str]:
    """The files that hold a head, by an index of tensor -> file."""
    for table in _tables(family.names(args)):
        ours = {key: _renamed(key, table) for key in names}
        if set(ours.values()) >= _MARK:
            return {names[key] for key, name in ours.items() if name is not None}
    return set()


# --- candidates -------------------------------------------------------------------


def _candidates(
    path: Path, tables: Sequence[Renames], family: Family
) -> Iterator[HeadWeights]:
    if path.is_file():
        file = [load(path)]
        yield from _taken(file, file, [*tables, BARE], "file", family)
        return
    trunk = [load(file) for file in sorted(path.glob(TRUNK))]
    sidecars = []
    for pattern in SIDECARS:
        found = [load(file, path) for file in sorted(path.glob(pattern))]
        beside = [*found, *trunk]
        sidecars += _taken(found, beside, [*tables, BARE], "sidecar", family)
    yield from sidecars
    if not sidecars:  # which need no shards beside them
        _check_index(path, tables)
    own = list(_taken(trunk, trunk, tables, "in the shards", family))
    yield from own
    if not own:
        yield from _taken(trunk, trunk, [BARE], "folder", family)


def _taken(
    found: Sequence[Shard],
    near: Sequence[Shard],
    tables: Iterable[Renames],
    layout: str,
    family: Family,
) -> Iterator[HeadWeights]:
    """The head in some files, by the first table under which there is one."""
    for table in tables:
        tensors: dict[str, mx.array] = {}
        holding = []
        for shard in found:
            ours = {_renamed(k, table): v for k, v in shard.arrays.items()}
            ours.pop(None, None)
            tensors |= ours
            holding += [shard] if ours else []
        if not (_BARE_MARK if table == BARE else _MARK) <= tensors.keys():
            continue
        plain = Encoding(False, "heads of this family store them so")
        written = encoding(tensors, holding, near)
        declared = {s.metadata.get(QUANTIZED) for s in holding} - {None}
        yield HeadWeights(
            tensors,
            ", ".join(shard.name for shard in holding),
            layout,
            written if family.zero_centred else plain,
            declared.pop() if len(declared) == 1 else None,
        )
        return


def _tables(names: Renames) -> list[Renames]:
    """A family's names below each root, and those that this package writes."""
    below = [tuple((root + old, new) for old, new in names) for root in ROOTS]
    return [*below, *([] if names == OURS else [OURS])]


def _renamed(key: str, table: Renames) -> str | None:
    """A tensor's name as we have it; None if it is none of the head's."""
    for old, new in table:
        if key.startswith(old):
            return new + key.removeprefix(old)
    return None


# --- what is wrong ----------------------------------------------------------------


def _check_index(path: Path, tables: Sequence[Renames]) -> None:
    """See that the files are there that the index names for the head."""
    if not path.is_dir():
        return
    places = index(path)
    for name, file in places.items():
        ours = any(_renamed(name, table) is not None for table in tables)
        if ours and not (path / file).is_file():
            raise HeadUnreadable(
                f"{path / file} is missing, which the index names for {name}; "
                "download it."
            )


def _nothing(path: Path, family: Family, args: Any) -> str:
    if not path.exists():
        return f"{path} does not exist, so no MTP head is there; name another place."
    start = family.names(args)[-1][0]
    names = ", ".join(f"{root}{start}*" for root in ROOTS)
    if path.is_file():
        return f"no MTP head in {path}: looked for tensors named {names}."
    files = len(list(path.glob(TRUNK)))
    declared = _declared(config(path))
    return (
        f"no MTP head in {path}: looked for tensors named {names} in {TRUNK} "
        f"({files} files) and in {', '.join(SIDECARS)}.{declared} Converted "
        "checkpoints often lack it; use the original checkpoint, name it with "
        "--mtp-head, or put its head beside this one (mlx_lm_mtp extract)."
    )


def _declared(said: Mapping[str, Any]) -> str:
    """What the configuration says that is not so."""
    both = {**said, **(said.get("text_config") or {})}
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if both.get(key):
            return f" Its config.json declares one all the same ({key}: {both[key]})."
    return ""
