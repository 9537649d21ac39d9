"""retry, rebuild, cancel, forget, pause and resume from the command line, and what status shows of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest

from tests.commandline import invoke
from tests.databases import MakeDsn
from tests.handles import FAIL, Hand, row

Admin: TypeAlias = psycopg.Connection[Any]

JOBS = """
from pgworker import App, Job
app = App()

@app.kind("work", facts="none")
async def work(job: Job[int]) -> None: ...
"""


@pytest.fixture
def jobs_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "verb_jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "verb_jobs:app"
    sys.modules.pop("verb_jobs", None)


def fail(hand: Hand, *keys: str) -> None:
    for key in keys:
        hand.enqueue(key, "r", 1)
        (claim,) = hand.claim()
        hand.settle(claim, FAIL)


@pytest.mark.contract("A55")
@pytest.mark.ruling("2.28")
def test_retry_says_how_many_jobs_it_put_back(dsn: str, hand: Hand, admin: Admin) -> None:
    fail(hand, *"abcd")
    admin.execute("update pgworker.jobs set last_code = 'payload_invalid' where key in ('b', 'c')")
    assert invoke("retry", "work", "--key", "a", dsn=dsn) == (0, "retried 1 job of kind work\n", "")
    by_code = invoke("retry", "work", "--code", "payload_invalid", dsn=dsn)
    assert by_code == (0, "retried 2 jobs of kind work\n", "")
    assert json.loads(invoke("retry", "work", "--all", "--json", dsn=dsn).out) == {"kind": "work", "retried": 1}
    none = invoke("retry", "work", "--all", dsn=dsn)
    assert none.code == 0
    assert none.out == "retried no job: of those chosen, kind work has none that has failed or was cancelled\n"
    assert admin.execute("select count(*) from pgworker.jobs where state = 'pending'").fetchone() == (4,)


@pytest.mark.ruling("2.28")
def test_rebuild_and_cancel_say_how_many(dsn: str, hand: Hand, admin: Admin) -> None:
    for key in "abc":
        hand.enqueue(key, "r", 1)
        (claim,) = hand.claim()
        hand.finish(claim)
    assert invoke("rebuild", "work", "--all", "--limit", "2", dsn=dsn).out.startswith("rebuilt 2 jobs of kind work")
    (claim,) = hand.claim()
    cancelled = invoke("cancel", "work", "--all", dsn=dsn).out
    assert cancelled.startswith("cancelled 2 jobs of kind work; any that ran have been asked to stop")
    assert hand.renew(claim).cancel_requested
    assert invoke("cancel", "work", "--all", dsn=dsn).out.startswith("cancelled no job: ")


@pytest.mark.ruling("2.15")
def test_a_job_whose_payload_is_gone_is_told(dsn: str, hand: Hand, admin: Admin) -> None:
    fail(hand, "a", "b")
    admin.execute("update pgworker.jobs set payload = null where key = 'a'")
    ended = invoke("retry", "work", "--all", dsn=dsn)
    assert (ended.code, ended.out) == (7, "")
    assert "the payload has been pruned (1 job was retried): enqueue with a payload and another revision" in ended.err
    assert invoke("rebuild", "work", "--key", "a", dsn=dsn).code == 7


@pytest.mark.ruling("2.28")
def test_forget_says_whether_there_was_something(dsn: str, hand: Hand, admin: Admin) -> None:
    hand.enqueue("k\x1b", "r", 1)
    assert invoke("forget", "work", "k\x1b", dsn=dsn) == (0, "forgot work k\\x1b\n", "")
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)
    assert invoke("forget", "work", "k", dsn=dsn).out == "nothing to forget: kind work has no job of this key\n"
    again = invoke("forget", "work", "k", "--json", dsn=dsn)
    assert json.loads(again.out) == {"kind": "work", "key": "k", "forgotten": False}


@pytest.mark.ruling("2.25", "2.28")
def test_pause_and_resume_say_what_holds(dsn: str, hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    until = invoke("pause", "work", "--until", "2031-05-01T10:00+02:00", "--code", "quota", dsn=dsn)
    assert until == (0, "paused work until 2031-05-01T08:00:00Z (quota)\n", "")
    assert invoke("pause", "work", "--for", "60", dsn=dsn).out == until.out, "the longer one stays"
    endless = invoke("pause", "work", dsn=dsn)
    assert endless.out == "paused work until it is resumed\n"
    assert hand.claim() == []
    shown = invoke("status", dsn=dsn).out
    assert endless.out in shown
    assert endless.out in invoke("status", "--kind", "work", dsn=dsn).out
    assert "paused" not in invoke("status", "--kind", "other", dsn=dsn).out
    (pause,) = json.loads(invoke("status", "--json", dsn=dsn).out)["pauses"]
    assert (pause["kind"], pause["until"], pause["code"]) == ("work", None, "paused")
    assert json.loads(invoke("pause", "work", "--json", dsn=dsn).out) == {"kind": "work", "pause": pause}
    assert invoke("resume", "work", dsn=dsn) == (0, "resumed work\n", "")
    assert invoke("resume", "work", dsn=dsn).out == "nothing to resume: work is not paused\n"
    assert json.loads(invoke("resume", "work", "--json", dsn=dsn).out) == {"kind": "work", "resumed": False}
    assert hand.claim()
    past = invoke("pause", "work", "--until", "2001-01-01T00:00Z", dsn=dsn)
    assert past.out == "work is not paused: that instant has passed\n"


@pytest.mark.contract("A67")
def test_status_shows_what_waits_by_kind_and_urgency(dsn: str, hand: Hand, admin: Admin) -> None:
    hand.enqueue("a")
    hand.enqueue("b", urgency="catch_up")
    hand.enqueue("c", urgency="catch_up", delay=3600)
    admin.execute("update pgworker.jobs set ready_at = ready_at - interval '125 s'")
    admin.execute(
        "insert into pgworker.jobs (kind, key, ready_at) select 'many', 'k' || n, clock_timestamp() - interval '1 h'"
        " from generate_series(1, 10001) n"
    )
    lines = [line.split() for line in invoke("status", dsn=dsn, width=80).out.splitlines()]
    assert ["kind", "urgency", "pending", "ready", "oldest", "ready"] in lines
    assert ["many", "fresh", "10,000+", "10,000+", "1", "h", "00", "min"] in lines
    assert ["work", "fresh", "1", "1", "2", "min", "05", "s"] in lines
    assert ["work", "catch_up", "2", "1", "2", "min", "05", "s"] in lines
    report = json.loads(invoke("status", "--json", "--kind", "work", dsn=dsn).out)
    assert [(each["urgency"], each["pending"], each["ready"]) for each in report["lag"]] == [
        ("fresh", 1, 1),
        ("catch_up", 2, 1),
    ]
    assert 125 <= report["kinds"][0]["oldest_ready_seconds"] < 185


@pytest.mark.ruling("2.27", "2.28")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["retry", "work"], "exactly one of --key, --code and --all"),
        (["retry", "work", "--all", "--key", "k"], "exactly one of --key, --code and --all"),
        (["rebuild", "work"], "exactly one of --key and --all"),
        (["cancel", "work", "--all", "--limit", "0"], "--limit"),
        (["cancel", "work", "--key", ""], "key"),
        (["retry", "no kind", "--all"], "kind"),
        (["forget", "work"], "KEY"),
        (["pause", "work", "--for", "1", "--until", "2031-05-01T08:00Z"], "not both"),
        (["pause", "work", "--until", "2031-05-01T08:00"], "with its time zone"),
        (["pause", "work", "--until", "tomorrow"], "with its time zone"),
        (["pause", "work", "--for", "nan"], "seconds are 0 to"),
        (["pause", "work", "--code", "two words"], "one printable ASCII word"),
    ],
)
def test_what_the_verbs_refuse(dsn: str, hand: Hand, words: list[str], said: str) -> None:
    hand.enqueue("k")
    ended = invoke(*words, dsn=dsn, width=200)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert hand.claim(), "something was done"


def test_with_an_app_its_kinds_are_checked_and_its_options_hold(
    jobs_app: str, dsn: str, hand: Hand, admin: Admin
) -> None:
    unknown = invoke("cancel", "wrok", "--all", "--app", jobs_app, dsn=dsn)
    assert (unknown.code, unknown.out) == (3, "")
    assert "the app has no kind 'wrok'; it has work" in unknown.err
    hand.enqueue("k", "r", 1)
    assert invoke("cancel", "work", "--all", "--app", jobs_app, dsn=dsn).code == 0
    assert row(admin, "k")["state"] == "cancelled"
    assert admin.execute("select count(*) from pgworker.facts").fetchone() == (0,)


@pytest.mark.ruling("2.27")
@pytest.mark.parametrize("verb", ["retry --all", "rebuild --all", "cancel --all", "forget k", "pause", "resume"])
def test_without_a_database_or_a_schema_a_verb_says_so(make_dsn: MakeDsn, verb: str) -> None:
    name, *rest = verb.split()
    nowhere = invoke(name, "work", *rest, dsn="host=127.0.0.1 port=1 dbname=none")
    assert nowhere.code == 4
    assert "no database" in nowhere.err
    empty = invoke(name, "work", *rest, dsn=make_dsn())
    assert empty.code == 5
    assert "migrate" in empty.err


# --- prune ----------------------------------------------------------------------------------------------------------

PRUNED = (
    JOBS
    + """
@app.kind("kept", keep=-1)
async def kept(job: Job[int]) -> None: ...

app.declare("elsewhere")
app.declare("own", queue=TableQueue("public.things", **{name: name for name in (
    "key", "revision", "state", "token", "lease_expires_at", "ready_at", "attempts")}))
"""
)


@pytest.mark.ruling("2.28")
def test_prune_does_what_workers_would_do_and_says_how_much(
    dsn: str, hand: Hand, admin: Admin, jobs_app: str, tmp_path: Path
) -> None:
    (tmp_path / "verb_jobs.py").write_text(PRUNED.replace("import App, Job", "import App, Job, TableQueue"))
    for hand.kind in ("work", "kept", "elsewhere"):
        for key in (None, None, "k"):
            hand.enqueue(key, payload=1)
            hand.finish(hand.claim()[0], "1")
    admin.execute("update pgworker.jobs set finished_at = finished_at - interval '8 days'")
    admin.execute(
        "insert into pgworker.facts (at, job_id, generation, attempts, kind, key, revision, what)"
        " values (clock_timestamp() - interval '31 days', 1, 1, 0, 'any', 'k', '', 'enqueued')"
    )
    named = invoke("prune", "kept", "--app", jobs_app, dsn=dsn)
    assert named == (0, "deleted 0 jobs, the payloads of 0 keyed ones, 0 results, and 0 facts\n", "")
    every = invoke("prune", "--app", jobs_app, dsn=dsn)
    assert every == (0, "deleted 2 jobs, the payloads of 1 keyed ones, 0 results, and 1 facts\n", "")
    again = invoke("prune", "work", "--app", jobs_app, "--json", dsn=dsn)
    assert json.loads(again.out) == {"jobs": 0, "payloads": 0, "results": 0, "facts": 0}
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (7,)
    assert [invoke("prune", kind, "--app", jobs_app, dsn=dsn).code for kind in ("elsewhere", "own", "nobody")] == [
        2,
        2,
        3,
    ]
    assert invoke("prune", "work", dsn=dsn).code == 2
