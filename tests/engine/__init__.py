"""Tests that need real vLLM engines, which they share per mode."""
