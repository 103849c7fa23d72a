"""How gated-delta layers are computed: chosen, checked before use, taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import oracle
import pytest
from checks import drafted, generation_differences, model_of, scripted
from mlx_lm.generate import generation_stream
from mlx_lm.models import gated_delta
from tiny import Spec

from mlx_lm_mtp import DraftOptions, Tally
from mlx_lm_mtp.errors import InvalidOption
from mlx_lm_mtp.state import arithmetics, kernels, recurrence, self_check
from mlx_lm_mtp.state.arithmetics import Arithmetic, Shapes
from mlx_lm_mtp.state.recurrence import Recurrence
from mlx_lm_mtp.stock_api import DraftRequest

SHAPES = Shapes(
    (1, 4, 1, 32),
    (1, 4, 2, 8),
    (1, 4, 2),
    (mx.bfloat16, mx.bfloat16, mx.bfloat16, mx.float32, mx.bfloat16, mx.float32),
    False,
    str(mx.cpu),
)
MASKED = SHAPES._replace(q=(2, 4, 1, 32), v=(2, 4, 2, 8), g=(2, 4, 2), masked=True)
VECTOR = SHAPES._replace(g=(1, 4, 2, 32))


def stock() -> Any:
    """Stock's function, whether or not it is wrapped."""
    return getattr(
        gated_delta.gated_delta_ops, "__wrapped__", gated_delta.gated_delta_ops
    )


def usual() -> Arithmetic:
    return arithmetics.of_stock(stock())


@pytest.mark.parametrize("shapes", [SHAPES, MASKED, VECTOR], ids=str)
def test_a_compiled_block_gives_what_stock_gives_token_by_token(shapes: Any) -> None:
    assert self_check.fault_of_states(usual(), shapes) == ""
    inputs, state, mask = shapes.draw(7)
    y, last, earlier = arithmetics.looped(*inputs, state, mask)
    expected = stock()(*inputs, state, mask)
    for ours, theirs in zip((y, last), expected, strict=True):
        assert self_check.same_bits(ours, theirs)
    assert len(earlier) == 3


def broken(what: str) -> Arithmetic:
    """Stock's arithmetic, whose states beside it are wrong."""

    def with_states(*call: Any) -> Any:
        y, last, earlier = arithmetics.looped(*call)
        if what == "a state":
            earlier[1] = earlier[1] * (1 + 2**-23)
        if what == "the last":
            last = last.astype(mx.bfloat16).astype(mx.float32)
        if what == "an output":
            y = y + 2**-6
        if what == "compile":
            raise RuntimeError("error: expected ';'\nin a long text")
        return y, last, earlier

    return Arithmetic("broken", stock(), with_states, fused=True)


@pytest.mark.parametrize("what", ["a state", "the last", "an output", "compile"])
def test_a_kernel_that_fails_is_not_used_and_one_line_says_so(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arithmetic, tally = broken(what), Tally()
    monkeypatch.setattr(recurrence, "of_stock", lambda stock: arithmetic)
    inputs, state, mask = SHAPES.draw(0)
    how = Recurrence("states", note=tally.note)
    with pytest.warns(RuntimeWarning, match="states are not captured in one kernel"):
        y, last, after = how.recorded(stock(), inputs, state, mask)
    assert (tally.capture, tally.recurrence) == ("replay", "broken")
    assert tally.capture_fault and "\n" not in tally.capture_fault
    assert tally.capture_fault in tally.summary()
    _, _, earlier = arithmetics.looped(*inputs, state, mask)
    assert all(self_check.same_bits(after(n), earlier[n - 1]) for n in (1, 2, 3))


def test_the_check_finds_a_single_bit() -> None:
    x = mx.array([1.0, 0.0])
    assert self_check.same_bits(x, mx.array([1.0, 0.0]))
    assert not self_check.same_bits(x, mx.array([1.0, -0.0]))
    assert not self_check.same_bits(x, x.astype(mx.float16))


def test_the_cheaper_one_is_taken_once_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, state, mask = SHAPES.draw(0)
    for storing, expected in ((2.0, "states"), (1.0, "states"), (4.0, "replay")):
        arithmetic = usual()._replace(name=str(storing), fused=True)
        seconds = iter([storing, 1.5, 1.0])  # with states, without, half of it
        monkeypatch.setattr(recurrence, "_seconds", lambda call, s=seconds: next(s))
        monkeypatch.setattr(recurrence, "of_stock", lambda stock, a=arithmetic: a)
        for _ in range(2):  # the second time without a measurement
            tally = Tally()
            Recurrence(note=tally.note).recorded(stock(), inputs, state, mask)
            assert tally.capture == expected


def test_seconds_are_measured() -> None:
    inputs, state, mask = SHAPES.draw(0)
    assert 0 < recurrence._seconds(lambda: stock()(*inputs, state, mask)) < 60


def test_states_of_a_long_forward_are_replayed() -> None:
    for width, expected in ((16, "states"), (17, "replay")):
        shapes = SHAPES._replace(
            q=(1, width, 1, 32), v=(1, width, 2, 8), g=(1, width, 2)
        )
        tally = Tally()
        inputs, state, mask = shapes.draw(0)
        Recurrence("states", note=tally.note).recorded(stock(), inputs, state, mask)
        assert tally.capture == expected


# --- in a generation ------------------------------------------------------------------

PROMPT = [5, 6, 7, 8, 9, 10]


def found(family: str, stats: Tally, **options: Any) -> list[str]:
    """What differs from stock's after twelve tokens."""
    return generation_differences(
        model_of(Spec(family)),
        PROMPT,
        12,
        scripted("1101"),
        options=DraftOptions(**options),
        ours={"stats": stats},
    )


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("capture", ["auto", "states", "replay"])
def test_every_capture_leaves_what_stock_leaves(family: str, capture: str) -> None:
    stats = Tally()
    assert found(family, stats, capture=capture) == []
    assert stats.capture == ("replay" if capture == "replay" else "states")
    assert stats.recurrence == "stock"
    assert stats.replays == 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A CUDA kernel that is stock's ops, and the widths that it was called with."""
    widths: list[int] = []

    def run(*call: Any) -> Any:
        widths.append(call[0].shape[1])
        return stock()(*call)

    def with_states(*call: Any) -> Any:
        widths.append(-call[0].shape[1])
        return arithmetics.looped(*call)

    kernel = Arithmetic("CUDA kernel", run, with_states, fused=True)
    monkeypatch.setattr(recurrence, "on_cuda", lambda: True)
    monkeypatch.setattr(recurrence, "of_cuda", lambda: kernel)
    monkeypatch.setattr(recurrence, "fault_of_states", lambda *_: "")
    monkeypatch.setattr(recurrence, "fault_of_outputs", lambda *_: "")
    yield widths


@pytest.mark.parametrize("k", [0, 3])
def test_all_forwards_of_a_drafted_generation_use_the_kernel_of_cuda(
    k: int, cuda: list[int]
) -> None:
    stats = Tally()
    options = {"num_draft_tokens": k, "capture": "states"}
    assert found("qwen3_5", stats, **options) == []
    assert stats.recurrence == "CUDA kernel"
    assert {1, len(PROMPT) - 1} <= set(cuda)
    assert any(width < -1 for width in cuda) == (k > 0)
    assert cuda.count(len(PROMPT) - 1) == 2  # layers
    cuda.clear()
    assert found("qwen3_5", stats, **options, recurrence="stock") == []
    assert (cuda, stats.recurrence) == ([], "stock")


def test_outside_a_drafted_generation_stock_stays_stock(cuda: list[int]) -> None:
    model = model_of(Spec("qwen3_5"))
    drafted(model, PROMPT, 4, scripted("1")([0] * 4))
    assert cuda
    cuda.clear()
    oracle.stock(model, PROMPT, 4)
    assert cuda == []


def test_without_drafts_the_arithmetic_is_that_of_drafts(cuda: list[int]) -> None:
    model, stats = model_of(Spec("qwen3_5")), Tally()
    request = DraftRequest(None, DraftOptions(num_draft_tokens=0), stats)
    steps = request.steps(mx.array(PROMPT), model, generation_stream, max_tokens=4)
    tokens = []
    for token, *_ in steps:
        tokens.append(token)
        cuda.append(0)  # what the caller computes is not part of it
        oracle.stock(model, PROMPT, 1)
        assert cuda.pop() == 0
    assert tokens == oracle.stock(model, PROMPT, 4).tokens
    assert len(cuda) >= 2 * 4 and stats.recurrence == "CUDA kernel"


def test_a_cuda_kernel_that_is_far_from_stock_is_not_used() -> None:
    def run(*call: Any) -> Any:
        y, last = stock()(*call)
        return y, last * 1.01

    far = usual()._replace(name="far", run=run)
    with pytest.warns(RuntimeWarning, match="CUDA's gated-delta kernel is not used"):
        assert "not close" in self_check.fault_of_outputs(far, usual(), SHAPES)


@pytest.mark.parametrize("shapes", [SHAPES, MASKED, VECTOR], ids=str)
def test_a_cuda_kernel_that_is_near_stock_is_used(shapes: Any) -> None:
    """It adds up in another order, and leaves out what is masked."""

    def run(*call: Any) -> Any:
        y, last = stock()(*call)
        y = y if call[-1] is None else y * call[-1][..., None, None]
        return y * (1 + 2**-9), last * (1 + 2**-20)

    near = usual()._replace(name=f"near {shapes}", run=run)
    assert self_check.fault_of_outputs(near, usual(), shapes) == ""


@pytest.mark.parametrize("shapes", [SHAPES, MASKED, VECTOR], ids=str)
def test_prompts_of_any_length_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, shapes: Any
) -> None:
    """With a stand-in for CUDA, whose kernel loops over any number of tokens."""
    seen = []

    def fault(cuda: Any, stock: Any, shapes: Any) -> str:
        seen.append(shapes)
        return ""

    monkeypatch.setattr(recurrence, "on_cuda", lambda: True)
    monkeypatch.setattr(recurrence, "of_cuda", usual)
    monkeypatch.setattr(recurrence, "fault_of_outputs", fault)
    for tokens in (16, 17, 40, 512):
        long = {
            n: (x[0], tokens, *x[2:]) for n, x in shapes._asdict().items() if n in "qvg"
        }
        recurrence._arithmetic(stock(), shapes._replace(**long), "auto")
    assert len(seen) == 4 and len(set(seen)) == 1
    assert seen[0].q[1] == 16


def test_a_kernel_is_refused_where_there_is_none() -> None:
    with pytest.raises(InvalidOption, match="none for the CPU; leave it"):
        Recurrence(recurrence="kernel")


# --- the text of stock's kernels ------------------------------------------------------


def test_texts_of_stock_s_kernels_are_had_without_metal() -> None:
    texts = kernels.texts()
    names = {text["name"] for text in texts.values()}
    assert len(texts) == len(names) == 5
    for text in texts.values():
        assert text["output_names"] == ["y", "state_out"]
        stored = kernels.storing_states(text["source"])
        assert stored.count("static_cast<StT>") == 2
        assert stored.count("{") == stored.count("}")


@pytest.mark.parametrize(
    "source",
    [
        "",
        "for (int t = 0; t < T; ++t) { y[t] = 0; }",
        "auto o_state = state_out; for (int t = 0; t < T; ++t) { y[t] = 0;",
        "auto o_state = state_out; for (int s = 0; s < T; ++s) { } o_state[0] = 1;",
    ],
)
def test_a_text_of_another_form_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="not known here|not closed"):
        kernels.storing_states(source)
