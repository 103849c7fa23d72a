"""Our own scripts, `mlx_lm_mtp` and `mlx_lm_mtp.generate`."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys

from .errors import DraftError


def generate() -> None:
    """`mlx_lm_mtp.generate`: stock's script, with the plugin turned on by hand."""
    from .install import install

    # Imported first, so that install() can tell which mlx-lm it is.
    stock = importlib.import_module("mlx_lm.generate")
    try:
        install()
    except DraftError as error:
        sys.exit(f"mlx_lm_mtp.generate: error: {error}")
    stock.main()


def main() -> None:
    """`mlx_lm_mtp`: what there is to say about this installation."""
    parser = argparse.ArgumentParser(
        prog="mlx_lm_mtp", description="Drafting for stock mlx-lm."
    )
    from ._version import __version__

    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plugins = commands.add_parser("plugins", help="list drafters and who brings them")
    plugins.set_defaults(run=_list_plugins)
    _add_bench(commands.add_parser("bench", help="stock and drafts, side by side"))
    args = parser.parse_args()
    args.run(args)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from .bench import command

    parser.description = (
        "Decode prompts with stock mlx-lm and with drafts, in turn, and compare speeds "
        "and tokens. See docs/benchmarks.md."
    )
    command.add_arguments(parser)
    parser.set_defaults(run=functools.partial(command.run, parser))


def _list_plugins(args: argparse.Namespace) -> None:
    from .plugins import drafters

    found = drafters()
    rows = [("drafter", "provider", "version")]
    for name in found:
        registration = found[name]
        rows.append((name, registration.provider, registration.version))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print(
            "  ".join(
                cell.ljust(w) for cell, w in zip(row, widths, strict=True)
            ).rstrip()
        )
