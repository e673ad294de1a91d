"""vLLM's NIXL connectors, instrumented: the same classes under the same names, with events."""
