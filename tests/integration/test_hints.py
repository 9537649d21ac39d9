"""The hint sender against a real server: what a listening session hears, and what a caller does not notice."""

from __future__ import annotations

import gc
import logging
import socket
import subprocess
import sys
import textwrap
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import TupleRow

from pgworker.hints import Hints
from pgworker.tablemap import TableMap

Connect: TypeAlias = Callable[[], psycopg.Connection[TupleRow]]
MakeHints: TypeAlias = Callable[..., Hints]


class Ears:
    """A session that listens and can tell what has come so far, without waiting for what does not come."""

    def __init__(self, connection: psycopg.Connection[TupleRow], channel: str) -> None:
        self.connection = connection
        self.channel = channel
        self._heard: deque[psycopg.Notify] = deque()
        connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))

    def hear_so_far(self) -> list[psycopg.Notify]:
        """Everything sent before now: the server delivers in commit order, so up to a mark of our own."""
        mark = f"mark {uuid.uuid4()}"
        self.connection.execute("select pg_catalog.pg_notify(%s, %s)", (self.channel, mark))
        heard: list[psycopg.Notify] = []
        while (notification := self.hear_next()).payload != mark:
            heard.append(notification)
        return heard

    def hear_next(self) -> psycopg.Notify:
        if not self._heard:  # several may come in one packet
            self._heard.extend(self.connection.notifies(timeout=10, stop_after=1))
        return self._heard.popleft()

    def payloads_so_far(self) -> list[str]:
        return [notification.payload for notification in self.hear_so_far()]


@pytest.fixture
def connect(dsn: str) -> Iterator[Connect]:
    opened: list[psycopg.Connection[TupleRow]] = []

    def connect() -> psycopg.Connection[TupleRow]:
        opened.append(psycopg.connect(dsn, autocommit=True))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def ears(connect: Connect, tables: TableMap) -> Ears:
    return Ears(connect(), tables.channel)


@pytest.fixture
def make_hints(dsn: str, tables: TableMap) -> Iterator[MakeHints]:
    made: list[Hints] = []

    def make(*, to: str = dsn, spacing: float = 0.010) -> Hints:
        made.append(Hints(to, channel=tables.channel, spacing=spacing))
        return made[-1]

    yield make
    for hints in made:
        hints.close(timeout=10)


def begin_with_id(connection: psycopg.Connection[TupleRow]) -> str:
    """Open a transaction; its id as the enqueue statement returns it."""
    connection.execute("begin")
    row = connection.execute("select pg_current_xact_id()::text").fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.contract("D86")
@pytest.mark.ruling("2.18")
def test_hints_are_heard_with_their_kind_and_purpose(ears: Ears, make_hints: MakeHints) -> None:
    hints = make_hints()
    hints.ready("mail")
    hints.ready("index")
    assert {ears.hear_next().payload, ears.hear_next().payload} == {"r:mail", "r:index"}


@pytest.mark.ruling("2.18", "1.19")
def test_each_purpose_has_its_payload(ears: Ears, make_hints: MakeHints) -> None:
    hints = make_hints()
    hints.ready("mail")
    hints.control("mail")
    hints.done("mail")
    assert {ears.hear_next().payload for _ in range(3)} == {"r:mail", "c:mail", "d:mail"}


@pytest.mark.ruling("1.4", "1.19")
def test_control_is_heard_once_its_transaction_has_committed(
    ears: Ears, connect: Connect, make_hints: MakeHints
) -> None:
    hints = make_hints()
    kept, undone = connect(), connect()
    hints.control("undone", transaction=begin_with_id(undone))
    hints.control("kept", transaction=begin_with_id(kept))
    undone.execute("rollback")
    kept.execute("commit")
    assert ears.hear_next().payload == "c:kept"
    hints.close(timeout=10)
    assert ears.payloads_so_far() == []


@pytest.mark.ruling("1.26")
def test_a_burst_is_coalesced_for_each_purpose(ears: Ears, make_hints: MakeHints) -> None:
    hints = make_hints(spacing=600)
    for _ in range(100):
        hints.control("mail")
        hints.done("mail")
    hints.close(timeout=10)
    heard = ears.payloads_so_far()
    assert set(heard) == {"c:mail", "d:mail"}
    assert len(heard) <= 4


@pytest.mark.contract("A7")
@pytest.mark.ruling("1.4")
def test_nothing_is_heard_before_the_commit(ears: Ears, connect: Connect, make_hints: MakeHints) -> None:
    hints = make_hints()
    open_transaction, ended = connect(), connect()
    pending = begin_with_id(open_transaction)
    other = begin_with_id(ended)
    ended.execute("commit")
    hints.ready("pending", transaction=pending)
    hints.ready("ended", transaction=other)  # asked about after the first one: once it is heard, both were asked about
    assert ears.hear_next().payload == "r:ended"
    assert ears.payloads_so_far() == []
    open_transaction.execute("commit")
    assert ears.hear_next().payload == "r:pending"


@pytest.mark.contract("A7")
@pytest.mark.ruling("1.4")
def test_nothing_is_heard_after_a_rollback(ears: Ears, connect: Connect, make_hints: MakeHints) -> None:
    hints = make_hints()
    app, bystander = connect(), connect()
    transaction = begin_with_id(app)
    still_open = begin_with_id(bystander)
    hints.ready("undone", transaction=transaction)
    hints.ready("open", transaction=still_open)
    app.execute("rollback")
    hints.close(timeout=10)  # asks once more about everything and sends what is due
    assert ears.payloads_so_far() == []
    bystander.execute("commit")


@pytest.mark.contract("A7")
@pytest.mark.ruling("1.4")
def test_a_connection_that_begins_anew_at_once_does_not_hide_the_commit(
    ears: Ears, connect: Connect, make_hints: MakeHints
) -> None:
    hints = make_hints()
    app = connect()
    first = begin_with_id(app)
    hints.ready("first", transaction=first)
    app.execute("commit")
    begin_with_id(app)
    assert ears.hear_next().payload == "r:first"
    app.execute("rollback")


@pytest.mark.ruling("1.4")
def test_a_savepoint_rolled_back_gives_a_needless_hint_and_no_more(
    ears: Ears, connect: Connect, make_hints: MakeHints
) -> None:
    hints = make_hints()
    app = connect()
    transaction = begin_with_id(app)
    app.execute("savepoint attempt")
    hints.ready("mail", transaction=transaction)
    app.execute("rollback to attempt")
    app.execute("commit")
    assert ears.hear_next().payload == "r:mail"


@pytest.mark.contract("A7")
def test_a_transaction_id_of_another_server_holds_up_no_other_hint(
    ears: Ears, connect: Connect, make_hints: MakeHints, caplog: pytest.LogCaptureFixture
) -> None:
    hints = make_hints()
    app = connect()
    committed = begin_with_id(app)
    app.execute("commit")
    with caplog.at_level(logging.WARNING, logger="pgworker"):
        hints.ready("foreign", transaction=str(2**62 + 12_345))
        hints.ready("mail", transaction=committed)
        hints.ready("index")
        hints.close(timeout=10)
    assert sorted(ears.payloads_so_far()) == ["r:index", "r:mail"]
    assert not caplog.records


@pytest.mark.contract("A8")
@pytest.mark.ruling("1.26")
def test_many_committed_transactions_are_one_hint(ears: Ears, connect: Connect, make_hints: MakeHints) -> None:
    hints = make_hints(spacing=600)
    app = connect()
    for _ in range(100):
        hints.ready("mail", transaction=begin_with_id(app))
        app.execute("commit")
    hints.close(timeout=10)
    assert ears.payloads_so_far() in (["r:mail"], ["r:mail", "r:mail"])


@pytest.mark.contract("A8")
@pytest.mark.ruling("1.26")
def test_a_burst_of_hints_is_at_most_two(ears: Ears, make_hints: MakeHints) -> None:
    hints = make_hints(spacing=600)
    for _ in range(100):
        hints.ready("mail")
    hints.close(timeout=10)  # sends the trailing one at once
    assert ears.payloads_so_far() in (["r:mail"], ["r:mail", "r:mail"])


@pytest.mark.contract("A8")
@pytest.mark.ruling("1.26")
def test_the_trailing_hint_comes_by_itself(ears: Ears, make_hints: MakeHints) -> None:
    hints = make_hints()
    hints.ready("mail")
    assert ears.hear_next().payload == "r:mail"
    hints.ready("mail")
    hints.ready("mail")
    assert ears.hear_next().payload == "r:mail"


@pytest.mark.field("L26")
def test_a_hint_carries_the_kind_and_nothing_else(ears: Ears, make_hints: MakeHints) -> None:
    kind = "k" * 63
    make_hints().ready(kind)
    assert ears.hear_next().payload == f"r:{kind}"


@pytest.mark.contract("A8")
@pytest.mark.ruling("1.21")
def test_a_server_that_does_not_answer_blocks_nobody(make_hints: MakeHints) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hints = make_hints(to=f"host=127.0.0.1 port={silent.getsockname()[1]} user=nobody sslmode=disable")
        hints.ready("mail")
        client, _ = silent.accept()  # the thread is inside its connection attempt now, and stays there
        for number in range(1_000):
            hints.ready("mail")
            hints.ready(f"kind{number}")
            hints.ready("mail", transaction=str(number))
        (sender,) = [thread for thread in threading.enumerate() if thread.name == "pgworker-hints"]
        hints.close(timeout=0)
        assert sender.is_alive()
        client.close()
        sender.join(timeout=10)


def test_an_outage_is_told_once_and_quotes_nothing(make_hints: MakeHints, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    refused = f"host=127.0.0.1 port={port} user=canary_user password=canary_password"
    hints = make_hints(to=refused)
    with caplog.at_level(logging.WARNING, logger="pgworker"):
        for _ in range(3):
            hints.ready("mail")
            hints.close(timeout=10)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3  # each close ended an episode
    assert "canary" not in caplog.text


def test_a_connection_that_broke_while_idle_is_replaced(
    ears: Ears, connect: Connect, make_hints: MakeHints, caplog: pytest.LogCaptureFixture
) -> None:
    hints = make_hints()
    hints.ready("before")
    sender_pid = ears.hear_next().pid
    connect().execute("select pg_terminate_backend(%s, 10000)", (sender_pid,))
    with caplog.at_level(logging.WARNING, logger="pgworker"):
        hints.ready("after")
        heard = ears.hear_next()
    assert heard.payload == "r:after"
    assert heard.pid != sender_pid
    assert not caplog.records


@pytest.mark.ruling("1.21", "2.24")
def test_one_thread_that_ends_with_close_and_starts_again(ears: Ears, make_hints: MakeHints) -> None:
    def senders() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "pgworker-hints"]

    hints = make_hints()
    assert senders() == []  # nothing before the first hint
    hints.ready("mail")
    hints.ready("index", transaction="3")
    assert senders() == ["pgworker-hints"]
    hints.close(timeout=10)
    hints.close(timeout=10)
    assert senders() == []
    assert "r:mail" in ears.payloads_so_far()
    hints.ready("again")
    assert ears.hear_next().payload == "r:again"


@pytest.mark.ruling("2.24")
def test_a_forgotten_sender_leaves_no_thread_behind(dsn: str, tables: TableMap, ears: Ears) -> None:
    hints = Hints(dsn, channel=tables.channel)
    hints.ready("mail")
    ears.hear_next()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "pgworker-hints"]
    del hints
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def run_script(script: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.ruling("1.21", "2.24")
def test_a_fork_after_first_use_gets_its_own_connection_and_leaves_the_parents_alone(
    dsn: str, tables: TableMap, ears: Ears
) -> None:
    script = """
        import os, sys
        import psycopg
        from psycopg import sql
        from pgworker.hints import Hints
        hints = Hints(sys.argv[1], channel=sys.argv[2])
        with psycopg.connect(sys.argv[1], autocommit=True) as watch:
            watch.execute(sql.SQL("listen {}").format(sql.Identifier(sys.argv[2])))
            hints.ready("parent-before")
            list(watch.notifies(timeout=10, stop_after=1))  # the thread's connection is open at the fork
        child = os.fork()
        if child == 0:
            hints.ready("child")
            hints.close(10)
            del hints
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        hints.ready("parent-after")
        hints.close(10)
    """
    run_script(script, dsn, tables.channel)
    heard = {notification.payload: notification.pid for notification in ears.hear_so_far()}
    assert sorted(heard) == ["r:child", "r:parent-after", "r:parent-before"]
    assert heard["r:parent-after"] == heard["r:parent-before"]
    assert heard["r:child"] != heard["r:parent-before"]


@pytest.mark.ruling("1.21", "2.24")
def test_a_program_that_ends_without_closing_still_sends_its_hint(dsn: str, tables: TableMap, ears: Ears) -> None:
    script = """
        import sys
        from pgworker.hints import Hints
        hints = Hints(sys.argv[1], channel=sys.argv[2])
        hints.ready("last words")
    """
    run_script(script, dsn, tables.channel)
    assert ears.payloads_so_far() == ["r:last words"]
