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
    """`mlx_lm_mtp`: what there is to say about models, heads, and this installation."""
    from ._version import __version__

    parser = argparse.ArgumentParser(
        prog="mlx_lm_mtp", description="Drafting for stock mlx-lm."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, help) in _COMMANDS.items():
        _add(commands.add_parser(name, help=help), module)
    plugins = commands.add_parser("plugins", help="list drafters and who brings them")
    plugins.set_defaults(run=_list_plugins)
    args = parser.parse_args()
    args.run(args)


# Each is a module with a DESCRIPTION, `add_arguments(parser)` and `run(parser, args)`.
_COMMANDS = {
    "doctor": (".doctor.command", "what a model's MTP head is, and whether it pays"),
    "extract": (".extract", "put the MTP head of a checkpoint beside a conversion"),
    "bench": (".bench.command", "stock and drafts, side by side"),
    "compare": (".compare.command", "are the tokens stock's, and if not, why"),
    "replay": (".replay", "a trace of --draft-trace, looked at without the model"),
}


def _add(parser: argparse.ArgumentParser, module: str) -> None:
    command = importlib.import_module(module, __package__)
    parser.description = command.DESCRIPTION
    command.add_arguments(parser)
    parser.set_defaults(run=functools.partial(command.run, parser))


def _list_plugins(args: argparse.Namespace) -> None:
    from .plugins import drafters

    found = [drafters()[name] for name in drafters()]
    rows = [("drafter", "provider", "version", "hooks")]
    rows += [(r.name, r.provider, r.version, ", ".join(r.hooks)) for r in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    options = [option for r in found for option in r.described()]
    print("\noptions (--draft-option NAME=VALUE):")
    print("\n".join(f"  {option}" for option in options or ["none"]))
