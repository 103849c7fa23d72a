"""Stock and drafted decoding side by side, in one process, on one checkpoint.

    python examples/benchmark.py [--model PATH] [--tokens N] [--temp T] [--json FILE]
    python examples/benchmark.py --strategies
    python examples/benchmark.py --drafters

Every prompt is decoded by stock and with each k (or each strategy) in turn, `repeat`
times over, so that a slow moment of the machine falls on all of them. Reported are
medians; a ratio below 1.00 is a loss and is shown like any other. Tokens are compared:
a difference is an error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import make_sampler

from mlx_lm_mtp import Tally, install
from mlx_lm_mtp.bench.figures import geometric_mean

install()

MODEL = Path(__file__).parent / "models" / "qwen3_5-tiny-mtp"

PROMPTS = {
    "code": [
        "def __init__(self, name):\n",
        "import os\nimport sys\n\ndef main(",
        "class TestCase(unittest.TestCase):\n",
        "def parse_args(argv=None):\n    parser = argparse.",
        "    try:\n        f = open(path)\n    except",
    ],
    "other": [
        "The assert statement",
        "Return a copy of the string with",
        "This module provides",
        "Augmented assignment is the combination of",
        "Note that the",
    ],
}


# Draft options, with the k that goes with them.
STRATEGIES: list[dict[str, Any]] = [
    {"k": 1},
    {"k": 2},
    {"k": 3},
    {"k": 4},
    {"k": 6},
    {"k": 6, "depth": "throughput"},
    {"k": 6, "depth": "confidence"},
    {"k": 6, "depth": "confidence", "reads": "once"},
    {"k": 3, "rescue": 1},
    {"k": 3, "rescue": 2},
    {"k": 6, "depth": "confidence", "rescue": 2},
    {"k": 3, "paths": 2},
    {"k": 3, "paths": 3},
    {"k": 3, "paths": 4},
    {"k": 3, "verify": "step"},
    {"k": 3, "hidden": "pre_norm"},
    {"k": 3, "draft_head_bits": 4},
    {"k": 3, "shortlist": 2048},
    {"k": 3, "capture": "replay"},
]
DRAFTERS: list[dict[str, Any]] = [
    {"k": 3},
    {"draft": "ngram", "k": 3},
    {"draft": "ngram", "k": 5},
    {"draft": "ngram", "k": 8},
    {"draft": "chain", "k": 5},
    {"draft": "chain", "k": 8},
    {"draft": "chain", "k": 6, "chain.drafters": "mtp:2,ngram"},
]
# For temperatures above 0.
SAMPLING: list[dict[str, Any]] = [
    {"k": 1},
    {"k": 1, "draft_sampling": "greedy"},
    {"k": 2},
    {"k": 2, "draft_sampling": "greedy"},
    {"k": 3},
    {"k": 3, "draft_sampling": "greedy"},
    {"k": 6, "depth": "confidence"},
    {"k": 6, "depth": "confidence", "draft_sampling": "greedy"},
]


@dataclass
class Row:
    """One prompt with one strategy: medians over the repetitions."""

    kind: str
    prompt: str
    strategy: str
    tokens: int
    tokens_a_round: float
    verifies_per_token: float
    stock_tps: float
    tps: float

    @property
    def ratio(self) -> float:
        """Speed-up over stock, measured in the same run."""
        return self.tps / self.stock_tps


def decode(
    model: Any, tokenizer: Any, prompt: str, max_tokens: int, **more: Any
) -> tuple[list[int], float]:
    """Tokens, and tokens per second over the whole call."""
    mx.random.seed(0)
    start = time.perf_counter()
    tokens = [
        response.token
        for response in mlx_lm.stream_generate(
            model, tokenizer, prompt, max_tokens=max_tokens, **more
        )
    ]
    return tokens, len(tokens) / (time.perf_counter() - start)


def measure(
    model: Any, tokenizer: Any, kind: str, prompt: str, args: argparse.Namespace
) -> list[Row]:
    """Stock and each strategy in turn, again and again."""
    stock_tps: list[float] = []
    tps: dict[str, list[float]] = {name: [] for name in args.strategies}
    stats: dict[str, Tally] = {}
    sampler = make_sampler(args.temp)
    for _ in range(args.repeat):
        truth, speed = decode(model, tokenizer, prompt, args.tokens, sampler=sampler)
        stock_tps.append(speed)
        for name, strategy in args.strategies.items():
            stats[name] = Tally()
            tokens, speed = decode(
                model,
                tokenizer,
                prompt,
                args.tokens,
                sampler=sampler,
                draft=strategy.get("draft", "mtp"),
                num_draft_tokens=strategy["k"],
                draft_options=options_of(strategy),
                draft_stats=stats[name],
            )
            assert tokens == truth, f"{prompt!r}, {name}: tokens differ from stock's"
            tps[name].append(speed)
    return [
        Row(
            kind,
            prompt,
            name,
            len(truth),
            stats[name].mean_acceptance_length,
            stats[name].verifies_per_token,
            statistics.median(stock_tps),
            statistics.median(tps[name]),
        )
        for name in args.strategies
    ]


def options_of(strategy: dict[str, Any]) -> dict[str, Any]:
    """What of a strategy is a draft option; k is always drafted, unless it says so."""
    given = {n: v for n, v in strategy.items() if n not in ("k", "draft")}
    return {"depth": "fixed", **given}


def report(rows: list[Row], args: argparse.Namespace) -> None:
    """The rows, then what they come to for each k, as Markdown."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm")
    )
    print(f"\n{platform.machine()}, {mx.default_device()}, {versions}; ", end="")
    how = f"temperature {args.temp}" if args.temp else "greedy"
    print(f"{args.tokens} tokens, {how}, median of {args.repeat}\n")
    print(
        "| prompt | strategy | tokens a round | stock tok/s | drafted tok/s | ratio |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.kind}: `{row.prompt.strip()[:28]!r}` | {row.strategy} | "
            f"{row.tokens_a_round:.2f} | {row.stock_tps:.1f} | {row.tps:.1f} | "
            f"{row.ratio:.2f} |"
        )
    print(
        "\n| strategy | prompts | tokens a round (mean) | verify forwards per token "
        "(mean) | ratio (geometric mean) |"
    )
    print("|---|---|---|---|---|")
    for name in args.strategies:
        for kind in (*PROMPTS, "all"):
            these = [r for r in rows if r.strategy == name and kind in (r.kind, "all")]
            length = statistics.fmean(r.tokens_a_round for r in these)
            forwards = statistics.fmean(r.verifies_per_token for r in these)
            ratio = geometric_mean([r.ratio for r in these])
            print(f"| {name} | {kind} | {length:.2f} | {forwards:.3f} | {ratio:.2f} |")


def main() -> None:
    """Measure every prompt and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--strategies", action="store_true", help="every strategy instead of each k"
    )
    parser.add_argument(
        "--sampling", action="store_true", help="ways of drafting what is sampled"
    )
    parser.add_argument(
        "--drafters", action="store_true", help="the other drafters beside the head"
    )
    parser.add_argument("--temp", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    args = parser.parse_args()
    every = [{"k": k} for k in args.k]
    every.append({"k": max(args.k), "depth": "throughput"})
    chosen = STRATEGIES if args.strategies else every
    chosen = SAMPLING if args.sampling else chosen
    chosen = DRAFTERS if args.drafters else chosen
    args.strategies = {
        ", ".join(f"{name}={value}" for name, value in strategy.items()): strategy
        for strategy in chosen
    }
    model, tokenizer = mlx_lm.load(args.model)
    tokenizer.eos_token_ids = set()  # always the full length, for stock as well
    decode(model, tokenizer, "warm up", 8)
    decode(model, tokenizer, "warm up", 8, draft="mtp")
    rows = [
        row
        for kind, prompts in PROMPTS.items()
        for prompt in prompts
        for row in measure(model, tokenizer, kind, prompt, args)
    ]
    report(rows, args)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
