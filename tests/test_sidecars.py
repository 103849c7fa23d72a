"""What a sidecar holds, what is refused, and what comes over the hub."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import families
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import pytest
from families import parameters, save
from hub import hub
from oracle import same_bits
from tiny import Spec

import mlx_lm_mtp
from mlx_lm_mtp import extract, load_head, stock_convert
from mlx_lm_mtp.anatomy import embedding, text_model
from mlx_lm_mtp.errors import InvalidOption
from mlx_lm_mtp.heads import find, head_of, sidecar

pytestmark = pytest.mark.usefixtures("plugin")

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
SMALL: dict[str, Any] = {"quantize": True, "q_bits": 4}
Command = Callable[..., tuple[int | str | None, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """`mlx_lm_mtp extract` with these arguments: exit code, output and error."""

    def command(*args: Any) -> tuple[int | str | None, str, str]:
        parser = argparse.ArgumentParser("mlx_lm_mtp extract")
        extract.add_arguments(parser)
        code: Any = 0
        try:
            extract.run(parser, parser.parse_args([str(arg) for arg in args]))
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return command


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The bundled checkpoint converted once in each way, by its arguments."""
    known: dict[str, Path] = {}

    def of(**how: Any) -> Path:
        name = json.dumps(how)
        if name not in known:
            path = tmp_path_factory.mktemp("converted") / "model"
            sys.modules["mlx_lm.convert"].convert(str(BUNDLED), str(path), **how)
            known[name] = path
        return known[name]

    return of


def head_at(path: Path) -> dict[str, mx.array]:
    model, _ = mlx_lm.utils.load_model(path)
    return parameters(head_of(model))


def assert_same(ours: dict[str, mx.array], theirs: dict[str, mx.array]) -> None:
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if not same_bits(ours[n], theirs[n])] == []


def weights(path: Path) -> dict[str, bytes]:
    """The files that stock loads, but for the card, which may name the folder."""
    found = [*path.glob("model*"), path / "config.json"]
    return {f.name: f.read_bytes() for f in found}


# --- more of what is written ------------------------------------------------------


def metadata(folder: Path) -> dict[str, str]:
    return mx.load(str(folder / sidecar.FILE), return_metadata=True)[1]


def agreements(
    model: nn.Module, texts: list[tuple[int, list[int]]], places: list[Path]
) -> list[float]:
    """How often a head's first choice is the target's, behind the prompts."""
    states, counts = [], []
    for start, ids in texts:
        tokens = mx.array(ids)[None]
        hidden = text_model(model)(tokens)
        logits = embedding(model).as_linear(hidden)
        states.append((start, tokens, hidden, logits.argmax(-1)[:, start:]))
        mx.eval(states[-1][1:])
    for place in places:
        head, right = load_head(model, place), 0
        for start, tokens, hidden, wanted in states:
            out = head(tokens[:, 1:], hidden[:, :-1], head.new_cache())
            chosen = head.logits(out).argmax(-1)[:, start - 1 :]
            right += (chosen == wanted).sum().item()
        counts.append(right / sum(s[3].size for s in states))
    return counts


MORE_PROMPTS = (
    "def __init__(self, name):\n",
    "class TestCase(unittest.TestCase):\n",
    "def is_prime(n):\n",
    "if __name__ == ",
    "def add(self, item):\n",
    "The assert statement",
    "Note that the",
    "An exception is raised if",
)


def test_four_bits_lose_less_than_two_points_beside_any_trunk(
    converted: Callable[..., Path],
) -> None:
    """On texts that the original writes, so that all are asked the same.

    A 4-bit trunk of so few parameters loses about 2 points itself, whatever the head.
    """
    model, tokenizer = mlx_lm.load(str(BUNDLED))
    texts = []
    for prompt in MORE_PROMPTS:
        ids = tokenizer.encode(prompt)
        steps = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=40)
        texts.append((len(ids), [*ids, *(step.token for step in steps)]))
    places = [converted(mtp=True, mtp_bits=8), converted(mtp=True, mtp_bits=4)]
    original, *others = agreements(model, texts, [BUNDLED, *places])
    assert original > 0.7
    assert others == pytest.approx([original] * 2, abs=0.02)
    full = converted(mtp=True, **SMALL)
    small = mlx_lm.load(str(full))[0]
    unkept, same, *kept = agreements(small, texts, [BUNDLED, full, *places])
    assert same == unkept
    assert kept == pytest.approx([unkept] * 2, abs=0.02)
    assert [unkept, *kept] == pytest.approx([original] * 3, abs=0.04)


def test_a_process_without_the_plugin_sees_no_head(
    converted: Callable[..., Path],
) -> None:
    code = (
        "import sys, mlx.core as mx, mlx_lm; mx.set_default_device(mx.cpu);"
        "assert 'mlx_lm_mtp' not in sys.modules;"
        "a, b = [mlx_lm.load(p)[0](mx.array([[5, 6, 7]])) for p in sys.argv[1:]];"
        "assert mx.array_equal(a, b).item() and mx.isfinite(a).all().item()"
    )
    places = converted(mtp=True, mtp_bits=8, **SMALL), converted(**SMALL)
    command = [sys.executable, "-c", code, *places]
    subprocess.run(command, check=True, env=os.environ | {"MLX_LM_MTP_AUTOLOAD": "0"})


def test_half_precision_is_the_head_s_too(converted: Callable[..., Path]) -> None:
    head = head_at(converted(mtp=True, dtype="float16"))
    assert {v.dtype for v in head.values()} == {mx.float16}


def test_casting_spares_what_stock_spares(tmp_path: Path) -> None:
    model = families.trunk("glm4_moe")
    head = load_head(model, families.write_wild(tmp_path, "glm4_moe"))
    sidecar.cast(head, mx.bfloat16, model.cast_predicate)
    dtypes = {k: v.dtype for k, v in parameters(head).items()}
    assert dtypes.pop("layers.0.mlp.gate.e_score_correction_bias") == mx.float32
    assert set(dtypes.values()) == {mx.bfloat16}


def test_a_quantised_head_stays_as_it_is(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    source, module = converted(mtp=True, mtp_bits=8), sys.modules["mlx_lm.convert"]
    module.convert(str(source), str(tmp_path / "again"), mtp=True)
    assert metadata(tmp_path / "again") == metadata(source)
    assert_same(head_at(tmp_path / "again"), head_at(source))
    with pytest.raises(InvalidOption, match="mtp_bits is 4, but the head is quantised"):
        module.convert(str(source), str(tmp_path / "other"), mtp=True, mtp_bits=4)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mtp_bits": 4}, "mtp_bits 4 is of no use without mtp; give it, too."),
        ({"mtp": True, "mtp_bits": 1}, "mtp_bits is 1; choose one of 2, 3, 4, 5, 6, 8"),
        ({"mtp": True, "mtp_group_size": 64}, "mtp_group_size is of no use without"),
    ],
    ids=["bits alone", "wrong bits", "group alone"],
)
def test_refused_in_python(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        mlx_lm.convert("/nowhere", **arguments)


def test_stock_s_own_option_would_be_left_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mtp", action="store_true")
    theirs = stock_convert.configure_parser(lambda: parser)()
    assert vars(theirs.parse_args(["--mtp"])) == {"mtp": True}

    def later(hf_path: str, mtp: bool = False) -> bool:
        return mtp

    assert stock_convert.convert(later) is later


def test_patterns_of_downloads_are_those_of_sidecars() -> None:
    mlx_lm_mtp.uninstall()
    stock = list(mlx_lm.utils.DEFAULT_ALLOW_PATTERNS)
    mlx_lm_mtp.install()
    assert [*stock, *find.SIDECARS] == mlx_lm.utils.DEFAULT_ALLOW_PATTERNS


def test_routers_have_the_bits_that_the_trunk_gives_them(tmp_path: Path) -> None:
    model = families.trunk("qwen3_5_moe")
    head = load_head(model, families.write_wild(tmp_path, "qwen3_5_moe"))
    sidecar.quantize(head, model, sidecar.Packing(4, 32))
    written = sidecar.write(head, tmp_path, "qwen3_5_moe")
    router = {"group_size": 64, "bits": 8, "mode": "affine"}
    assert written.quantization == {
        "bits": 4,
        "group_size": 32,
        "mode": "affine",
        "layers.0.mlp.gate": router,
        "layers.0.mlp.shared_expert_gate": router,
    }
    assert json.loads(metadata(tmp_path)["mtp_quantization"]) == written.quantization
    assert str(written).endswith("4 bits in groups of 32 (2 parts otherwise)")


def test_groups_that_divide_nothing_are_refused(tmp_path: Path) -> None:
    model = families.trunk("mimo")
    head = load_head(model, families.write_wild(tmp_path, "mimo"))
    with pytest.raises(InvalidOption, match="group size is 128, which divides no part"):
        sidecar.quantize(head, model, sidecar.Packing(4, 128))


def test_a_full_disk_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = load_head(families.trunk("mimo"), families.write_wild(tmp_path, "mimo"))
    before = {f.name for f in tmp_path.iterdir()}

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidOption, match="No space left on device.*; make room"):
        sidecar.write(head, tmp_path, "mimo")
    assert {f.name for f in tmp_path.iterdir()} == before


def test_a_half_written_file_is_no_head(tmp_path: Path) -> None:
    """Should the process be killed: neither stock nor the package looks at it."""
    with sidecar._replacing(tmp_path / sidecar.FILE) as temporary:
        temporary.write_bytes(b"half")
        assert {*tmp_path.iterdir()} == {temporary}
        assert not [*tmp_path.glob("model*.safetensors")]
        assert not any([*tmp_path.glob(pattern)] for pattern in find.SIDECARS)
    assert [f.name for f in tmp_path.iterdir()] == [sidecar.FILE]


@pytest.fixture
def plain(converted: Callable[..., Path], tmp_path: Path) -> Path:
    """The bundled model as stock converts it: its head is lost."""
    return shutil.copytree(converted(), tmp_path / "plain")


def test_extracting_writes_what_converting_writes(
    command: Command, plain: Path, converted: Callable[..., Path]
) -> None:
    assert command("--from", BUNDLED, "--to", plain)[0] == 0
    ours, theirs = plain / sidecar.FILE, converted(mtp=True) / sidecar.FILE
    assert ours.read_bytes() == theirs.read_bytes()
    assert weights(plain) == weights(converted())


def test_a_type_for_an_extracted_head(command: Command, plain: Path) -> None:
    arguments = ("--from", BUNDLED, "--to", plain, "--dtype", "float32")
    code, out, _ = command(*arguments)
    assert code == 0 and "15 tensors, 3.0 MB, float32, not quantised" in out
    assert {v.dtype for v in head_at(plain).values()} == {mx.float32}


def test_a_folder_s_own_head_can_be_quantised(command: Command, plain: Path) -> None:
    assert command("--from", BUNDLED, "--to", plain)[0] == 0
    again = ("--from", plain, "--to", plain, "--force", "--bits")
    code, out, _ = command(*again, 8)
    assert code == 0 and "quantised to 8 bits" in out
    code, _, err = command(*again, 4)
    assert code == 2 and "--bits is 4, but the head is quantised to 8 bits" in err


def test_a_folder_that_cannot_be_loaded(command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5"}')
    code, _, err = command("--from", BUNDLED, "--to", tmp_path)
    assert code == 2 and f"--to {tmp_path} cannot be loaded (No safetensors" in err


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 4160), ("head_dim", 128)])
def test_other_sizes_that_no_shape_of_the_head_shows(
    command: Command, plain: Path, tmp_path: Path, name: str, value: int
) -> None:
    other = shutil.copytree(BUNDLED, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["text_config"][name] = value
    (other / "config.json").write_text(json.dumps(config))
    code, _, err = command("--from", other, "--to", plain)
    assert code == 2
    assert f"does not fit this model: its {name} is {value}, the model's " in err
    assert not (plain / sidecar.FILE).exists()


def test_a_head_of_the_right_size_with_other_weights(
    command: Command, plain: Path, tmp_path: Path
) -> None:
    mx.random.seed(2)
    shuffled = {
        f"mtp.{k}": mx.random.permutation(v, axis=0)
        for k, v in head_at(BUNDLED).items()
    }
    source = tmp_path / "shuffled.safetensors"
    save(source, shuffled, {"format": "mlx"})
    code, out, err = command("--from", source, "--to", plain)
    figure = out.splitlines()[-1].removeprefix("accepted: ")
    assert code == 0 and (plain / sidecar.FILE).exists()
    assert int(figure.partition("%")[0]) < 10
    assert err.startswith(f"mlx_lm_mtp extract: warning: only {figure} were accepted")


# --- the hub ----------------------------------------------------------------------

HUB = """
import sys
from pathlib import Path
import mlx.core as mx
mx.set_default_device(mx.cpu)
import mlx_lm, mlx_lm.utils, mlx_lm_mtp
if "stock" not in sys.argv:
    mlx_lm_mtp.install()
if "convert" in sys.argv:
    sys.argv[1:] = ["--model", "owner/name", "--mlx-path", "out", "--mtp"]
    sys.modules["mlx_lm.convert"].main()
else:
    mlx_lm.load("owner/name")
    path = mlx_lm.utils.hf_repo_to_path("owner/name")
    print(sorted(f.name for f in Path(path).glob("m*.safetensors")))
"""


def on_hub(
    root: Path, url: str, *words: str, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    """A process of its own, which knows this hub alone."""
    known = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(root / "cache"),
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_XET": "1",
        "MLX_LM_MTP_AUTOLOAD": "0",
    }
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-c", HUB, *words],
        env=clean | known,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "hub" / "owner" / "name"
    checkpoints.write(path, Spec(weights="bf16"), form="mlx", head=False)
    (path / "README.md").write_text("---\nlicense: mit\n---\n")
    return path


def test_a_sidecar_is_downloaded_with_its_model(
    tmp_path: Path, repository: Path
) -> None:
    checkpoints.save(repository / sidecar.FILE, {"mtp.x": mx.zeros(1)}, "mlx")
    with hub(tmp_path / "hub") as server:
        stock = on_hub(tmp_path, server.url, "stock")
        offline = on_hub(tmp_path, server.url, offline=True)
        ours = on_hub(tmp_path, server.url)
    assert "mtp" not in stock.stdout and stock.returncode == 0, stock.stderr
    # What stock has downloaded is whole without the sidecar, for us as well.
    assert offline.stdout == stock.stdout, offline.stderr
    assert "'mtp.safetensors'" in ours.stdout, ours.stderr


def test_a_repository_is_converted_with_its_head(
    tmp_path: Path, repository: Path
) -> None:
    checkpoints.write(repository, Spec(weights="bf16"))
    with hub(tmp_path / "hub") as server:
        done = on_hub(tmp_path, server.url, "convert")
    assert done.returncode == 0, done.stderr
    assert metadata(tmp_path / "out")["mtp_family"] == "qwen3_5"


def test_a_repository_without_a_head_is_not_downloaded(
    tmp_path: Path, repository: Path
) -> None:
    with hub(tmp_path / "hub") as server:
        done = on_hub(tmp_path, server.url, "convert")
        fetched = set(server.fetched)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "mlx_lm.convert: error: no MTP head in owner/name: its index names "
    )
    assert fetched == {"config.json", "model.safetensors.index.json"}
    assert not (tmp_path / "out").exists()
