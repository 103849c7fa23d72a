"""Kernels run on a CPU as on Metal: arithmetic, lock-step; and stock's own kernels."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import metal
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metal import KernelError, MetalKernel, Order
from mlx_lm.models.gated_delta import gated_delta_ops

pytestmark = pytest.mark.skipif(
    shutil.which(metal.COMPILER) is None, reason=f"needs {metal.COMPILER}"
)
ORDERS: list[Order] = ["butterfly", "sequential"]
FLOATS = [mx.float32, mx.float16, mx.bfloat16]


def run(
    source: str,
    inputs: dict[str, Any],
    shape: Sequence[int],
    dtype: mx.Dtype = mx.float32,
    *,
    order: Order = "butterfly",
    **launch: Any,
) -> mx.array:
    """The output `y` of a kernel, by default with a thread for each element."""
    kernel = MetalKernel("tested", list(inputs), ["y"], source, order=order)
    launch = {
        "grid": (math.prod(shape), 1, 1),
        "threadgroup": (256, 1, 1),
        "output_shapes": [shape],
        "output_dtypes": [dtype],
        **launch,
    }
    return kernel(inputs=list(inputs.values()), **launch)[0]


def each(statement: str) -> str:
    """A kernel of which thread i runs a statement."""
    return f"uint i = thread_position_in_grid.x; {statement};"


# --- arithmetic -------------------------------------------------------------------


def every(dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Pairs of floats: all that there are of 16 bits, or as many of 32 bits."""
    bits = mx.arange(1 << 16, dtype=mx.uint32)
    if dtype.size == 4:
        bits = bits * 0x9E3779B1  # spread over all exponents
    other = mx.random.permutation(bits, key=mx.random.key(0))
    unsigned = mx.uint16 if dtype.size == 2 else mx.uint32
    return bits.astype(unsigned).view(dtype), other.astype(unsigned).view(dtype)


def same_numbers(a: mx.array, b: mx.array) -> bool:
    """Of one shape and dtype; any NaN is like any other, for none is prescribed."""
    alike = (a.shape, a.dtype) == (b.shape, b.dtype)
    return alike and mx.array_equal(a, b, equal_nan=True).item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_operation_rounds_as_in_mlx(dtype: mx.Dtype) -> None:
    a, b = every(dtype)
    source = each("y[i] = a[i] * b[i] + a[i] / b[i] - b[i]")
    ours = run(source, {"a": a, "b": b}, a.shape, dtype)
    assert same_numbers(ours, a * b + a / b - b)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_narrow_floats_with_others(dtype: mx.Dtype) -> None:
    a, _ = every(dtype)
    b, _ = every(mx.float32)
    inputs = {"a": a, "b": b}
    in_float = run(each("y[i] = a[i] * b[i]"), inputs, a.shape)
    rounded = run(each("y[i] = b[i]"), inputs, a.shape, dtype)
    with_integer = run(
        each("y[i] = static_cast<float>(2049 * a[i] + 2049)"), inputs, a.shape
    )
    in_place = run(each("auto x = a[i]; x += b[i]; y[i] = x"), inputs, a.shape, dtype)
    assert same_numbers(in_float, a.astype(mx.float32) * b)
    assert same_numbers(rounded, b.astype(dtype))
    assert same_numbers(with_integer, (2049 * a + 2049).astype(mx.float32))
    assert same_numbers(in_place, (a.astype(mx.float32) + b).astype(dtype))


# --- what a kernel is given -------------------------------------------------------


def test_scalars_are_values() -> None:
    x = mx.arange(7, dtype=mx.float32)
    for n, scale, negative in [(3, 0.5, True), (-2, 2.25, False)]:
        inputs = {"x": x, "n": n, "scale": scale, "negative": negative}
        source = each("y[i] = (negative ? -1 : 1) * (x[i] * scale + n)")
        expected = (-1 if negative else 1) * (x * scale + n)
        assert same_numbers(run(source, inputs, x.shape), expected)


@pytest.mark.parametrize("dtype", [mx.int32, mx.bfloat16, mx.uint8], ids=str)
def test_template_arguments_are_known_to_the_compiler(dtype: mx.Dtype) -> None:
    """A branch that is not taken need not even compile, as in a template on Metal."""
    source = each("""
        T values[N] = {1, 2, 3};
        if constexpr (First) y[i] = x[i] + values[0];
        else y[i] = T::no_such_name + values[N - 1];
    """)
    x = mx.arange(20).astype(dtype)

    def ours(first: bool) -> mx.array:
        template = [("T", dtype), ("N", 3), ("First", first)]
        return run(source, {"x": x}, x.shape, dtype, template=template)

    assert same_numbers(ours(True), x + 1)
    with pytest.raises(KernelError, match="no_such_name"):
        ours(False)


def test_a_number_without_a_suffix_is_a_float() -> None:
    x = mx.random.normal((100,), key=mx.random.key(0))
    tenth = mx.array(0.1, mx.float32)
    assert same_numbers(run(each("y[i] = x[i] * 0.1"), {"x": x}, x.shape), x * tenth)


def test_inputs_are_rows_in_order_and_have_shapes() -> None:
    x = mx.arange(12).reshape(3, 4).T[::2]
    source = each("y[i] = x[i] + 100 * x_shape[1] + 10 * x_shape[0] + x_ndim")
    assert x.shape == (2, 3)
    assert same_numbers(run(source, {"x": x}, x.shape, mx.int32), x + 322)


def test_what_a_header_defines_and_several_outputs() -> None:
    kernel = MetalKernel(
        "tested",
        ["x"],
        ["less", "large"],
        each("less[i] = lower(x + i); large[i] = x[i] >= 3"),
        header="float lower(const device float* x) { return *x - 1; }",
    )
    x = mx.arange(5, dtype=mx.float32)
    less, large = kernel(
        inputs=[x],
        output_shapes=[x.shape, x.shape],
        output_dtypes=[mx.float32, mx.bool_],
        grid=(5, 1, 1),
        threadgroup=(2, 1, 1),
    )
    assert same_numbers(less, x - 1)
    assert same_numbers(large, x >= 3)


# Threads along x, y and z; no side of the grid is a multiple of the group's.
GRID = (11, 5, 3)
GROUP = (8, 3, 2)


def positions() -> dict[str, np.ndarray]:
    """What each word of Metal is in the threads of the grid, in their order."""
    grid, group = np.array(GRID), np.array(GROUP)
    threads = np.unravel_index(np.arange(grid.prod()), GRID[::-1])
    thread = np.stack(threads[::-1], axis=1)
    local, where = thread % group, thread // group
    size = np.minimum(group, grid - where * group)
    index = local[:, 0] + size[:, 0] * (local[:, 1] + size[:, 1] * local[:, 2])
    return {
        "thread_position_in_grid": thread,
        "thread_position_in_threadgroup": local,
        "threadgroup_position_in_grid": where,
        "threads_per_grid": grid + 0 * thread,
        "threads_per_threadgroup": size,
        "thread_index_in_threadgroup": index,
        "thread_index_in_simdgroup": index % 32,
        "simdgroup_index_in_threadgroup": index // 32,
    }


@pytest.mark.parametrize("word", positions())
def test_positions(word: str) -> None:
    expected = positions()[word]
    parts = [".x", ".y", ".z"] if expected.ndim == 2 else [""]
    source = "auto at = thread_position_in_grid; uint n = threads_per_grid.x;"
    source += "uint i = at.x + n * (at.y + threads_per_grid.y * at.z);"
    for j, part in enumerate(parts):
        source += f"y[{len(parts)} * i + {j}] = {word}{part};"
    launch = {"grid": GRID, "threadgroup": GROUP}
    found = run(source, {}, expected.shape, mx.uint32, **launch)
    assert np.array_equal(np.array(found), expected)


def test_the_source_can_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    run(each("y[i] = 0"), {}, (1,), verbose=True)
    assert "y[i] = 0" in capsys.readouterr().out


# --- simdgroups -------------------------------------------------------------------


def uneven(dtype: mx.Dtype = mx.float32) -> mx.array:
    """Two simdgroups of numbers whose sum depends on the order."""
    x = mx.random.normal((2, 32), key=mx.random.key(3))
    return (x * mx.exp(4 * x)).astype(dtype)


def summed(x: mx.array, order: Order) -> mx.array:
    """The sums of rows, in an order of addition."""
    columns = [x[:, i] for i in range(32)]
    while len(columns) > 1:
        if order == "butterfly":
            columns = [a + b for a, b in zip(columns[::2], columns[1::2], strict=True)]
        else:
            columns = [columns[0] + columns[1], *columns[2:]]
    return mx.repeat(columns[0], 32).reshape(x.shape)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_simd_sum_adds_in_an_order(order: Order, dtype: mx.Dtype) -> None:
    x = uneven(dtype)
    other = next(o for o in ORDERS if o != order)
    ours = run(each("y[i] = simd_sum(x[i])"), {"x": x}, x.shape, dtype, order=order)
    assert same_numbers(ours, summed(x, order))
    assert not same_numbers(ours, summed(x, other))


def test_a_written_tree_is_the_butterfly() -> None:
    x = uneven()
    steps = "".join(f"sum += simd_shuffle_xor(sum, {2**k});" for k in range(5))
    source = each(f"float sum = x[i]; {steps} y[i] = sum")
    for order in ORDERS:
        ours = run(source, {"x": x}, x.shape, order=order)
        assert same_numbers(ours, summed(x, "butterfly"))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int64], ids=str)
def test_lanes_exchange_values(dtype: mx.Dtype) -> None:
    lane = np.arange(32)
    sources = {
        "simd_shuffle_xor(x[i], 1)": lane ^ 1,
        "simd_shuffle_xor(x[i], 21)": lane ^ 21,
        "metal::simd_shuffle(x[i], 31 - i % 32)": 31 - lane,
        "simd_shuffle(x[i], 5)": 0 * lane + 5,
        "simd_shuffle_down(x[i], 3)": np.where(lane < 29, lane + 3, lane),
    }
    x = (100 * uneven()).astype(dtype)
    calls = "".join(f"y[{64 * k} + i] = {call};" for k, call in enumerate(sources))
    expected = mx.stack([x[:, mx.array(source)] for source in sources.values()])
    launch = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
    ours = run(each(calls), {"x": x}, expected.shape, dtype, **launch)
    assert same_numbers(ours, expected)


def test_simd_max() -> None:
    x = uneven()
    ours = run(each("y[i] = simd_max(x[i])"), {"x": x}, x.shape)
    assert same_numbers(ours, mx.broadcast_to(x.max(axis=1, keepdims=True), x.shape))


def test_lanes_may_do_different_things_between_operations() -> None:
    source = each("""
        float sum = 0;
        for (uint k = 0; k < i % 32; ++k) sum += 1;
        for (int round = 0; round < 3; ++round) sum = simd_shuffle(sum, (i + 1) % 32);
        if (i % 2) { y[i] = -sum; return; }
        y[i] = sum
    """)
    lane = mx.arange(64) % 32
    expected = (lane + 3) % 32 * mx.where(lane % 2 == 1, -1, 1)
    assert same_numbers(run(source, {}, (64,)), expected.astype(mx.float32))


# --- what no kernel may do --------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("if (i >= n) y[i] = simd_sum(1.0f)", "0 has ended.*lane 5 waits at simd_sum"),
        ("if (i < n) simd_sum(i); y[i] = 0", "0 waits at simd_sum in line 1.*5 has en"),
        (
            "if (i < n) simd_sum(i);\n else simd_sum(i)",
            "0 .* in line 1, lane 5 .* in line 2",
        ),
        ("i < n ? simd_sum(i) : simd_max(i)", "0 .* simd_sum .* lane 5 .* at simd_max"),
        ("for (uint k = 0; k < (i < n ? 1 : 2); ++k) simd_sum(i)", "0 has ended"),
    ],
)
def test_lanes_that_part_are_found(source: str, where: str) -> None:
    """Afterwards the same kernel can run again."""
    written = each(f"y[i] = 0; {source}")
    for _ in range(2):
        with pytest.raises(KernelError, match=f"(?s)tested: .* diverges: lane {where}"):
            run(written, {"n": 5}, (32,))
        assert run(written, {"n": 32}, (32,)).shape == (32,)


def test_a_group_that_is_not_full_cannot_exchange() -> None:
    source = each("y[i] = i; if (exchange) simd_sum(i)")
    with pytest.raises(KernelError, match="lane 8 has ended or does not exist"):
        run(source, {"exchange": True}, (40,))
    for n in (5, 40):
        assert same_numbers(run(source, {"exchange": False}, (n,)), mx.arange(float(n)))


@pytest.mark.parametrize("at", ["i + 1", "i - 1", "i + 1000", "i - 1000"])
def test_writes_outside_are_found(at: str) -> None:
    source = each(f"y[i] = 1; int at = {at}; if (at < 0 || at > 9) y[at] = 2")
    with pytest.raises(KernelError, match="tested writes outside of y"):
        run(source, {}, (10,))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int8, mx.bool_], ids=str)
def test_elements_that_are_not_written_are_found(dtype: mx.Dtype) -> None:
    x = mx.ones((10,), dtype)
    source = each("if (i != 3 && i != 7) y[i] = x[i]")
    with pytest.raises(KernelError, match="tested: element 3 of y is not written"):
        run(source, {"x": x}, x.shape, dtype)
    mixed = run(source, {"x": x}, x.shape, dtype, init_value=0)
    assert mixed.tolist() == [i not in (3, 7) for i in range(10)]


def test_any_bits_can_be_written() -> None:
    x = mx.array([-1, 0x55555555], mx.int32)
    assert same_numbers(run(each("y[i] = x[i]"), {"x": x}, x.shape, mx.int32), x)


@pytest.mark.parametrize("at", ["i + 1", "int(i) - 1"])
def test_reads_outside_that_matter_are_found(at: str) -> None:
    x = mx.arange(10.0)
    with pytest.raises(KernelError, match="element [09] of y .*nobody has written"):
        run(each(f"y[i] = x[{at}]"), {"x": x}, x.shape)


def test_errors_of_the_compiler_are_shown() -> None:
    with pytest.raises(
        KernelError, match="tested:2:.* error: .*nothing.* was not declared"
    ):
        run(each("\n y[i] = nothing"), {}, (1,))


@pytest.mark.parametrize(
    ("grid", "group"), [((8, 8, 32), (8, 8, 32)), ((0, 1, 1), (1, 1, 1))]
)
def test_sizes_that_no_mac_takes(grid: Any, group: Any) -> None:
    with pytest.raises(KernelError, match="threads in groups of"):
        run("y[0] = 1;", {}, (1,), grid=grid, threadgroup=group)


# --- stock's kernels --------------------------------------------------------------

GENERIC = ["plain", "masked", "vector", "vector masked"]
KINDS = [*GENERIC, "xtree", "packed"]
# Hk, Hv, Dk and Dv; the packed kernel is for the first alone.
LARGE = (1, 2, 128, 24)
ODD = (2, 6, 64, 5)
Launch = Callable[..., Sequence[mx.array]]  # gives y and the state


def launch_of(kind: str, order: Order = "butterfly") -> Launch:
    """How stock launches a kernel: with q, k, v, g, beta, the state and a mask."""
    if kind == "xtree":
        return metal.stock_xtree(order)
    return functools.partial(metal.stock_launch(order), allow_packed=kind == "packed")


@dataclass(frozen=True)
class Case:
    """What a kernel is run with."""

    kind: str
    dtype: mx.Dtype = mx.float32
    heads: tuple[int, int, int, int] = LARGE
    batch: int = 1
    tokens: int = 3
    seed: int = 0

    def inputs(self) -> list[mx.array]:
        """q, k, v, g, beta, the state and, if the kernel takes one, a mask."""
        key_heads, heads, width, rows = self.heads
        start = (self.batch, self.tokens)
        keys = iter(mx.random.split(mx.random.key(self.seed), 7))

        def uniform(*shape: int, low: float = -1.0) -> mx.array:
            return mx.random.uniform(low, 1, shape, key=next(keys))

        q, k = (uniform(*start, key_heads, width) / width**0.5 for _ in range(2))
        v, beta = uniform(*start, heads, rows), uniform(*start, heads, low=0)
        gate = (*start, heads, width) if "vector" in self.kind else (*start, heads)
        g, state = uniform(*gate, low=0.5), uniform(self.batch, heads, rows, width)
        mask = [uniform(*start) > -0.3] if "masked" in self.kind else []
        q, k, v, beta = (a.astype(self.dtype) for a in (q, k, v, beta))
        return [q, k, v, g, beta, state, *mask]


def cases(*kinds: str) -> st.SearchStrategy[Case]:
    """Few shapes of heads, because each is compiled anew; any other shape."""
    return st.builds(
        Case,
        kind=st.sampled_from(kinds),
        dtype=st.sampled_from(FLOATS),
        heads=st.just(LARGE) if "packed" in kinds else st.sampled_from([LARGE, ODD]),
        batch=st.integers(1, 2),
        tokens=st.integers(1, 4),
        seed=st.integers(0, 99),
    )


def step_by_step(launch: Launch, inputs: list[mx.array]) -> list[mx.array]:
    """One launch for each token, each from the state that the last one left."""
    *sequences, state = inputs[:6]
    ys = []
    for t in range(sequences[0].shape[1]):
        now = [a[:, t : t + 1] for a in (*sequences, *inputs[6:])]
        y, state = launch(*now[:5], state, *now[5:])
        ys.append(y)
    return [mx.concatenate(ys, axis=1), state]


def all_same(a: Sequence[mx.array], b: Sequence[mx.array]) -> bool:
    """Whether y and the state have the same bits."""
    return all(same_numbers(x, y) for x, y in zip(a, b, strict=True))


@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=max(settings.default.max_examples // 5, 1))
def test_tokens_in_one_launch_or_in_many(kind: str, data: st.DataObject) -> None:
    inputs = data.draw(cases(kind)).inputs()
    launch = launch_of(kind)
    assert all_same(launch(*inputs), step_by_step(launch, inputs))


@given(case=cases("packed"), order=st.sampled_from(ORDERS))
def test_packed_is_xtree_in_any_order(case: Case, order: Order) -> None:
    inputs = case.inputs()
    packed = launch_of("packed", order)(*inputs)
    assert all_same(packed, launch_of("xtree")(*inputs))


@given(case=cases("plain"))
def test_plain_is_xtree_if_simd_sum_is_a_butterfly(case: Case) -> None:
    inputs = case.inputs()
    assert all_same(launch_of("plain")(*inputs), launch_of("xtree")(*inputs))


@pytest.mark.parametrize("kind", GENERIC)
def test_other_kernels_depend_on_the_order(kind: str) -> None:
    inputs = Case(kind).inputs()
    one, other = (launch_of(kind, order)(*inputs) for order in ORDERS)
    assert not same_numbers(one[0], other[0])
    assert not same_numbers(one[1], other[1])


@given(case=cases(*GENERIC, "xtree") | cases("packed"))
def test_kernels_are_close_to_the_operations(case: Case) -> None:
    """Where a token is masked, stock's operations give a y all the same."""
    inputs = case.inputs()
    y, state = launch_of(case.kind)(*inputs)
    like, like_state = gated_delta_ops(*inputs)
    if "masked" in case.kind:
        like = mx.where(inputs[-1][..., None, None], like, 0)
    assert mx.allclose(state, like_state, rtol=1e-5, atol=1e-5)
    assert mx.allclose(y, like, rtol=1e-2 if case.dtype.size == 2 else 1e-5, atol=1e-5)
