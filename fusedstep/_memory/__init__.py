"""What a step works on: parameters with their gradients and states, tables of them, and the plan."""

from .. import _engines
from .trial import try_engine

# only this layer can take a step, which trying out an engine needs
_engines.trial = try_engine
