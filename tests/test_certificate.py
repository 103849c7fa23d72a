"""The exactness certificate, on devices that are planted: they round rows otherwise."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from checks import THREE, generation_differences, model_of, scripted
from mlx_lm.models import base, switch_layers
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from mutants import replaced
from tiny import VOCAB, Spec

from mlx_lm_mtp import certificate, store
from mlx_lm_mtp.certificate import NO_FORM, Certificate, fingerprint
from mlx_lm_mtp.options import DraftOptions
from mlx_lm_mtp.state import cuda_rows, forms, row_check
from mlx_lm_mtp.state.bits import same_bits
from mlx_lm_mtp.state.forms import ATTENTION, BATCHED, Call, Form, computed
from mlx_lm_mtp.stats import Tally
from mlx_lm_mtp.target import Target
from mlx_lm_mtp.testing.scripted import Branching
from mlx_lm_mtp.wrapping import unwrap_all

PROMPT = [5, 9, 2, 33, 7, 1, 60, 12]
RIGHT = scripted("110111010")
OPS: dict[str, tuple[Any, str]] = {
    "attention": (mx.fast, "scaled_dot_product_attention"),
    "quantised attention": (base, "quantized_scaled_dot_product_attention"),
    "Linear": (nn.Linear, "__call__"),
    "QuantizedLinear": (nn.QuantizedLinear, "__call__"),
    "Embedding": (nn.Embedding, "as_linear"),
    "QuantizedEmbedding": (nn.QuantizedEmbedding, "as_linear"),
    "SwitchGLU": (switch_layers.SwitchGLU, "__call__"),
}
SPECS = {
    "attention": Spec("qwen3_5"),
    "Linear": Spec("qwen3_next", weights="bf16"),
    "QuantizedLinear": Spec("qwen3_5", weights="4bit"),
    "Embedding": Spec("qwen3_5", tied=True),
    "QuantizedEmbedding": Spec("qwen3_5", tied=True, weights="4bit"),
    "SwitchGLU": Spec("qwen3_next", experts=True),
}


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test measures for itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(certificate, "_known", {})


def rows(x: mx.array, *more: Any) -> int:
    return x.size // x.shape[-1]


def queries(q: mx.array, *more: Any) -> int:
    return q.shape[0] * q.shape[2]


@contextlib.contextmanager
def device(
    op: str, otherwise: Callable[..., bool] = lambda rows, *args: rows > 1
) -> Iterator[None]:
    """One that computes an op a little otherwise where `otherwise` says so.

    Args:
        op: One of `OPS`.
        otherwise: Is told how many rows there are, and the op's arguments.
    """
    owner, name = OPS[op]
    stock = vars(owner)[name]
    of_layer = isinstance(owner, type)

    def planted(*args: Any, **named: Any) -> mx.array:
        n = rows(*args[1:]) if of_layer else queries(*args)
        y = stock(*args, **named)
        return y * (1 + 2**-7) if otherwise(n, *args) else y

    unwrap_all()
    with patch.object(owner, name, planted):
        try:
            yield
        finally:
            unwrap_all()


def certified(spec: Spec, width: int, paths: int = 1) -> Form | None:
    model = model_of(spec)
    caches = make_prompt_cache(model)
    return Certificate(Target(model), caches).form(paths, width)


def differences(model: nn.Module, options: DraftOptions = THREE, **more: Any) -> Any:
    return generation_differences(model, PROMPT, 24, RIGHT, options=options, **more)


# --- what is certified ----------------------------------------------------------------


@pytest.mark.parametrize("spec", dict.fromkeys(SPECS.values()), ids=str)
def test_on_this_device_everything_is_batched(spec: Spec) -> None:
    assert [certified(spec, w) for w in (1, 2, 4)] == [BATCHED] * 3
    assert certified(spec, 3, paths=2) == BATCHED


@pytest.mark.parametrize("op", SPECS)
def test_what_differs_runs_by_row_and_nothing_else(op: str) -> None:
    """And tokens and caches are those of stock on the same device."""
    stats = Tally()
    with device(op):
        assert certified(SPECS[op], 4) == Form(frozenset({op}))
        model = model_of(SPECS[op])
        assert differences(model, ours={"stats": stats}) == []
        fast = DraftOptions(num_draft_tokens=3, exactness="fast")
        assert differences(model, fast) != []
    assert stats.accepted.total() > 4
    assert stats.forms == dict.fromkeys("234", f"{op} by row")
    assert f"verified exactly, with {op} by row" in stats.stats.summary()


def test_two_ops_that_differ_both_run_by_row() -> None:
    spec = SPECS["QuantizedLinear"]
    with device("QuantizedLinear"), device_beside("attention"):
        form = certified(spec, 3)
    assert form == Form(frozenset({ATTENTION, "QuantizedLinear"}))
    assert str(form) == "QuantizedLinear, attention by row"


@contextlib.contextmanager
def device_beside(op: str) -> Iterator[None]:
    """A second op that differs."""
    owner, name = OPS[op]
    stock = vars(owner)[name]

    def planted(q: mx.array, *args: Any, **named: Any) -> mx.array:
        y = stock(q, *args, **named)
        return y * 1.01 if q.shape[2] > 1 else y

    with patch.object(owner, name, planted):
        yield
        unwrap_all()


def test_paths_run_by_row_too() -> None:
    options = DraftOptions(num_draft_tokens=2, paths=2)
    with device("Linear"):
        assert certified(SPECS["Linear"], 3, paths=2) == Form(frozenset({"Linear"}))
        found = generation_differences(
            model_of(SPECS["Linear"]),
            PROMPT,
            20,
            lambda truth: Branching(truth, lambda i: i % 3 != 0),
            options=options,
        )
    assert found == []


def test_widths_are_certified_one_by_one() -> None:
    """As where a device goes over to another kernel at so many rows."""
    stats = Tally()
    with device("QuantizedLinear", lambda n, *args: n > 2):
        spec = SPECS["QuantizedLinear"]
        assert certified(spec, 2) == BATCHED
        assert certified(spec, 3) == Form(frozenset({"QuantizedLinear"}))
        assert differences(model_of(spec), ours={"stats": stats}) == []
    by_row = "QuantizedLinear by row"
    assert stats.forms == {"2": "batched", "3": by_row, "4": by_row}


@contextlib.contextmanager
def model_that_differs(model: nn.Module, width: int) -> Iterator[None]:
    """One whose logits differ behind so many tokens, whatever runs by row."""
    stock = type(model).__call__

    def planted(self: Any, tokens: mx.array, *args: Any, **named: Any) -> mx.array:
        logits = stock(self, tokens, *args, **named)
        return logits * 1.01 if tokens.shape[1] == width else logits

    with patch.object(type(model), "__call__", planted):
        yield


def test_no_wider_than_there_is_a_form() -> None:
    stats, model = Tally(), model_of(SPECS["attention"])
    with model_that_differs(model, 4):
        assert differences(model, ours={"stats": stats}) == []
    assert stats.forms == {"2": "batched", "3": "batched", "4": "none"}
    assert stats.drafted[1] and not stats.drafted[2]


def test_no_drafts_without_a_form_and_the_statistics_say_so() -> None:
    stats, model = Tally(), model_of(SPECS["attention"])
    with model_that_differs(model, 2):
        assert differences(model, ours={"stats": stats}) == []
    assert not stats.drafted
    assert NO_FORM in stats.stats.summary()


def test_a_cache_that_differs_is_seen() -> None:
    """The last state is in no logits that are compared."""
    model = model_of(SPECS["attention"])
    stock = type(model).__call__

    def planted(self: Any, tokens: mx.array, cache: Any = None) -> mx.array:
        logits = stock(self, tokens, cache=cache)
        if tokens.shape[1] == 3:
            cache[-1].keys[..., -1:] = 1
        return logits

    with patch.object(type(model), "__call__", planted):
        assert certified(SPECS["attention"], 3) is None


def test_attention_is_certified_by_bands_of_length() -> None:
    """A kernel for longer contexts is met on the way, in the same generation."""
    stats = Tally()
    long = [i % VOCAB for i in range(250)]

    def otherwise(n: int, q: mx.array, k: mx.array, *args: Any) -> bool:
        return n > 1 and k.shape[2] >= 262

    with device("attention", otherwise):
        found = generation_differences(
            model_of(SPECS["attention"]),
            long,
            40,
            RIGHT,
            options=THREE,
            ours={"stats": stats},
        )
    assert found == []
    assert stats.forms["4"] == "attention by row"


def test_a_quantised_cache_is_another_matter() -> None:
    """It is quantised between two rounds."""
    stats = Tally()
    how = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 14}
    with device("quantised attention"):
        model = model_of(SPECS["attention"])
        assert differences(model, ours={"stats": stats}, **how) == []
    assert stats.forms["4"] == "attention by row"


def test_a_small_ring_is_certified_before_it_is_full() -> None:
    model = model_of(Spec("qwen3"))
    caches = [RotatingKVCache(max_size=12) for _ in model.layers]
    assert Certificate(Target(model), caches).form(1, 4) == BATCHED


# --- rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("paths", [1, 3])
@pytest.mark.parametrize("flat", [True, False])
def test_a_layer_by_row_is_called_once_a_row(paths: int, flat: bool) -> None:
    layer, seen = nn.Linear(8, 5), []
    shape = (paths * 2, 8) if flat else (paths, 2, 8)
    x = mx.random.normal(shape, key=mx.random.key(0))

    def noted(layer: nn.Module, row: mx.array) -> mx.array:
        seen.append(row.shape)
        return row @ layer.weight.T

    with computed(BATCHED, paths, 2):
        y = forms.one_by_one(Call("Linear", noted, (layer, x), {}))
    assert seen == [(1, 8) if flat else (1, 1, 8)] * (2 * paths)
    assert same_bits(y, x @ layer.weight.T)


def test_arrays_that_have_other_rows_are_left_alone() -> None:
    """As the positions of an image, or the heads of a token."""
    layer, x = nn.Linear(8, 5), mx.ones((1, 7, 8))
    with computed(Form(frozenset({"Linear"})), 1, 3):
        assert layer(x).shape == (1, 7, 5)


def test_a_mask_of_its_own_is_not_cut() -> None:
    q = mx.ones((1, 1, 3, 64))
    mask = mx.zeros((3, 3))
    by_row = Form(frozenset({ATTENTION}))
    with computed(by_row, 1, 3), patch.object(forms, "_attention_by_row") as cut:
        mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0, mask=mask)
        cut.assert_not_called()
        mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0, mask="causal")
        cut.assert_called_once()


MUTANTS = {
    "rows_see_later_keys": replaced(
        forms, "_first", lambda stock: lambda x, path, n: stock(x, path, 10**6)
    ),
    "rows_of_the_first_path": replaced(
        forms, "_first", lambda stock: lambda x, path, n: stock(x, 0, n)
    ),
    "ops_that_differ_are_not_seen": replaced(
        row_check, "keeps_bits", lambda stock: lambda *args: True
    ),
    "forms_are_not_used": replaced(
        forms, "_by_row", lambda stock: lambda *args, **named: False
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_form_is_never_certified(name: str) -> None:
    """The comparison of whole verifies does not rely on the parts."""
    with device("attention"), MUTANTS[name]():
        assert certified(SPECS["attention"], 3, paths=2) in (
            None,
            # Everything by row, if only the search for what differs is broken.
            Form(frozenset({ATTENTION, "Linear", "Embedding"}))
            if name == "ops_that_differ_are_not_seen"
            else None,
        )


def test_a_kernel_that_adds_up_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's, which is compared with one-row products first."""
    layer, x = nn.Linear(64, 48, bias=False), mx.ones((1, 2, 64))
    monkeypatch.setattr(cuda_rows, "on_cuda", lambda: True)
    for factor, used in ((1.0, True), (1 + 2**-20, False)):
        cuda_rows._is_exact.cache_clear()
        monkeypatch.setattr(
            cuda_rows, "_product", lambda x, w, factor=factor: x @ w.T * factor
        )
        assert (cuda_rows.product_by_row(layer, x) is not None) == used
    cuda_rows._is_exact.cache_clear()
    assert cuda_rows.product_by_row(nn.Linear(64, 48, bias=True), x) is None
    quantized = nn.QuantizedLinear(64, 48, bias=False)
    assert cuda_rows.product_by_row(quantized, x) is None


# --- what is kept ---------------------------------------------------------------------


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "mlx-lm-mtp" / "certificates").iterdir())


def test_it_is_measured_once(tmp_path: Path) -> None:
    with device("attention"):
        form = certified(SPECS["attention"], 3)
    (file,) = kept(tmp_path)
    assert json.loads(file.read_text()) == {"1x3 to 256": ["attention"]}
    certificate._known.clear()
    with patch.object(Certificate, "_find") as find:
        assert certified(SPECS["attention"], 3) == form
        find.assert_not_called()
        certified(SPECS["attention"], 2)
        find.assert_called_once()


@pytest.mark.parametrize("text", ["", "{", "[1]", "\0"])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    certified(SPECS["attention"], 3)
    (file,) = kept(tmp_path)
    file.write_text(text)
    certificate._known.clear()
    assert certified(SPECS["attention"], 3) == BATCHED
    assert json.loads(file.read_text()) == {"1x3 to 256": []}


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr(store, "_warned", set())
    with pytest.warns(RuntimeWarning, match="set XDG_CACHE_HOME") as told:
        certified(SPECS["attention"], 2)
        certified(SPECS["attention"], 3)
    assert len(told) == 1


def test_nothing_is_measured_if_exactness_is_not_asked_for() -> None:
    stats, model = Tally(), model_of(SPECS["attention"])
    fast = DraftOptions(num_draft_tokens=3, exactness="fast")
    with patch.object(Certificate, "_find") as find:
        assert differences(model, fast, ours={"stats": stats}) == []
        find.assert_not_called()


def changed(monkeypatch: pytest.MonkeyPatch, what: str) -> str:
    """The fingerprint after one thing was changed."""
    model = model_of(Spec("qwen3_5"))
    caches = make_prompt_cache(model)
    if what == "version":
        monkeypatch.setattr(certificate, "version", lambda name: "0")
    if what == "plugin":
        monkeypatch.setattr(certificate, "__version__", "0")
    if what == "environment":
        monkeypatch.setenv("MLX_SOMETHING", "1")
    if what == "device":
        monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "M9"})
    if what == "dtype":
        model = model_of(Spec("qwen3_5", weights="bf16"))
    if what == "bits":
        model = model_of(Spec("qwen3_5", weights="4bit"))
    if what == "caches":
        caches[-1] = QuantizedKVCache(group_size=32, bits=8)
    if what == "weights":
        model = model_of(Spec("qwen3_5", seed=1))
    return fingerprint(Target(model), caches)


@pytest.mark.parametrize(
    "what",
    ["version", "plugin", "environment", "device", "dtype", "bits", "caches"],
)
def test_a_change_invalidates_it(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with monkeypatch.context() as patched:
        other = changed(patched, what)
    assert other != changed(monkeypatch, "nothing") == changed(monkeypatch, "weights")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "quantised": lambda model: nn.quantize(model, group_size=32, bits=4),
    "adapters": lambda model: linear_to_lora_layers(
        model, 1, {"rank": 4, "scale": 20.0, "dropout": 0.0}
    ),
    "another dtype": lambda model: model.set_dtype(mx.bfloat16),
    "one weight": lambda model: model.layers[0].mlp.up_proj.update(
        {"weight": mx.zeros((8, 8))}
    ),
    "an attribute": lambda model: setattr(model.layers[0].mlp, "scale", 2),
}


def fingerprints(change: Callable[[Any], Any]) -> tuple[str, str, str]:
    """Of one model: twice as it is, and once changed in place."""
    model = Spec("qwen3_5").build()
    found = [fingerprint(Target(model), []) for _ in range(2)]
    change(model)
    return *found, fingerprint(Target(model), [])


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_changed_in_place_is_another(change: str) -> None:
    before, again, after = fingerprints(CHANGES[change])
    assert before == again != after


def test_what_is_kept_by_model_alone_would_be_seen() -> None:
    with replaced(certificate, "_look", lambda stock: lambda part: None)():
        before, _, after = fingerprints(CHANGES["quantised"])
    assert before == after


def test_processes_agree_on_a_fingerprint(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); import mlx.core as mx;"
        "mx.set_default_device(mx.cpu); from tiny import Spec;"
        "from mlx_lm_mtp.certificate import fingerprint;"
        "from mlx_lm_mtp.target import Target;"
        "print(fingerprint(Target(Spec('qwen3_5').build()), []))"
    )
    root = Path(__file__).parents[1]
    found = {
        subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True)
        for _ in range(2)
    }
    assert len(found) == 1


def test_measuring_draws_no_numbers_of_the_callers() -> None:
    model = model_of(SPECS["attention"])
    mx.random.seed(4)
    expected = mx.random.uniform(shape=(3,))
    mx.random.seed(4)
    Certificate(Target(model), make_prompt_cache(model)).form(1, 3)
    assert mx.array_equal(mx.random.uniform(shape=(3,)), expected)
