"""Every option of stock's command line, with drafts and without: the same output."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import oracle
import pytest
import tiny
from adapters import adapter
from checks import PROMPT, drafted
from mlx_lm.models.cache import load_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, save_model
from oracle import stock
from scripted import Scripted

from mlx_lm_mtp import DraftOptions, Tally, stock_cli
from mlx_lm_mtp.heads import head_of

pytestmark = pytest.mark.usefixtures("plugin")

TRAINED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not (loop.last and not add_generation_prompt) %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if style %}# {{ style }}\n{% endif %}{% endif %}"
)
PROMPT_TEXT = "class Node:\\n    def __init__(self, value):\\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained checkpoint with a chat template."""
    folder = tmp_path_factory.mktemp("options") / "model"
    folder.mkdir()
    for file in TRAINED.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((TRAINED / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A script of mlx-lm with these arguments; what it prints."""

    def run(*args: Any, script: str = "generate") -> str:
        monkeypatch.setattr(sys, "argv", [f"mlx_lm.{script}", *map(str, args)])
        __import__(f"mlx_lm.{script}")
        sys.modules[f"mlx_lm.{script}"].main()
        return re.sub(r"[\d.]+ (tokens-per-sec|GB)", r"\1", capsys.readouterr().out)

    return run


OPTIONS: dict[str, tuple[Any, ...]] = {
    "greedy": (),
    "temp": ("--temp", 0.9, "--seed", 5),
    "seed": ("--temp", 0.7, "--seed", 99),
    "top-p": ("--temp", 0.9, "--top-p", 0.8, "--seed", 5),
    "min-p": ("--temp", 1, "--min-p", 0.1, "--min-tokens-to-keep", 3, "--seed", 5),
    "top-k": ("--temp", 1.2, "--top-k", 8, "--seed", 5),
    "xtc": (
        *("--temp", 1, "--xtc-probability", 0.6, "--xtc-threshold", 0.2),
        *("--seed", 3),
    ),
    "all sampling": (
        *("--temp", 0.8, "--top-p", 0.9, "--min-p", 0.02, "--top-k", 40),
        *("--xtc-probability", 0.3, "--seed", 8),
    ),
    "extra-eos-token": ("--extra-eos-token", "self", ")"),
    "max-kv-size": ("--max-kv-size", 24),
    "kv-bits": ("--kv-bits", 8, "--kv-group-size", 32, "--quantized-kv-start", 0),
    "quantized-kv-start": (
        *("--kv-bits", 4, "--kv-group-size", 64, "--quantized-kv-start", 40),
    ),
    "prefill-step-size": ("--prefill-step-size", 4),
    "system-prompt": ("--system-prompt", "Write Python."),
    "prefill-response": ("--prefill-response", "def f(x):\n    return"),
    "both prompts": ("--system-prompt", "Python.", "--prefill-response", "import"),
    "ignore-chat-template": ("--ignore-chat-template",),
    "use-default-chat-template": ("--use-default-chat-template",),
    "chat-template-config": ("--chat-template-config", '{"style": "short"}'),
    "trust-remote-code": ("--trust-remote-code",),
    "verbose": ("--verbose", "F"),
    "quantize-activations": ("--quantize-activations",),  # of no layer that is plain
    "one token": ("--max-tokens", 1),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_output_is_stock_s(run: Any, path: Path, option: str) -> None:
    arguments = ("--model", path, "--prompt", PROMPT_TEXT, "--max-tokens", 40)
    theirs = run(*arguments, *OPTIONS[option])
    ours = run(*arguments, *OPTIONS[option], "--mtp").splitlines()
    told = [line for line in ours if line.startswith("Draft: mtp, k=3")]
    assert len(told) == (option != "verbose")
    assert [line for line in ours if line not in told] == theirs.splitlines()
    if option not in ("one token", "max-kv-size", "extra-eos-token"):
        assert not told or "accepted" in told[0]


def test_all_options_of_stock_are_looked_at() -> None:
    """A new one must be tested as well."""
    known = {argument for more in OPTIONS.values() for argument in map(str, more)}
    here = {"--adapter-path", "--prompt-cache-file", "--image", "--draft-model"}
    shared = {"--model", "--prompt", "--max-tokens", "--num-draft-tokens", "--help"}
    parser = sys.modules["mlx_lm.generate"].setup_arg_parser()
    options = {
        max(action.option_strings, key=len)
        for action in parser._actions
        if action.container.title != "drafting (mlx-lm-mtp)"
    }
    ours = {"--mtp", "--draft", "--draft-option", "--draft-stats"}
    assert options - ours <= known | here | shared
    assert stock_cli.requested() == {}


def test_a_prompt_from_stdin(
    run: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def output(*more: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("def main():\n"))
        return run("--model", path, "--prompt", "-", "-m", 20, *more).splitlines()

    assert output("--mtp")[:-1] == output()


# --- adapters -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_an_adapted_trunk_with_the_head_as_it_is(
    run: Any, path: Path, tmp_path: Path, kind: str
) -> None:
    arguments = ("--model", path, "--prompt", PROMPT_TEXT, "--max-tokens", 40)
    adapted = (*arguments, "--adapter-path", adapter(path, tmp_path / kind, kind))
    theirs = run(*adapted)
    assert theirs != run(*arguments)  # the adapter matters
    *ours, told = run(*adapted, "--mtp").splitlines()
    assert ours == theirs.splitlines()
    assert "accepted" in told


def test_an_adapter_that_is_applied_later_reaches_the_head(path: Path) -> None:
    """It uses the trunk's lm_head and embedding as they are now."""
    model, _ = mlx_lm.load(str(path))
    hidden, token = mx.ones((1, 1, 256)), mx.array([[3]])
    head = head_of(model)
    before = head.logits(hidden), head(token, hidden, None)
    parameters = {"rank": 2, "scale": 20.0, "dropout": 0.0, "keys": ["embed_tokens"]}
    linear_to_lora_layers(model.language_model.model, 0, parameters)
    embedding = model.language_model.model.embed_tokens
    embedding.lora_b = mx.ones_like(embedding.lora_b)
    assert head_of(model) is head
    after = head.logits(hidden), head(token, hidden, None)
    for a, b in zip(before, after, strict=True):
        assert not mx.array_equal(a, b)


# --- prompt caches --------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("more", [(), ("--kv-bits", 8), ("--max-kv-size", 20)], ids=str)
def test_a_prompt_cache_file_of_stock_s(
    run: Any, path: Path, tmp_path: Path, more: tuple[Any, ...], chat: bool
) -> None:
    model, file = (path if chat else TRAINED), tmp_path / "cache.safetensors"
    making = ("--model", model, "--prompt", "import os\n", "--prompt-cache-file", file)
    run(*making, *more, script="cache_prompt")
    used = ("--prompt-cache-file", file, "--prompt", "def main():\\n", "-m", 30)
    group = ("--kv-group-size", 64) if more[:1] == ("--kv-bits",) else ()
    before = file.read_bytes()
    theirs = run(*used, *group)
    *ours, told = run(*used, *group, "--mtp").splitlines()
    assert ours == theirs.splitlines()
    assert "the drafter has not seen" in told
    assert file.read_bytes() == before


@pytest.mark.parametrize("more", [(), ("--kv-bits", 8)], ids=str)
def test_a_prompt_cache_file_with_what_the_drafter_has_seen(
    run: Any, tmp_path: Path, more: tuple[Any, ...]
) -> None:
    """Drafts go on as if the prompt had just been fed; stock can use the file, too."""
    prompt, file = "import os\nimport sys\n\n\n", tmp_path / "cache.safetensors"
    making = ("--model", TRAINED, "--prompt", prompt, "--prompt-cache-file", file)
    plain = tmp_path / "plain.safetensors"
    run(*making, *more, "--mtp", script="cache_prompt")
    run(*making[:-1], plain, *more, script="cache_prompt")
    ours, stock = (load_prompt_cache(str(f)) for f in (file, plain))
    assert len(ours) == len(stock) + 2
    assert oracle.differences(ours[: len(stock)], stock) == []
    used = ("--prompt", "def main():\\n", "-m", 40)
    group = ("--kv-group-size", 64) if more else ()
    cold = run(*used, *group, "--prompt-cache-file", plain, "--mtp").splitlines()
    warm = run(*used, *group, "--prompt-cache-file", file, "--mtp").splitlines()
    theirs = run(*used, *group, "--prompt-cache-file", file).splitlines()
    assert cold[:-1] == warm[:-1] == theirs
    assert "has not seen" in cold[-1] and "has not seen" not in warm[-1]


def test_a_prompt_cache_is_not_made_with_what_cannot_work(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cache.safetensors"
    making = ("--model", TRAINED, "--prompt", "x", "--prompt-cache-file", file)
    with pytest.raises(SystemExit) as stop:
        run(*making, "--mtp", "--draft-option", "deep=1", script="cache_prompt")
    assert stop.value.code == 2
    assert "unknown draft option 'deep'" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        run("--help", script="cache_prompt")
    said = capsys.readouterr().out
    assert "--mtp-head" in said and "--num-draft-tokens K" not in said
    assert "--draft-stats" not in said and not file.exists()


# --- quantised activations ------------------------------------------------------------


@pytest.fixture
def quantized(tmp_path: Path) -> Iterator[nn.Module]:
    """A tiny model that quantises its activations, loaded as stock loads it."""
    model = tiny.Spec("qwen3").build()
    nn.quantize(
        model, 32, 8, mode="mxfp8", class_predicate=lambda _, m: type(m) is nn.Linear
    )
    save_model(tmp_path, model)
    args = {k: v for k, v in vars(model.args).items() if v is not None}
    args["quantization"] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    (tmp_path / "config.json").write_text(json.dumps(args))
    yield load_model(tmp_path, model_config={"quantize_activations": True})[0]


def test_quantised_activations_are_not_fed_in_rows(quantized: nn.Module) -> None:
    """MLX's CPU backend multiplies one row of them, so stock prefills one by one."""
    assert any(isinstance(m, nn.QQLinear) for m in quantized.modules())
    theirs = stock(quantized, PROMPT, 12, prefill_step_size=1)
    stats = Tally()
    ours = drafted(
        quantized,
        PROMPT,
        12,
        Scripted(theirs.tokens),
        stats=stats,
        prefill_step_size=1,
    )
    assert ours.tokens == theirs.tokens
    assert "for one row only" in stats.summary()
    options = DraftOptions(verify="step")
    stats = Tally()
    ours = drafted(
        quantized,
        PROMPT,
        12,
        Scripted(theirs.tokens),
        options=options,
        stats=stats,
        prefill_step_size=1,
    )
    assert ours.tokens == theirs.tokens and stats.acceptance_rate == 1.0


# --- penalties, which have no option on the command line ------------------------------

API: dict[str, Callable[[], dict[str, Any]]] = {
    "repetition": lambda: {"repetition_penalty": 1.3, "repetition_context_size": 10},
    "presence": lambda: {"presence_penalty": 0.8, "presence_context_size": 30},
    "frequency": lambda: {"frequency_penalty": 0.4, "frequency_context_size": 50},
    "bias": lambda: {"logit_bias": {201: -3.0, 30: 2.0}},
    "all": lambda: {
        "logit_bias": {201: -1.0},
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
    },
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", API)
def test_penalties_are_those_of_stock(
    trained: Any, name: str, temperature: float
) -> None:
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    def tokens(**draft: Any) -> tuple[list[int], Any]:
        mx.random.seed(3)
        made = list(
            mlx_lm.stream_generate(
                *trained,
                "class TestCase(unittest.TestCase):\n",
                max_tokens=60,
                sampler=make_sampler(temperature),
                logits_processors=make_logits_processors(**API[name]()),
                **draft,
            )
        )
        return [response.token for response in made], made[-1]

    theirs, _ = tokens()
    for sampling in ("shared", "greedy"):
        ours, last = tokens(draft="mtp", draft_options={"draft_sampling": sampling})
        assert ours == theirs
        assert last.draft_stats.acceptance_rate > 0.1 and not last.draft_stats.unguided


@pytest.fixture(scope="module")
def trained() -> Any:
    import mlx_lm_mtp

    mlx_lm_mtp.install()
    return mlx_lm.load(str(TRAINED))
