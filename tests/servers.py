"""Stock's server in a process of its own, with the plugin and without."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
_PATIENCE = 120  # seconds until it must have loaded its model


@dataclass
class Server:
    """One that runs.

    Args:
        url: Where.
        process: The process.
        log: What it has written.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @functools.cached_property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none")

    @functools.cached_property
    def _answers(self) -> dict[str, Any]:
        return {}

    def once(self, ask: Callable[..., Any], *args: Any, **request: Any) -> Any:
        """What `ask` finds here; the same question is asked no second time.

        For stock's answers, which ours are compared with again and again.
        """
        key = json.dumps([ask.__name__, args, request], sort_keys=True)
        if key not in self._answers:
            self._answers[key] = ask(self, *args, **request)
        return copy.deepcopy(self._answers[key])

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return json.loads(answer.read() or "null")

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        """Status and body of an answer to any bytes."""
        request = urllib.request.Request(f"{self.url}{path}", data=body)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextlib.contextmanager
def server(
    log: Path, *options: Any, plugin: bool = True, model: Path = BUNDLED
) -> Iterator[Server]:
    """A server that runs as long as the context.

    Drafts are counted, so it drafts k tokens a round unless the options say otherwise.
    """
    if "--mtp" in options and not any("depth=" in str(word) for word in options):
        options = (*options, "--draft-option", "depth=fixed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", MAIN, "--model", model, "--port", port, *options]
    path = os.pathsep.join(p for p in sys.path if p)
    known = {"MLX_LM_MTP_AUTOLOAD": "0", "PLUGIN": str(int(plugin)), "PYTHONPATH": path}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | known,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        found = Server(f"http://127.0.0.1:{port}", process, log)
        waited_for(found)
        yield found
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(30)


class Servers:
    """Servers by their command lines; each starts when it is first asked for.

    Args:
        folder: For what they log.
        stack: They run as long as it is open.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._started: dict[Any, Server] = {}

    def __call__(
        self, *options: Any, plugin: bool = True, model: Path = BUNDLED
    ) -> Server:
        key = (options, plugin, model)
        if key not in self._started:
            log = self._folder / f"{len(self._started)}.log"
            starting = server(log, *options, plugin=plugin, model=model)
            self._started[key] = self._stack.enter_context(starting)
        return self._started[key]


# Turned on by hand, so that a bare checkout can be tested, too. On the CPU.
MAIN = """
import os, sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
if os.environ["PLUGIN"] == "1":
    import mlx_lm_mtp
    mlx_lm_mtp.install()
from mlx_lm.server import main
sys.argv[0] = "mlx_lm.server"
main()
"""


def waited_for(server: Server) -> None:
    """Wait until it listens."""
    for _ in range(_PATIENCE * 10):
        if server.process.poll() is not None:
            raise RuntimeError(server.log.read_text())
        with contextlib.suppress(OSError, urllib.error.URLError):
            server.get("/health")
            return
        time.sleep(0.1)
    raise RuntimeError(f"it does not answer: {server.log.read_text()}")
