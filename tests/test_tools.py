"""`mlx_lm.chat` and `mlx_lm.benchmark` with `--mtp`, beside stock's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
MAIN = """
import importlib, os, sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
if os.environ["PLUGIN"] == "1":
    import mlx_lm_mtp
    mlx_lm_mtp.install()
sys.argv = sys.argv[1:]
importlib.import_module(sys.argv[0]).main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint, with a chat template."""
    path = shutil.copytree(BUNDLED, tmp_path_factory.mktemp("chat") / "model")
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": TEMPLATE}
    file.write_text(json.dumps(config))
    return path


def run(
    *words: Any, typed: str = "", plugin: bool = True
) -> subprocess.CompletedProcess[str]:
    """One of stock's scripts in a process of its own."""
    path = os.pathsep.join(p for p in sys.path if p)
    known = {"MLX_LM_MTP_AUTOLOAD": "0", "PLUGIN": str(int(plugin)), "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", MAIN, *map(str, words)],
        env=os.environ | known,
        input=typed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def clockless(out: str) -> list[str]:
    """The lines of a chat, without speeds and what drafting says."""
    lines = (re.sub(r"[\d.]+ (tok/s|GB)", r"\1", row) for row in out.splitlines())
    return [row.rstrip() for row in lines if "Draft: " not in row]


def test_a_chat_is_stock_s_and_says_what_was_drafted(model: Path) -> None:
    words = ("mlx_lm.chat", "--model", model, "--max-tokens", 20)
    typed = "Write a loop.\nAnd a class.\nr\nA loop.\nq\n"
    ours = run(*words, "--mtp", "--num-draft-tokens", 2, typed=typed)
    stock = run(*words, typed=typed, plugin=False)
    assert (ours.returncode, stock.returncode) == (0, 0), ours.stderr
    assert clockless(ours.stdout) == clockless(stock.stdout)
    assert ours.stdout.count("  Draft: mtp, k=2, ") == 3


def test_a_sampled_chat_is_stock_s(model: Path) -> None:
    words = ("mlx_lm.chat", "--model", model, "--max-tokens", 20, "--temp", 0.8)
    ours = run(*words, "--mtp", "--seed", 3, typed="Write a loop.\nMore.\nq\n")
    stock = run(*words, "--seed", 3, typed="Write a loop.\nMore.\nq\n", plugin=False)
    assert clockless(ours.stdout) == clockless(stock.stdout)


def test_without_mtp_a_chat_says_nothing_of_drafts(model: Path) -> None:
    words = ("mlx_lm.chat", "--model", model, "--max-tokens", 5)
    assert "Draft" not in run(*words, typed="x\nq\n").stdout


def test_a_benchmark_drafts(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "stats.json"
    words = ("mlx_lm.benchmark", "--model", model, "-p", 16, "-g", 20, "-n", 2)
    done = run(*words, "--mtp", "--draft-stats", file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Draft: mtp, k=3, ") == 3  # with the one that warms up
    assert "Averages: prompt_tps=" in done.stdout
    assert json.loads(file.read_text())["tokens"] == 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mlx_lm.benchmark", "--mtp", "-b", 4), "--batch-size 4 cannot go with --mtp"),
        (("mlx_lm.benchmark", "--draft", "medusa"), "unknown drafter 'medusa'"),
        (
            ("mlx_lm.chat", "--mtp", "--num-draft-tokens", -1),
            "must be an integer of at",
        ),
        (("mlx_lm.chat", "--mtp-head", "x"), "is of no use without --mtp; add it."),
    ],
    ids=str,
)
def test_refused_before_a_model_is_loaded(words: tuple[Any, ...], said: str) -> None:
    done = run(*words, "--model", "/nowhere")
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


def test_a_model_without_a_head_is_told_in_a_sentence(tmp_path: Path) -> None:
    bare = shutil.copytree(BUNDLED, tmp_path / "bare")
    import mlx.core as mx

    for file in bare.glob("*.safetensors"):
        tensors, metadata = mx.load(str(file), return_metadata=True)
        kept = {k: v for k, v in tensors.items() if not k.startswith("mtp.")}
        mx.eval(kept)
        mx.save_safetensors(str(file), kept, metadata)
    done = run("mlx_lm.benchmark", "--model", bare, "--mtp", "-p", 4, "-g", 4)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("mlx_lm.benchmark: error: no MTP")
