"""The engine for every device and tensor subclass: programs as torch's operations on lists of tensors."""

from .engine import BY_ADDRESS, NAME, bind, chunk, unavailable

__all__ = ["BY_ADDRESS", "NAME", "bind", "chunk", "unavailable"]
