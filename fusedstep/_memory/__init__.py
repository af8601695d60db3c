"""What a step is computed on: parameters with their gradients and states, tables of them, and the plan."""

from .. import _engines
from .trial import try_engine

# engines cannot take a step by themselves, and choose one that has to be tried out before
_engines.trial = try_engine
