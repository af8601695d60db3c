"""What a step is computed on: rows of parameters with their gradients and states, tables of them, and the plan."""
