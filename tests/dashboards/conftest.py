"""What the tests of the dashboards share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboards import browser, tools


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """Return the address of a browser's DevTools; all boards are drawn in it, each in a tab of its own."""
    with browser.running(tools.chromium()) as endpoint:
        yield endpoint
