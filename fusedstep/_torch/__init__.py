"""What torch expects of an optimizer: groups, arguments, step, checkpoints, statistics."""
