"""The engine for GPUs: programs as Triton kernels."""

from .engine import BY_ADDRESS, NAME, bind, chunk, unavailable
from .fingerprint import WORD, fingerprints

__all__ = ["BY_ADDRESS", "NAME", "WORD", "bind", "chunk", "fingerprints", "unavailable"]
