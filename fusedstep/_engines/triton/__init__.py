"""The engine for GPUs: programs as Triton kernels."""

from .engine import BY_ADDRESS, NAME, bind, chunk, unavailable

__all__ = ["BY_ADDRESS", "NAME", "bind", "chunk", "unavailable"]
