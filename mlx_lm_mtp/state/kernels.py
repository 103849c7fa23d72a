"""Stock's own gated-delta kernels, with the state after every token, and for CUDA.

Stock fuses the recurrence in Metal kernels that keep the state in registers and store
it once, behind the last token. Here their text is taken as stock makes it, and what
stores the last state is repeated behind each token: arithmetic and order of additions
are stock's, whichever of its kernels it chooses, for nothing of them is written anew.

CUDA has no such kernel in stock, which loops over ops there. The same text, with the
words of Metal explained, serves it as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta

# Stock's name of a kernel: its factory, and the variant that it is.
_VARIANTS: dict[str, tuple[str, dict[str, bool]]] = {
    "_gated_delta_kernel": ("_make_gated_delta_kernel", {}),
    "_gated_delta_kernel_masked": ("_make_gated_delta_kernel", {"has_mask": True}),
    "_gated_delta_kernel_vec": ("_make_gated_delta_kernel", {"vectorized": True}),
    "_gated_delta_kernel_vec_masked": (
        "_make_gated_delta_kernel",
        {"has_mask": True, "vectorized": True},
    ),
    "_gated_delta_kernel_packed": ("_make_gated_delta_packed_kernel", {}),
}
_LOOP = "for (int t = 0; t < T; ++t) {"

# What Metal's words are in CUDA. A simdgroup is a warp, for all rows are 32 wide.
_WORDS = """
template <typename E>
struct Floats {  // reads any type as the float that stock's arithmetic is in
  const E* at;
  __device__ float operator[](long i) const { return static_cast<float>(at[i]); }
  __device__ Floats operator+(long n) const { return {at + n}; }
  __device__ void operator+=(long n) { at += n; }
};
template <typename E>
__device__ Floats<E> floats(const E* at) { return {at}; }

__device__ float simd_shuffle_xor(float x, int lane) {
  return __shfl_xor_sync(0xffffffff, x, lane);
}
__device__ float simd_sum(float x) {
  for (int lane = 1; lane < 32; lane *= 2) x += simd_shuffle_xor(x, lane);
  return x;
}
"""
_PLACE = """
struct { unsigned x, y, z; }
    thread_position_in_threadgroup = {threadIdx.x, threadIdx.y, threadIdx.z},
    thread_position_in_grid = {
        blockIdx.x * blockDim.x + threadIdx.x,
        blockIdx.y * blockDim.y + threadIdx.y,
        blockIdx.z * blockDim.z + threadIdx.z},
    threads_per_grid = {
        gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z};
auto thread_index_in_simdgroup = threadIdx.x % 32;
"""

Launch = Callable[..., list[mx.array]]
Make = Callable[..., Launch]
Size = tuple[int, int, int]


def launcher(make: Make, *, states: bool, packed: bool = True) -> Launch:
    """Stock's choice and launch of a kernel, on kernels that `make` makes of its text.

    Args:
        make: `mx.fast.metal_kernel`, :func:`cuda_kernel`, or what stands in for them.
        states: Whether the states before the last are stored as well.
        packed: Whether the kernel that packs rows may be chosen.

    Returns:
        A function of q, k `(B, T, Hk, Dk)`, v `(B, T, Hv, Dv)`, g `(B, T, Hv)` or
        `(B, T, Hv, Dk)`, beta `(B, T, Hv)`, a state `(B, Hv, Dv, Dk)` and a mask
        `(B, T)` or None. It gives y `(B, T, Hv, Dv)`, the state after the last token
        and, with `states`, those after the tokens before, `(T - 1, B, Hv, Dv, Dk)`.

    Raises:
        ValueError: If stock's kernels have a form that is not known here.
    """
    made = _storing(make) if states else make
    kernels = {name: made(**text) for name, text in texts().items()}
    launch = with_globals(gated_delta._gated_delta_kernel_impl, **kernels)
    return functools.partial(launch, allow_packed=packed)


@functools.cache
def texts() -> dict[str, dict[str, Any]]:
    """What stock hands to `mx.fast.metal_kernel`, by its name of the kernel."""
    metal = SimpleNamespace(is_available=lambda: True)
    stand_in = SimpleNamespace(metal=metal, fast=SimpleNamespace(metal_kernel=dict))
    return {
        name: with_globals(getattr(gated_delta, factory), mx=stand_in)(**variant)
        for name, (factory, variant) in _VARIANTS.items()
    }


def with_globals(function: Any, **names: Any) -> Callable[..., Any]:
    """A function of stock's that finds these names; nobody else does."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# --- the state after every token ------------------------------------------------------


def _storing(make: Make) -> Make:
    """Makes kernels that store the state after every token."""

    def made(*, name: str, output_names: list[str], source: str, **text: Any) -> Launch:
        kernel = make(
            name=f"{name}_states",
            output_names=[*output_names, "states"],
            source=storing_states(source),
            **text,
        )

        def launch(
            *, inputs: list[Any], output_shapes: Any, output_dtypes: Any, **how: Any
        ) -> list[mx.array]:
            earlier = inputs[0].shape[1] - 1
            return kernel(
                inputs=inputs,
                output_shapes=[*output_shapes, (earlier, *output_shapes[1])],
                output_dtypes=[*output_dtypes, output_dtypes[1]],
                **how,
            )

        return launch

    return made


def storing_states(source: str) -> str:
    """A kernel's text that stores the state behind each token, as it does at its end.

    Raises:
        ValueError: If the text has another form than stock's: a loop over the tokens,
            and behind it what stores the state in `o_state`.
    """
    head, loop, rest = source.partition(_LOOP)
    body = rest[: _closing(rest)] if loop else ""
    store = rest[len(body) + 1 :]
    if "o_state[" not in store or "o_state =" not in head:
        raise ValueError("stock's gated-delta kernel has a form that is not known here")
    return (
        f"{head}auto t_state = states + (o_state - state_out);\n{loop}{body}"
        f"if (t + 1 < T) {{{store.replace('o_state', 't_state')}"
        f"t_state += threads_per_grid.z * Dv * Dk;\n}}\n}}{store}"
    )


def _closing(text: str) -> int:
    """Where the brace is that closes the block in which the text begins."""
    depth = 1
    for i, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return i
    raise ValueError("a block is not closed")


# --- CUDA -----------------------------------------------------------------------------


def cuda_kernel(
    *, name: str, input_names: list[str], output_names: list[str], source: str
) -> Launch:
    """`mx.fast.cuda_kernel` for a text that was written for `mx.fast.metal_kernel`.

    T is its one scalar; a CUDA kernel is given a pointer to it.
    """
    arrays = [f"auto {n} = floats({n}_in);\n" for n in input_names if n != "T"]
    kernel = mx.fast.cuda_kernel(
        name=name,
        input_names=[f"{n}_in" for n in input_names],
        output_names=output_names,
        header=_WORDS,
        source="".join([_PLACE, "const int T = *T_in;\n", *arrays, source]),
    )

    def launch(*, grid: Size, threadgroup: Size, **how: Any) -> list[mx.array]:
        # Metal cuts threadgroups to the grid; CUDA would start threads beyond it.
        fitting = tuple(map(math.gcd, grid, threadgroup))
        return kernel(grid=grid, threadgroup=fitting, **how)

    return launch
