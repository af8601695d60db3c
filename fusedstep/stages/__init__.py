"""Work on whole tensors between two sweeps, for rules that ask for it by `staged(x, stage)`."""

from .._algorithm.stage import Stage
from .newton_schulz import NewtonSchulz, named_coefficients

__all__ = ["NewtonSchulz", "Stage", "named_coefficients"]
