"""``python -m mlx_lm_mtp.testing NAME``: check a drafter that is installed."""

from __future__ import annotations

import argparse
import sys

from ..errors import DraftError
from .report import DrafterFault
from .suite import CHECKS, check_drafter


def main() -> None:
    """Print the report; the exit status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_lm_mtp.testing",
        description="Check a drafter on tiny models with every kind of cache.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="checks:\n" + "\n".join(f"  {name}" for name in CHECKS),
    )
    parser.add_argument("name", help="under which the drafter is registered")
    parser.add_argument("--only", nargs="+", default=(), metavar="CHECK")
    parser.add_argument("--without", nargs="+", default=(), metavar="CHECK")
    args = parser.parse_args()
    try:
        report = check_drafter(args.name, only=args.only, without=args.without)
    except DrafterFault as fault:
        sys.exit(fault.report.summary())
    except (DraftError, ValueError) as error:
        parser.error(str(error))
    print(report.summary())


if __name__ == "__main__":
    main()
