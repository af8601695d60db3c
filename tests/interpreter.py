"""Triton's interpreter, with bfloat16 as hardware rounds it."""

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float


def _convert_as_hardware_does(data, source, target, rounding):
    """The interpreter cuts a float32 off to bfloat16 where every GPU rounds to nearest even."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(data, source, target, rounding)
    return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()


interpreter._convert_float = _convert_as_hardware_does
