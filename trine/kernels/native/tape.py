"""A model as a list of operations: it is run once, with symbols in the place of tensors.

    tape = Tape(groups)
    logits = model(tape.step())            # parts of the model call `norm`, `linear`, ... of the tape
    program = Program(tape, threads)       # see program.py

A symbol stands for lines of numbers, one for each token, in a buffer; when Python drops it the buffer is free
again, so the list needs no more of them than live at one time. It does not know models.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from trine.errors import Unsupported
from trine.kernels.attention.base import Bounds, Step

from .blocks import FLOATS, Packed
from .library import Buffer, Group, Op

EMBED, NORM, LINEAR, PLACE, ATTEND, GATED, TAKE = range(1, 8)
QUANTIZE, QUANTIZED, WANTED = 1, 2, 4
NONE, LOGITS = -1, -2


class Symbol:
    """What will be a tensor [lines, width]."""

    def __init__(self, tape: Tape, width: int, wanted: bool, buffer: int = NONE) -> None:
        self.tape, self.width, self.wanted, self.buffer = tape, width, wanted, buffer
        self.maker: Op | None = None  # which may leave it in bytes as well

    def __del__(self) -> None:
        if self.buffer >= 0:
            self.tape.free.append(self.buffer)

    def __len__(self) -> int:
        return 1  # some; how many a step says

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.width

    def to(self, dtype: Any) -> Symbol:
        return self

    def add_(self, bias: Tensor) -> Symbol:
        self.tape.bias(bias)
        return self

    def index_select(self, dim: int, which: Symbol) -> Symbol:
        return self.tape.take(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.index_select and isinstance(args[2], Symbol):
            return args[2].tape.embed(args[0], args[0].shape[1], FLOATS[args[0].dtype], args[2])
        raise Unsupported(f"a step with {getattr(function, '__name__', function)} in it cannot be recorded")


class Write(Symbol):
    """Where the tokens of a step have their KV, in one group."""

    def __init__(self, tape: Tape, group: int) -> None:
        super().__init__(tape, 0, False)
        self.group = group


class Tape:
    """`groups`: of KV, what their layers have in common."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        self.free: list[int] = []
        self.kept: list[Any] = []  # what operations point to

    def step(self) -> Step:
        """Of symbols."""
        nothing: Any = Symbol(self, 0, False)
        groups: Any = [nothing] * len(self.groups)
        write: Any = [Write(self, group) for group in range(len(self.groups))]
        bound = Bounds(0, 0, 0)
        return Step(nothing, nothing, write, nothing, nothing, groups, nothing, nothing, 0, groups, bound)

    def embed(self, table: Tensor, width: int, kind: int, ids: Symbol) -> Symbol:
        out = self._new(width)
        self._op(EMBED, out=out, a=width, b=kind, c=table.stride(0) * table.element_size(), p=table)
        return out

    def norm(self, x: Symbol | None, residual: Symbol, weight: Tensor, eps: float) -> Symbol:
        """Of the residual, to which x is added first."""
        out = self._new(residual.width, residual.wanted)
        out.maker = self._op(NORM, x, residual, out, a=residual.width, x=eps, p=weight)
        return out

    def linear(self, x: Symbol, weight: Packed, wide: bool) -> Symbol:
        """wide: the logits."""
        out = (
            Symbol(self, weight.struct.outs, x.wanted, LOGITS)
            if wide
            else self._new(weight.struct.outs, x.wanted)
        )
        flags = QUANTIZED if x.maker is not None else 0
        if x.maker is not None:
            x.maker.flags |= QUANTIZE
        self.buffers[x.buffer].quantized = 1
        self.kept.append(weight)
        out.maker = None
        self._op(LINEAR, x, None, out, flags=flags).p = ctypes.addressof(weight.struct)
        return out

    def bias(self, bias: Tensor) -> None:
        """Behind the last product."""
        assert self.ops[-1].kind == LINEAR
        self.ops[-1].p2 = self._address(bias)

    def place(self, qkv: Symbol, group: int, keys: Tensor, values: Tensor, turns: Tensor, norm: Tensor | None, eps: float) -> Symbol:  # fmt: skip
        """In place; the queries are at the front."""
        op = self._op(PLACE, qkv, d=group, x=eps, p=keys)
        op.p2, op.p3 = self._address(values), self._address(turns)
        op.p4 = None if norm is None else self._address(norm)
        return qkv

    def attend(self, qkv: Symbol, group: int, keys: Tensor, values: Tensor) -> Symbol:
        out = self._new(self.groups[group].heads * self.groups[group].dim, qkv.wanted)
        self._op(ATTEND, qkv, None, out, d=group, p=keys).p2 = self._address(values)
        return out

    def gated(self, x: Symbol, kind: int) -> Symbol:
        out = self._new(x.width // 2, x.wanted)
        out.maker = self._op(GATED, x, None, out, a=x.width // 2, b=kind)
        return out

    def take(self, x: Symbol) -> Symbol:
        """The lines of tokens whose logits are wanted."""
        out = self._new(x.width, True)
        self._op(TAKE, x, None, out, a=x.width)
        return out

    def _new(self, width: int, wanted: bool = False) -> Symbol:
        for i in self.free:
            if self.buffers[i].width == width:
                self.free.remove(i)
                return Symbol(self, width, wanted, i)
        self.buffers.append(Buffer(width, 0))
        return Symbol(self, width, wanted, len(self.buffers) - 1)

    def _op(self, kind: int, source: Symbol | None = None, more: Symbol | None = None, out: Symbol | None = None, p: Tensor | None = None, **rest: Any) -> Op:  # fmt: skip
        numbers = (NONE if symbol is None else symbol.buffer for symbol in (source, more, out))
        first = next(symbol for symbol in (out, source) if symbol is not None)
        op = Op(kind, *numbers, **rest)
        op.flags |= WANTED if first.wanted else 0
        op.p = None if p is None else self._address(p)
        self.ops.append(op)
        return op

    def _address(self, tensor: Tensor) -> int:
        assert tensor.stride(-1) == 1
        self.kept.append(tensor)
        return tensor.data_ptr()
