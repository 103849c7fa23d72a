"""A matrix product of a few rows on CUDA with the bits of as many one-row products.

For one row MLX multiplies by a kernel of its own (`mlx/backend/cuda/gemms/gemv.cu`),
for several it calls cuBLAS, which adds up in another order. One row after the other
would read the weights once a row. This kernel reads them once, and adds up each row as
MLX does one: lane l of a warp multiplies and adds, one by one, the V inputs from
`V (l + 32 i)` on, for i = 0, 1, …; then the lanes are added as a butterfly. A warp
makes O outputs, so that the rows, too, are read less often.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .recurrence import on_cuda

_MOST = 16  # rows; each takes a register in every lane
_WARPS = 8  # in a block
_MANY = 2048  # outputs from which on a warp makes two: there are warps enough
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_INPUTS = 3  # random ones, to compare with one-row products on

_HEADER = """
template <typename T, int V>
struct __align__(sizeof(T) * V) Few { T at[V]; };
"""
_SOURCE = """
const int K = *k_in, N = *n_in;
const int lane = threadIdx.x;
const int first = (blockIdx.x * blockDim.y + threadIdx.y) * O;
float sum[O][R];
#pragma unroll
for (int o = 0; o < O; ++o)
  #pragma unroll
  for (int r = 0; r < R; ++r) sum[o][r] = 0.0f;
for (int k = V * lane; k < K; k += 32 * V) {
  Few<T, V> a[O];
  #pragma unroll
  for (int o = 0; o < O; ++o) {
    const long long n = min(first + o, N - 1);
    a[o] = *reinterpret_cast<const Few<T, V>*>(w + n * K + k);
  }
  #pragma unroll
  for (int r = 0; r < R; ++r) {
    const auto b = *reinterpret_cast<const Few<T, V>*>(x + (long long)r * K + k);
    #pragma unroll
    for (int o = 0; o < O; ++o)
      #pragma unroll
      for (int i = 0; i < V; ++i)
        sum[o][r] = __fmaf_rn(
            static_cast<float>(a[o].at[i]), static_cast<float>(b.at[i]), sum[o][r]);
  }
}
#pragma unroll
for (int o = 0; o < O; ++o)
  #pragma unroll
  for (int r = 0; r < R; ++r) {
    for (int other = 16; other > 0; other /= 2)
      sum[o][r] += __shfl_xor_sync(0xffffffff, sum[o][r], other);
    if (lane == 0 && first + o < N)
      y[(long long)r * N + first + o] = static_cast<T>(sum[o][r]);
  }
"""


def product_by_row(layer: nn.Module, x: mx.array) -> mx.array | None:
    """`x @ layer.weight.T` with the bits of one-row products; None if it has no kernel.

    Args:
        layer: A `Linear`, or an `Embedding` that is used as one.
        x: `(P, S, K)`, or any other rows of K.
    """
    if not isinstance(layer, (nn.Linear, nn.Embedding)) or "bias" in layer:
        return None
    if not on_cuda():
        return None
    weight, rows = layer["weight"], math.prod(x.shape[:-1])
    served = weight.dtype == x.dtype and x.dtype in _DTYPES and rows <= _MOST
    if not served or not _is_exact(rows, x.shape[-1], x.dtype):
        return None
    return _product(x, weight)


@functools.cache
def _is_exact(rows: int, inputs: int, dtype: mx.Dtype) -> bool:
    """Whether the kernel has the bits of one-row products, tried on random numbers."""
    for seed, outputs in itertools.product(range(_INPUTS), (1001, _MANY + 1)):
        of_x, of_w = mx.random.split(mx.random.key(seed))
        x = mx.random.normal((rows, inputs), key=of_x).astype(dtype)
        weight = mx.random.normal((outputs, inputs), key=of_w).astype(dtype)
        single = mx.concatenate([x[r : r + 1] @ weight.T for r in range(rows)])
        if not mx.array_equal(_product(x, weight), single).item():
            return False
    return True


def _product(x: mx.array, weight: mx.array) -> mx.array:
    *leading, inputs = x.shape
    rows, outputs = math.prod(leading), weight.shape[0]
    each = 2 if outputs >= _MANY else 1
    at_once = next(n for n in (4, 2, 1) if inputs % (32 * n) == 0 or n == 1)
    (y,) = _kernel()(
        inputs=[x, weight, inputs, outputs],
        template=[("T", x.dtype), ("R", rows), ("V", at_once), ("O", each)],
        grid=(32 * -(-outputs // (each * _WARPS)), _WARPS, 1),
        threadgroup=(32, _WARPS, 1),
        output_shapes=[(*leading, outputs)],
        output_dtypes=[x.dtype],
    )
    return y


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="few_rows",
        input_names=["x", "w", "k_in", "n_in"],
        output_names=["y"],
        header=_HEADER,
        source=_SOURCE,
    )
