"""`mlx_lm_mtp bench`: what it measures, what it makes of it, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import statistics
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from scripted import Scripted

import mlx_lm_mtp.drafters.mtp
from mlx_lm_mtp import cli
from mlx_lm_mtp.bench import costs, measure, prompts, shapes
from mlx_lm_mtp.bench.figures import Beside, Results, geometric_mean
from mlx_lm_mtp.bench.measure import Chosen, Run
from mlx_lm_mtp.bench.oracle import OracleDrafter
from mlx_lm_mtp.depth import Known
from mlx_lm_mtp.learnt import Learning, Learnt
from mlx_lm_mtp.plugins import DrafterPlugins
from mlx_lm_mtp.state.recurrence import Recurrence
from mlx_lm_mtp.stats import DraftStats

pytestmark = pytest.mark.usefixtures("plugin", "registered")

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
TINY = ("--shape", "tiny", "--prompt-tokens", 4, "--tokens", 8, "--repeat", 1)
ALWAYS = ("--synthetic-acceptance", 1, "--draft-cost", "none")
Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter `mtp`, in a bare checkout as well."""
    known = DrafterPlugins()
    known.add(mlx_lm_mtp.drafters.mtp, "mlx-lm-mtp")
    monkeypatch.setattr("mlx_lm_mtp.plugins.drafters", lambda: known)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """`mlx_lm_mtp bench` with these arguments: exit code, standard output and error."""

    def bench(*args: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx_lm_mtp", "bench", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    return bench


@pytest.fixture
def as_json(bench: Bench, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What a run that succeeds writes to its JSON file."""

    def as_json(*args: Any) -> dict[str, Any]:
        file = tmp_path / "bench.json"
        code, _, err = bench(*args, "--json", file)
        assert code == 0, err
        return json.loads(file.read_text())

    return as_json


# --- figures ----------------------------------------------------------------------


def medians(found: dict[str, Any], k: int) -> list[float]:
    """For each prompt the median ratio, from nothing but tokens and seconds."""
    speeds = {
        (run["prompt"], run["repetition"], run["k"]): (run["tokens"] - 1)
        / run["decoding"]
        for run in found["runs"]
    }
    ratios: dict[int, list[float]] = {}
    for (prompt, repetition, of), speed in speeds.items():
        if of == k:
            ratio = speed / speeds[prompt, repetition, None]
            ratios.setdefault(prompt, []).append(ratio)
    return [statistics.median(several) for several in ratios.values()]


def predictions(found: dict[str, Any], k: int) -> list[float]:
    """For each prompt tokens a round / (v(k+1)/v(1) + k c/v(1)), from its parts."""
    made = []
    for prompt in range(len(found["prompts"])):
        costs = [c for c in found["costs"] if c["prompt"] == prompt]
        runs = [r for r in found["runs"] if (r["prompt"], r["k"]) == (prompt, k)]
        stock = [r for r in found["runs"] if (r["prompt"], r["k"]) == (prompt, None)]
        speed = statistics.median(r["speed"] for r in stock)
        v = statistics.median(c["verify"][str(k + 1)] for c in costs)
        c = statistics.median(c["draft"] for c in costs)
        tokens = sum(r["stats"]["tokens"] for r in runs)
        rounds = sum(r["stats"]["rounds"] for r in runs)
        made.append(tokens / rounds / speed / (v + k * c))
    return made


def test_figures_follow_from_what_was_measured(bench: Bench, tmp_path: Path) -> None:
    file, ks = tmp_path / "bench.json", [0, 1, 3]
    arguments = (*TINY, "--repeat", 2, "--k", *ks, "--synthetic-acceptance", 0.7)
    code, out, err = bench(*arguments, "--json", file)
    found = json.loads(file.read_text())
    assert (code, err) == (0, "")
    stock, *drafted, cold, warm = found["summary"]
    assert [row["k"] for row in drafted] == ks and stock["k"] is None
    assert (cold["k"], warm["k"]) == ("throughput, cold", "throughput, warm")
    assert (cold["runs"], warm["runs"]) == (3, 3)
    for row in (cold, warm):
        every = medians(found, row["k"])
        assert math.isclose(row["ratio"], geometric_mean(every))
        assert row["predicted"] is None and f"| {row['k']} | " in out
    for row in drafted:
        every = medians(found, row["k"])
        assert math.isclose(row["ratio"], geometric_mean(every))
        assert row["ratios"][0] <= min(every) <= max(every) <= row["ratios"][1]
        assert f"| **{row['ratio']:.2f}** (" in out
        if row["k"]:
            hoped = geometric_mean(predictions(found, row["k"]))
            assert math.isclose(row["predicted"], hoped) and f"| {hoped:.2f} " in out
        else:
            assert row["predicted"] is None
        part = found["verify_seconds"][str(row["k"] + 1)]
        assert f"v({row['k'] + 1}) | {part * 1e3:.2f} " in out
        assert row["parted"] == 0 and row["runs"] == 6
    assert f"mlx_lm_mtp bench {' '.join(map(str, arguments))}" in out
    assert "that of mtp, an MTP head with random weights" in out


def test_stock_and_every_way_to_draft_are_run_in_turn(
    as_json: Callable[..., Any],
) -> None:
    found = as_json(*TINY, *ALWAYS, "--repeat", 2, "--max-k", 1)
    order = [(run["repetition"], run["prompt"], run["k"]) for run in found["runs"]]
    ways = {r: (None, 0, 1, f"throughput, {('cold', 'warm')[r]}") for r in (0, 1)}
    assert order == [(r, p, k) for r in (0, 1) for p in (0, 1, 2) for k in ways[r]]
    assert {run["tokens"] for run in found["runs"]} == {8}
    assert {run["prompt_tokens"] for run in found["runs"]} == {4}
    assert all(set(cost["verify"]) == {"1", "2"} for cost in found["costs"])
    assert {cost["context"] for cost in found["costs"]} == {4 + 8 // 2}


def test_stock_runs_without_the_plugin(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, seen = measure._Bench._decode, []

    def noted(*args: Any, **drafting: Any) -> Any:
        wrapped = hasattr(mlx_lm.stream_generate, "__wrapped__")
        seen.append((wrapped, "draft" in drafting))
        return decode(*args, **drafting)

    monkeypatch.setattr(measure._Bench, "_decode", noted)
    assert bench(*TINY, *ALWAYS, "--k", 1)[0] == 0
    assert set(seen) == {(True, True), (False, False)}


def test_every_verify_is_timed_behind_the_same_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verify, seen = costs._verify, []

    def noted(target: Any, tokens: mx.array, caches: list[Any], form: Any) -> float:
        seconds = verify(target, tokens, caches, form)
        seen.append((max(c.offset for c in caches if hasattr(c, "offset")), tokens))
        return seconds

    monkeypatch.setattr(costs, "_verify", noted)
    model = shapes.build("tiny", mx.float32)
    context, following = [1, 2, 3, 4, 5], [6, 7, 8]
    found = costs.verify_seconds(model, context, following, [1, 3], Recurrence())
    assert list(found) == [1, 3] and min(found.values()) > 0
    assert {offset for offset, tokens in seen if tokens.shape[1] == 1} == {5 + 1}
    assert {offset for offset, tokens in seen if tokens.shape[1] == 3} == {5 + 3}
    assert seen[-1][1].tolist() == [[6, 7, 8]]


def test_drafts_are_timed_behind_the_context() -> None:
    drafter = Scripted([0] * 40)
    model = shapes.build("tiny", mx.float32)
    assert costs.draft_seconds(model, drafter, 2, "post_norm", [1, 2, 3], 4) > 0
    assert drafter.prompt == [1, 2, 3] and set(drafter.seen) == {4}


def test_no_prediction_where_rounds_are_of_several_lengths(
    as_json: Callable[..., Any],
) -> None:
    option = ("--draft-option", "depth=confidence")
    _, row = as_json(*TINY, "--k", 2, *option)["summary"]
    assert row["predicted"] is None and row["ratio"] > 0


def test_ratios_compare_runs_of_one_repetition_with_any_baseline() -> None:
    def run(k: int | None, repetition: int, seconds: float) -> Run:
        return Run(0, repetition, k, 4, 11, 0.1, seconds)

    results = Results()
    for record in (run(None, 0, 2), run(0, 0, 4), run(2, 0, 1), run(None, 1, 6)):
        results.add(record)
    results.add(run(2, 1, 2))
    assert results.ratios(2, 0) == [2, 3]
    assert results.ratios(2, 0, baseline=0) == [4]


# --- depth=throughput ---------------------------------------------------------------


def test_what_was_chosen_is_compared_with_the_best_k_of_each_prompt() -> None:
    def record(prompt: int, repetition: int, k: Any, speed: float, *by_k: int) -> None:
        stats = DraftStats(rounds_by_k=Counter(dict(enumerate(by_k))))
        run = (prompt, repetition, k, 4, 11, 0.1, 10 / speed)
        results.add(Run(*run, stats=None if k is None else stats))

    results = Results()
    # Of prompt 0 the best is k=2, of prompt 1 it is k=0; repetition 1 is twice as fast.
    speeds = {0: {None: 10, 0: 8, 2: 20}, 1: {None: 10, 0: 12, 2: 5}}
    for repetition, prompt in itertools.product((0, 1), (0, 1)):
        for k, speed in speeds[prompt].items():
            record(prompt, repetition, k, speed * (1 + repetition), 5)
    record(0, 0, Chosen.COLD, 15, 1, 0, 3)
    record(1, 0, Chosen.COLD, 6, 2, 2)
    record(0, 1, Chosen.WARM, 40, 0, 0, 4)
    record(1, 1, Chosen.WARM, 18, 1)
    cold, warm = results.choices
    assert (cold.k, warm.k) == (Chosen.COLD, Chosen.WARM)
    assert cold.share_by_k == [3 / 8, 2 / 8, 3 / 8]
    assert warm.share_by_k == [1 / 5, 0, 4 / 5]
    assert cold.stock == approx(geometric_mean([1.5, 0.6]), 0.6)
    assert cold.best == approx(geometric_mean([0.75, 0.5]), 0.5)
    assert warm.stock == approx(geometric_mean([2, 0.9]), 0.9)
    assert warm.best == approx(geometric_mean([1, 0.75]), 0.75)


def approx(mean: float, worst: float) -> Beside:
    return Beside(pytest.approx(mean), pytest.approx(worst))


@pytest.mark.throughput
def test_what_was_learnt_is_kept_from_the_first_run_on(
    as_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    knew: list[bool] = []
    begin = Learnt.begin

    def noted(self: Learnt) -> Learning:
        begun = begin(self)
        knew.append(begun.to_dict() != Known().to_dict())
        return begun

    monkeypatch.setattr(Learnt, "begin", noted)
    found = as_json(*TINY, *ALWAYS, "--tokens", 24, "--repeat", 2, "--k", 1, 3)
    # Six runs, none of them for warming up, and all learn for the others.
    assert knew == [False] + 5 * [True]
    for choice in found["throughput"]:
        assert math.isclose(sum(choice["share_by_k"]), 1)
        assert len(choice["share_by_k"]) <= 1 + 3
    runs = [run for run in found["runs"] if str(run["k"]).startswith("throughput")]
    assert {run["stats"]["num_draft_tokens"] for run in runs} == {3}
    assert all("depth=fixed" not in run["stats"]["strategy"] for run in runs)


@pytest.mark.throughput
def test_where_all_drafts_are_wrong(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    never = ("--synthetic-acceptance", 0, "--tokens", 32, "--k", 2, "--json", file)
    code, out, err = bench(*TINY, *never)
    assert (code, err) == (0, "")
    found = json.loads(file.read_text())
    (cold,) = found["throughput"]  # one repetition: nothing is warm
    assert cold["share_by_k"][0] > 0 and "throughput, warm" not in out
    row = found["summary"][-1]
    assert row["tokens_a_round"] == 1 and row["parted"] == 0
    worst = cold["best"]["worst"]
    assert f"| **{cold['best']['mean']:.2f}** ({worst:.2f}) " in out
    assert f" | k=0 {cold['share_by_k'][0]:.0%}" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--k", 1, "--draft-option", "depth=fixed"),
        ("--k", 1, "--draft-option", "depth=throughput"),
        ("--k", 0),  # there is nothing to choose
    ],
    ids=str,
)
def test_nothing_is_measured_beside_a_depth_that_was_asked_for(
    as_json: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    found = as_json(*TINY, *ALWAYS, *arguments)
    assert [row["k"] for row in found["summary"]] == [None, arguments[1]]
    assert found["throughput"] == []


# --- the oracle -------------------------------------------------------------------


def proposed(oracle: OracleDrafter, k: int) -> list[int]:
    return oracle.draft(mx.array([[0]]), k).tokens[0].tolist()


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_the_oracle_is_right_as_often_as_asked(acceptance: float) -> None:
    truth = [i % 7 for i in range(4001)]
    said = proposed(OracleDrafter(truth, acceptance, vocabulary=7, seed=1), 4000)
    right = statistics.fmean(a == b for a, b in zip(said, truth[1:], strict=True))
    assert abs(right - acceptance) < (0.03 if 0 < acceptance < 1 else 1e-9)
    assert set(said) == set(range(7))


def test_what_the_oracle_says_depends_on_the_position_alone() -> None:
    truth = list(range(100, 150))
    oracle = OracleDrafter(truth, 0.5, vocabulary=1000, seed=2)
    whole = proposed(oracle, 49)
    oracle.observe(
        mx.array([[1, 2, 3]]), None
    )  # not the truth: it goes on all the same
    assert proposed(oracle, 4) == whole[3:7]
    oracle.observe(mx.zeros((1, 45)), None)
    assert proposed(oracle, 4) == whole[48:]  # as far as the truth goes
    oracle.begin()
    assert proposed(oracle, 49) == whole
    assert proposed(OracleDrafter(truth, 0.5, vocabulary=1000, seed=3), 49) != whole


def test_the_oracle_drafts_with_what_it_costs() -> None:
    cost = Scripted([9] * 20)
    oracle = OracleDrafter([1, 2, 3, 4], 1.0, vocabulary=10, cost=cost)
    oracle.begin()
    oracle.prefill(mx.array([[5, 6]]), None)
    oracle.observe(mx.array([[1]]), None)
    assert (cost.prompt, cost.seen) == ([5, 6], [1])
    assert proposed(oracle, 2) == [3, 4] and not oracle.needs_hidden
    cost.draft = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        proposed(oracle, 2)


@pytest.mark.parametrize(("acceptance", "rounds"), [(1, 2), (0, 8)])
def test_acceptance_in_a_generation(
    as_json: Callable[..., Any], acceptance: int, rounds: int
) -> None:
    found = as_json(*TINY, "--synthetic-acceptance", acceptance, "--k", 3, "--temp", 1)
    row = found["summary"][1]
    assert row["acceptance"] == acceptance
    assert row["tokens_a_round"] == 8 / rounds


def test_every_k_has_the_same_oracle_and_every_repetition_another(
    as_json: Callable[..., Any],
) -> None:
    arguments = ("--synthetic-acceptance", 0.5, "--draft-cost", "none")
    arguments += ("--draft-option", "depth=fixed")
    found = as_json(*TINY, *arguments, "--tokens", 40, "--repeat", 2, "--k", 1, 39)
    first = {
        (run["repetition"], run["k"]): run["stats"]["accept_histogram"]
        for run in found["runs"]
        if run["prompt"] == 0 and run["k"]
    }
    assert first[0, 39] != first[1, 39]
    for repetition in (0, 1):  # k=1 accepts 2n + 1 in a row as n + 1 times one
        by_one = first[repetition, 1][1]
        rows = enumerate(first[repetition, 39])
        assert by_one == sum((n + 1) // 2 * times for n, times in rows)


# --- models -----------------------------------------------------------------------


def test_the_bundled_checkpoint(bench: Bench, tmp_path: Path) -> None:
    file, png = tmp_path / "prompts", tmp_path / "bench.png"
    file.write_text("import os\n\nclass Node:\n")
    arguments = (BUNDLED, "--prompts", file, "--tokens", 8, "--repeat", 1, "--k", 2)
    code, out, err = bench(*arguments, "--plot", png)
    assert (code, err) == (0, "")
    assert "- Drafts: mtp; depth=fixed\n" in out and "| `class Node:` " in out
    assert "| 0 of 2 " in out
    signature, _, kind, width, height = struct.unpack(
        ">8s I4sII", png.read_bytes()[:24]
    )
    assert (signature, kind) == (b"\x89PNG\r\n\x1a\n", b"IHDR")
    assert min(width, height) > 400


@pytest.mark.parametrize(
    ("draft", "option"),
    [
        ("chain", "chain.drafters=ngram"),
        ("draft-model", f"draft-model.model={BUNDLED}"),
    ],
    ids=str,
)
def test_drafters_that_have_options_or_build_others(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    draft: str,
    option: str,
) -> None:
    known, file = DrafterPlugins(), tmp_path / "prompts"
    file.write_text("class Node:")
    for name in ("chain", "draft_model", "ngram"):
        drafter = importlib.import_module(f"mlx_lm_mtp.drafters.{name}")
        known.add(drafter, "mlx-lm-mtp")
    monkeypatch.setattr("mlx_lm_mtp.plugins.drafters", lambda: known)
    arguments = (BUNDLED, "--prompts", file, "--tokens", 4, "--repeat", 1)
    arguments += ("--k", 0, 1, "--draft", draft)
    code, out, err = bench(*arguments, "--draft-option", option)
    assert (code, err) == (0, "")
    assert f"- Drafts: {draft}; depth=fixed; {option}\n" in out
    code, _, err = bench(*arguments, "--draft-option", "ngram.sorted=1")
    assert code == 2 and "sorted" in err


def test_a_checkpoint_that_has_lost_its_head(bench: Bench, tmp_path: Path) -> None:
    bare = checkpoints.write(tmp_path, head=False).path
    arguments = (bare, "--tokens", 4, "--repeat", 1, "--k", 1)
    arguments += ("--synthetic-acceptance", 1)
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "") and "no MTP head in" in err
    code, out, _ = bench(*arguments, "--draft-cost", "random")
    assert code == 0 and "that of an MTP head with random weights" in out
    code, out, _ = bench(*arguments, "--draft-cost", "none")
    assert code == 0 and "time of a draft: none at all" in out


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float32", None), ("float16", None), ("bfloat16", 4)]
)
def test_a_shape_with_random_weights(dtype: str, bits: int | None) -> None:
    model = shapes.build("tiny", shapes.DTYPES[dtype], bits)
    head = shapes.random_head(model)
    for module in (model, head):
        kinds = {type(m) for m in module.modules()}
        assert (nn.QuantizedLinear in kinds, nn.Linear in kinds) == (
            bits is not None,
            bits is None,
        )
        dtypes = {
            value.dtype
            for path, value in tree_flatten(module.parameters())
            if not path.endswith("A_log") and value.dtype != mx.uint32
        }
        assert dtypes == {shapes.DTYPES[dtype]}
    ids = mx.random.randint(0, 256, (1, 300), key=mx.random.key(0))
    logits = model(ids)
    assert mx.isfinite(logits).all() and logits.std() > 0.1
    assert len(set(mx.argmax(logits, axis=-1)[0].tolist())) > 10


@pytest.mark.parametrize(
    ("shape", "layers", "parameters"),
    [
        ("qwen3.5-4b", 32, 4.2e9),
        ("qwen3.5-9b", 32, 8.95e9),
        ("qwen3-next-80b-a3b-4layers", 48, 79.7e9),
    ],
)
def test_shapes_have_as_many_parameters_as_the_models(
    shape: str, layers: int, parameters: float
) -> None:
    """Counted on arrays that are never computed."""
    config = shapes.SHAPES[shape] | {"num_hidden_layers": layers}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    count = sum(value.size for _, value in tree_flatten(model.parameters()))
    assert math.isclose(count, parameters, rel_tol=0.01)


# --- prompts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("one\n\n  two\n", ["one", "  two"]),
        ('["a\\nb", "c"]', ["a\nb", "c"]),
        ("[draft] a line\nanother", ["[draft] a line", "another"]),
    ],
)
def test_prompts_of_a_file(text: str, found: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    assert prompts.read(file) == found


def test_help_names_every_shape_and_what_is_measured_beside_each_k(
    bench: Bench,
) -> None:
    code, out, _ = bench("--help")
    assert code == 0
    assert all(f" {shape}" in out for shape in shapes.SHAPES)
    said = "--draft-option depth=... measures every k that way, and nothing beside them"
    assert said in " ".join(out.split())


# --- what goes wrong --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to measure is given; name a MODEL, or a --shape."),
        (("m", "--shape", "tiny"), "MODEL and --shape are both given; choose one."),
        (("--shape", "huge"), "--shape is 'huge'; choose one of: tiny, qwen3.5-4b, "),
        (("/nowhere",), "MODEL /nowhere cannot be loaded ("),
        (("m", "--bits", 4), "--bits is of no use without --shape; leave it out."),
        ((*TINY, "--prompts", "x"), "--prompts is of no use without MODEL"),
        ((*TINY, "--draft-cost", "none"), "no use without --synthetic-acceptance"),
        (("m", "--prompts", "/no"), "--prompts /no cannot be read: No such file"),
        ((*TINY, "--tokens", 1), "--tokens: '1' is given; give an integer of at least"),
        ((*TINY, "--repeat", 0), "--repeat: '0' is given; give an integer of at least"),
        ((*TINY, "--k", "x"), "--k: 'x' is given; give an integer of at least 0."),
        ((*TINY, "--temp", "nan"), "--temp: 'nan' is given; give a number of at least"),
        ((*TINY, "--synthetic-acceptance", 1.5), "'1.5' is given; give a number of at"),
        ((*TINY, "--k", 1, "--max-k", 2), "not allowed with argument --k"),
        ((*TINY, "--draft", "medusa"), "unknown drafter 'medusa'; the known ones are:"),
        ((*TINY, "--draft-option", "tau"), "--draft-option takes name=value, got 'tau"),
        ((*TINY, "--draft-option", "verify=x"), "verify is 'x'; choose one of: batch"),
        ((*TINY, "--json", "/no/x"), "/no/x is in a folder that does not exist; make"),
        ((*TINY, "--plot", "x.pdf"), "--plot: 'x.pdf' is given; name a file *.png."),
        (
            (*TINY, *ALWAYS, "--draft-option", "rescue=1"),
            "drafter 'oracle' gives no branches, which draft option rescue=1 needs",
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_refused_in_one_sentence(
    bench: Bench, arguments: tuple[Any, ...], said: str
) -> None:
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("mlx_lm_mtp bench: error: ") and said in last


@pytest.mark.parametrize(
    ("text", "said"),
    [("\n", "holds no prompts"), ("[1]", "something else than strings")],
)
def test_prompts_that_are_none(
    bench: Bench, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    code, _, err = bench("m", "--prompts", file)
    assert code == 2 and said in err and str(file) in err


def test_without_matplotlib(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: None if name == "matplotlib" else found(name, *more),
    )
    code, out, err = bench(*TINY, "--plot", tmp_path / "x.png")
    assert (code, out) == (2, "")
    assert "--plot needs matplotlib" in err and "pip install 'mlx-lm-mtp[bench]'" in err


@pytest.fixture
def wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted runs of up to k=2 say something else at token 5."""
    decode = measure._Bench._decode

    def decoded(self: Any, *args: Any, **drafting: Any) -> Any:
        said, *more = decode(self, *args, **drafting)
        if drafting.get("num_draft_tokens") == 2:
            said[5] += 1
        return said, *more

    monkeypatch.setattr(measure._Bench, "_decode", decoded)


@pytest.mark.usefixtures("wrong_token")
def test_other_tokens_than_stock_s_are_an_error_on_a_cpu(bench: Bench) -> None:
    code, out, err = bench(*TINY, *ALWAYS, "--k", 1, 2)
    assert code == 2
    assert out.count("| 0 of 3 ") == 1 and out.count("| 3 of 3 ") == 2
    said = "6 of 9 runs parted from stock's tokens, the first at token 5 of"
    assert f"{said} 'random ids 1' with k=2; on a CPU they must be" in err


@pytest.mark.usefixtures("wrong_token")
def test_other_tokens_than_stock_s_are_reported_on_a_gpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    code, out, err = bench(*TINY, *ALWAYS, "--k", 1, 2)
    assert (code, err) == (0, "")
    assert "| 3 of 3 " in out and "the first at token 5 of 'random ids 1'" in out


def test_a_text_that_ends_at_once_cannot_be_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ending(tokenizer: Any) -> TokenizerWrapper:
        made = TokenizerWrapper(tokenizer)
        made.eos_token_ids = set(range(256))
        return made

    monkeypatch.setattr("mlx_lm_mtp.bench.subject.TokenizerWrapper", ending)
    assert bench(*TINY, *ALWAYS, "--k", 1)[0] == 0
    code, _, err = bench(*TINY, *ALWAYS, "--k", 1, "--no-ignore-eos")
    assert code == 2
    assert "'random ids 1' ends after 1 token, which cannot be timed" in err


@pytest.mark.parametrize(("after", "done"), [(0, 0), (4, 4), (5, 7)])
def test_an_interrupt_reports_what_was_measured(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    after: int,
    done: int,
) -> None:
    drafted, calls = measure._Bench.drafted, []

    def interrupted(self: Any, *args: Any) -> Run:
        calls.append(args)
        if len(calls) > after:
            raise KeyboardInterrupt
        return drafted(self, *args)

    monkeypatch.setattr(measure._Bench, "drafted", interrupted)
    file = tmp_path / "bench.json"
    code, out, err = bench(*TINY, *ALWAYS, "--k", 1, 2, "--json", file)
    # Two calls are for warming up; each prompt has stock and its costs besides.
    assert code == 130
    assert f"interrupted after {done} of 15 measurements." in err
    assert file.exists() == bool(done) and ("| k=2 " in out) == bool(done)
    if done:
        runs = json.loads(file.read_text())["runs"]
        known = [None, 1, 2, "throughput, cold", None]
        assert [run["k"] for run in runs] == known[: len(runs)]
        assert ("throughput, cold" in out) == (len(runs) > 3)
