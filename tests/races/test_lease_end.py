"""A lease ends in the middle of a statement: between any two readings of the clock."""

from __future__ import annotations

import pytest

from pgworker import statements
from pgworker.tablemap import TableMap
from tests.chaos.audit import Admin
from tests.handles import Hand, row

# A clock that jumps an hour forth or back each time it is read, wherever it begins.
_CLOCK = """
create sequence public.readings;
create function public.jumping_clock() returns timestamptz language sql volatile as
    $$ select pg_catalog.clock_timestamp() + pg_catalog.nextval('public.readings') % 2 * interval '1 hour' $$;
grant all on sequence public.readings to public"""


@pytest.mark.parametrize("begins", [0, 1])
def test_a_payload_without_revision_that_comes_as_the_lease_ends_keeps_all_of_it_or_nothing(
    hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch, begins: int
) -> None:
    admin.execute(_CLOCK)
    hand.enqueue("k")
    (claim,) = hand.claim(ttl_seconds=1800)
    render = statements.render
    text = render("insert_jobs", TableMap()).replace(b"clock_timestamp()", b"public.jumping_clock()")
    monkeypatch.setattr(
        statements, "render", lambda name, tables: text if name == "insert_jobs" else render(name, tables)
    )
    admin.execute("select setval('public.readings', %s)", [begins + 1])
    hand.enqueue("k", payload=2)
    after = row(admin, "k")
    assert (after["generation"], after["payload"]) == (2, 2)
    kept = (after["token"], after["lease_expires_at"], after["runner"])
    assert kept == (None, None, None) or (kept[0] == claim.token and None not in kept)
