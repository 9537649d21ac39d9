"""What all tests share; the parts are in tests/plugins."""

from __future__ import annotations

pytest_plugins = [
    "pytester",
    "tests.plugins.contract",
    "tests.plugins.database",
    "tests.plugins.hygiene",
    "tests.plugins.server",
]
