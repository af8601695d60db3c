"""The engine for CPU tensors: programs traced into LLVM."""

from .engine import BY_ADDRESS, CHUNK, NAME, bind, unavailable

__all__ = ["BY_ADDRESS", "CHUNK", "NAME", "bind", "unavailable"]
