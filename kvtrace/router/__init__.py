"""A streaming router for prefill and decode engines, by push and by pull, that says what it did and when."""
