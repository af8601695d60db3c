"""The engine for GPUs: programs as Triton kernels."""

from .engine import BY_ADDRESS, CHUNK, NAME, bind, unavailable

__all__ = ["BY_ADDRESS", "CHUNK", "NAME", "bind", "unavailable"]
