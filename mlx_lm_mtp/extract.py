"""`mlx_lm_mtp extract`: put the head of one checkpoint beside a converted model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DraftError, HeadMismatch, InvalidOption

if TYPE_CHECKING:
    import mlx.nn as nn

    from .heads.head import MTPHead
    from .heads.sidecar import Packing
    from .stats import DraftStats

DESCRIPTION = (
    "Put the MTP head of a checkpoint beside a converted model, in mtp.safetensors, "
    "after a look whether the two belong together. See docs/converting.md."
)
_DTYPES = ("bfloat16", "float16", "float32")
# What the shapes of a head alone do not tell apart, or not always.
_SIZES = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_TEXT = (
    "The following function returns the sum of all numbers in a list.\n\n"
    "def total(numbers):\n"
)
_TOKENS = 48
# Heads of the same model have 0.6 to 0.9 accepted, those of another one almost none.
_LOW = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of the subcommand its arguments."""
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        required=True,
        metavar="SOURCE",
        help="what has the head: a folder, a file, or a repository, of which only the "
        "files with the head are fetched",
    )
    add(
        "--to",
        dest="folder",
        required=True,
        type=Path,
        metavar="DIR",
        help="the folder of the converted model",
    )
    add("--bits", type=int, metavar="B", help="quantise it: 2, 3, 4, 5, 6 or 8")
    add(
        "--group-size",
        type=int,
        metavar="G",
        help="weights that share a scale: 32, 64 (the default) or 128",
    )
    add("--dtype", choices=_DTYPES, help="of what is not packed (default: as it is)")
    add("--force", action="store_true", help="replace an mtp.safetensors that is there")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Find, check, measure and write the head, and say so.

    Raises:
        SystemExit: With 2 for everything that keeps it from being written.
    """
    try:
        packing = _checked(args)
        _extract(args, packing, parser.prog)
    except DraftError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def _checked(args: argparse.Namespace) -> Packing | None:
    """How to quantise; whatever can be told before a model is loaded is told."""
    from .heads import sidecar

    options = ("--bits", "--group-size")
    packing = sidecar.Packing.of(args.bits, args.group_size, options)
    if not (args.folder / "config.json").is_file():
        raise InvalidOption(
            f"--to {args.folder} has no config.json; name the folder of a converted "
            "model."
        )
    sidecar.check_free(args.folder, args.force)
    return packing


def _extract(args: argparse.Namespace, packing: Packing | None, prog: str) -> None:
    from . import anatomy
    from .heads import load_head, sidecar

    model, tokenizer = _loaded(args.folder)
    head = load_head(model, args.source)
    _check_sizes(model, args.folder)
    _prepare(head, model, args.dtype, packing)
    stats = acceptance(model, tokenizer, head)
    written = sidecar.write(head, args.folder, anatomy.family(model))
    print(f"wrote {written.file}: {written}")
    figure = f"{stats.acceptance_rate:.0%} of {stats.drafted.total()} first drafts"
    print(f"accepted: {figure}")
    if stats.acceptance_rate < _LOW:
        print(
            f"{prog}: warning: only {figure} were accepted, so this is probably not "
            f"the head of this model; see that --from {args.source} is what "
            f"--to {args.folder} was converted from.",
            file=sys.stderr,
        )


def _loaded(folder: Path) -> Any:
    """Model and tokenizer, by stock."""
    import mlx_lm

    from .install import install

    install()
    try:
        return mlx_lm.load(str(folder))
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise InvalidOption(
            f"--to {folder} cannot be loaded ({reason}); name the folder of a "
            "converted model."
        ) from error


def _check_sizes(model: nn.Module, folder: Path) -> None:
    """Compare what the configurations say, where both say it.

    Raises:
        HeadMismatch: If a size differs.
    """
    from .heads import loaded_of

    loaded = loaded_of(model)
    assert loaded is not None, "load_head comes before"
    place = loaded.place if loaded.place.is_dir() else loaded.place.parent
    theirs, ours = _sizes(place), _sizes(folder)
    for name in sorted(theirs.keys() & ours.keys()):
        if theirs[name] != ours[name]:
            raise HeadMismatch(
                f"the MTP head in {place} does not fit this model: its {name} is "
                f"{theirs[name]}, the model's {ours[name]}. Use the head of the "
                "checkpoint that the model was made from."
            )


def _sizes(folder: Path) -> dict[str, int]:
    from .heads.shards import config

    found = config(folder)
    both = {**found, **(found.get("text_config") or {})}
    return {name: both[name] for name in _SIZES if both.get(name) is not None}


def _prepare(
    head: MTPHead, model: nn.Module, dtype: str | None, packing: Packing | None
) -> None:
    """Make of a head what is to be written, in place."""
    import mlx.core as mx

    from .heads import sidecar

    if dtype is not None:
        casts = getattr(model, "cast_predicate", lambda name: True)
        sidecar.cast(head, getattr(mx, dtype), casts)
    if packing is not None:
        sidecar.quantize(head, model, packing)
    mx.eval(head.parameters())


def acceptance(model: nn.Module, tokenizer: Any, head: MTPHead) -> DraftStats:
    """What a short greedy generation makes of a head's first drafts.

    Args:
        model: The target.
        tokenizer: Its own.
        head: Which drafts one token a round.
    """
    import mlx.core as mx

    from .drafters.mtp import MTPDrafter
    from .generate import draft_generate_step
    from .options import DraftOptions
    from .stats import Tally

    prompt, tally = mx.array(tokenizer.encode(_TEXT)), Tally()
    options = DraftOptions(num_draft_tokens=1)
    steps = draft_generate_step(
        prompt,
        model,
        MTPDrafter(head),
        options=options,
        stats=tally,
        max_tokens=_TOKENS,
    )
    for _ in steps:
        pass
    return tally.stats
