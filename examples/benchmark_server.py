"""Stock's server with `--mtp` and without, beside each other, under several clients.

Both servers run at once in processes of their own; rounds of requests go to one and
then to the other, so that a slow moment of the machine falls on both. Every client
sends its requests one after the other.

    python examples/benchmark_server.py --clients 1 2 4 8
    python examples/benchmark_server.py --turns 10
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI

MODEL = Path(__file__).parent / "models" / "qwen3_5-tiny-mtp"
PROMPTS = [
    "def __init__(self, name, parent=None):\n",
    "import argparse\nimport sys\n\n\ndef main(argv=None):\n",
    'class Queue:\n    """A first-in, first-out queue with a maximum size."""\n',
    "Explain in a few paragraphs what a compiler does.\n",
    "def read(path, encoding=None):\n",
    "Return a copy of the string with",
    "class Node:\n    def __init__(self, value):\n",
    "for i in range(len(self.items)):\n",
]
QUESTIONS = ["Add two numbers.", "Now multiply them.", "Write a class.", "Sort it."]


@contextlib.contextmanager
def server(*options: str) -> Iterator[OpenAI]:
    """A server that runs as long as the context, and a client for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "mlx_lm", "server", "--model", MODEL, "--port", port]
    command += ["--log-level", "ERROR", "--prompt-cache-size", 2, *options]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=log, stderr=log
        )
        try:
            _wait(f"http://127.0.0.1:{port}/health")
            yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        finally:
            process.terminate()
            process.wait()


def _wait(url: str) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url).close()
            return
        time.sleep(0.1)
    raise SystemExit("the server does not answer")


def one(client: OpenAI, i: int, tokens: int) -> tuple[int, float]:
    """Tokens of one request, and its seconds."""
    start = time.perf_counter()
    prompt = PROMPTS[i % len(PROMPTS)]
    answer = client.completions.create(
        model="default_model", prompt=prompt, max_tokens=tokens
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens, time.perf_counter() - start


def several(
    client: OpenAI, clients: int, requests: int, tokens: int
) -> tuple[float, float]:
    """Tokens per second of all clients together, and of the median client."""

    def work(which: int) -> tuple[int, float]:
        made = [one(client, which + r, tokens) for r in range(requests)]
        return sum(n for n, _ in made), sum(s for _, s in made)

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        made = list(threads.map(work, range(clients)))
    seconds = time.perf_counter() - start
    together = sum(n for n, _ in made) / seconds
    return together, statistics.median(n / s for n, s in made)


def conversation(client: OpenAI, turns: int, tokens: int) -> tuple[float, list[str]]:
    """Tokens per second of a conversation, and its answers."""
    messages: list[dict[str, str]] = []
    texts, count, start = [], 0, time.perf_counter()
    for i in range(turns):
        messages.append({"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]})
        answer = client.chat.completions.create(
            model="default_model", messages=messages, max_tokens=tokens
        )
        texts.append(answer.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": texts[-1]})
        count += answer.usage.completion_tokens
    return count / (time.perf_counter() - start), texts


def main() -> None:
    """Run both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--turns", type=int, default=0, help="a conversation instead")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--num-draft-tokens", default="3")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    drafts = ("--mtp", "--num-draft-tokens", args.num_draft_tokens)
    with server() as stock, server(*drafts) as ours:
        for client in (stock, ours):
            several(client, max(args.clients), 1, 8)  # warms up
        if args.turns:
            _conversations(stock, ours, args)
        else:
            _clients(stock, ours, args)


def _conversations(stock: OpenAI, ours: OpenAI, args: argparse.Namespace) -> None:
    speeds: dict[str, list[float]] = {"stock": [], "--mtp": []}
    for _ in range(args.repeat):
        theirs, texts = conversation(stock, args.turns, args.tokens)
        mine, same = conversation(ours, args.turns, args.tokens)
        assert texts == same, "the answers differ"
        speeds["stock"].append(theirs)
        speeds["--mtp"].append(mine)
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    print(f"{args.turns} turns of {args.tokens} tokens, tokens per second")
    for name, median in medians.items():
        print(f"{name:8} {median:6.1f}  {median / medians['stock']:.2f}")


def _clients(stock: OpenAI, ours: OpenAI, args: argparse.Namespace) -> None:
    print("clients  together: stock  --mtp  ratio   each: stock  --mtp")
    for clients in args.clients:
        how = (clients, args.requests, args.tokens)
        made = [(several(stock, *how), several(ours, *how)) for _ in range(args.repeat)]
        both = [statistics.median(m[who][0] for m in made) for who in (0, 1)]
        each = [statistics.median(m[who][1] for m in made) for who in (0, 1)]
        print(
            f"{clients:7}  {both[0]:15.1f}  {both[1]:5.1f}  {both[1] / both[0]:5.2f}"
            f"  {each[0]:12.1f}  {each[1]:5.1f}"
        )


if __name__ == "__main__":
    main()
