"""Conversions that keep the head, and heads put beside conversions."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
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
from oracle import same_bits
from tiny import Spec

import mlx_lm_mtp
from mlx_lm_mtp import cli, extract, load_head
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.errors import HeadNotFound, InvalidOption
from mlx_lm_mtp.heads import head_of, sidecar

pytestmark = pytest.mark.usefixtures("plugin")

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
PROMPTS = (
    "def main(argv=None):\n    parser = argparse.ArgumentParser(",
    "class Queue:\n    def __init__(self, size):\n",
    "Return a copy of the string with",
    "import os\nimport sys\n\n\ndef read(path):\n",
)
Command = Callable[..., tuple[int | str, str, str]]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """`mlx_lm.convert` or `mlx_lm_mtp extract`: exit code, output and error."""

    def command(name: str, *args: Any) -> tuple[int | str, str, str]:
        words = name.split()
        monkeypatch.setattr(sys, "argv", [*words, *map(str, args)])
        main = cli.main
        if words[0] == "mlx_lm.convert":
            main = importlib.import_module("mlx_lm.convert").main
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return command


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bundled checkpoint converted once in each way, by its arguments."""
    known: dict[str, Path] = {}

    def of(**how: Any) -> Path:
        name = json.dumps(how)
        if name not in known:
            path = tmp_path_factory.mktemp("converted") / "model"
            module = importlib.import_module("mlx_lm.convert")
            module.convert(str(BUNDLED), str(path), **how)
            known[name] = path
        return known[name]

    return of


def accepted(path: Path, source: Path | None = None, prompts: int = 4) -> float:
    """The share of first drafts that are accepted, over a few texts."""
    model, tokenizer = mlx_lm.load(str(path))
    drafter = MTPDrafter(head_of(model, source))
    counts = [0, 0]
    how = {"num_draft_tokens": 1, "draft_options": {"depth": "fixed"}}
    for prompt in PROMPTS[:prompts]:
        for response in mlx_lm.stream_generate(
            model, tokenizer, prompt, draft=drafter, max_tokens=64, **how
        ):
            stats = response.draft_stats
        counts = [counts[0] + stats.accepted[0], counts[1] + stats.drafted[0]]
    return counts[0] / counts[1]


@pytest.fixture(scope="module")
def original(request: pytest.FixtureRequest) -> float:
    mlx_lm_mtp.install()
    return accepted(BUNDLED)


def head_at(path: Path) -> dict[str, mx.array]:
    model, _ = mlx_lm.utils.load_model(path)
    return parameters(head_of(model))


def differing(ours: dict[str, mx.array], theirs: dict[str, mx.array]) -> list[str]:
    names = ours.keys() | theirs.keys()
    return sorted(
        n
        for n in names
        if n not in ours or n not in theirs or not same_bits(ours[n], theirs[n])
    )


def files(path: Path) -> dict[str, str]:
    """What a folder holds, but for a sidecar and the card, which names the command."""
    return {
        f.name: hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(path.iterdir())
        if f.is_file() and f.name not in (sidecar.FILE, "README.md")
    }


# --- converting -------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"dtype": "float32"},
    "8 bits": {"quantize": True, "q_bits": 8},
    "4 bits": {"quantize": True, "q_bits": 4},
}
# As the model's, or 2 points from it: 8 bits lose nothing here, 4 bits a little.
HEADS: dict[str, dict[str, Any]] = {
    "full": {},
    "8 bits": {"mtp_bits": 8},
    "6 bits": {"mtp_bits": 6, "mtp_group_size": 32},
}


@pytest.mark.parametrize("head", HEADS)
def test_a_converted_head_accepts_as_before(
    converted: Any, original: float, head: str
) -> None:
    path = converted(mtp=True, **HEADS[head])
    assert accepted(path) == pytest.approx(original, abs=0.02)


def test_a_full_head_on_a_quantised_trunk(converted: Any) -> None:
    """It drafts as the original's does on that trunk: token for token."""
    path = converted(mtp=True, **WAYS["4 bits"])
    assert accepted(path, prompts=1) == accepted(path, BUNDLED, prompts=1)


@pytest.mark.parametrize("way", WAYS)
def test_the_trunk_is_stock_s(converted: Any, way: str) -> None:
    with_head, without = converted(mtp=True, **WAYS[way]), converted(**WAYS[way])
    assert files(with_head) == files(without)
    assert not (without / sidecar.FILE).exists()


def test_a_round_trip_keeps_every_bit(converted: Any) -> None:
    assert differing(head_at(converted(mtp=True)), head_at(BUNDLED)) == []


def test_stock_alone_sees_no_head(converted: Any) -> None:
    mlx_lm_mtp.uninstall()
    ours, _ = mlx_lm.utils.load_model(converted(mtp=True))
    theirs, _ = mlx_lm.utils.load_model(converted())
    tokens = mx.array([[1, 2, 3]])
    assert same_bits(ours(tokens), theirs(tokens))
    mlx_lm_mtp.install()


def test_what_the_file_says_of_itself(converted: Any) -> None:
    _, plain = mx.load(str(converted(mtp=True) / sidecar.FILE), return_metadata=True)
    assert plain == {"format": "mlx", "mtp_norms": "shifted", "mtp_family": "qwen3_5"}
    path = converted(mtp=True, mtp_bits=8) / sidecar.FILE
    tensors, packed = mx.load(str(path), return_metadata=True)
    said = json.loads(packed["mtp_quantization"])
    assert said == {"bits": 8, "group_size": 64, "mode": "affine"}
    assert "mtp.fc.scales" not in tensors  # it stays plain
    assert len(tensors) == 29


def test_types_and_dequantising_are_the_trunk_s(converted: Any, tmp_path: Path) -> None:
    wide = head_at(converted(mtp=True, dtype="float32"))
    assert {v.dtype for v in wide.values()} == {mx.float32}
    packed = converted(mtp=True, mtp_bits=8, quantize=True, q_bits=8)
    convert = importlib.import_module("mlx_lm.convert").convert
    convert(str(packed), str(tmp_path / "again"), dequantize=True, mtp=True)
    again = head_at(tmp_path / "again")
    assert not any(name.endswith("scales") for name in again)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_random_models_of_all_kinds(tmp_path: Path, family: str, experts: bool) -> None:
    if family == "qwen3_next" and not experts:
        pytest.skip("stock loads no converted one")
    written = checkpoints.write(tmp_path / "a", Spec(family, experts=experts))
    convert = importlib.import_module("mlx_lm.convert").convert
    convert(str(written.path), str(tmp_path / "b"), mtp=True)
    assert differing(head_at(tmp_path / "b"), head_at(written.path)) == []


def test_the_command_says_what_it_kept(command: Command, tmp_path: Path) -> None:
    arguments = ("--hf-path", BUNDLED, "--mlx-path", tmp_path / "m", "--mtp")
    code, out, _ = command("mlx_lm.convert", *arguments, "--mtp-bits", 4)
    assert code == 0
    (line,) = (row for row in out.splitlines() if "MTP head" in row)
    assert line.startswith("[INFO] Kept the MTP head in mtp.safetensors: 29 tensors, ")
    assert line.endswith("quantised to 4 bits in groups of 64")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mtp-bits", 4), "--mtp-bits 4 is of no use without --mtp; give it, too."),
        (("--mtp", "--mtp-bits", 7), "--mtp-bits is 7; choose one of 2, 3, 4, 5, 6, 8"),
        (
            ("--mtp", "--mtp-bits", 4, "--mtp-group-size", 48),
            "--mtp-group-size is 48; choose one of 32, 64, 128.",
        ),
        (("--mtp", "--mtp-group-size", 32), "is of no use without --mtp-bits"),
    ],
)
def test_refused_before_anything_is_loaded(
    command: Command, arguments: tuple[Any, ...], said: str
) -> None:
    code, _, err = command("mlx_lm.convert", "--hf-path", "/nowhere", *arguments)
    assert code == 2 and said in err.splitlines()[-1]


def test_without_a_head_nothing_is_converted(command: Command, tmp_path: Path) -> None:
    bare = checkpoints.write(tmp_path / "bare", head=False).path
    target = tmp_path / "m"
    arguments = ("--hf-path", bare, "--mlx-path", target, "--mtp")
    code, *_ = command("mlx_lm.convert", *arguments)
    assert isinstance(code, str) and code.startswith("mlx_lm.convert: error: no MTP")
    assert not target.exists()


def test_without_mtp_nothing_of_ours_is_done(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "write", None)
    monkeypatch.setattr("mlx_lm_mtp.heads.load_head", None)
    arguments = ("--hf-path", BUNDLED, "--mlx-path", tmp_path / "m")
    assert command("mlx_lm.convert", *arguments)[0] == 0


def test_the_head_is_there_before_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("mlx_lm.convert")
    seen: list[bool] = []

    def upload(path: Path, repo: str) -> None:
        seen.append((Path(path) / sidecar.FILE).exists())

    monkeypatch.setattr(module, "upload_to_hub", upload)
    module.convert(str(BUNDLED), str(tmp_path / "m"), mtp=True, upload_repo="a/b")
    assert seen == [True]


def test_stock_s_objects_are_put_back() -> None:
    module, utils = importlib.import_module("mlx_lm.convert"), mlx_lm.utils
    mlx_lm_mtp.uninstall()
    stock = [module.convert, module.main, module.save, utils.DEFAULT_ALLOW_PATTERNS]
    mlx_lm_mtp.install()
    assert "mtp*.safetensors" in utils.DEFAULT_ALLOW_PATTERNS
    assert module.convert is not stock[0] and module.save is not stock[2]
    mlx_lm_mtp.uninstall()
    again = [module.convert, module.main, module.save, utils.DEFAULT_ALLOW_PATTERNS]
    assert all(a is b for a, b in zip(stock, again, strict=True))
    assert "mtp*.safetensors" not in utils.DEFAULT_ALLOW_PATTERNS
    mlx_lm_mtp.install()


# --- extracting -------------------------------------------------------------------


@pytest.fixture
def bare(converted: Any, tmp_path: Path) -> Path:
    """The bundled model as stock converts it: its head is lost."""
    return shutil.copytree(converted(), tmp_path / "bare")


@pytest.mark.parametrize("more", [(), ("--bits", 8)], ids=["full", "8 bits"])
def test_a_head_is_put_beside_a_conversion(
    command: Command, bare: Path, more: tuple[Any, ...]
) -> None:
    arguments = ("--from", BUNDLED, "--to", bare, *more)
    code, out, err = command("mlx_lm_mtp extract", *arguments)
    assert (code, err) == (0, "")
    *_, wrote, figure = out.splitlines()  # converting has said more
    assert wrote.startswith(f"wrote {bare / sidecar.FILE}: ")
    assert figure.startswith("accepted: ") and figure.endswith(" first drafts")
    assert accepted(bare) == pytest.approx(accepted(bare, BUNDLED), abs=0.02)


def test_an_extracted_head_can_be_extracted(
    command: Command, bare: Path, converted: Any, tmp_path: Path
) -> None:
    command("mlx_lm_mtp extract", "--from", BUNDLED, "--to", bare)
    other = shutil.copytree(converted(), tmp_path / "other")
    for source in (bare / sidecar.FILE, bare):
        command("mlx_lm_mtp extract", "--from", source, "--to", other, "--force")
        assert differing(head_at(other), head_at(BUNDLED)) == []


def test_a_sidecar_is_not_replaced_unasked(command: Command, bare: Path) -> None:
    (bare / sidecar.FILE).write_bytes(b"somebody's")
    arguments = ("mlx_lm_mtp extract", "--from", BUNDLED, "--to", bare)
    code, _, err = command(*arguments)
    assert code == 2 and "is there already; --force replaces it." in err
    assert (bare / sidecar.FILE).read_bytes() == b"somebody's"
    (bare / sidecar.FILE).rename(bare / "mtp-old.safetensors")
    code, _, err = command(*arguments, "--force")
    assert code == 2 and "is a head already; move it away first." in err


def test_a_head_of_another_model_is_told_with_its_figure(
    command: Command, bare: Path, tmp_path: Path
) -> None:
    head = {k: mx.zeros_like(v) for k, v in head_at(BUNDLED).items()}
    save(tmp_path / "zeros.safetensors", head, {"format": "mlx"})
    source = tmp_path / "zeros.safetensors"
    code, out, err = command("mlx_lm_mtp extract", "--from", source, "--to", bare)
    assert code == 0 and "accepted: 0% of 47 first drafts" in out
    assert "only 0% of 47 first drafts were accepted" in err
    assert (bare / sidecar.FILE).exists()


def test_a_head_that_does_not_fit_is_refused(
    command: Command, bare: Path, tmp_path: Path
) -> None:
    other = checkpoints.write(tmp_path / "other").path
    code, _, err = command("mlx_lm_mtp extract", "--from", other, "--to", bare)
    assert code == 2 and "does not fit this model" in err
    assert not (bare / sidecar.FILE).exists()


def test_configurations_must_agree(
    command: Command, bare: Path, tmp_path: Path
) -> None:
    """Head counts do not always show in the shapes of a head."""
    other = shutil.copytree(BUNDLED, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_attention_heads"] *= 2
    (other / "config.json").write_text(json.dumps(config))
    code, _, err = command("mlx_lm_mtp extract", "--from", other, "--to", bare)
    assert code == 2 and "its num_attention_heads is" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "/nowhere"), "--to /nowhere has no config.json"),
        (("--to", BUNDLED, "--bits", 7), "--bits is 7; choose one of"),
        (("--to", BUNDLED, "--group-size", 32), "of no use without --bits"),
    ],
)
def test_extract_refuses_before_anything_is_loaded(
    command: Command, arguments: tuple[Any, ...], said: str
) -> None:
    code, _, err = command("mlx_lm_mtp extract", "--from", "/nowhere", *arguments)
    assert code == 2 and said in err


def test_a_source_without_a_head(command: Command, bare: Path, tmp_path: Path) -> None:
    code, _, err = command("mlx_lm_mtp extract", "--from", tmp_path, "--to", bare)
    assert code == 2 and f"no MTP head in {tmp_path}" in err
    assert not (bare / sidecar.FILE).exists()


# --- writing ----------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("bits", [None, 4])
def test_every_family_is_read_as_it_was_written(
    tmp_path: Path, family: str, bits: int | None
) -> None:
    model = families.trunk(family)
    head = load_head(model, families.write_wild(tmp_path, family))
    if bits is not None:
        sidecar.quantize(head, model, sidecar.Packing(bits, 32))
        assert "scales" not in head.fc
    target = tmp_path / "target"
    target.mkdir()
    sidecar.write(head, target, family)
    assert differing(parameters(load_head(model, target)), parameters(head)) == []


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("there", [True, False], ids=["one before", "none before"])
@pytest.mark.parametrize("where", ["save", "fsync", "replace"])
def test_an_interrupted_write_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, there: bool
) -> None:
    path = families.write_wild(tmp_path, "qwen3_5")
    head = load_head(families.trunk("qwen3_5"), path)
    target = tmp_path / "target"
    target.mkdir()
    if there:
        (target / sidecar.FILE).write_bytes(b"before")

    def interrupted(*args: Any, **kwargs: Any) -> None:
        if where == "save":
            Path(args[0]).write_bytes(b"half")
        raise Interrupted

    owner: Any = mx if where == "save" else sidecar.os
    name = "save_safetensors" if where == "save" else where
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(Interrupted):
        sidecar.write(head, target, "qwen3_5")
    left = {f.name: f.read_bytes() for f in target.iterdir()}
    assert left == ({sidecar.FILE: b"before"} if there else {})


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    path = families.write_wild(tmp_path, "qwen3_5")
    head = load_head(families.trunk("qwen3_5"), path)
    with pytest.raises(InvalidOption, match="cannot be written"):
        sidecar.write(head, tmp_path / "nowhere", "qwen3_5")


def test_a_head_is_not_quantised_twice(tmp_path: Path) -> None:
    model = families.trunk("qwen3_5")
    head = load_head(model, families.write_wild(tmp_path, "qwen3_5"))
    sidecar.quantize(head, model, sidecar.Packing(8, 32))
    with pytest.raises(InvalidOption, match="is quantised to 8 bits already"):
        sidecar.quantize(head, model, sidecar.Packing(4, 32))


def test_what_groups_do_not_divide_stays_plain(tmp_path: Path) -> None:
    model = families.trunk("qwen3_5")  # 64 and 96 numbers wide
    head = load_head(model, families.write_wild(tmp_path, "qwen3_5"))
    sidecar.quantize(head, model, sidecar.Packing(4, 64))
    assert isinstance(head.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert isinstance(head.layers[0].mlp.down_proj, nn.Linear)


def test_acceptance_needs_no_chat_template() -> None:
    model, tokenizer = mlx_lm.load(str(BUNDLED))
    stats = extract.acceptance(model, tokenizer, head_of(model))
    assert stats.tokens == 48 and stats.acceptance_rate > 0.5


def test_a_repository_without_a_head_is_told_by_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its weights are downloaded."""
    bare = checkpoints.write(tmp_path / "bare", head=False).path
    asked: list[Any] = []

    def download(repo: str, revision: Any = None, allow_patterns: Any = None) -> Path:
        asked.append(allow_patterns)
        return bare

    monkeypatch.setattr(mlx_lm.utils, "_download", download)
    convert = importlib.import_module("mlx_lm.convert").convert
    with pytest.raises(HeadNotFound, match="its index names"):
        convert("owner/name", str(tmp_path / "m"), mtp=True)
    assert len(asked) == 1 and "model*.safetensors" not in asked[0]
