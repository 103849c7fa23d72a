"""Heads on the hub: only the files with a head are fetched, by the hub's own client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import families
import mlx.core as mx
import pytest
from families import save
from hub import hub

LOAD = """
import sys
import families
from mlx_lm_mtp import load_head
from mlx_lm_mtp.errors import HeadError

try:
    head = load_head(families.trunk("qwen3_5"), sys.argv[1])
except HeadError as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(head.fc.weight.sum().item())
"""


def load(name: str, root: Path, url: str) -> subprocess.CompletedProcess[str]:
    """Load a head in a process of its own, which knows this hub alone."""
    known = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(root / "cache"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-c", LOAD, name],
        env=clean | known,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model of three shards of which the second holds the head."""
    path = tmp_path / "hub" / "owner" / "name"
    head = families.wild_head("qwen3_5")
    rest = {"model.norm.weight": mx.ones(64)}
    conv = {"model.layers.0.linear_attn.conv1d.weight": mx.zeros((8, 1, 4))}
    shards = {"1": rest, "2": head, "3": conv}
    names = {k: f"model-{i}.safetensors" for i, part in shards.items() for k in part}
    for i, part in shards.items():
        save(path / f"model-{i}.safetensors", part, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": names})
    )
    config = json.dumps(families.config_of("qwen3_5"))
    (path / "config.json").write_text(config)
    (path / "tokenizer.json").write_text("{}")
    return path


def shown(head: families.Tensors) -> str:
    return f"{head['mtp.fc.weight'].sum().item()}\n"


def test_only_the_shard_with_the_head_is_fetched(
    tmp_path: Path, repository: Path
) -> None:
    with hub(tmp_path / "hub") as server:
        done = load("owner/name", tmp_path, server.url)
    assert (done.returncode, done.stderr.count("Error")) == (0, 0), done.stderr
    assert done.stdout == shown(families.wild_head("qwen3_5"))
    weights = {name for name in server.fetched if name.endswith(".safetensors")}
    assert weights == {"model-2.safetensors"}
    assert "tokenizer.json" not in server.fetched
    assert "%" in done.stderr  # the client's progress


def test_a_sidecar_is_all_that_is_fetched(tmp_path: Path, repository: Path) -> None:
    tensors = {f"mtp.{k}": v for k, v in head_of_seed(5).items()}
    save(repository / "mtp.safetensors", tensors, {"format": "mlx"})
    with hub(tmp_path / "hub") as server:
        done = load("owner/name", tmp_path, server.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown(tensors)
    weights = {name for name in server.fetched if name.endswith(".safetensors")}
    assert weights == {"mtp.safetensors"}


def test_without_an_index_all_is_fetched(tmp_path: Path, repository: Path) -> None:
    (repository / "model.safetensors.index.json").unlink()
    with hub(tmp_path / "hub") as server:
        done = load("owner/name", tmp_path, server.url)
    assert done.returncode == 0, done.stderr
    assert "model-3.safetensors" in server.fetched


def test_a_second_time_nothing_is_fetched(tmp_path: Path, repository: Path) -> None:
    with hub(tmp_path / "hub") as server:
        load("owner/name", tmp_path, server.url)
        fetched = len(server.fetched)
        done = load("owner/name", tmp_path, server.url)
    assert done.returncode == 0, done.stderr
    assert len(server.fetched) == fetched


def test_a_repository_that_is_not_there(tmp_path: Path, repository: Path) -> None:
    with hub(tmp_path / "hub") as server:
        done = load("owner/nowhere", tmp_path, server.url)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("HeadNotFound: there is no path 'owner/nowhere'")
    assert line.endswith("name a folder, a file, or owner/name.")


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    done = load("owner/name", tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "HeadNotFound: there is no path 'owner/name'" in done.stderr
    assert "Traceback" not in done.stderr


def head_of_seed(seed: int) -> families.Tensors:
    """A head in the names that this package writes."""
    wild = families.wild_head("qwen3_5", seed)
    return {k.removeprefix("mtp."): v for k, v in wild.items()}
