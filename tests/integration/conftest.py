"""What several files here share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

if TYPE_CHECKING:
    from tests.adapters import Adapter


@pytest.fixture(params=["jobs", "messages", "threads"])
def adapter(request: pytest.FixtureRequest, admin: psycopg.Connection[Any]) -> Iterator[Adapter]:
    """Each of the three tables that a queue may live in."""
    from tests.adapters import ADAPTERS  # noqa: PLC0415 - other files here need none of it

    chosen = next(each for each in ADAPTERS if each.name == request.param)
    chosen.create(admin)
    yield chosen
    admin.execute("drop schema if exists crawl cascade")  # so that the database need not be made anew
