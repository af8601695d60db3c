"""What a step is computed on: parameters with their gradients and states, tables of them, and the plan."""
