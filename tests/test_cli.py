"""Stock's script with `--mtp`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import checkpoints
import pytest

from mlx_lm_mtp import cli, stock_cli

pytestmark = pytest.mark.usefixtures("plugin")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("cli") / "model").path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`mlx_lm.generate` with these arguments: exit code, standard output and error."""

    def run(*args: Any) -> tuple[int | str, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *map(str, args)])
        code: Any = 0
        try:
            sys.modules["mlx_lm.generate"].main()
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def clockless(out: str) -> list[str]:
    return re.sub(r"[\d.]+ (tokens-per-sec|GB)", r"\1", out).splitlines()


def test_stock_s_output_then_one_line_of_ours(run: Any, path: Path) -> None:
    arguments = ("--model", path, "--prompt", "def f(x):", "--max-tokens", 20)
    _, stock, _ = run(*arguments)
    code, ours, _ = run(*arguments, "--mtp", "--num-draft-tokens", 2)
    *same, line = clockless(ours)
    assert (code, same) == (0, clockless(stock))
    assert re.fullmatch(
        r"Draft: mtp, k=2, \d\.\d\d tokens a round, [\d.]+% accepted "
        r"\(by position: [\d.]+% / [\d.]+%\)",
        line,
    )


@pytest.mark.parametrize(
    "more",
    [
        ("--temp", 0.9, "--top-p", 0.9, "--seed", 5),
        ("--temp", 1.0, "--xtc-probability", 0.5, "--seed", 3),
        ("--max-kv-size", 16),
        ("--kv-bits", 8, "--kv-group-size", 32, "--quantized-kv-start", 0),
        ("--extra-eos-token", "!", "'"),
        ("--num-draft-tokens", 0),
        ("--draft-option", "verify=step", "--draft-option", "hidden=pre_norm"),
    ],
    ids=lambda more: more[0].strip("-"),
)
def test_stock_s_options_keep_their_meaning(
    run: Any, path: Path, more: tuple[Any, ...]
) -> None:
    arguments = ("--model", path, "--prompt", "def f(x):", "--max-tokens", 20)
    theirs = () if more[0] == "--draft-option" else more
    _, stock, _ = run(*arguments, *theirs)
    code, ours, _ = run(*arguments, *more, "--mtp")
    assert (code, clockless(ours)[:-1]) == (0, clockless(stock))


def test_quiet_prints_the_text_alone(run: Any, path: Path) -> None:
    arguments = ("--model", path, "--prompt", "x", "--verbose", "F")
    assert run(*arguments)[1] == run(*arguments, "--mtp")[1] != ""


def test_help_says_what_there_is(run: Any) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name in ("--mtp", "--draft NAME", "--draft-option", "verify=batch|step"):
        assert name in out


def test_without_mtp_nothing_of_ours_is_said_or_loaded(
    run: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_lm_mtp.plugins.drafters", None)
    code, out, _ = run("--model", path, "--prompt", "x", "--max-tokens", 2)
    assert code == 0 and "Draft" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--draft", "medusa"), "unknown drafter 'medusa'; the known ones are: "),
        (("--draft", "some/model"), "A draft model is --draft-model."),
        (("--mtp", "--image", "x.png"), "--image cannot go with --mtp"),
        (("--mtp", "--num-draft-tokens", "-1"), "num_draft_tokens must be an integer"),
        (("--mtp", "--draft-model", "x"), "--draft-model x cannot go with --mtp"),
        (
            ("--draft", "ngram", "--draft-model", "x"),
            "--draft-model x cannot go with --draft ngram; choose one",
        ),
        (
            ("--draft", "ngram", "--draft-option", "ngram.tries=0"),
            "draft option ngram.tries is 0; give an integer of at least 1.",
        ),
        (
            ("--mtp", "--draft-option", "x.y=0"),
            "unknown draft option 'x.y'; there is no drafter 'x', only: chain, ",
        ),
        (("--mtp", "--draft", "mtp"), "not allowed with argument --mtp"),
        (("--mtp", "--draft-option", "verify"), "takes name=value, got 'verify'"),
        (("--mtp", "--draft-option", "verify=x"), "verify is 'x'; choose one of"),
        (("--mtp", "--draft-option", "deep=3"), "unknown draft option 'deep'"),
        (
            ("--mtp", "--draft-option", "depth=3"),
            "depth is '3'; choose one of: throughput, fixed",
        ),
        (("--mtp", "--draft-option", "tau=2"), "tau is 2.0; give a number of at least"),
        (("--mtp", "--draft-option", "paths=x"), "paths is 'x'; give an integer of"),
        (("--mtp", "--draft-option", "profile=1"), "profile is '1'; give True or"),
        (("--draft-option", "verify=step"), "of no use without --mtp"),
        (("--mtp-head", "x"), "--mtp-head x is of no use without --mtp; add it."),
        (("--draft", "mtp", "--mtp-head", ""), "--mtp-head is empty; name a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refused_before_a_model_is_loaded(
    run: Any, arguments: tuple[str, ...], said: str
) -> None:
    code, _, err = run("--model", "/nowhere", *arguments)
    assert code == 2
    assert said in err.splitlines()[-1]


def test_no_head(run: Any, tmp_path: Path) -> None:
    bare = checkpoints.write(tmp_path, head=False).path
    code, *_ = run("--model", bare, "--prompt", "x", "--mtp")
    assert code.startswith("mlx_lm.generate: error: no MTP head in ")
    assert str(bare) in code and "mtp.*" in code and "original checkpoint" in code


def test_a_head_that_does_not_fit(run: Any, tmp_path: Path) -> None:
    import mlx.core as mx

    written = checkpoints.write(tmp_path, file="model-head.safetensors")
    tensors = {f"mtp.{k}": v for k, v in written.head.items()}
    tensors["mtp.fc.weight"] = mx.zeros((64, 64))
    checkpoints.save(written.path / "model-head.safetensors", tensors)
    code, *_ = run("--model", written.path, "--prompt", "x", "--mtp")
    assert "does not fit this model: fc.weight is (64, 64)" in code
    assert "(64, 128)" in code


@pytest.mark.parametrize("keep", [6, 0.5, 0.98])
def test_a_damaged_weight_file(run: Any, tmp_path: Path, keep: float) -> None:
    written = checkpoints.write(tmp_path)
    file = sorted(written.path.glob("*.safetensors"))[-1]
    data = file.read_bytes()
    file.write_bytes(data[: keep if keep > 1 else int(len(data) * keep)])
    code, *_ = run("--model", written.path, "--prompt", "x", "--mtp")
    assert isinstance(code, str) and code.startswith("mlx_lm.generate: error: ")
    assert "\n" not in code and file.name in code


def test_a_head_from_elsewhere(run: Any, path: Path, tmp_path: Path) -> None:
    """A model without one, and the head in a file, a folder and a folder of its own."""
    bare = checkpoints.write(tmp_path / "bare", head=False).path
    arguments = ("--model", bare, "--prompt", "def f(x):", "--max-tokens", 12)
    _, stock, _ = run(*arguments)
    _, with_its_own, _ = run("--model", path, *arguments[2:], "--mtp")
    for place in (path, path / "model-00002-of-00002.safetensors"):
        code, ours, _ = run(*arguments, "--mtp", "--mtp-head", place)
        *same, line = clockless(ours)
        assert (code, same) == (0, clockless(stock))
        *_, wanted = clockless(with_its_own)
        assert line == wanted.replace("k=3", f"k=3, head={place}")


def test_a_head_from_a_place_without_one(run: Any, path: Path, tmp_path: Path) -> None:
    arguments = ("--model", path, "--prompt", "x", "--mtp", "--mtp-head")
    code, *_ = run(*arguments, tmp_path / "nowhere")
    assert code.endswith(
        "nowhere does not exist, so no MTP head is there; name another place."
    )
    bare = checkpoints.write(tmp_path, head=False).path
    code, *_ = run(*arguments, bare)
    assert code.startswith(f"mlx_lm.generate: error: no MTP head in {bare}")


def test_a_head_given_as_the_model(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_mtp"}')
    checkpoints.save(tmp_path / "model.safetensors", {})
    code, *_ = run("--model", tmp_path, "--prompt", "x", "--mtp")
    assert "holds an MTP head alone" in code and "--model" in code


def test_arguments_do_not_outlive_main(run: Any, path: Path) -> None:
    run("--model", path, "--prompt", "x", "--mtp", "--max-tokens", 2)
    assert stock_cli.requested() == {}


def test_a_borrowed_parser_asks_for_nothing() -> None:
    parser = sys.modules["mlx_lm.generate"].setup_arg_parser()
    assert parser.parse_args(["--mtp"]).draft == "mtp"
    assert stock_cli.requested() == {}


def test_we_stand_back_when_stock_has_the_option() -> None:
    import argparse

    def later_stock() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser()
        parser.add_argument("--mtp", action="store_true")
        return parser

    parser = stock_cli.setup_arg_parser(later_stock)()
    assert parser.parse_args(["--mtp"]).mtp is True


def test_our_own_script_is_stock_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mlx_lm_mtp.generate", "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.generate()
    assert stop.value.code == 0 and "--mtp" in capsys.readouterr().out


def test_our_own_script_refuses_an_unknown_mlx_lm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mlx_lm_mtp

    mlx_lm_mtp.uninstall()
    monkeypatch.setattr("mlx_lm._version.__version__", "0.33.1")
    monkeypatch.setattr(sys, "argv", ["mlx_lm_mtp.generate", "--mtp"])
    with pytest.raises(SystemExit, match="mlx-lm 0.33.1 is installed, .* needs"):
        cli.generate()


def test_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlx_lm_mtp

    monkeypatch.setattr(sys, "argv", ["mlx_lm_mtp", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.strip() == mlx_lm_mtp.__version__


def test_statistics_are_written_as_json(run: Any, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "stats.json"
    code, out, _ = run("--model", path, "--prompt", "def f(x):", "--max-tokens", 20,
                       "--mtp", "--draft-stats", file)  # fmt: skip
    stats = json.loads(file.read_text())
    assert code == 0
    assert f"{stats['mean_acceptance_length']:.2f} tokens a round" in out
    assert sum(stats["accept_histogram"]) == stats["rounds"]
    accepted = sum(n * r for n, r in enumerate(stats["accept_histogram"]))
    assert accepted == sum(stats["accepted"])
    assert stats["rounds"] + accepted == stats["tokens"] == 20


def test_statistics_that_cannot_be_written_are_refused_at_once(
    run: Any, tmp_path: Path
) -> None:
    code, _, err = run("--mtp", "--draft-stats", tmp_path / "no" / "stats.json")
    assert code == 2 and "is in a folder that does not exist; make it" in err
    code, _, err = run("--draft-stats", tmp_path / "stats.json")
    assert code == 2 and "--draft-stats is of no use without" in err
