"""cuBLASLt through ctypes: the ways it has to multiply matrices of some sizes, and one of them done.

The library is the one that torch has loaded; torch takes the first way that it names. Here all can be had. It does
not know which is fastest, or when it is asked. The numbers in capitals are those of cublasLt.h.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trine.errors import Unsupported

KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
SUMS_IN_FLOAT32 = 68  # cublasComputeType
TRANSPOSE_FIRST = 3  # attribute of a product
WORKSPACE, PARTIAL_SUMS = 1, 3  # attributes of a search
PARTIAL_SUMS_IN_FLOAT32 = 2  # where inputs are divided: not in the type of the result, which torch allows
ALIGNED = 256  # bytes: what a search takes for granted of all addresses
MULTIPLE = 8  # of ins and outs: rows of 16 bits then start at 16 bytes, as tensor cores read them


class Sizes(NamedTuple):
    """y [rows, outs] = x [rows, ins] W [outs, ins]^T; `wide`: y is float32."""

    rows: int
    outs: int
    ins: int
    wide: bool


class Found(ctypes.Structure):
    """An answer of a search: cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Way(NamedTuple):
    """How to multiply. It holds some hundred bytes of the library for as long as the process lives."""

    product: c_void_p
    weight: c_void_p
    x: c_void_p
    y: c_void_p
    algorithm: Any  # by reference


class Lt:
    """One handle, and one workspace: all its calls must be ordered one after the other.

    A recorded graph has the workspace's address: this object has to outlive it."""

    def __init__(self, library: Any, space: Tensor, dtype: torch.dtype) -> None:
        self.library, self.space, self.kind = library, space, KINDS[dtype]
        self.room = space.numel() * space.element_size()
        self.one, self.zero = byref(c_float(1.0)), byref(c_float(0.0))
        self.handle = self._make("cublasLtCreate")

    def ways(self, sizes: Sizes, most: int) -> list[Way]:
        """What the library can do, what it thinks best first. Unsupported says what went wrong."""
        rows, outs, ins, wide = sizes
        product = self._make("cublasLtMatmulDescCreate", c_int(SUMS_IN_FLOAT32), c_int(KINDS[torch.float32]))
        self._set("cublasLtMatmulDescSetAttribute", product, TRANSPOSE_FIRST, c_int(1))
        # The library counts down columns: what it sees are the transposed matrices, y^T = W x^T.
        weight, x = self._matrix(self.kind, ins, outs), self._matrix(self.kind, ins, rows)
        y = self._matrix(KINDS[torch.float32] if wide else self.kind, outs, rows)
        search = self._make("cublasLtMatmulPreferenceCreate")
        self._set("cublasLtMatmulPreferenceSetAttribute", search, WORKSPACE, c_size_t(self.room))
        scheme = c_uint32(PARTIAL_SUMS_IN_FLOAT32)
        self._set("cublasLtMatmulPreferenceSetAttribute", search, PARTIAL_SUMS, scheme)
        found, count = (Found * most)(), c_int(0)
        matrices = (weight, x, y, y)
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self.handle, product, *matrices, search, c_int(most), found, byref(count)),
        )
        self._call("cublasLtMatmulPreferenceDestroy", search)
        good = [one for one in found[: count.value] if one.state == 0 and one.workspace <= self.room]
        return [Way(product, weight, x, y, byref(one.algorithm)) for one in good]

    def multiply(self, way: Way, x: Tensor, weight: Tensor, y: Tensor, stream: int) -> None:
        """Order it on a stream, by its address."""
        target = y.data_ptr()
        status = self.library.cublasLtMatmul(
            self.handle, way.product,
            self.one, weight.data_ptr(), way.weight, x.data_ptr(), way.x,
            self.zero, target, way.y, target, way.y,
            way.algorithm, self.space.data_ptr(), self.room, stream,
        )  # fmt: skip
        if status:
            raise Unsupported(f"cublasLtMatmul says {status}")

    def _matrix(self, kind: int, inner: int, outer: int) -> c_void_p:
        """[outer, inner], each row behind the one before."""
        sizes = c_uint64(inner), c_uint64(outer), c_int64(inner)
        return self._make("cublasLtMatrixLayoutCreate", c_int(kind), *sizes)

    def _make(self, name: str, *values: Any) -> c_void_p:
        made = c_void_p()
        self._call(name, byref(made), *values)
        return made

    def _set(self, name: str, of: c_void_p, attribute: int, value: Any) -> None:
        self._call(name, of, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *values: Any) -> None:
        if status := getattr(self.library, name)(*values):
            raise Unsupported(f"{name} says {status}")


def suits(weight: Tensor) -> bool:
    """Whether W [outs, ins] lies as it has to."""
    even = not any(size % MULTIPLE for size in weight.shape)
    return even and weight.is_contiguous() and weight.data_ptr() % ALIGNED == 0


def load() -> Any:
    """The library; Unsupported says why there is none."""
    if torch.version.hip or not torch.version.cuda:
        raise Unsupported("this torch is built without CUDA")
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)  # by this name the loader finds the one that is loaded already
        library.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
    except (OSError, AttributeError) as error:
        raise Unsupported(f"{name} cannot be loaded: {error}") from error
    return library
