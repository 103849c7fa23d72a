"""Kernels that store the state after every token, on Metal as it is emulated.

They run beside stock's own kernels, whose text comes from stock as well; what is
compared are bits. The states are compared with stock run on fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import metal
import mlx.core as mx
import pytest
from checks import PROMPT, generation_differences, scripted
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import gated_delta
from tiny import Spec

from mlx_lm_mtp import DraftOptions, Tally
from mlx_lm_mtp.state import arithmetics, kernels, self_check
from mlx_lm_mtp.state.arithmetics import Arithmetic, Shapes
from mlx_lm_mtp.state.bits import same_bits
from mlx_lm_mtp.wrapping import unwrap_all

# What stock has a kernel for: packed rows, one row a simdgroup, gates by channel.
PACKED = {"Hk": 1, "Hv": 2, "Dk": 128, "Dv": 8}
PLAIN = {"Hk": 2, "Hv": 2, "Dk": 64, "Dv": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "packed": PACKED,
    "packed-bf16": {**PACKED, "dtype": mx.bfloat16},
    "packed-half": {**PACKED, "dtype": mx.float16},
    "plain": PLAIN,
    "plain-bf16": {**PLAIN, "Hv": 4, "dtype": mx.bfloat16},
    "masked": {**PLAIN, "masked": True},
    "vector": {**PLAIN, "vector": True},
    "vector-masked": {**PLAIN, "vector": True, "masked": True},
}


def shapes(
    B: int,
    T: int,
    *,
    Hk: int,
    Hv: int,
    Dk: int,
    Dv: int,
    dtype: mx.Dtype = mx.float32,
    vector: bool = False,
    masked: bool = False,
) -> Shapes:
    gates = (B, T, Hv, Dk) if vector else (B, T, Hv)
    dtypes = (dtype, dtype, dtype, mx.float32, dtype, mx.float32)
    return Shapes((B, T, Hk, Dk), (B, T, Hv, Dv), gates, dtypes, masked, "Metal")


def stock_s(order: metal.Order = "butterfly") -> Callable[..., Any]:
    """Stock's own kernels, as Metal would run them."""
    launch = metal.stock_launch(order)

    def gated_delta_kernel(*call: Any) -> Any:
        return tuple(launch(*call, allow_packed=True))

    return gated_delta_kernel


def ours(order: metal.Order = "butterfly") -> Callable[..., Any]:
    made = metal.stand_in(order).fast.metal_kernel
    return kernels.launcher(made, states=True)


def first(n: int, inputs: Any, mask: Any) -> tuple[list[mx.array], Any]:
    """The first n tokens."""
    return [x[:, :n] for x in inputs], None if mask is None else mask[:, :n]


@pytest.mark.parametrize("variant", VARIANTS)
@given(B=st.integers(1, 2), T=st.integers(2, 5), seed=st.integers(0, 2**16))
def test_states_are_those_of_stock_on_fewer_tokens(
    variant: str, B: int, T: int, seed: int
) -> None:
    inputs, state, mask = shapes(B, T, **VARIANTS[variant]).draw(seed)
    stock = stock_s()
    y, last, earlier = ours()(*inputs, state, mask)
    for found, expected in zip((y, last), stock(*inputs, state, mask), strict=True):
        assert same_bits(found, expected)
    for n in range(1, T):
        prefix, seen = first(n, inputs, mask)
        assert same_bits(earlier[n - 1], stock(*prefix, state, seen)[1])


@pytest.mark.parametrize("order", ["butterfly", "sequential"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_self_check_passes(variant: str, order: metal.Order) -> None:
    """Also where simd_sum adds in another order, for both are stock's text."""
    arithmetic = Arithmetic(order, stock_s(order), ours(order), fused=True)
    assert (
        self_check.fault_of_states(arithmetic, shapes(1, 3, **VARIANTS[variant])) == ""
    )


@pytest.mark.parametrize(
    ("stock", "bug", "fault"),
    [
        ("state[i] * g", "state[i] * 0.5f * g", "differs from token 1"),
        ("if (t + 1 < T)", "if (t + 2 < T)", "not written"),
        ("t_state += ", "t_state += 1 + ", "writes outside of states"),
        ("states + (o_state - state_out)", "states", "not written"),
        ("t_state[s_idx] =", "t_state[s_idx] = -", "differs from token 1"),
        ("auto t_state", "auto t_state ;", "does not compile"),
    ],
)
def test_the_self_check_finds_a_wrong_kernel(stock: str, bug: str, fault: str) -> None:
    def faulty(*, name: str, source: str, **text: Any) -> Any:
        assert stock in source or name != "gated_delta_step_states"
        return metal.MetalKernel(name=name, source=source.replace(stock, bug), **text)

    wrong = kernels.launcher(faulty, states=True)
    arithmetic = Arithmetic(bug, stock_s(), wrong, fused=True)
    with pytest.warns(RuntimeWarning, match="states are not captured"):
        assert fault in self_check.fault_of_states(arithmetic, shapes(2, 3, **PLAIN))


# --- in a generation ------------------------------------------------------------------


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gated-delta layers run on kernels; names of those of ours that were launched."""
    launched: list[str] = []

    class Noted(metal.MetalKernel):
        def __call__(self, **how: Any) -> list[mx.array]:
            launched.append(self.name)
            return super().__call__(**how)

    unwrap_all()
    monkeypatch.setattr(gated_delta, "gated_delta_ops", stock_s())
    monkeypatch.setattr(mx.fast, "metal_kernel", Noted)
    yield launched
    unwrap_all()


@pytest.mark.parametrize("capture", ["states", "replay"])
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_a_generation_on_kernels(
    family: str, capture: str, on_metal: list[str]
) -> None:
    stats = Tally()
    found = generation_differences(
        Spec(family).build(),
        PROMPT,
        10,
        scripted("1101"),
        options=DraftOptions(capture=capture),
        ours={"stats": stats},
    )
    assert found == []
    assert (stats.capture, stats.recurrence) == (capture, "stock")
    assert bool(on_metal) == (capture == "states")
    assert all(name.endswith("_states") for name in on_metal)


def test_stock_s_ops_are_what_its_kernels_compute() -> None:
    inputs, state, _ = shapes(1, 4, **PACKED).draw(1)
    for found, expected in zip(
        stock_s()(*inputs, state, None),
        arithmetics.looped(*inputs, state)[:2],
        strict=True,
    ):
        assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5).item()
