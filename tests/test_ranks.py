"""Several processes: what is drafted for in a pipeline, and what is refused."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import tiny
from servers import BUNDLED, MAIN, Server, waited_for

from mlx_lm_mtp.errors import InvalidOption
from mlx_lm_mtp.options import DraftOptions
from mlx_lm_mtp.serving.asked import Asked, read

TWO = SimpleNamespace(size=lambda: 2, rank=lambda: 0)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.distributed, "init", lambda *args, **kwargs: TWO)


# --- refused ------------------------------------------------------------------------


def test_a_server_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plugin: None,
    several: None,
) -> None:
    module = importlib.import_module("mlx_lm.server")
    for options in (("--mtp",), ("--draft", "mtp")):
        monkeypatch.setattr(sys, "argv", ["mlx_lm.server", *options])
        with pytest.raises(SystemExit) as stop:
            module.main()
        assert stop.value.code == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "--mtp and --draft cannot go with 2 ranks: only the first one" in said


def test_a_request_is_told() -> None:
    nothing = Asked(None, DraftOptions())
    with pytest.raises(InvalidOption, match="distributed over 2 ranks"):
        read({"draft": "mtp"}, nothing, 3, ranks=2)
    assert read({"draft": "none"}, nothing, 3, ranks=2).draft is None
    assert read({}, nothing, 3, ranks=2).draft is None
    assert read({"draft": "mtp"}, nothing, 3).draft == "mtp"


def test_a_model_of_divided_layers_is_not_drafted_for(plugin: None) -> None:
    from mlx_lm.generate import stream_generate

    model = tiny.Spec("qwen3").build()
    model.model.layers[1].self_attn.group = mx.distributed.init()  # of one: whole
    tokenizer = SimpleNamespace()
    for k in (0, 1):
        with pytest.raises(Exception) as error:
            stream_generate(
                model, tokenizer, [1, 2], draft="mtp", num_draft_tokens=k
            ).send(None)
        assert "divided" not in str(error.value)
    model.model.layers[1].self_attn.group = TWO
    with pytest.raises(InvalidOption, match="divided among ranks"):
        stream_generate(model, tokenizer, [1, 2], draft="mtp")


# --- two processes on this machine --------------------------------------------------


@contextlib.contextmanager
def ranks(folder: Path, code: str, *options: Any) -> Iterator[list[Any]]:
    """Two processes that run the same and find each other."""
    with contextlib.ExitStack() as free:
        sockets = [free.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    (folder / "hosts.json").write_text(json.dumps(hosts))
    known = {
        "MLX_LM_MTP_AUTOLOAD": "0",
        "PLUGIN": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "MLX_HOSTFILE": str(folder / "hosts.json"),
    }
    command = [sys.executable, "-c", code, *(str(word) for word in options)]
    processes = []
    for rank in range(2):
        with (folder / f"{rank}.log").open("wb") as out:
            environment = os.environ | known | {"MLX_RANK": str(rank)}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=out, stderr=out)
            )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(30)


PIPELINE = """
import sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
group = mx.distributed.init(backend="ring", strict=True)
import mlx_lm_mtp
mlx_lm_mtp.install()
from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import sharded_load
model, tokenizer = sharded_load(sys.argv[1], pipeline_group=group)
def tokens(temperature, **more):
    mx.random.seed(3)
    responses = stream_generate(
        model, tokenizer, "def main(argv=None):\\n", max_tokens=24,
        sampler=make_sampler(temperature), **more,
    )
    found = list(responses)
    return [r.token for r in found], sum(r.from_draft for r in found)
for temperature in (0, 0.8):
    plain, _ = tokens(temperature)
    for options in ({}, {"capture": "replay"}, {"depth": "confidence"}):
        drafted, accepted = tokens(temperature, draft="mtp", draft_options=options)
        assert drafted == plain and accepted, (temperature, options)
print("all the same")
"""


def test_a_pipeline_is_drafted_for(tmp_path: Path) -> None:
    with ranks(tmp_path, PIPELINE, BUNDLED) as processes:
        for rank, process in enumerate(processes):
            process.wait(120)
            assert "all the same" in (tmp_path / f"{rank}.log").read_text()


def test_a_distributed_server_is_stock_s(tmp_path: Path, stock: Server) -> None:
    """It answers, and says why it does not draft."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--model", BUNDLED, "--port", port, "--pipeline")
    with ranks(tmp_path, MAIN, *options) as processes:
        at = Server(f"http://127.0.0.1:{port}", processes[0], tmp_path / "0.log")
        waited_for(at)
        body = {"prompt": "import os\n", "max_tokens": 8}
        sampled = body | {"temperature": 0.8, "seed": 3}
        for request in (json.dumps(body).encode(), json.dumps(sampled).encode()):
            status, found = at.post("/v1/completions", request)
            _, wanted = stock.post("/v1/completions", request)
            assert status == 200, found
            assert json.loads(found)["choices"] == json.loads(wanted)["choices"]
        status, found = at.post(
            "/v1/completions", json.dumps(body | {"draft": "mtp"}).encode()
        )
        assert status == 400 and "over 2 ranks" in json.loads(found)["error"]
        assert at.get("/v1/draft/stats")["plain"]["tokens"] == 16
