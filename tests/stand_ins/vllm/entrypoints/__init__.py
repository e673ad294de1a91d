"""A stand-in package: only what the lab starts."""
