"""`migrate`, `enqueue` and `status` on a real database."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgworker import NewJob
from tests.commandline import invoke
from tests.databases import MakeDsn
from tests.handles import Hand, hand, row

Admin: TypeAlias = psycopg.Connection[Any]

JOBS = """
from dataclasses import dataclass
from pgworker import App, Job
app = App()

@dataclass
class Doc:
    text: str
    size: int = 0

@app.kind("work")
async def work(job: Job[Doc]) -> None: ...
"""


@pytest.fixture
def jobs_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An app whose kind `work` takes a Doc."""
    (tmp_path / "cli_jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "cli_jobs:app"
    sys.modules.pop("cli_jobs", None)


@pytest.fixture
def by_hand(dsn: str) -> Iterator[Hand]:
    """The runtime's statements one by one, for the kind `work`."""
    opened = hand(dsn)
    yield opened
    opened.connection.close()


# --- migrate ---------------------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.28")
def test_migrate_plans_applies_and_is_then_done(make_dsn: MakeDsn) -> None:
    dsn = make_dsn()
    plan = invoke("migrate", "--plan", dsn=dsn)
    assert plan.code == 0
    assert "0001 jobs" in plan.out
    assert "The first schema." in plan.out
    pending = json.loads(invoke("migrate", "--plan", "--json", dsn=dsn).out)
    assert [each["number"] for each in pending["pending"]] == [1]
    assert invoke("migrate", dsn=dsn) == (0, "applied 0001 jobs to schema pgworker\n", "")
    for words in (["migrate"], ["migrate", "--plan"]):
        assert invoke(*words, dsn=dsn) == (0, "schema pgworker is up to date, nothing to apply\n", "")
    assert json.loads(invoke("migrate", "--json", dsn=dsn).out) == {"schema": "pgworker", "applied": []}


def test_the_sql_that_migrate_prints_makes_the_schema(make_dsn: MakeDsn) -> None:
    dsn = make_dsn()
    script = invoke("migrate", "--sql", "--schema", "other")
    assert (script.code, script.err) == (0, "")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(script.out.encode())
    assert invoke("migrate", "--plan", "--schema", "other", dsn=dsn).out.startswith("schema other is up to date")


def test_the_grants_that_migrate_prints_let_a_role_enqueue(make_dsn: MakeDsn, run_name: str) -> None:
    dsn = make_dsn(migrated=True)
    role = f"{run_name}_granted"
    grants = invoke("migrate", "--role", role)
    assert (grants.code, grants.err) == (0, "")
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(f"create role \"{role}\" login password 'guest'".encode())
        try:
            theirs = make_conninfo(dsn, user=role, password="guest")
            denied = invoke("enqueue", "work", dsn=theirs)
            assert denied.code == 5, denied.err
            owner.execute(grants.out.encode())
            assert invoke("enqueue", "work", dsn=theirs).code == 0
        finally:
            owner.execute(f'drop owned by "{role}"; drop role "{role}"'.encode())


@pytest.mark.parametrize("words", [["--plan", "--sql"], ["--sql", "--role", "x"], ["--role", "x", "--json"]])
def test_migrate_does_one_thing(words: list[str]) -> None:
    ended = invoke("migrate", *words)
    assert (ended.code, ended.out) == (2, "")
    assert "give one of --plan, --sql and --role" in ended.err


# --- enqueue ---------------------------------------------------------------------------------------------------------


def test_enqueue_says_whose_it_is(dsn: str, by_hand: Hand) -> None:
    assert invoke("enqueue", "work", "--key", "a", "--tenant", "t", dsn=dsn).code == 0
    assert invoke("enqueue", "work", "--key", "b", dsn=dsn).code == 0
    found = by_hand.connection.execute("select key, tenant from pgworker.jobs order by key").fetchall()
    assert found == [("a", "t"), ("b", "")]


@pytest.mark.ruling("2.4")
def test_enqueue_says_what_it_did(dsn: str, by_hand: Hand) -> None:
    same = ["enqueue", "work", "[1]", "--key", "k", "--revision", "r1"]
    newer = ["enqueue", "work", "[2]", "--key", "k", "--revision", "r2"]
    created = invoke(*same, dsn=dsn)
    assert created == (0, "created work k: a new job (pending)\n", "")
    assert invoke(*same, dsn=dsn).out.startswith("unchanged work k: ")
    assert invoke(*newer, dsn=dsn).out.startswith("replaced work k: ")
    by_hand.claim()
    assert invoke(*newer[:-1], "r3", "--if-pending", "keep", dsn=dsn).out.startswith("kept work k: ")
    assert invoke(*newer[:-1], "r3", dsn=dsn).out.startswith("superseded work k: ")
    (claim,) = by_hand.claim()
    by_hand.finish(claim)
    again = invoke(*same, "--json", dsn=dsn)
    assert json.loads(again.out) == {
        "kind": "work",
        "key": "k",
        "revision": "r1",
        "status": "requeued",
        "state": "pending",
    }


def test_enqueue_passes_its_options_on(dsn: str, admin: Admin) -> None:
    options = ["--key", "k", "--delay", "60.5", "--priority", "-3", "--urgency", "catch_up"]
    assert invoke("enqueue", "work", "-", *options, dsn=dsn, stdin='{"big": 1180591620717411303424}').code == 0
    found = row(admin, "k")
    assert found["payload"] == {"big": 2**70}
    assert (found["priority"], found["class"]) == (-3, 1)
    ((seconds,),) = admin.execute("select extract(epoch from ready_at - created_at) from pgworker.jobs").fetchall()
    assert 60 < seconds < 61


def test_enqueue_without_a_payload_or_a_key_makes_an_event(dsn: str, admin: Admin) -> None:
    first, second = (json.loads(invoke("enqueue", "work", "--json", dsn=dsn).out)["key"] for _ in range(2))
    assert first < second
    assert row(admin, first)["payload"] is None


def test_enqueue_wakes_the_workers(dsn: str, admin: Admin) -> None:
    admin.execute("listen pgworker_pgworker")
    assert invoke("enqueue", "work", dsn=dsn).code == 0
    (told,) = admin.notifies(timeout=10, stop_after=1)
    assert told.payload == "r:work"


def test_enqueue_with_an_app_takes_what_its_kind_takes(jobs_app: str, dsn: str, admin: Admin) -> None:
    words = ["enqueue", "work", "--key", "k", "--app", jobs_app]
    wrong = invoke(*words, '{"text": 3}', dsn=dsn)
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err.startswith("pgworker: the payload is refused at $.text: ")
    missing = invoke(*words, "{}", dsn=dsn)
    assert missing.code == 2
    assert "text" in missing.err
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)
    assert invoke(*words, '{"text": "abc", "size": 2}', dsn=dsn).code == 0
    assert row(admin, "k")["payload"] == {"text": "abc", "size": 2}


def test_an_app_that_is_in_use_already_cannot_be_led_elsewhere(jobs_app: str, tmp_path: Path, dsn: str) -> None:
    (tmp_path / "cli_jobs.py").write_text(JOBS.replace("App()", f"App({dsn!r})") + "app.settings\n")
    assert invoke("enqueue", "work", '{"text": ""}', "--app", jobs_app, dsn="host=unused").code == 0
    refused = invoke("enqueue", "work", '{"text": ""}', "--app", jobs_app, "--dsn", dsn)
    assert (refused.code, refused.out) == (2, "")
    assert "the app is in use already" in refused.err


def test_the_dsn_option_wins_over_the_apps_own(jobs_app: str, tmp_path: Path, dsn: str) -> None:
    (tmp_path / "cli_jobs.py").write_text(JOBS.replace("App()", "App('host=unused')"))
    assert invoke("enqueue", "work", '{"text": ""}', "--app", jobs_app, "--dsn", dsn, dsn="host=unused").code == 0


@pytest.mark.ruling("2.27")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["work", "{1"], "this is no JSON"),
        (["work", "SECRET-text"], "this is no JSON"),
        (["work", "NaN"], "this is no JSON"),
        (["work", "-"], "not UTF-8"),
        (["work", '"\\u0000 SECRET"'], "refused at $: "),
        (["work", "--delay", "nan"], "seconds are 0 to"),
        (["work", "--delay", "-1"], "seconds are 0 to"),
        (["work", "--revision", "r"], "give the key, too"),
        (["work", "--key", ""], "key"),
        (["work", "--priority", "40000"], "priority is -32767 to 32767"),
        (["no kind"], "kind"),
        (["work", "--urgency", "soon"], "--urgency"),
    ],
)
def test_what_enqueue_refuses(dsn: str, admin: Admin, words: list[str], said: str) -> None:
    ended = invoke("enqueue", *words, dsn=dsn, stdin=b"\xff" if "-" in words else None)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert "SECRET" not in ended.err
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)


def test_what_others_wrote_cannot_steer_the_terminal(dsn: str, admin: Admin) -> None:
    key = "[bold]a\n\x1b[31m\u202e"
    assert "work [bold]a\\n\\x1b[31m\\u202e: " in invoke("enqueue", "work", "--key", key, dsn=dsn).out
    report(admin, runner="host[/red]\x1b[2J:1", status={"last_error": "\x1b]0;title\x07", "lifecycle": "[link=x]y"})
    out = invoke("status", dsn=dsn).out
    assert "host[/red]\\x1b[2J:1" in out
    assert "[link=x]y" in out
    assert "\x1b" not in out


# --- status ----------------------------------------------------------------------------------------------------------


def report(
    admin: Admin, *, kind: str = "work", runner: str = "host:1:aa", silent: float = 0, status: object = None
) -> None:
    """A runner of ten minutes that reported itself so many seconds ago."""
    admin.execute(
        "insert into pgworker.runners (runner, kind, started_at, seen_at, release, status)"
        " values (%(runner)s, %(kind)s, clock_timestamp() - interval '600 s' - %(silent)s * interval '1 s',"
        " clock_timestamp() - %(silent)s * interval '1 s', '1.2', %(status)s)",
        {"runner": runner, "kind": kind, "silent": silent, "status": json.dumps(status or {})},
    )


def test_status_of_an_empty_database_reads_well(dsn: str) -> None:
    ended = invoke("status", dsn=dsn)
    first, *rest = ended.out.splitlines()
    assert first.endswith(", schema pgworker")
    assert rest == ["no jobs yet", "no runner has reported within the last day"]
    assert (ended.code, ended.err) == (0, "")
    assert invoke("status", "--check", dsn=dsn).code == 0


def test_status_of_a_kind_without_jobs_names_it(dsn: str, by_hand: Hand) -> None:
    by_hand.enqueue("k")
    rest = invoke("status", "--kind", "nope", dsn=dsn).out.splitlines()[1:3]
    assert rest == ["no jobs of kind nope", "no runner of kind nope has reported within the last day"]


def test_status_counts_by_kind_and_state(dsn: str, by_hand: Hand, admin: Admin) -> None:
    by_hand.enqueue_many([NewJob(None, f"k{number}", "r") for number in range(5)])
    for claim in by_hand.claim(2):
        by_hand.finish(claim)
    by_hand.claim(1)
    by_hand.claim(1, ttl_seconds=0.001)
    admin.execute("select pg_sleep(0.01)")
    admin.execute("update pgworker.jobs set ready_at = clock_timestamp() - interval '125 s' where token is null")
    assert invoke("enqueue", "index", "--delay", "60", dsn=dsn).code == 0
    out = invoke("status", dsn=dsn, width=100).out
    headings, index, work, *_ = (
        line.split() for line in out.splitlines() if line.split()[:1] in (["kind"], ["index"], ["work"])
    )
    assert headings == ["kind", "ready", "running", "scheduled", "expired", "succeeded", "failed"]
    assert index == ["index", "-", "-", "1", "-", "-", "-"]
    assert work == ["work", "1", "1", "-", "1", "2", "-"]
    found = json.loads(invoke("status", "--json", "--kind", "work", dsn=dsn).out)
    assert [each["kind"] for each in found["kinds"]] == ["work"]
    assert found["kinds"][0]["counts"] == {
        "ready": 1,
        "running": 1,
        "scheduled": 0,
        "expired": 1,
        "succeeded": 2,
        "failed": 0,
        "cancelled": 0,
    }
    assert 125 <= found["kinds"][0]["oldest_ready_seconds"] < 135


def test_status_counts_no_further_than_ten_thousand(dsn: str, admin: Admin) -> None:
    admin.execute(
        "insert into pgworker.jobs (kind, key, state, ready_at) select 'work', 'p' || n, 'pending',"
        " clock_timestamp() - interval '30 s' from generate_series(1, 10001) n"
    )
    admin.execute(
        "insert into pgworker.jobs (kind, key, state, finished_at) select 'work', 's' || n, 'succeeded',"
        " clock_timestamp() from generate_series(1, 10001) n"
    )
    (work, _) = (line.split() for line in invoke("status", dsn=dsn).out.splitlines() if line.strip().startswith("work"))
    assert work[:5] == ["work", "10,000+", "0+", "10,000+", "-"]
    (kind,) = json.loads(invoke("status", "--json", dsn=dsn).out)["kinds"]
    assert kind["at_least"] == ["ready", "running", "scheduled", "expired", "succeeded"]
    assert "no live runner; 10,000 or more of its jobs wait" in invoke("status", dsn=dsn).out


@pytest.mark.ruling("1.28", "2.27")
def test_status_check_finds_kinds_without_a_live_runner(dsn: str, by_hand: Hand, admin: Admin) -> None:
    assert invoke("status", "--check", "--kind", "work", dsn=dsn).code == 6
    by_hand.enqueue("k")
    waiting = invoke("status", "--check", dsn=dsn)
    assert waiting.code == 6
    assert "finding: kind work has no live runner; 1 of its jobs waits" in waiting.out
    assert invoke("status", dsn=dsn).code == 0
    report(admin, silent=11, runner="gone:1:aa")
    stale = invoke("status", "--check", dsn=dsn, width=120)
    assert stale.code == 6
    assert "stale 11 s" in stale.out
    assert "kind work has no live runner, the last was heard of 11 s ago (gone:1:aa); 1 of its jobs waits" in stale.out
    report(admin, silent=9, runner="live:1:bb")
    assert invoke("status", "--check", "--kind", "work", dsn=dsn).code == 0
    assert invoke("status", "--check", dsn=dsn).code == 0
    assert invoke("status", "--check", "--kind", "work", "--kind", "other", dsn=dsn).code == 6


def test_status_shows_the_runners(dsn: str, admin: Admin) -> None:
    status = {"lifecycle": "retrying", "in_flight": 3, "succeeded": 1200, "retried": 2, "last_error": "handler_failed"}
    report(admin, status={**status, "field_of_a_newer_release": 1})
    report(admin, kind="index", status="not what we write")
    lines = [line.split() for line in invoke("status", dsn=dsn).out.splitlines()]
    shown = ["work", "host:1:aa", "retrying", "10", "min", "00", "s", "3", "1,200", "succeeded,", "2", "retried"]
    assert [*shown, "handler_failed"] in lines
    assert ["index", "host:1:aa", "unknown", "10", "min", "00", "s", "0"] in lines
    work = json.loads(invoke("status", "--json", dsn=dsn).out)["runners"][1]
    assert (work["lifecycle"], work["outcomes"]["succeeded"], work["release"]) == ("retrying", 1200, "1.2")
    assert not work["stale"]


@pytest.mark.parametrize("width", [60, 80, 120, None])
def test_status_never_folds_a_name(dsn: str, admin: Admin, width: int | None) -> None:
    kind, runner, code = "send_monthly_invoice_reminder", "worker-7f9c8d5b-xkq2v:4711:1277e9", "connection_refused"
    for state in ("pending", "succeeded", "failed", "cancelled"):
        admin.execute(
            "insert into pgworker.jobs (kind, key, state, ready_at, finished_at) select %(kind)s, %(state)s,"
            " %(state)s, clock_timestamp(), case %(state)s when 'pending' then null else clock_timestamp() end",
            {"kind": kind, "state": state},
        )
    status = {"lifecycle": "running", "succeeded": 1200, "retried": 21, "last_error": code}
    report(admin, kind=kind, runner=runner, status=status)
    report(admin, kind="index", silent=40, status=status)
    out = invoke("status", dsn=dsn, width=width).out
    assert out.split().count(kind) == 3
    assert out.split().count(runner) == 1
    assert out.split().count(code) == 2
    assert max(len(line) for line in out.splitlines()[1:] if "finding" not in line) <= (width or 200)
