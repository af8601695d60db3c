"""Programs as LLVM: every operation on sixteen numbers at once, or on one.

LLVM lowers a vector to whatever the processor has, so no vectoriser has to recognise a loop.
`load` and `store` are the one place where the cpu engine knows how values are stored: they widen to the type
computed in, and round to nearest even back.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from ..._algorithm.bits import DRAWN_TOGETHER, draw_code
from ..._algorithm.code import Instruction
from ..._algorithm.formats import Plane

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
FLOATS = {torch.float32: F32, torch.float64: F64}

_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_ARITHMETIC = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv", "neg": "fneg"}
_OF_WHOLE = {"add": "add", "sub": "sub", "mul": "mul", "neg": "neg", "and": "and_", "xor": "xor"}
_INTRINSICS = {"fma": "fma", "sqrt": "sqrt", "abs": "fabs"}
_SHIFTS = {"shift_left": "shl", "shift_right": "lshr"}
# of the C library, on one number at a time: rules that need them are rare
_LIBRARY = {"power": "pow", "cos": "cos", "exp": "exp", "log": "log", "tanh": "tanh"}


def wide(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def _element(kind: ir.Type) -> ir.Type:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def _of(element: ir.Type, like: ir.Type) -> ir.Type:
    """The type with these elements, and as many as `like` has."""
    return wide(element) if isinstance(like, ir.VectorType) else element


def constant(kind: ir.Type, number: float) -> ir.Value:
    one = int(number) if isinstance(_element(kind), ir.IntType) else number
    return ir.Constant(kind, [one] * LANES if isinstance(kind, ir.VectorType) else one)


def fill(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector with `value` in every lane."""
    one = builder.insert_element(ir.Constant(wide(value.type), ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(wide(I32), [0] * LANES))


def call_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=function_type), args)


def _suffix(kind: ir.Type) -> str:
    """A type as the names of intrinsics have it."""
    element = _element(kind)
    name = (
        f"i{element.width}"
        if isinstance(element, ir.IntType)
        else {"float": "f32", "double": "f64"}[str(element)]
    )
    return f"v{LANES}{name}" if isinstance(kind, ir.VectorType) else name


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, sign: str = ">") -> ir.Value:
    """The larger of two, or the smaller by "<"; NaN if either is."""
    if isinstance(_element(a.type), ir.IntType):
        return builder.select(builder.icmp_signed(sign, a, b), a, b)
    is_nan, wins = builder.fcmp_unordered("uno", a, a), builder.fcmp_ordered(sign, a, b)
    return builder.select(builder.or_(is_nan, wins), a, b)


class Place(NamedTuple):
    """Where a vector's elements are: lanes beyond the end of a tensor, if any, and their inputs of draws."""

    mask: Any = None
    draw_inputs: tuple[ir.Value, ...] = ()


class Emitter:
    """Writes the instructions of a program for numbers of one type, a vector's or a scalar's.

    Beside a vector of a block's elements there may be one number for all of them.
    """

    def __init__(self, builder: ir.IRBuilder, kind: ir.Type, rounds_power: bool = False) -> None:
        self.builder, self.kind, self.element = builder, kind, _element(kind)
        self._rounds_power = rounds_power
        self._drawn: dict[int, list[ir.Value]] = {}

    def run(
        self,
        code: Sequence[Instruction],
        values: list[ir.Value],
        place: Place = Place(),  # noqa: B008
    ) -> list[ir.Value]:
        """`values`, then the results of `code` on them."""
        values = [*values]
        for op, args in code:
            values.append(self.emit(op, args, values, place))
        return values

    def emit(self, op: str, args: Sequence[int | float], values: list[Any], place: Place) -> ir.Value:
        """The result of one instruction on these values."""
        return self._emit(op, [arg if isinstance(arg, float) else values[arg] for arg in args], place)

    def constant(self, number: float) -> ir.Value:
        return constant(self.kind, number)

    def _emit(self, op: str, args: list[Any], place: Place) -> ir.Value:
        b = self.builder
        if op == "where":
            chosen = self._alike(args[1:], like=args[0].type)
            return b.select(self._truth(args[0]), *chosen)
        if op in _SHIFTS:
            return getattr(b, _SHIFTS[op])(args[0], constant(args[0].type, args[1]))
        if op == "draw":
            return self._draw(int(args[0]), place)
        args = self._alike(args)
        is_whole = isinstance(_element(args[0].type), ir.IntType)
        if op == "constant":
            return args[0]
        if op in _COMPARISONS and is_whole:
            return b.icmp_signed(_COMPARISONS[op], *args)
        if op in _COMPARISONS:
            compare = b.fcmp_unordered if op == "ne" else b.fcmp_ordered
            return compare(_COMPARISONS[op], *args)
        if op in _OF_WHOLE and is_whole:
            return getattr(b, _OF_WHOLE[op])(*args)
        if op in _ARITHMETIC:
            return getattr(b, _ARITHMETIC[op])(*args)
        if op in ("maximum", "minimum"):
            return larger(b, args[0], args[1], ">" if op == "maximum" else "<")
        if op in _INTRINSICS:
            return call_intrinsic(b, f"llvm.{_INTRINSICS[op]}.{_suffix(args[0].type)}", args[0].type, args)
        if op in _LIBRARY:
            return self._library(op, args)
        return self._stored_word(op, args)

    def _stored_word(self, op: str, args: list[ir.Value]) -> ir.Value:
        """The words of formats, but for what a whole block is needed for."""
        b, value, kind = self.builder, args[0], args[0].type
        if op == "bits":
            return b.bitcast(_resized(b, value, F32), _of(I32, kind))
        if op == "from_bits":
            return _resized(b, b.bitcast(value, _of(F32, kind)), self.element)
        if op == "number":
            return b.sitofp(value, _of(self.element, kind))
        if op == "product_high":
            long = [b.zext(arg, _of(I64, kind)) for arg in args]
            product = b.lshr(b.mul(*long), constant(_of(I64, kind), 32))
            return b.trunc(product, _of(I32, kind))
        dtype = getattr(torch, op.removeprefix("round_"))
        return _widened(b, _narrowed(b, value, dtype), dtype, kind)

    def _draw(self, slot: int, place: Place) -> ir.Value:
        fours, word = divmod(slot, DRAWN_TOGETHER)
        if fours not in self._drawn:
            code = draw_code(fours)
            values = self.run(code.code, [*place.draw_inputs])
            self._drawn[fours] = [values[int(number)] for number in code.numbers]
        return self._drawn[fours][word]

    def _alike(self, args: list[Any], like: ir.Type | None = None) -> list[ir.Value]:
        """Numbers of one type: conditions as 0 or 1, constants as what they stand beside, one for all lanes."""
        values = [self._number(arg) for arg in args if not isinstance(arg, float)]
        if not values:
            element = self.kind if like is None else _of(self.element, like)
            return [constant(element, arg) for arg in args]
        kinds = [value.type for value in values]
        kind = next((kind for kind in kinds if isinstance(kind, ir.VectorType)), kinds[0])
        if isinstance(like, ir.VectorType):
            kind = _of(_element(kind), like)
        found = iter(values)
        return [
            constant(kind, arg) if isinstance(arg, float) else self._filled(next(found), kind) for arg in args
        ]

    def _filled(self, value: ir.Value, kind: ir.Type) -> ir.Value:
        is_one = isinstance(kind, ir.VectorType) and not isinstance(value.type, ir.VectorType)
        return fill(self.builder, value) if is_one else value

    def _truth(self, value: ir.Value) -> ir.Value:
        is_truth = _element(value.type) == I1
        return value if is_truth else self.builder.fcmp_unordered("!=", value, constant(value.type, 0.0))

    def _number(self, value: ir.Value) -> ir.Value:
        is_truth = _element(value.type) == I1
        return self.builder.uitofp(value, _of(self.element, value.type)) if is_truth else value

    def _library(self, op: str, args: list[ir.Value]) -> ir.Value:
        kind = args[0].type
        if not isinstance(kind, ir.VectorType):
            result = self._call_library(op, args)
            if op == "power" and self._rounds_power:
                # where scalars are float32, what cancels (1 - beta^t) must be rounded before it does
                result = self.builder.fpext(self.builder.fptrunc(result, F32), F64)
            return result
        result = ir.Constant(kind, ir.Undefined)
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

_STORED = {
    torch.float64: F64,
    torch.float32: F32,
    torch.float16: ir.HalfType(),
    torch.bfloat16: I16,
    torch.int16: I16,
    torch.int8: I8,
    torch.uint8: I8,
}
_SHORT = {torch.float64: "f64", torch.float32: "f32", torch.float16: "f16"}
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


def block_largest(builder: ir.IRBuilder, vectors: Sequence[ir.Value], masks: Sequence[Any]) -> ir.Value:
    """The bits of the largest number in vectors that are a block, without its sign; NaN is above all."""
    whole, largest = wide(I32), constant(wide(I32), 0)
    for value, mask in zip(vectors, masks, strict=True):
        size = builder.and_(builder.bitcast(_resized(builder, value, F32), whole), constant(whole, 0x7FFFFFFF))
        # what lies beyond is no part of the block
        size = size if mask is None else builder.select(mask, size, constant(whole, 0))
        largest = larger(builder, largest, size)
    return call_intrinsic(builder, f"llvm.vector.reduce.smax.{_suffix(whole)}", I32, [largest])


def below(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Lanes below `count`."""
    numbers = ir.Constant(wide(I32), [*range(LANES)])
    return builder.icmp_signed("<", numbers, fill(builder, builder.trunc(count, I32)))


def load(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, plane: Plane, to: ir.VectorType, place: Place
) -> ir.Value:
    """Sixteen elements from `index` on, or those of the mask; one, if they share it."""
    stored, size = plane.dtype, plane.dtype.itemsize
    if plane.block > 1:
        one = builder.load(_place(builder, address, builder.udiv(index, I64(plane.block)), _STORED[stored]))
        return _widened(builder, one, stored, to.element)
    kind = wide(_STORED[stored])
    at = builder.bitcast(_place(builder, address, index, _STORED[stored]), kind.as_pointer())
    if place.mask is None:
        value = builder.load(at, align=size)
    else:
        name = f"llvm.masked.load.{_stored_suffix(kind, stored)}.p0"
        value = call_intrinsic(builder, name, kind, [at, I32(size), place.mask, ir.Constant(kind, None)])
    return _widened(builder, value, stored, to)


def store(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, plane: Plane, value: ir.Value, place: Place
) -> None:
    stored, size = plane.dtype, plane.dtype.itemsize
    value = _narrowed(builder, value, stored)
    if plane.block > 1:
        builder.store(value, _place(builder, address, builder.udiv(index, I64(plane.block)), _STORED[stored]))
        return
    at = builder.bitcast(_place(builder, address, index, _STORED[stored]), value.type.as_pointer())
    if place.mask is None:
        builder.store(value, at, align=size)
    else:
        name = f"llvm.masked.store.{_stored_suffix(value.type, stored)}.p0"
        call_intrinsic(builder, name, ir.VoidType(), [value, at, I32(size), place.mask])


def _stored_suffix(kind: ir.VectorType, stored: torch.dtype) -> str:
    return f"v{LANES}{_SHORT[stored]}" if stored in _SHORT else _suffix(kind)


def _place(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, stored: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(address, stored.as_pointer()), [index])


def _resized(builder: ir.IRBuilder, value: ir.Value, element: ir.Type) -> ir.Value:
    """Numbers of 32 or 64 bits as the others."""
    if _element(value.type) == element:
        return value
    change = builder.fpext if element == F64 else builder.fptrunc
    return change(value, _of(element, value.type))


def _widened(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype, to: ir.Type) -> ir.Value:
    if stored == torch.uint8:
        return builder.zext(value, _of(I32, to))
    if not stored.is_floating_point:
        return builder.sext(value, _of(I32, to))
    if stored == torch.bfloat16:
        bits = builder.shl(builder.zext(value, _of(I32, to)), constant(_of(I32, to), 16))
        value = builder.bitcast(bits, _of(F32, to))
    if stored == torch.float16:
        value = builder.fpext(value, _of(F32, to))
    return _resized(builder, value, _element(to))


def _narrowed(builder: ir.IRBuilder, value: ir.Value, stored: torch.dtype) -> ir.Value:
    if not stored.is_floating_point:
        return builder.trunc(value, _of(_STORED[stored], value.type))
    # 16 bits are reached from 32: processors have no instruction for more at once
    value = _resized(builder, value, F64 if stored == torch.float64 else F32)
    kind = value.type
    if stored == torch.float16:
        return builder.fptrunc(value, _of(_STORED[stored], kind))
    if stored != torch.bfloat16:
        return value
    if _ROUNDS_TO_BFLOAT:
        function = builder.module.globals.get(_TO_BFLOAT)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(_of(I16, kind), [kind]), _TO_BFLOAT)
        return builder.call(function, [value])
    whole = _of(I32, kind)
    bits = builder.bitcast(value, whole)
    # to nearest even: add half of what is cut off, less one unless the last kept bit is odd
    odd = builder.and_(builder.lshr(bits, constant(whole, 16)), constant(whole, 1))
    bits = builder.add(bits, builder.add(odd, constant(whole, 0x7FFF)))
    bits = builder.lshr(bits, constant(whole, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, constant(whole, 0x7FC0), bits), _of(I16, kind))


# sums, in float64


def added(builder: ir.IRBuilder, kind: str, total: ir.Value, value: ir.Value, mask: Any) -> ir.Value:
    """A running sum, or largest, of sixteen parts with `value`, or those lanes of `mask`, taken in."""
    if mask is not None:  # what lies beyond may be NaN
        value = builder.select(mask, value, ir.Constant(value.type, None))
    value = _resized(builder, value, F64)
    return larger(builder, total, value) if kind == "max" else builder.fadd(total, value)


def folded(builder: ir.IRBuilder, kind: str, parts: ir.Value) -> ir.Value:
    """The sixteen parts as one, in order."""
    if kind == "sum":
        name = f"llvm.vector.reduce.fadd.{_suffix(parts.type)}"
        return call_intrinsic(builder, name, F64, [F64(0.0), parts])
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
