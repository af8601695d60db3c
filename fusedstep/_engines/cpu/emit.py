"""Programs as LLVM: every operation on sixteen numbers at once, or on one.

LLVM lowers a vector of sixteen to whatever the processor has, so no vectoriser has to recognise a loop.
`load` and `store` are the one place where the cpu engine knows how values are stored: they widen to the type
computed in, and round to nearest even back.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from ..._algorithm.cut import Instruction

LANES = 16

I1, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
FLOATS = {torch.float32: F32, torch.float64: F64}

_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_ARITHMETIC = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
# of the C library, on one number at a time: rules that need them are rare
_LIBRARY = {"power": "pow", "cos": "cos", "exp": "exp", "log": "log", "tanh": "tanh"}


def wide(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def fill(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector with `value` in every lane."""
    one = builder.insert_element(ir.Constant(wide(value.type), ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(wide(I32), [0] * LANES))


def call_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=function_type), args)


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, sign: str = ">") -> ir.Value:
    """The larger of two, or the smaller by "<"; NaN if either is."""
    is_nan, wins = builder.fcmp_unordered("uno", a, a), builder.fcmp_ordered(sign, a, b)
    return builder.select(builder.or_(is_nan, wins), a, b)


class Emitter:
    """Writes the instructions of a program for numbers of one type, a vector's or a scalar's."""

    def __init__(self, builder: ir.IRBuilder, kind: ir.Type, rounds_power: bool = False) -> None:
        self.builder, self.kind = builder, kind
        self.element = kind.element if isinstance(kind, ir.VectorType) else kind
        self._rounds_power = rounds_power

    def run(self, code: Sequence[Instruction], values: list[ir.Value]) -> list[ir.Value]:
        """`values`, then the results of `code` on them."""
        values = [*values]
        for op, args in code:
            given = [self.constant(arg) if isinstance(arg, float) else values[arg] for arg in args]
            values.append(self._emit(op, given))
        return values

    def constant(self, number: float) -> ir.Value:
        if isinstance(self.kind, ir.VectorType):
            return ir.Constant(self.kind, [number] * LANES)
        return ir.Constant(self.kind, number)

    def _emit(self, op: str, args: list[ir.Value]) -> ir.Value:
        b = self.builder
        if op == "where":
            return b.select(self._truth(args[0]), *map(self._number, args[1:]))
        args = [*map(self._number, args)]
        if op == "constant":
            return args[0]
        if op in _ARITHMETIC:
            return getattr(b, _ARITHMETIC[op])(*args)
        if op in _COMPARISONS:
            compare = b.fcmp_unordered if op == "ne" else b.fcmp_ordered
            return compare(_COMPARISONS[op], *args)
        if op == "neg":
            return b.fneg(args[0])
        if op in ("maximum", "minimum"):
            return larger(b, args[0], args[1], ">" if op == "maximum" else "<")
        if op in ("fma", "sqrt"):
            return call_intrinsic(b, f"llvm.{op}.{self._suffix}", self.kind, args)
        return self._library(op, args)

    @property
    def _suffix(self) -> str:
        name = "f64" if self.element == F64 else "f32"
        return f"v{LANES}{name}" if isinstance(self.kind, ir.VectorType) else name

    def _truth(self, value: ir.Value) -> ir.Value:
        is_truth = value.type in (I1, wide(I1))
        return value if is_truth else self.builder.fcmp_unordered("!=", value, self.constant(0.0))

    def _number(self, value: ir.Value) -> ir.Value:
        return self.builder.uitofp(value, self.kind) if value.type in (I1, wide(I1)) else value

    def _library(self, op: str, args: list[ir.Value]) -> ir.Value:
        if not isinstance(self.kind, ir.VectorType):
            result = self._call_library(op, args)
            if op == "power" and self._rounds_power:
                # where scalars are float32, what cancels (1 - beta^t) must be rounded before it does
                result = self.builder.fpext(self.builder.fptrunc(result, F32), F64)
            return result
        result = ir.Constant(self.kind, ir.Undefined)
        for lane in map(I32, range(LANES)):
            one = self._call_library(op, [self.builder.extract_element(arg, lane) for arg in args])
            result = self.builder.insert_element(result, one, lane)
        return result

    def _call_library(self, op: str, args: list[ir.Value]) -> ir.Value:
        b, is_wide = self.builder, self.element == F64
        args = [arg if is_wide else b.fpext(arg, F64) for arg in args]
        name, module = _LIBRARY[op], b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(F64, [F64] * len(args)), name)
        result = b.call(function, args)
        return result if is_wide else b.fptrunc(result, F32)


# storage

_STORED = {torch.float64: F64, torch.float32: F32, torch.float16: ir.HalfType(), torch.bfloat16: I16}
_SHORT = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "i16"}
# llvmlite has no bfloat type, but its text has: one instruction where the processor has it, instead of eight
_ROUNDS_TO_BFLOAT = llvm.get_host_cpu_features().get("avx512bf16", False)
_TO_BFLOAT = "fusedstep_to_bfloat"
_TO_BFLOAT_TEXT = f"""
define internal <{LANES} x i16> @"{_TO_BFLOAT}"(<{LANES} x float> %x) alwaysinline {{
  %narrow = fptrunc <{LANES} x float> %x to <{LANES} x bfloat>
  %bits = bitcast <{LANES} x bfloat> %narrow to <{LANES} x i16>
  ret <{LANES} x i16> %bits
}}
"""


def below(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Lanes below `count`."""
    lanes = ir.Constant(wide(I32), list(range(LANES)))
    return builder.icmp_signed("<", lanes, fill(builder, builder.trunc(count, I32)))


def load(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, stored: torch.dtype, to: ir.Type, mask: Any
) -> ir.Value:
    """Sixteen elements from `index` on, or those of `mask`."""
    place, kind, size = _place(builder, address, index, stored), wide(_STORED[stored]), stored.itemsize
    if mask is None:
        value = builder.load(place, align=size)
    else:
        name = f"llvm.masked.load.v{LANES}{_SHORT[stored]}.p0"
        value = call_intrinsic(builder, name, kind, [place, I32(size), mask, ir.Constant(kind, None)])
    return _widened(builder, value, stored, wide(to))


def store(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, stored: torch.dtype, value: ir.Value, mask: Any
) -> None:
    place, size = _place(builder, address, index, stored), stored.itemsize
    value = _narrowed(builder, value, stored)
    if mask is None:
        builder.store(value, place, align=size)
    else:
        name = f"llvm.masked.store.v{LANES}{_SHORT[stored]}.p0"
        call_intrinsic(builder, name, ir.VoidType(), [value, place, I32(size), mask])


def _place(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, stored: torch.dtype) -> ir.Value:
    first = builder.inttoptr(address, _STORED[stored].as_pointer())
    return builder.bitcast(builder.gep(first, [index]), wide(_STORED[stored]).as_pointer())


def _widened(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype, to: ir.VectorType) -> ir.Value:
    if stored == torch.bfloat16:
        bits = builder.shl(builder.zext(value, wide(I32)), fill(builder, I32(16)))
        value = builder.bitcast(bits, wide(F32))
    if stored == torch.float16:
        value = builder.fpext(value, wide(F32))
    if value.type == to:
        return value
    return builder.fptrunc(value, to) if stored == torch.float64 else builder.fpext(value, to)


def _narrowed(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype) -> ir.Value:
    # 16 bits are reached from 32: processors have no instruction for more at once
    to = wide(F64 if stored == torch.float64 else F32)
    if value.type != to:
        value = (builder.fpext if stored == torch.float64 else builder.fptrunc)(value, to)
    if stored == torch.float16:
        return builder.fptrunc(value, wide(_STORED[stored]))
    if stored != torch.bfloat16:
        return value
    if _ROUNDS_TO_BFLOAT:
        function = builder.module.globals.get(_TO_BFLOAT)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(wide(I16), [wide(F32)]), _TO_BFLOAT)
        return builder.call(function, [value])
    bits = builder.bitcast(value, wide(I32))
    # to nearest even: add half of what is cut off, less one unless the last kept bit is odd
    odd = builder.and_(builder.lshr(bits, fill(builder, I32(16))), fill(builder, I32(1)))
    bits = builder.add(bits, builder.add(odd, fill(builder, I32(0x7FFF))))
    bits = builder.lshr(bits, fill(builder, I32(16)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, fill(builder, I32(0x7FC0)), bits), wide(I16))


# sums, in float64


def added(builder: ir.IRBuilder, kind: str, total: ir.Value, value: ir.Value, mask: Any) -> ir.Value:
    """A running sum, or largest, of sixteen parts with `value`, or those lanes of `mask`, taken in."""
    if mask is not None:  # what lies beyond may be NaN
        value = builder.select(mask, value, ir.Constant(value.type, None))
    value = value if value.type == wide(F64) else builder.fpext(value, wide(F64))
    return larger(builder, total, value) if kind == "max" else builder.fadd(total, value)


def folded(builder: ir.IRBuilder, kind: str, parts: ir.Value) -> ir.Value:
    """The sixteen parts as one, in order."""
    if kind == "sum":
        return call_intrinsic(builder, f"llvm.vector.reduce.fadd.v{LANES}f64", F64, [F64(0.0), parts])
    total = builder.extract_element(parts, I32(0))
    for lane in range(1, LANES):
        total = larger(builder, total, builder.extract_element(parts, I32(lane)))
    return total


# loops; variables live on the stack until LLVM moves them to registers


@contextmanager
def loop(builder: ir.IRBuilder, begin: ir.Value, end: ir.Value, by: int = 1) -> Iterator[ir.Value]:
    """Everything written inside is repeated for i = begin, begin + by, ... below end."""
    function = builder.function
    with builder.goto_entry_block():
        variable = builder.alloca(I64)
    builder.store(begin, variable)
    head, body, done = (function.append_basic_block(name) for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.load(variable)
    builder.cbranch(builder.icmp_signed("<", i, end), body, done)
    builder.position_at_end(body)
    yield i
    builder.store(builder.add(i, I64(by)), variable)
    builder.branch(head)
    builder.position_at_end(done)


def variable(builder: ir.IRBuilder, kind: ir.Type) -> ir.Value:
    with builder.goto_entry_block():
        return builder.alloca(kind)


# compiling


def function(name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.IRBuilder:
    """A builder at the beginning of a function in a module of its own."""
    module = ir.Module(name)
    module.triple = llvm.get_process_triple()
    made = ir.Function(module, ir.FunctionType(result, arguments), name)
    # the stack's variables go to a block of their own, before anything else
    entry, start = made.append_basic_block("entry"), made.append_basic_block("start")
    builder = ir.IRBuilder(entry)
    builder.branch(start)
    builder.position_at_end(start)
    return builder


@functools.cache
def _target() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    for name in _LIBRARY.values():
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    host = {"cpu": llvm.get_host_cpu_name(), "features": llvm.get_host_cpu_features().flatten()}
    return llvm.Target.from_default_triple().create_target_machine(**host, opt=3)


class Compiled:
    """A function in machine code: its address, and how Python calls it."""

    def __init__(self, builder: ir.IRBuilder, result: Any, arguments: Sequence[Any]) -> None:
        name, text = builder.function.name, str(builder.module)
        if _TO_BFLOAT in text:
            declaration = next(line for line in text.splitlines() if "declare" in line and _TO_BFLOAT in line)
            text = text.replace(declaration, _TO_BFLOAT_TEXT)
        module = llvm.parse_assembly(text)
        module.verify()
        passes = llvm.create_pass_builder(_target(), llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(module, passes)
        # owns the code
        self._engine = llvm.create_mcjit_compiler(module, _target())
        self._engine.finalize_object()
        self.address = self._engine.get_function_address(name)
        self.call: Callable = ctypes.CFUNCTYPE(result, *arguments)(self.address)
