"""Stock's conversion with `--mtp`: the head goes along, in a sidecar.

Stock's `convert` loads the model, casts and quantises it, saves it and uploads the
folder, all by names of its modules. What was asked for is kept for the duration of the
call: the wrapped `load_model` then looks for the head, before the long work, and the
wrapped `save` writes it once the trunk is there, before the upload.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DraftError, HeadNotFound, InvalidOption

if TYPE_CHECKING:
    import mlx.nn as nn

    from .heads.head import MTPHead
    from .heads.sidecar import Packing

# As in heads/find.py, which would load too much while mlx_lm is imported.
SIDECARS = ["mtp*.safetensors", "optiq/mtp*.safetensors", "mtp/*.safetensors"]
_OPTIONS = ("mtp_bits", "mtp_group_size")
_FLAGS = ("--mtp-bits", "--mtp-group-size")
_DOC = """
    Added by mlx-lm-mtp (keyword arguments):
        mtp (bool): Keep the MTP head, in ``mtp.safetensors``. Default: ``False``.
        mtp_bits (int, optional): Quantise the head to so many bits. Default: ``None``,
          full precision whatever the model is quantised to.
        mtp_group_size (int, optional): Weights of the head that share a scale.
          Default: ``64``.
    """


@dataclass(frozen=True)
class Keeping:
    """What becomes of the head of the conversion that runs.

    Args:
        packing: How to quantise it; None for not at all.
        dtype: What the conversion is told to save, if it is.
        dequantize: Whether the conversion dequantises.
    """

    packing: Packing | None
    dtype: str | None
    dequantize: bool


_keeping: ContextVar[Keeping | None] = ContextVar("_keeping", default=None)


# --- the wrappers -----------------------------------------------------------------


def convert(stock: Callable[..., None]) -> Callable[..., None]:
    """Wrap stock's function of that name: it takes `mtp` and what goes with it."""
    if "mtp" in inspect.signature(stock).parameters:
        return stock  # which has come to have the option itself

    @functools.wraps(stock)
    def wrapper(
        *args: Any,
        mtp: bool = False,
        mtp_bits: int | None = None,
        mtp_group_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        packing = _packing(mtp, mtp_bits, mtp_group_size, ("mtp", *_OPTIONS))
        if not mtp:
            return stock(*args, **kwargs)
        given = inspect.signature(stock).bind(*args, **kwargs).arguments
        _check_repository(given)
        keeping = Keeping(packing, given.get("dtype"), bool(given.get("dequantize")))
        token = _keeping.set(keeping)
        try:
            return stock(*args, **kwargs)
        finally:
            _keeping.reset(token)

    wrapper.__doc__ = f"{stock.__doc__ or ''}{_DOC}"
    return wrapper


def load_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap stock's function of that name: a conversion's model must have a head."""

    @functools.wraps(stock)
    def wrapper(model_path: Path, *args: Any, **kwargs: Any) -> Any:
        model, config = stock(model_path, *args, **kwargs)
        if _keeping.get() is not None:
            from .heads import load_head

            load_head(model, Path(model_path))
        return model, config

    return wrapper


def save(stock: Callable[..., None]) -> Callable[..., None]:
    """Wrap stock's function of that name: a conversion's head is saved as well."""

    @functools.wraps(stock)
    def wrapper(
        dst_path: str | Path,
        src_path_or_repo: str | Path,
        model: nn.Module,
        tokenizer: Any,
        config: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        rest = (src_path_or_repo, model, tokenizer, config, *args)
        keeping = _keeping.get()
        if keeping is None:
            return stock(dst_path, *rest, **kwargs)
        from . import anatomy
        from .heads import sidecar

        head = _as_wanted(model, config, keeping)
        stock(dst_path, *rest, **kwargs)
        written = sidecar.write(head, Path(dst_path), anatomy.family(model))
        print(f"[INFO] Kept the MTP head in {written.file.name}: {written}")

    return wrapper


def allow_patterns(stock: list[str]) -> list[str]:
    """Stock's patterns of files to download, and those of sidecars."""
    return [*stock, *(p for p in SIDECARS if p not in stock)]


def snapshot_download(stock: Callable[..., str]) -> Callable[..., str]:
    """Wrap the hub's function of that name, where mlx-lm calls it.

    A copy that was downloaded without its sidecar is whole to stock, and offline it has
    to stay so, though more files are asked for now.
    """

    @functools.wraps(stock)
    def wrapper(*args: Any, **kwargs: Any) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        patterns = kwargs.get("allow_patterns") or []
        try:
            return stock(*args, **kwargs)
        except LocalEntryNotFoundError:
            rest = [pattern for pattern in patterns if pattern not in SIDECARS]
            if len(rest) in (0, len(patterns)):
                raise
            return stock(*args, **kwargs | {"allow_patterns": rest})

    return wrapper


def configure_parser(stock: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap stock's function of that name: its parser knows our arguments."""

    @functools.wraps(stock)
    def wrapper() -> argparse.ArgumentParser:
        parser = stock()
        # As above: should stock come to have the option itself, we stand back.
        if "--mtp" not in parser.format_usage():
            _add_arguments(parser)
        return parser

    return wrapper


def main(stock: Callable[[], None]) -> Callable[[], None]:
    """Wrap stock's `main`: an error of ours is one sentence and exit code 1."""

    @functools.wraps(stock)
    def wrapper() -> None:
        try:
            stock()
        except DraftError as error:
            sys.exit(f"mlx_lm.convert: error: {error}")

    return wrapper


# --- the head ---------------------------------------------------------------------


def _as_wanted(model: nn.Module, config: dict[str, Any], keeping: Keeping) -> MTPHead:
    """The head as it is to be written, with nothing left of the plain trunk."""
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    from .heads import head_of, sidecar

    head = head_of(model)
    if keeping.dequantize:
        dequantize_model(head)
    dtype = _dtype(keeping, config)
    if dtype is not None:
        casts = getattr(model, "cast_predicate", lambda name: True)
        sidecar.cast(head, getattr(mx, dtype), casts)
    if keeping.packing is not None:
        sidecar.quantize(head, model, keeping.packing)
    mx.eval(head.parameters())
    return head


def _dtype(keeping: Keeping, config: dict[str, Any]) -> str | None:
    """What stock casts the trunk to, if it does."""
    from mlx_lm.convert import MODEL_CONVERSION_DTYPES

    text = config.get("text_config") or {}
    dtype = keeping.dtype or config.get("torch_dtype") or text.get("dtype")
    return dtype if dtype in MODEL_CONVERSION_DTYPES else None


def _check_repository(given: dict[str, Any]) -> None:
    """See in its index whether a repository has a head, before it is downloaded.

    Args:
        given: The arguments of the conversion.

    Raises:
        HeadNotFound: If the index names none.
    """
    from . import anatomy
    from .heads.families import family_of
    from .heads.find import head_files
    from .heads.shards import INDEX, index

    repository = given["hf_path"]
    if Path(repository).exists():
        return  # nothing to be downloaded: the head is looked for in the files
    folder = _fetched(repository, given, ["config.json", INDEX, *SIDECARS])
    model = _skeleton(folder, given)
    names, args = index(folder), anatomy.language_model(model).args
    beside = any(any(folder.glob(pattern)) for pattern in SIDECARS)
    if names and not beside and not head_files(names, family_of(model), args):
        raise HeadNotFound(
            f"no MTP head in {repository}: its index names {len(names)} tensors and "
            "none of a head; convert without --mtp, or from the original repository."
        )


def _fetched(repository: str, given: dict[str, Any], patterns: list[str]) -> Path:
    from mlx_lm.utils import _download

    revision = given.get("revision")
    return _download(repository, revision=revision, allow_patterns=patterns)


def _skeleton(folder: Path, given: dict[str, Any]) -> nn.Module:
    """The model that a configuration describes, without weights."""
    from mlx_lm.utils import load_model

    from . import random_state

    trusted = bool(given.get("trust_remote_code"))
    with random_state.untouched():
        model, _ = load_model(
            folder, lazy=True, strict=False, trust_remote_code=trusted
        )
    return model


# --- arguments --------------------------------------------------------------------


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("MTP head (mlx-lm-mtp)")
    group.add_argument(
        "--mtp",
        action="store_true",
        help="Keep the model's MTP head, in mtp.safetensors beside the weights.",
    )
    group.add_argument(
        "--mtp-bits",
        metavar="B",
        type=int,
        help="Quantise the head, too, to 2, 3, 4, 5, 6 or 8 bits. Without it the head "
        "keeps full precision, whatever -q does.",
    )
    group.add_argument(
        "--mtp-group-size",
        metavar="G",
        type=int,
        help="Weights of the head that share a scale: 32, 64 (the default) or 128.",
    )
    parser.parse_args = _checking(parser, parser.parse_args)  # type: ignore[method-assign]


def _checking(
    parser: argparse.ArgumentParser, parse_args: Callable[..., Any]
) -> Callable[..., Any]:
    """What cannot work is told before a model is loaded."""

    @functools.wraps(parse_args)
    def wrapper(*args: Any, **kwargs: Any) -> argparse.Namespace:
        found = parse_args(*args, **kwargs)
        try:
            _packing(
                found.mtp, found.mtp_bits, found.mtp_group_size, ("--mtp", *_FLAGS)
            )
        except DraftError as error:
            parser.error(str(error))
        return found

    return wrapper


def _packing(
    mtp: bool, bits: int | None, group_size: int | None, names: tuple[str, str, str]
) -> Packing | None:
    """How the head is to be quantised, by arguments that are called so."""
    if not mtp:
        for name, value in zip(names[1:], (bits, group_size), strict=True):
            if value is not None:
                raise InvalidOption(
                    f"{name} {value} is of no use without {names[0]}; give it, too."
                )
        return None
    from .heads.sidecar import Packing

    return Packing.of(bits, group_size, names[1:])
