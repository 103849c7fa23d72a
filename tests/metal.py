"""Metal compute kernels on a CPU, run from the source that Metal would be given.

A kernel is compiled as C++ behind ``metal_words.h``. It computes as Metal does in safe
math mode, without contraction, and the lanes of a simdgroup run in lock-step. A kernel
whose results would mean nothing on a Mac raises :class:`KernelError`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta

from mlx_lm_mtp.state.kernels import with_globals

Order = Literal["butterfly", "sequential"]

COMPILER = "g++"
_OPTIONS = (
    "-std=c++17",
    "-O1",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fsingle-precision-constant",  # Metal has no double
    f"-I{Path(__file__).parent}",
)
_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}
_POSITIONS = {
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_threadgroup": "uint3",
    "thread_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
}
_MOST_THREADS = 1024  # of a threadgroup
_GUARD = 1 << 16  # bytes on either side of an array
_FILLS = (0xFF, 0x55)  # what memory holds that nobody has written; the first is NaN

_Size = ctypes.c_uint32 * 3


class KernelError(Exception):
    """A kernel that does not compile, or whose results would mean nothing."""


class MetalKernel:
    """What `mx.fast.metal_kernel` returns, on a CPU; see there for the arguments.

    Each launch runs the kernel twice, in memory that held different bytes before: what
    then differs was never written, or was computed from beyond the end of an array.

    Args:
        order: In which `simd_sum` adds; stock takes the butterfly to be Apple's.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object = None,
        *,
        order: Order = "butterfly",
    ) -> None:
        if atomic_outputs:
            raise NotImplementedError("atomic outputs")
        self.name = name
        self.source = source
        self.header = header
        self.order = order
        self._inputs = input_names
        self._outputs = output_names

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        if min(*grid, *threadgroup) < 1 or math.prod(threadgroup) > _MOST_THREADS:
            raise KernelError(f"a grid of {grid} threads in groups of {threadgroup}")
        read = dict(self._read(inputs))
        text = self._text(read, output_dtypes, template)
        if verbose:
            print(text)
        before = [_bytes(array) for array in read.values()]
        like = list(zip(output_shapes, output_dtypes, strict=True))

        def run(fill: int) -> list[np.ndarray]:
            blank = [_blank(*kind, init_value, fill) for kind in like]
            return self._run(_compiled(text), grid, threadgroup, before, blank, fill)

        first, second = map(run, _FILLS)
        self._check_same(first, second, output_dtypes)
        return [_array(data, *kind) for data, kind in zip(first, like, strict=True)]

    def _read(self, inputs: Sequence[Any]) -> Iterator[tuple[str, mx.array]]:
        """What the kernel reads: its inputs, and those of their shapes it mentions."""
        for name, value in zip(self._inputs, inputs, strict=True):
            array = mx.array(value)
            yield name, array
            if f"{name}_shape" in self.source:
                yield f"{name}_shape", mx.array(array.shape, mx.int32)
            if f"{name}_ndim" in self.source:
                yield f"{name}_ndim", mx.array(array.ndim)

    def _text(
        self,
        read: dict[str, mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]],
    ) -> str:
        """The C++ that is compiled: the kernel, and how one thread calls it."""
        parameters, arguments = zip(*self._signature(read, output_dtypes), strict=True)
        kernel = f"custom_kernel_{self.name}"
        return f"""\
#define SIMD_ORDER {self.order}
#include "metal_words.h"
#line 1 "{self.name} (header)"
{self.header}
{_listed("template <", [f"{_kind(value)} {name}" for name, value in template])}
static void {kernel}({", ".join(parameters)}) {{
#line 1 "{self.name}"
{self.source}
}}
#line 1 "{self.name} (launch)"
static void** arrays;
void emulator::run_thread(const Position& at) {{
  {kernel}{_listed("<", [_value(value) for _, value in template])}
      ({", ".join(arguments)});
}}
extern "C" const char* launch(void** given, const uint3* grid, const uint3* group) {{
  arrays = given;
  return emulator::run_grid(*grid, *group);
}}
"""

    def _signature(
        self, read: dict[str, mx.array], output_dtypes: Sequence[mx.Dtype]
    ) -> Iterator[tuple[str, str]]:
        """Each parameter of the kernel, and the argument that a thread gives."""
        for name, kind in _POSITIONS.items():
            if name in self.source:
                yield f"const {kind} {name}", f"at.{name}"
        arrays = [(n, f"const {_TYPES[a.dtype]}", a.ndim) for n, a in read.items()]
        for name, dtype in zip(self._outputs, output_dtypes, strict=True):
            arrays.append((name, _TYPES[dtype], 1))
        for i, (name, kind, ndim) in enumerate(arrays):
            # A scalar is a reference, so that the source can use it as a value.
            by, value = ("*", "") if ndim else ("&", "*")
            yield f"{kind}{by} {name}", f"{value}static_cast<{kind}*>(arrays[{i}])"

    def _run(
        self,
        launch: Callable[..., bytes | None],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        inputs: list[np.ndarray],
        outputs: list[np.ndarray],
        fill: int,
    ) -> list[np.ndarray]:
        """The bytes of the outputs, with nothing but `fill` around each array."""
        buffers = [np.pad(a, _GUARD, constant_values=fill) for a in inputs + outputs]
        places = (ctypes.c_void_p * len(buffers))(
            *(buffer.ctypes.data + _GUARD for buffer in buffers)
        )
        if wrong := launch(places, _Size(*grid), _Size(*threadgroup)):
            raise KernelError(f"kernel {self.name}: {wrong.decode()}")
        written = buffers[len(inputs) :]
        for name, buffer in zip(self._outputs, written, strict=True):
            if (buffer[:_GUARD] != fill).any() or (buffer[-_GUARD:] != fill).any():
                raise KernelError(f"kernel {self.name} writes outside of {name}")
        return [buffer[_GUARD:-_GUARD] for buffer in written]

    def _check_same(
        self,
        first: list[np.ndarray],
        second: list[np.ndarray],
        dtypes: Sequence[mx.Dtype],
    ) -> None:
        """What a kernel writes must not hang on what the memory held before."""
        for name, a, b, dtype in zip(self._outputs, first, second, dtypes, strict=True):
            different = np.flatnonzero(a != b)
            if different.size:
                raise KernelError(
                    f"kernel {self.name}: element {different[0] // dtype.size} of "
                    f"{name} is not written, or computed from what nobody has written"
                )


@functools.cache
def _compiled(text: str) -> Callable[..., bytes | None]:
    """The function `launch` of a text, which gives what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "kernel.so")
        command = [COMPILER, *_OPTIONS, "-xc++", "-", "-o", str(library)]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise KernelError(f"a kernel does not compile:\n{done.stderr}")
        launch = ctypes.CDLL(str(library)).launch  # it stays when its file is gone
    launch.restype = ctypes.c_char_p
    return launch


def _listed(opening: str, items: list[str]) -> str:
    """Items in angle brackets; nothing if there are none."""
    return f"{opening}{', '.join(items)}>" if items else ""


def _kind(value: Any) -> str:
    """What kind of template parameter takes a value."""
    return "typename" if isinstance(value, mx.Dtype) else type(value).__name__


def _value(value: Any) -> str:
    """A template argument, as C++ has it."""
    return _TYPES[value] if isinstance(value, mx.Dtype) else str(value).lower()


def _bytes(array: mx.array) -> np.ndarray:
    """The bytes of an array, row after row."""
    return np.array(array.reshape(-1).view(mx.uint8))


def _array(data: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """The array that has these bytes."""
    return mx.array(data).view(dtype).reshape(shape)


def _blank(
    shape: Sequence[int], dtype: mx.Dtype, init_value: float | None, fill: int
) -> np.ndarray:
    """The bytes of an output before a kernel runs."""
    if init_value is not None:
        return _bytes(mx.broadcast_to(mx.array(init_value, dtype), shape))
    return np.full(math.prod(shape) * dtype.size, fill, np.uint8)


# --- stock's kernels --------------------------------------------------------------


def stand_in(order: Order = "butterfly") -> SimpleNamespace:
    """What makes kernels out of `mlx.core`, as if Metal were there."""
    return SimpleNamespace(
        metal=SimpleNamespace(is_available=lambda: True),
        fast=SimpleNamespace(metal_kernel=functools.partial(MetalKernel, order=order)),
    )


def stock_kernels(order: Order = "butterfly") -> dict[str, MetalKernel]:
    """The kernels of `mlx_lm.models.gated_delta`, by their global names there."""
    plain, xtree, packed = (
        with_globals(factory, mx=stand_in(order))
        for factory in (
            gated_delta._make_gated_delta_kernel,
            gated_delta._make_gated_delta_kernel_xtree,
            gated_delta._make_gated_delta_packed_kernel,
        )
    )
    return {
        "_gated_delta_kernel": plain(),
        "_gated_delta_kernel_masked": plain(has_mask=True),
        "_gated_delta_kernel_vec": plain(vectorized=True),
        "_gated_delta_kernel_vec_masked": plain(has_mask=True, vectorized=True),
        "_gated_delta_kernel_xtree": xtree(),
        "_gated_delta_kernel_packed": packed(),
    }


def stock_launch(order: Order = "butterfly") -> Callable[..., list[mx.array]]:
    """Stock's own launch: `(q, k, v, g, beta, state, mask=None, *, allow_packed)`."""
    return with_globals(
        gated_delta._gated_delta_kernel_impl,
        _ENABLE_GDN_PACKED=True,
        **stock_kernels(order),
    )


def stock_xtree(order: Order = "butterfly") -> Callable[..., list[mx.array]]:
    """Stock's comparator of the packed kernel: `(q, k, v, g, beta, state)`."""
    return with_globals(gated_delta.gated_delta_kernel_xtree, **stock_kernels(order))
