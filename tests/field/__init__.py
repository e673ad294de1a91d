"""Field reports as traces: what was seen, what kvtrace says of it, and that the deciding event decides."""
