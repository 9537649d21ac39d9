"""All of these tests hurt processes or servers that they started themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.processes import start

__all__ = ["start"]

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.chaos)
