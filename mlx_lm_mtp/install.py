"""Turns the plugin on and off: the only module that assigns into mlx-lm.

Each stock function is wrapped where it is defined, right after its module has run, so
that every later import sees the wrapper; copies that other modules of mlx-lm imported
before are replaced as well. Undoing puts the very objects back.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import _mlx_lm_mtp_boot as boot

from . import origin, stock_api, stock_cli, stock_convert, wrapping
from .errors import UnsupportedVersion

Wrapper = Callable[[Any], Any]


def _load_model(stock: Callable[..., Any]) -> Callable[..., Any]:
    return stock_convert.load_model(origin.remembering(stock))


_WRAPPERS: dict[str, dict[str, Wrapper]] = {
    "mlx_lm.utils": {
        "DEFAULT_ALLOW_PATTERNS": stock_convert.allow_patterns,
        "snapshot_download": stock_convert.snapshot_download,
        "load_model": _load_model,
        "save": stock_convert.save,
    },
    "mlx_lm.convert": {
        "convert": stock_convert.convert,
        "configure_parser": stock_convert.configure_parser,
        "main": stock_convert.main,
    },
    "mlx_lm.generate": {
        "speculative_generate_step": stock_api.speculative_generate_step,
        "stream_generate": stock_api.stream_generate,
        "generate": stock_api.generate,
        "batch_generate": stock_api.batch_generate,
        "setup_arg_parser": stock_cli.setup_arg_parser,
        "main": stock_cli.main,
    },
}
# Modules of which more than functions is wrapped, once they are imported: by what of
# ours, which few processes need.
_SEEN_THROUGH: dict[str, tuple[str, str]] = {
    "mlx_lm.server": ("stock_server", "see_through"),
    "mlx_lm.chat": ("stock_tools", "chat"),
    "mlx_lm.benchmark": ("stock_tools", "benchmark"),
    "mlx_lm.cache_prompt": ("stock_tools", "cache_prompt"),
}


# What stock has, and what we put in its place.
_applied: list[tuple[Any, Any]] = []


def install() -> None:
    """Turn the plugin on in this process; a second call changes nothing.

    Raises:
        UnsupportedVersion: If mlx-lm is loaded and not of the supported range.
    """
    for name in boot.TARGETS:
        module = sys.modules.get(name)
        if module is not None:  # None there blocks an import
            patch(module)
    boot.enable()


def uninstall() -> None:
    """Undo :func:`install`: every patched name is the stock object again."""
    boot.disable()
    wrapping.unwrap_all()  # first, for some of these are wrapped once more
    while _applied:
        stock, ours = _applied.pop()
        # Modules that were imported since have copied the name: look for the object.
        for owner, name in list(_holders(ours)):
            setattr(owner, name, stock)


@contextmanager
def uninstalled() -> Iterator[None]:
    """Stock as it is without this package, while the context lasts."""
    uninstall()
    try:
        yield
    finally:
        install()


def patch(module: ModuleType) -> None:
    """Wrap the functions of one stock module that has just been executed.

    Raises:
        UnsupportedVersion: If mlx-lm is not of the supported range.
        AttributeError: If stock lacks a function that we know; nothing is changed.
    """
    _check_version()
    wrappers = _WRAPPERS.get(module.__name__, {})
    stock = {name: getattr(module, name) for name in wrappers}
    applied = {id(ours) for _, ours in _applied}
    for name, wrapper in wrappers.items():
        if id(stock[name]) not in applied:
            _replace(stock[name], wrapper(stock[name]))
    if module.__name__ in _SEEN_THROUGH:
        ours, function = _SEEN_THROUGH[module.__name__]
        getattr(importlib.import_module(f".{ours}", __package__), function)(module)


def _replace(stock: Any, ours: Any) -> None:
    _applied.append((stock, ours))
    for owner, name in list(_holders(stock)):
        setattr(owner, name, ours)


def _holders(stock: Any) -> Iterator[tuple[ModuleType, str]]:
    """Every name in mlx-lm's modules that is bound to this object."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "mlx_lm" and module is not None:
            for name, value in list(vars(module).items()):
                if value is stock:
                    yield module, name


def _check_version() -> None:
    from mlx_lm import _version

    version = _version.__version__
    if version.split(".")[:2] != ["0", "32"]:
        raise UnsupportedVersion(
            f"mlx-lm {version} is installed, mlx-lm-mtp needs >=0.32,<0.33; "
            "pip install 'mlx-lm>=0.32,<0.33', or a newer mlx-lm-mtp."
        )
