"""The engine for CPU tensors: programs traced into LLVM."""

from .engine import BY_ADDRESS, NAME, bind, chunk, unavailable

__all__ = ["BY_ADDRESS", "NAME", "bind", "chunk", "unavailable"]
