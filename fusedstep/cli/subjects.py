"""x"""
from __future__ import annotations
import inspect
import torch
from . import references
def reference_of(name, options):
    theirs = getattr(torch.optim, name, None)
    if theirs is not None and options.keys() <= inspect.signature(theirs).parameters.keys():
        return theirs
    return getattr(references, name)
