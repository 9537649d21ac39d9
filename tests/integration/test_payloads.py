"""Payloads and results from one process to the other, through a real jsonb column: exact, or refused with a path."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, TypeAlias, TypedDict
from uuid import UUID

import msgspec
import psycopg
import pydantic
import pytest
from psycopg.types.json import Jsonb

from pgworker import App, ConfigError, Job, NewJob, PayloadError, Retry
from pgworker.events import JobSettled
from tests.handles import Recorder, result, row, running

Admin: TypeAlias = psycopg.Connection[Any]

received: list[Any] = []


@pytest.fixture(autouse=True)
def _forget_received() -> Iterator[None]:
    received.clear()
    yield
    received.clear()


class Colour(Enum):
    RED = "red"


@dataclass
class Part:
    id: UUID
    price: Decimal
    weight: float = 0.5


@dataclass
class Order:
    name: str
    parts: list[Part]
    due: datetime | None = None
    colour: Colour = Colour.RED


class Point(msgspec.Struct):
    x: int
    y: float
    label: str | None = None
    seen: frozenset[int] = frozenset()


class Film(TypedDict):
    title: str
    year: int


class User(pydantic.BaseModel):
    name: str
    born: date
    tags: set[str] = set()


async def echo_dataclass(job: Job[Order]) -> Order:
    received.append(job.payload)
    return job.payload


def echo_struct(job: Job[Point]) -> Point:
    received.append(job.payload)
    return job.payload


async def echo_typed_dict(job: Job[Film]) -> Film:
    received.append(job.payload)
    return job.payload


def echo_pydantic(job: Job[User]) -> User:
    received.append(job.payload)
    return job.payload


async def echo_list(job: Job[list[Order]]) -> list[Order]:
    received.append(job.payload)
    return job.payload


async def echo_untyped(job: Job[Any]) -> Any:
    received.append(job.payload)
    return job.payload


def echo_unannotated(job):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 - that is the case
    received.append(job.payload)
    return job.payload


ID = UUID("00000000-0000-0000-0000-00000000002a")
ORDER = Order("n", [Part(ID, Decimal("1.10")), Part(ID, Decimal(-3), 1e16)], datetime(2030, 1, 2, 3, 4, 5, 678, UTC))
PLAIN_ORDER = {
    "name": "n",
    "parts": [
        {"id": str(ID), "price": "1.10", "weight": 0.5},
        {"id": str(ID), "price": "-3", "weight": 1e16},
    ],
    "due": "2030-01-02T03:04:05.000678Z",
    "colour": "red",
}


@pytest.mark.parametrize(
    ("handler", "payload", "stored"),
    [
        (echo_dataclass, ORDER, PLAIN_ORDER),
        (echo_list, [ORDER, ORDER], [PLAIN_ORDER, PLAIN_ORDER]),
        (echo_struct, Point(1, 2.0, "p", frozenset({3})), {"x": 1, "y": 2.0, "label": "p", "seen": [3]}),
        (echo_typed_dict, Film(title="t", year=1999), {"title": "t", "year": 1999}),
        (
            echo_pydantic,
            User(name="n", born=date(2000, 1, 2), tags={"a"}),
            {"name": "n", "born": "2000-01-02", "tags": ["a"]},
        ),
        (echo_untyped, {"b": [1, None, True], "a": "ä"}, {"b": [1, None, True], "a": "ä"}),
        (echo_unannotated, [1, "2"], [1, "2"]),
    ],
    ids=["dataclass", "list of dataclasses", "struct", "typed dict", "pydantic", "untyped", "unannotated"],
)
async def test_a_typed_value_arrives_and_returns_as_it_was(
    app: App, admin: Admin, handler: Callable[[Any], Any], payload: object, stored: object
) -> None:
    app.kind("work")(handler)
    await app.enqueue("work", payload, key="k")
    assert row(admin, "k")["payload"] == stored
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobSettled)))
    assert row(admin, "k")["state"] == "succeeded"
    assert received == [payload]
    assert type(received[0]) is type(payload)
    kept = result(admin, "k")
    assert kept is not None
    assert kept["value"] == stored


EXACT: list[object] = [
    2**70,
    -(2**70),
    10**400,
    1e16,
    1e22,
    1.5e300,
    5e-324,
    0.1,
    1.0,
    -0.0,
    2**53 + 1,
    "",
    "\\u0000 is six characters",
    'tab\t newline\n quote" 💡 \u2028 %s {} $1',
    {"": 1, "k\\": {"z": [], "a": {}}},
    [[[[[[[[[[None]]]]]]]]]],
    None,
    False,
    0,
]


@pytest.mark.field("L28")
@pytest.mark.ruling("1.35")
async def test_what_json_can_hold_comes_back_exact(app: App, admin: Admin) -> None:
    app.kind("work", batch=50)(echo_batch)
    await app.enqueue_many("work", [NewJob(value, f"k{index:02}") for index, value in enumerate(EXACT)])
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == len(EXACT))
    assert received == EXACT
    assert [type(value) for value in received] == [type(value) for value in EXACT]
    for index, value in enumerate(EXACT):
        stored = result(admin, f"k{index:02}")
        assert (None if stored is None else stored["value"]) == value
        assert row(admin, f"k{index:02}")["has_result"] is (value is not None)


async def echo_batch(jobs: list[Job[Any]]) -> list[Any]:
    received.extend(job.payload for job in jobs)
    return [job.payload for job in jobs]


REFUSED = [
    ({"rows": [0, {"name": "SECRET\0"}]}, r"\$\.rows\[1\]\.name: contains U\+0000"),
    ({"rows": ["SECRET\ud800"]}, r"\$\.rows\[0\]: contains a lone surrogate"),
    ({"a": math.nan}, r"\$\.a: is NaN or infinite"),
    ([-math.inf], r"\$\[0\]: is NaN or infinite"),
    ({"a": {1: "SECRET"}}, r"\$\.a: has a key that is not a str"),
    ({"SECRET\0": 1}, r"\$\[\.\.\.\]: is under a key that contains U\+0000"),
    ({"a": 10**5000}, r"\$\.a: is an int of more than \d+ digits"),
    ({"a": b"SECRET"}, r"\$\.a: is `bytes`"),
    ({"a": datetime(2030, 1, 1, tzinfo=UTC)}, r"\$\.a: is `datetime`"),
    ({"a": {"SECRET"}}, r"\$\.a: is `set`"),
    ({"a": object()}, r"\$\.a: is `object`"),
    ("SECRET" * 200_000, r"\$: takes 1200002 bytes of JSON, over the limit of 1048576"),
]


async def call(door: Callable[..., Any], *arguments: object) -> None:
    """Through either door: only the async one's answer must be awaited."""
    answer = door(*arguments)
    if inspect.isawaitable(answer):
        await answer


@pytest.mark.field("L28")
@pytest.mark.parametrize(("payload", "says"), REFUSED, ids=[says[:40] for _, says in REFUSED])
async def test_what_json_cannot_hold_is_refused_at_enqueue(app: App, admin: Admin, payload: object, says: str) -> None:
    app.declare("work")
    doors: list[Callable[..., Any]] = [app.enqueue, app.sync.enqueue]
    for enqueue in doors:
        with pytest.raises(PayloadError, match=says + r".*\(payload of kind 'work'\)$") as refused:
            await call(enqueue, "work", payload)
        assert "SECRET" not in str(refused.value)
        assert refused.value.__cause__ is None
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)


@pytest.mark.field("L28")
@pytest.mark.ruling("1.18")
async def test_what_json_cannot_hold_as_a_result_fails_its_own_job_only(
    app: App, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    values = [value for value, _ in REFUSED]

    @app.kind("work", batch=100, max_attempts=1)
    async def work(jobs: list[Job[int]]) -> list[Any]:
        return [values[job.payload // 2] if job.payload % 2 else "fine" for job in jobs]

    await app.enqueue_many("work", [NewJob(index, f"k{index:02}") for index in range(2 * len(values))])
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 2 * len(values))
    found = admin.execute("select state, last_code, has_result from pgworker.jobs order by key").fetchall()
    assert found == [("succeeded", None, True), ("failed", "result_rejected", False)] * len(values)
    assert admin.execute("select distinct value from pgworker.results").fetchall() == [("fine",)]
    assert "path=$.rows[1].name reason=contains U+0000" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.field("L28")
@pytest.mark.parametrize("text", ["a\0b", "a\ud800", "\x1b[31m", "x" * 100_000])
async def test_any_error_text_ends_as_a_plain_failure(app: App, admin: Admin, text: str) -> None:
    @app.kind("work", max_attempts=1)
    async def work(job: Job[None]) -> None:
        raise ValueError(text)

    await app.enqueue("work", key="k")
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobSettled)))
    after = row(admin, "k")
    assert (after["state"], after["last_code"]) == ("failed", "handler_failed")


async def test_a_kinds_own_limit_counts_bytes_of_json(app: App, admin: Admin) -> None:
    app.declare("small", payload_limit=10)
    app.declare("default")
    await app.enqueue("small", "12345678", key="at the limit")
    with pytest.raises(PayloadError, match="takes 11 bytes of JSON, over the limit of 10"):
        await app.enqueue("small", "123456789")
    await app.enqueue("default", "x" * (1024 * 1024 - 2), key="a megabyte")
    with pytest.raises(PayloadError, match="takes 1048577 bytes"):
        await app.enqueue("default", "x" * (1024 * 1024 - 1))
    assert admin.execute("select key from pgworker.jobs order by key").fetchall() == [
        ("a megabyte",),
        ("at the limit",),
    ]
    with pytest.raises(ConfigError, match="limit"):
        app.declare("huge", payload_limit=2**40)


WRONG: list[tuple[Callable[[Any], Any], Any, str]] = [
    (echo_dataclass, Order(7, []), r"\$\.name: expected `str`, got `int`"),  # type: ignore[arg-type]
    (echo_dataclass, Order("n", [Part("SECRET", Decimal(1))]), r"\$\.parts\[0\]\.id: "),  # type: ignore[arg-type]
    (echo_dataclass, dataclasses.asdict(ORDER), r"\$: is `dict`, which would come back as `Order`"),
    (echo_dataclass, {"parts": []}, r"\$\.name: is required and missing"),
    (echo_struct, Point("SECRET", 2.0), r"\$\.x: expected `int`, got `str`"),  # type: ignore[arg-type]
    (echo_struct, Point(1, True), r"\$\.y: expected `float`, got `bool`"),
    (echo_typed_dict, {"title": "SECRET"}, r"\$\.year: is required and missing"),
    (echo_typed_dict, {"title": "t", "year": "SECRET"}, r"\$\.year: expected `int`, got `str`"),
    (echo_typed_dict, {"title": "t", "year": 1, "extra": "SECRET"}, r"\$\.extra: is not part of the declared type"),
    (
        echo_pydantic,
        User.model_construct(name=7, born=date(2000, 1, 1)),
        r"\$\.name: is refused by pydantic: string_type",
    ),
    (echo_pydantic, {"name": "SECRET"}, r"\$\.born: is required and missing"),
]


@pytest.mark.parametrize(("handler", "payload", "says"), WRONG, ids=[says[:40] for *_, says in WRONG])
async def test_a_payload_of_a_wrong_type_is_refused_with_the_fields_name(
    app: App, admin: Admin, handler: Callable[[Any], Any], payload: object, says: str
) -> None:
    app.kind("work")(handler)
    with pytest.raises(PayloadError, match=says) as refused:
        await app.enqueue("work", payload)
    assert "SECRET" not in str(refused.value)
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)


@pytest.mark.contract("A46")
@pytest.mark.parametrize(
    ("handler", "stored"),
    [
        (echo_dataclass, {"name": "SECRET", "parts": "SECRET"}),
        (echo_struct, {"x": "SECRET", "y": 1.0}),
        (echo_typed_dict, {"title": "SECRET"}),
        (echo_pydantic, {"name": "n", "born": "SECRET"}),
        (echo_list, None),
    ],
    ids=["dataclass", "struct", "typed dict", "pydantic", "null"],
)
async def test_a_payload_that_does_not_fit_never_reaches_the_handler(
    app: App, admin: Admin, caplog: pytest.LogCaptureFixture, handler: Callable[[Any], Any], stored: object
) -> None:
    caplog.set_level("DEBUG")
    app.kind("work")(handler)
    admin.execute("insert into pgworker.jobs (kind, key, payload) values ('work', 'k', %s)", [Jsonb(stored)])
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await seen.wait(lambda: bool(seen.of(JobSettled)))
        assert worker.status()["work"].last_error == "payload_invalid"
    after = row(admin, "k")
    assert (after["state"], after["attempts"], after["last_code"]) == ("failed", 1, "payload_invalid")
    assert received == []
    assert "SECRET" not in caplog.text


@pytest.mark.ruling("2.21")
async def test_fields_that_a_newer_producer_added_are_ignored(app: App, admin: Admin) -> None:
    app.kind("work")(echo_struct)
    admin.execute('select pgworker.enqueue(\'work\', \'{"x": 1, "y": 2.5, "new": {"deep": 1}}\')')
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobSettled)))
    assert received == [Point(1, 2.5)]


@pytest.mark.ruling("2.21")
async def test_an_older_worker_leaves_newer_versions_to_newer_workers(app: App, dsn: str, admin: Admin) -> None:
    app.kind("work")(echo_untyped)
    async with App(dsn) as newer:
        newer.kind("work", version=2)(echo_untyped)
        await newer.enqueue("work", "of version 2", key="new")
        before = row(admin, "new")
        await app.enqueue("work", "of version 1", key="old")
        seen = Recorder(app)
        async with running(app.worker()):
            await seen.wait(lambda: bool(seen.of(JobSettled)))
            await app.enqueue("work", "later", delay=timedelta(seconds=0.05))  # one more round
            await seen.wait(lambda: len(seen.of(JobSettled)) == 2)
        assert received == ["of version 1", "later"]
        assert row(admin, "new") == before
        seen = Recorder(newer)
        await app.enqueue("work", "old again", key="old")
        async with running(newer.worker()):
            await seen.wait(lambda: len(seen.of(JobSettled)) == 2)
        assert sorted(received[2:]) == ["of version 2", "old again"]


# --- results --------------------------------------------------------------------------------------------------------


OUTCOMES: list[Any] = [Point(1, 2.5), Retry(code="again"), None, Point("SECRET", 1.0)]  # type: ignore[arg-type]


async def one_of_three(job: Job[int]) -> Point | Retry | None:
    return OUTCOMES[job.payload]  # type: ignore[no-any-return]


def one_of_three_sync(job: Job[int]) -> Point | Retry | None:
    return OUTCOMES[job.payload]  # type: ignore[no-any-return]


async def many_of_three(jobs: list[Job[int]]) -> list[Point | Retry | None]:
    return [await one_of_three(job) for job in jobs]


@pytest.mark.parametrize("handler", [one_of_three, one_of_three_sync, many_of_three])
async def test_a_result_is_of_the_type_that_the_handler_promises(
    app: App, admin: Admin, caplog: pytest.LogCaptureFixture, handler: Callable[[Any], Any]
) -> None:
    app.kind("work", batch=4 if handler is many_of_three else None, max_attempts=5)(handler)
    await app.enqueue_many("work", [NewJob(index, f"k{index}") for index in range(4)])
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 4)
    found = admin.execute("select state, attempts, last_code, has_result from pgworker.jobs order by key").fetchall()
    assert found == [
        ("succeeded", 0, None, True),
        ("pending", 1, "again", False),
        ("succeeded", 0, None, False),
        ("pending", 1, "result_rejected", False),
    ]
    stored = result(admin, "k0")
    assert stored is not None
    assert stored["value"] == {"x": 1, "y": 2.5, "label": None, "seen": []}
    assert "SECRET" not in caplog.text


def of_their_own_types(jobs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 - that is the case
    return [Point(1, 2.5), Film(title="t", year=1), Part(ID, Decimal("1.1")), User(name="n", born=date(2000, 1, 2)), 7][
        : len(jobs)
    ]


async def test_a_handler_without_annotations_may_return_any_storable_type(app: App, admin: Admin) -> None:
    app.kind("work", batch=5)(of_their_own_types)
    await app.enqueue_many("work", [NewJob(index, f"k{index}") for index in range(5)])
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 5)
    stored = [value for (value,) in admin.execute("select value from pgworker.results order by key")]
    assert stored == [
        {"x": 1, "y": 2.5, "label": None, "seen": []},
        {"title": "t", "year": 1},
        {"id": str(ID), "price": "1.1", "weight": 0.5},
        {"name": "n", "born": "2000-01-02", "tags": []},
        7,
    ]


async def whole_batch(jobs: list[Job[int]]) -> list[Point] | Retry:
    return Retry(code="all_again")


async def test_an_instruction_may_stand_for_a_whole_batch(app: App, admin: Admin) -> None:
    app.kind("work", batch=4)(whole_batch)
    await app.enqueue_many("work", [NewJob(index) for index in range(3)])
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 3)
    assert admin.execute("select distinct attempts, last_code from pgworker.jobs").fetchall() == [(1, "all_again")]
