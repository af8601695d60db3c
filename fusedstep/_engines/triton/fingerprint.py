"""Fingerprints of tensors: they show on the device, without the host, whether a tensor has changed."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import sent
from .engine import on

# words of 4 bytes that a program mixes at once, how many programs there are for a tensor, and their warps
_BLOCK, _PROGRAMS, _WARPS = 1024, 256, 4
WORD = 4


def fingerprints(tensors: list[Tensor]) -> Tensor:
    """A 64-bit number for the contents of each of these dense tensors, whose memory must be whole words.

    Computed on their device, in one launch.
    """
    device = tensors[0].device
    cells = np.array([(t.data_ptr(), t.numel() * t.itemsize // WORD) for t in tensors], np.int64)
    placed = sent(torch.from_numpy(cells), device)
    found = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    grid = len(tensors), min(_PROGRAMS, triton.cdiv(int(cells[:, 1].max()), _BLOCK)) or 1
    with on(device):
        fusedstep_fingerprint[grid](placed, found, BLOCK=_BLOCK, num_warps=_WARPS)
    return found


@triton.jit
def fusedstep_fingerprint(cells, found, BLOCK: tl.constexpr):
    row, programs = tl.program_id(0), tl.num_programs(1)
    address = tl.load(cells + 2 * row).to(tl.pointer_type(tl.uint32))
    words = tl.load(cells + 2 * row + 1)
    total = tl.zeros([BLOCK], tl.uint64)
    for first in range(tl.program_id(1).to(tl.int64) * BLOCK, words, programs * BLOCK):
        i = first + tl.arange(0, BLOCK)
        mixed = _mixed(tl.load(address + i, i < words, other=0).to(tl.uint64), i.to(tl.uint64))
        total += tl.where(i < words, mixed, 0)
    tl.atomic_add(found + row, tl.sum(total, 0).to(tl.int64, bitcast=True))


@triton.jit
def _mixed(word, place):
    """Bits that all depend on all bits of a word and on its place: the finish of SplitMix64."""
    x = word + (place + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
