"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("kvtrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtrace")

# A shell that starts the tests in the background has them ignore SIGINT, and every program that they start inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)
