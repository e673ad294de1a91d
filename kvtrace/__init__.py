"""kvtrace: where the time to first token goes when prefill and decode run apart."""

__version__ = "0.1.0"
