"""Types, loops and machine code: LLVM as the cpu engine uses it.

LLVM lowers a vector of sixteen to whatever the processor has, so no vectoriser has to recognise a loop.
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

LANES = 16

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
FLOATS = {torch.float32: F32, torch.float64: F64}
# functions of the C library, on one number at a time: rules that need them are rare
LIBRARY = {"power": "pow", "cos": "cos", "exp": "exp", "log": "log", "tanh": "tanh"}


def wide(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def element_of(kind: ir.Type) -> ir.Type:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def of_elements(element: ir.Type, like: ir.Type) -> ir.Type:
    """A type of such elements, a vector if `like` is one."""
    return wide(element) if isinstance(like, ir.VectorType) else element


def constant(kind: ir.Type, number: float) -> ir.Value:
    one = int(number) if isinstance(element_of(kind), ir.IntType) else number
    return ir.Constant(kind, [one] * LANES if isinstance(kind, ir.VectorType) else one)


def fill(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector with `value` in every lane."""
    one = builder.insert_element(ir.Constant(wide(value.type), ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(wide(I32), [0] * LANES))


def call_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=function_type), args)


def suffix(kind: ir.Type) -> str:
    """The name of a type within the names of intrinsics."""
    element = element_of(kind)
    name = (
        f"i{element.width}"
        if isinstance(element, ir.IntType)
        else {"float": "f32", "double": "f64"}[str(element)]
    )
    return f"v{LANES}{name}" if isinstance(kind, ir.VectorType) else name


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, sign: str = ">") -> ir.Value:
    """The larger of two, or the smaller if `sign` is "<"; NaN if either is."""
    if isinstance(element_of(a.type), ir.IntType):
        return builder.select(builder.icmp_signed(sign, a, b), a, b)
    is_nan, wins = builder.fcmp_unordered("uno", a, a), builder.fcmp_ordered(sign, a, b)
    return builder.select(builder.or_(is_nan, wins), a, b)


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

# llvmlite has no bfloat type, but LLVM's text has: one instruction on processors that know it, instead of eight
ROUNDS_TO_BFLOAT = llvm.get_host_cpu_features().get("avx512bf16", False)
TO_BFLOAT = "fusedstep_to_bfloat"
TO_BFLOAT_TEXT = f"""
define internal <{LANES} x i16> @"{TO_BFLOAT}"(<{LANES} x float> %x) alwaysinline {{
  %narrow = fptrunc <{LANES} x float> %x to <{LANES} x bfloat>
  %bits = bitcast <{LANES} x bfloat> %narrow to <{LANES} x i16>
  ret <{LANES} x i16> %bits
}}
"""


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
def _host() -> dict[str, str]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    for name in LIBRARY.values():
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return {"cpu": llvm.get_host_cpu_name(), "features": llvm.get_host_cpu_features().flatten()}


class Compiled:
    """A function in machine code: its address, and how Python calls it."""

    def __init__(self, builder: ir.IRBuilder, result: Any, arguments: Sequence[Any]) -> None:
        name, text = builder.function.name, str(builder.module)
        if TO_BFLOAT in text:
            declaration = next(line for line in text.splitlines() if "declare" in line and TO_BFLOAT in line)
            text = text.replace(declaration, TO_BFLOAT_TEXT)
        module = llvm.parse_assembly(text)
        module.verify()
        host = _host()
        # the engine owns its target: two cannot share one
        target = llvm.Target.from_default_triple().create_target_machine(**host, opt=3)
        passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(module, passes)
        # the engine owns the code
        self._engine = llvm.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        self.address = self._engine.get_function_address(name)
        self.call: Callable = ctypes.CFUNCTYPE(result, *arguments)(self.address)
