"""The engine for every device and tensor subclass: programs as torch's operations on lists of tensors."""

from .engine import BY_ADDRESS, CHUNK, NAME, bind, unavailable

__all__ = ["BY_ADDRESS", "CHUNK", "NAME", "bind", "unavailable"]
