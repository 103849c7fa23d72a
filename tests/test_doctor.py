"""`mlx_lm_mtp doctor`: what it finds, what follows from it, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import families
import mlx.core as mx
import mlx_lm
import pytest
from checkpoints import save
from tiny import Spec

from mlx_lm_mtp import Tally, cli, errors, learnt
from mlx_lm_mtp.depth import MEASURED
from mlx_lm_mtp.doctor import examine, report, verdict
from mlx_lm_mtp.doctor.findings import Findings
from mlx_lm_mtp.doctor.verdict import BROKEN, DOES_NOT_PAY, WORKS, expected, judge
from mlx_lm_mtp.heads import head_of
from mlx_lm_mtp.origin import ByModel

pytestmark = pytest.mark.usefixtures("plugin")

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
SHORT = ("--tokens", 8, "--max-k", 2, "--prompt", "def f(x):")
Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    """`mlx_lm_mtp doctor` with these arguments: exit code, output and error."""

    def doctor(*args: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx_lm_mtp", "doctor", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        code = stop.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return doctor


def line(out: str, name: str) -> str:
    (found,) = (row for row in out.splitlines() if row.startswith(f"{name}:"))
    return found.partition(":")[2].strip()


def write_windowed(path: Path) -> Path:
    """A random model that looks back on 8 tokens, with a random head."""
    name = "exaone_moe"
    trunk = families.parameters(families.trunk(name))
    families.save(path / "model.safetensors", trunk, {"format": "mlx"})
    families.save(path / "mtp.safetensors", families.wild_head(name), {"format": "pt"})
    config = families.config_of(name) | {"eos_token_id": 95}
    assert config["sliding_window"] == 8
    (path / "config.json").write_text(json.dumps(config))
    checkpoints.write_tokenizer(path)
    return path


def write_uneven(path: Path) -> None:
    """The bundled checkpoint with a final norm that turns the sign of every other
    channel.

    Its own norm is nearly flat, so that hidden states before and behind it differ in
    length alone, which the head takes out again. Here the lm_head turns the signs back,
    exactly: the trunk says what it said, and so does a head that is given hidden states
    from *before* the norm.
    """
    model, _ = mlx_lm.load(str(BUNDLED))
    trunk, head = families.parameters(model), families.parameters(head_of(model))
    name = "language_model.model.norm.weight"
    by = mx.array([1.0, -1.0] * (trunk[name].size // 2), dtype=trunk[name].dtype)
    trunk["language_model.lm_head.weight"] = (
        trunk["language_model.model.embed_tokens.weight"] * by
    )
    trunk[name] = trunk[name] * by
    head["norm.weight"] = head["norm.weight"] * by  # it shares the lm_head
    save(path / "model.safetensors", trunk, "mlx")
    write_sidecar(path, head)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / file, path)
    config = json.loads((BUNDLED / "config.json").read_text())
    for part in (config, config["text_config"]):
        part["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config))


def write_sidecar(path: Path, head: dict[str, mx.array]) -> None:
    save(path / "mtp.safetensors", {f"mtp.{k}": v for k, v in head.items()}, "mlx")


# --- a model that works -----------------------------------------------------------


def test_the_bundled_checkpoint(doctor: Doctor, tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    code, out, err = doctor(BUNDLED, "--json", file)
    found = json.loads(file.read_text())
    assert (code, err) == (found["exit_code"], "")
    assert found["head"]["tensors"] == 15 and found["head"]["types"] == {"bfloat16": 15}
    assert found["head"]["norms"].startswith(
        "zero-centred; the trunk's conv1d is in raw"
    )
    assert found["head"]["layout"] == "in the shards"
    assert "model-00002-of-00002.safetensors" in line(out, "head")
    post, pre = (found["acceptance"][h] for h in ("post_norm", "pre_norm"))
    assert len(post) == 4 and post == sorted(post, reverse=True)
    assert post[0] > 0.8 and post[0] >= pre[0] - 0.05
    assert found["hidden"] == "post_norm"
    assert set(found["verify"]) == set(found["exact"]) == {str(w) for w in range(1, 9)}
    assert set(found["exact"].values()) == {"batched"}
    assert line(out, "exact") == "batched for 1 to 8 tokens"
    assert found["draft"] > 0 and found["capture"] == "states"
    assert found["self_check"] == "passed" and found["undrafted"] == {}
    assert line(out, "gated delta").endswith("by states; self-check: passed")
    ways = {"ArraysCache recorded", "KVCache trimmed"}
    assert found["rollback"].keys() == ways
    assert all(way in line(out, "caches") for way in ways)
    assert found["expected_speed"].keys() == {"1", "2", "3", "4"}
    k = found["recommended_k"]
    assert f"--num-draft-tokens {k}." in line(out, "what to do") or code == DOES_NOT_PAY


def test_the_better_hidden_states_are_found(doctor: Doctor, tmp_path: Path) -> None:
    """On the bundled checkpoint both are the same, and would be if one was ignored."""
    write_uneven(tmp_path)
    code, out, _ = doctor(tmp_path, "--tokens", 48, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    post, pre = (found["acceptance"][h] for h in ("post_norm", "pre_norm"))
    assert pre[0] > 0.8 > 0.5 > post[0]
    assert found["family_hidden"] == "post_norm" and found["hidden"] == "pre_norm"
    assert "(pre_norm, used)" in out
    said = line(out, "what to do")
    assert said.endswith(" --draft-option hidden=pre_norm.") or code == DOES_NOT_PAY


def test_json_on_the_terminal_is_all_there_is(doctor: Doctor, tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path).path
    code, out, _ = doctor(path, *SHORT, "--json", "-")
    assert json.loads(out)["exit_code"] == code


def test_a_head_from_elsewhere(doctor: Doctor, tmp_path: Path) -> None:
    bare = checkpoints.write(tmp_path / "bare", head=False).path
    head = checkpoints.write(tmp_path / "head", form="mlx", head_bits=4).path
    code, out, _ = doctor(bare, *SHORT, "--mtp-head", head)
    assert code == BROKEN  # a random one
    assert str(head) in line(out, "head")
    assert line(out, "quantised") == "8 of 4 bits in groups of 32"
    assert line(out, "norms") == "as stock multiplies them; safetensors format: mlx"


def test_another_head_is_told(doctor: Doctor, tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    save(
        tmp_path / "mtp.safetensors",
        {f"mtp.{k}": v for k, v in written.head.items()},
        "mlx",
    )
    _, out, err = doctor(tmp_path, *SHORT)
    assert line(out, "head").startswith("mtp.safetensors (sidecar)")
    assert "model-00002-of-00002.safetensors" in line(out, "passed over")
    assert err == ""  # what a generation would warn of is in the report


# --- what is broken ---------------------------------------------------------------


def test_a_head_of_another_model(doctor: Doctor, tmp_path: Path) -> None:
    """All zeros: whatever it drafts is wrong."""
    written = checkpoints.write(tmp_path, head=False)
    write_sidecar(tmp_path, {k: mx.zeros_like(v) for k, v in written.head.items()})
    code, out, _ = doctor(tmp_path, *SHORT)
    assert code == BROKEN and line(out, "verdict") == "broken"
    said = line(out, "what to do")
    assert said.startswith("Take the head of the checkpoint that this model was made")
    assert "as stock multiplies them; safetensors format: mlx" in said


def test_norms_that_are_declared_wrongly(doctor: Doctor, tmp_path: Path) -> None:
    """Raw norms in a file that says otherwise: no error, and no acceptance."""
    from mlx_lm_mtp.heads import find
    from mlx_lm_mtp.heads.families.qwen import QWEN

    raw = find.find_head(BUNDLED, QWEN, None).tensors
    write_sidecar(tmp_path, raw)
    code, out, _ = doctor(BUNDLED, "--mtp-head", tmp_path, "--tokens", 32)
    assert line(out, "norms") == "as stock multiplies them; safetensors format: mlx"
    assert code == BROKEN
    assert "its norms are written otherwise" in line(out, "what to do")


def test_no_head(doctor: Doctor, tmp_path: Path) -> None:
    code, out, err = doctor(checkpoints.write(tmp_path, head=False).path, *SHORT)
    assert (code, err) == (BROKEN, "")
    assert line(out, "what to do").startswith("no MTP head in ")
    assert "declares one all the same" in out


def test_a_head_that_does_not_fit(doctor: Doctor, tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    head = dict(written.head) | {"fc.weight": mx.zeros((64, 64))}
    write_sidecar(tmp_path, head)
    code, out, _ = doctor(tmp_path, *SHORT)
    assert code == BROKEN
    assert "fc.weight is (64, 64), the model needs (64, 128)" in line(out, "what to do")
    # What was found is told all the same.
    assert line(out, "head") == f"mtp.safetensors (sidecar) in {tmp_path}"
    assert line(out, "tensors") == "15 (15 of float32)"
    assert line(out, "norms") == "as stock multiplies them; safetensors format: mlx"


def test_a_packed_head_of_another_size(doctor: Doctor, tmp_path: Path) -> None:
    """Its bits are told by dimensions that are not the model's."""
    written = checkpoints.write(tmp_path, head_bits=4, form="mlx")
    head = dict(written.head) | {"norm.weight": mx.ones((32,))}
    write_sidecar(tmp_path, head)
    code, out, _ = doctor(tmp_path, *SHORT)
    assert code == BROKEN and "norm.weight is (32,)" in line(out, "what to do")
    assert line(out, "quantised") == "8 of unknown bits"


def test_a_truncated_file(doctor: Doctor, tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path).path
    head = checkpoints.write(
        tmp_path / "head", form="mlx", file="model-mtp.safetensors"
    )
    file = head.path / "model-mtp.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    code, out, _ = doctor(path, *SHORT, "--mtp-head", file)
    assert code == BROKEN and "is damaged or cut short" in line(out, "what to do")


def test_a_model_that_does_not_load(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_mtp"}')
    save(tmp_path / "model.safetensors", {})
    code, out, _ = doctor(tmp_path)
    assert code == BROKEN and "qwen3_5_mtp" in line(out, "what to do")
    assert "Traceback" not in out


def test_a_model_of_no_known_family(doctor: Doctor, tmp_path: Path) -> None:
    spec = Spec("qwen3")
    model = spec.build()
    checkpoints.write_tokenizer(tmp_path)
    tensors = dict(checkpoints.tree_flatten(model.parameters()))
    checkpoints.write_shards(tmp_path, [tensors], "mlx")
    config = dataclasses.asdict(model.args) | {
        "model_type": "qwen3",
        "eos_token_id": 95,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = doctor(tmp_path, *SHORT)
    assert code == BROKEN
    assert "no MTP head is known for models of type 'qwen3'" in line(out, "what to do")


def test_a_window_that_is_full_is_no_fault(doctor: Doctor, tmp_path: Path) -> None:
    """No verify is made there, so none can differ; and nothing is drafted."""
    path, long = write_windowed(tmp_path), "def f(x): return x"
    code, out, err = doctor(path, "--tokens", 8, "--max-k", 2, "--prompt", long)
    assert (code, err) == (DOES_NOT_PAY, "")
    assert line(out, "exact") == (
        "batched for 1 tokens; drafting makes no wider ones here"
    )
    # Of 8 tokens; the last round has no room for drafts anyway.
    assert line(out, "not drafted") == "7 rounds, since a rotating cache is full"
    assert line(out, "what to do") == (
        "Decode without it here: nothing could be drafted, since a rotating cache is "
        "full."
    )


def test_a_model_that_cannot_be_computed(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise RuntimeError("[malloc] Unable\nto allocate")

    path = checkpoints.write(tmp_path).path
    monkeypatch.setattr(examine, "verify_seconds", full)
    code, out, _ = doctor(path, *SHORT)
    assert code == BROKEN and line(out, "head")
    assert "on this machine ([malloc] Unable to allocate);" in line(out, "what to do")


def test_json_that_cannot_be_written(doctor: Doctor, tmp_path: Path) -> None:
    """Not exit code 1, which would say that the head does not pay."""
    path = checkpoints.write(tmp_path).path
    code, out, err = doctor(path, *SHORT, "--json", tmp_path)
    assert code == 2 and line(out, "verdict")
    assert err.count("\n") == 1 and "cannot be written (Is a directory)" in err


def test_an_mlx_lm_of_another_version(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise errors.UnsupportedVersion("mlx-lm 9 is installed.")

    module = sys.modules["mlx_lm_mtp.install"]  # the package has a function so called
    monkeypatch.setattr(module, "install", refuse)
    code, _, err = doctor(tmp_path)
    assert code == 2 and err == "mlx_lm_mtp doctor: error: mlx-lm 9 is installed.\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", 2), "'2' is given; give an integer from 8 to 4096."),
        (("--max-k", 9), "'9' is given; give an integer from 1 to 7."),
        (("--json", "no/where.json"), "is in a folder that does not exist"),
    ],
)
def test_refused_before_anything_is_loaded(
    doctor: Doctor, arguments: tuple[Any, ...], said: str
) -> None:
    code, _, err = doctor("nowhere", *arguments)
    assert code == 2 and said in err.splitlines()[-1]


def test_an_interrupt_is_no_traceback(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(examine, "of_checkpoint", interrupted)
    code, _, err = doctor(tmp_path)
    assert code == 130 and err == "mlx_lm_mtp doctor: interrupted.\n"


@pytest.mark.throughput
def test_what_it_learns_of_depths_is_there_for_the_next_process(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learnt, "_learnt", ByModel())
    _, out, _ = doctor(BUNDLED, "--tokens", 48, "--max-k", 2, "--prompt", "import os")
    told = line(out, "depth")
    assert re.fullmatch(r"(k=\d in \d+%,? ?)+ of rounds, .* for later runs", told)
    monkeypatch.setattr(learnt, "_learnt", ByModel())
    stats = Tally()
    model, tokenizer = mlx_lm.load(str(BUNDLED))
    for _ in mlx_lm.stream_generate(
        model, tokenizer, "import", max_tokens=8, draft="mtp", draft_stats=stats
    ):
        pass
    assert stats.rounds and not stats.parked[MEASURED]


# --- what follows from what was found -----------------------------------------------

VERIFY = {w: 1 + 0.1 * (w - 1) for w in range(1, 9)}
GOOD = Findings(
    "model",
    {"device": "cpu", "device_name": "a machine"}
    | dict.fromkeys(("mlx", "mlx-lm", "mlx-lm-mtp"), "1"),
    family_hidden="post_norm",
    acceptance={"post_norm": (0.8, 0.6, 0.4), "pre_norm": (0.7, 0.5, 0.3)},
    drafted=60,
    verify=VERIFY,
    draft=0.1,
    exact=dict.fromkeys(VERIFY, "batched"),
)


def test_expected_speeds_follow_from_the_parts() -> None:
    speeds = expected((0.8, 0.6, 0.4), VERIFY, 0.1)
    assert speeds[1] == pytest.approx(1.8 / (1.1 + 0.1))
    assert speeds[2] == pytest.approx(2.4 / (1.2 + 0.2))
    assert speeds[3] == pytest.approx(2.8 / (1.3 + 0.3))


def test_the_best_k_is_recommended() -> None:
    found = judge(GOOD)
    assert (found.code, found.k, found.hidden) == (WORKS, 3, "post_norm")
    assert found.advice == "Use it: mlx_lm.generate --mtp --num-draft-tokens 3."
    dear = dataclasses.replace(GOOD, draft=0.5)
    assert judge(dear).k == 1


def test_where_nothing_is_gained_none_is_recommended() -> None:
    linear = {w: float(w) for w in VERIFY}
    found = judge(dataclasses.replace(GOOD, verify=linear))
    assert (found.code, found.k) == (DOES_NOT_PAY, 0)
    assert "a verify of two tokens costs 2.00 of one and a draft 0.10" in found.advice


def test_a_gain_within_the_noise_is_none() -> None:
    even = {w: 1 + 0.79 * (w - 1) for w in VERIFY}
    found = judge(dataclasses.replace(GOOD, verify=even, draft=0.0))
    assert max((found.speeds or {}).values()) > 1
    assert found.code == DOES_NOT_PAY


def test_other_hidden_states_are_named_only_where_they_are_clearly_better() -> None:
    better = GOOD.acceptance["pre_norm"]
    little = {"post_norm": (0.66, 0.5, 0.3), "pre_norm": better}
    much = {"post_norm": (0.3, 0.1, 0.0), "pre_norm": better}
    assert judge(dataclasses.replace(GOOD, acceptance=little)).hidden == "post_norm"
    found = judge(dataclasses.replace(GOOD, acceptance=much))
    assert found.hidden == "pre_norm"
    assert found.advice.endswith("--draft-option hidden=pre_norm.")


def test_next_to_nothing_accepted_is_broken() -> None:
    none = {"post_norm": (0.01, 0, 0), "pre_norm": (0.02, 0, 0)}
    assert judge(dataclasses.replace(GOOD, acceptance=none)).code == BROKEN


def test_nothing_drafted_is_not_called_broken() -> None:
    found = judge(
        dataclasses.replace(
            GOOD,
            acceptance={"post_norm": (), "pre_norm": ()},
            undrafted={"a rotating cache is full": 9},
        )
    )
    assert (found.code, found.k) == (DOES_NOT_PAY, 0)


def test_widths_that_drafting_does_not_make_are_no_fault() -> None:
    narrow = dataclasses.replace(GOOD, exact={1: "batched", 2: "batched", 3: None})
    assert judge(narrow).code == WORKS
    said = line(report.report(narrow, judge(narrow)), "exact")
    assert said.startswith("batched for 1 to 2 tokens")


def test_a_self_check_that_failed_is_told() -> None:
    odd = dataclasses.replace(
        GOOD, recurrence="stock", capture="replay", capture_fault="it differs"
    )
    out = report.report(odd, judge(odd))
    assert line(out, "gated delta") == (
        "stock, rolled back by replay; self-check: it differs"
    )
    assert odd.to_dict()["self_check"] == "it differs"


def test_forms_are_told_by_width() -> None:
    exact = dict.fromkeys(range(2, 8), "attention by row")
    odd = dataclasses.replace(GOOD, exact={1: "batched", **exact, 8: "none"})
    assert judge(odd).code == WORKS
    assert line(report.report(odd, judge(odd)), "exact") == (
        "batched for 1 tokens; attention by row for 2 to 7 tokens; no form for 8 tokens"
    )


def test_without_any_form_it_does_not_pay() -> None:
    odd = dataclasses.replace(GOOD, exact={1: "batched", 2: "none", 3: "none"})
    assert judge(odd).code == DOES_NOT_PAY
    assert "exactness=fast" in judge(odd).advice


def test_all_that_is_found_is_in_the_json() -> None:
    found = report.to_dict(GOOD, judge(GOOD))
    fields = {f.name for f in dataclasses.fields(Findings)}
    assert found.keys() >= fields | {"verdict", "recommended_k", "what_to_do"}
    json.dumps(found, default=list)


def test_a_speed_of_each_k_is_in_the_table() -> None:
    out = report.report(GOOD, judge(GOOD))
    rows = [row.split() for row in out.splitlines()]
    assert ["4", "1300.00", "1.30", "3", "1.75", "*"] in rows
    assert ["8", "1700.00", "1.70", "7"] in rows
    assert verdict.WORKS == 0 and line(out, "verdict") == "works"
