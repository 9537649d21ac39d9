"""Payloads and results: a value comes back equal from jsonb, or is refused with a path and without being shown.

`jsonb` below stands in for the column: it writes numbers as Postgres does (no exponents, scale kept, no negative zero).
The same values were put through PostgreSQL 15 and 18 by hand when this file was written, with the same results.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Required, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretStr, computed_field, field_serializer

from pgworker.errors import ConfigError, PayloadError
from pgworker.payload import MAX_DEPTH, check_key, check_kind, check_revision, codec_for

SECRET = "canary-7f3a"  # stands for private data: it may be in no message


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Shape(Enum):
    ROUND = "round"


class Odd(Enum):
    NUL = "a\0"


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Row:
    name: str
    count: int = 0


@dataclass
class Report:
    title: str
    rows: list[Row] = field(default_factory=list)
    score: float | None = None
    extra: Any = None


@dataclass(frozen=True, slots=True)
class Rich:
    at: datetime
    day: date
    clock: time
    took: timedelta
    price: Decimal
    ident: UUID
    blob: bytes
    colour: Colour
    shape: Shape
    tags: frozenset[str]
    point: tuple[int, float]
    weights: dict[str, float]
    number: int | float


class Page(msgspec.Struct, rename="camel"):
    first_name: str
    parts: list[Page] = []
    seen: int | msgspec.UnsetType = msgspec.UNSET


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""


@dataclass
class Nothing:
    pass


class Options(TypedDict, total=False):
    name: Required[str]
    size: int


@dataclass(eq=False)
class Unequal:
    """Neither == nor a default comparison says anything about it, yet its parts do."""

    number: int
    note: float | None = field(default=None, compare=False)


class Model(BaseModel):
    name: str
    at: datetime | None = None
    ratio: float | None = None
    children: list[Model] = []
    extra: Any = None


class Aliased(BaseModel):
    model_config = ConfigDict(extra="allow")
    user_name: str = Field(alias="userName")


class TwiceAliased(BaseModel):
    value: str = Field(validation_alias="theValue", serialization_alias="theValue")


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str

    @computed_field
    def shout(self) -> str:
        return self.name.upper()


class Sorted(BaseModel):
    counts: dict[str, int]

    @field_serializer("counts")
    def in_order(self, counts: dict[str, int]) -> dict[str, int]:
        return dict(sorted(counts.items()))


class Lossy(BaseModel):
    kept: int = 0
    dropped: int = Field(default=0, exclude=True)


class Vault(BaseModel):
    password: SecretStr


@dataclass
class Holder:
    model: Model
    models: dict[str, Model]


@dataclass
class Picky:
    word: str

    def __post_init__(self) -> None:
        if self.word == SECRET:
            msg = f"Expected `nothing like {self.word}`"
            raise ValueError(msg)
        if self.word == f"{SECRET}!":
            raise KeyError(self.word)


class _Number(float):
    """A JSON number that remembers its text."""

    text: str


def jsonb(text: str) -> str:
    """What `select $1::jsonb::text` answers, keys' order aside."""

    def number(token: str) -> _Number:
        value = Decimal(token)
        kept = _Number(value)
        kept.text = format(abs(value) if value == 0 else value, "f")
        return kept

    return _written(json.loads(text, parse_float=number, parse_int=number))


def _written(value: object) -> str:
    if isinstance(value, _Number):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value)


def stored(value: object, declared: object) -> object:
    codec = codec_for(declared)
    return codec.decode(jsonb(codec.encode(value)))


def identical(left: object, right: object) -> bool:
    """Equal with equal types at all depths: 1, 1.0 and True are three values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(identical, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(identical(left[key], right[key]) for key in left)
    return left == right


def refusal(value: object, declared: object = object) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        codec_for(declared).encode(value)
    return caught.value


def unreadable(text: str, declared: object = object) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        codec_for(declared).decode(text)
    return caught.value


finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**40), 10**40) | finite | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=12,
)
instants = st.datetimes() | st.datetimes(min_value=datetime(1975, 1, 1), timezones=st.timezones())  # noqa: DTZ001 - naive
quick = settings(max_examples=60, deadline=None)


# What comes back


@pytest.mark.ruling("1.35")
@quick
@given(plain)
def test_plain_json_comes_back_identical(value: object) -> None:
    assert identical(stored(value, object), value)


@quick
@given(
    st.builds(
        Rich,
        at=instants,
        day=st.dates(),
        clock=st.times(),
        took=st.timedeltas(),
        price=st.decimals(allow_nan=False, allow_infinity=False),
        ident=st.uuids(),
        blob=st.binary(),
        colour=st.sampled_from(Colour),
        shape=st.sampled_from(Shape),
        tags=st.frozensets(texts),
        point=st.tuples(st.integers(), finite),
        weights=st.dictionaries(texts, finite),
        number=st.integers() | finite,
    )
)
def test_the_scalars_that_a_type_declares_come_back(value: Rich) -> None:
    back = stored(value, Rich)
    assert isinstance(back, Rich)
    assert type(back.number) is type(value.number)
    assert back.at.timestamp() == value.at.timestamp()
    assert (back.at.tzinfo is None) == (value.at.tzinfo is None)
    assert _without_instant(back) == _without_instant(value)


def _without_instant(value: Rich) -> tuple[object, ...]:
    return tuple(getattr(value, name) for name in Rich.__slots__ if name != "at")


@quick
@given(st.builds(Report, texts, st.lists(st.builds(Row, texts, st.integers())), st.none() | finite, plain))
def test_a_dataclass_comes_back(value: Report) -> None:
    back = stored(value, Report)
    assert back == value
    assert isinstance(back, Report)
    assert identical(back.extra, value.extra)


@pytest.mark.field("L28")
@pytest.mark.ruling("1.35")
@pytest.mark.parametrize(
    "number",
    [0, -1, 2**53 + 1, 2**63, 2**64, 2**70, -(2**70), 10**4299, 10**4300 - 1, 1 - 10**4299],
    ids=lambda number: f"{number.bit_length()} bits",
)
def test_an_integer_of_any_size_comes_back_exact(number: int) -> None:
    for declared in (object, int):
        assert identical(stored(number, declared), number)
    assert identical(stored({"deep": [number]}, object), {"deep": [number]})


@pytest.mark.ruling("1.35")
@pytest.mark.parametrize(
    "number",
    [
        1.0,
        0.1,
        1e15,
        1e16,
        -1e16,
        1.2345678901234567e17,
        1e22,
        1e308,
        sys.float_info.max,
        5e-324,
        sys.float_info.min,
        1e-7,
    ],
)
def test_a_float_comes_back_exact_and_a_float(number: float) -> None:
    for declared in (object, float, int | float):
        assert identical(stored(number, declared), number)
    assert identical(stored([{"x": number}, number, [number]], object), [{"x": number}, number, [number]])


def test_a_number_in_a_text_is_left_alone() -> None:
    value = ["1e16", "a,1e16]", '"1e16', "\\", 1e16, '\\",1e16,', {"1e16": "2e20}"}]
    assert identical(stored(value, object), value)
    assert codec_for(object).encode("x,1e16") == '"x,1e16"'


def test_negative_zero_comes_back_as_an_equal_zero() -> None:
    back = stored([-0.0], object)
    assert identical(back, [0.0])


def test_an_integer_where_a_float_is_declared_is_exact_or_refused() -> None:
    assert stored(Report("t", score=2), Report) == Report("t", score=2.0)
    assert stored(2**70, float) == 2.0**70
    assert refusal(Report("t", score=2**53 + 1), Report).path == "$.score"


def test_unknown_fields_are_ignored_when_reading() -> None:
    text = '{"name": "a", "later": {"x": [1]}, "count": 2}'
    assert codec_for(Row).decode(text) == Row("a", 2)
    assert codec_for(Options).decode('{"name": "a", "later": 1}') == {"name": "a"}
    assert codec_for(Model).decode(text) == Model(name="a")
    assert codec_for(Row).decode('{"name": "a"}') == Row("a"), "and a missing one takes its default"


def test_structs_typed_dicts_tuples_and_none_come_back() -> None:
    page = Page("a", [Page("b", seen=3)])
    assert codec_for(Page).encode(page) == '{"firstName":"a","parts":[{"firstName":"b","parts":[],"seen":3}]}'
    assert stored(page, Page) == page
    assert stored({"name": "a", "size": 1}, Options) == {"name": "a", "size": 1}
    assert stored({"name": "a"}, Options) == {"name": "a"}
    assert stored(Point(1, 2), Point) == Point(1, 2)
    assert stored([None], list[None]) == [None]
    assert stored(None, None) is None
    assert stored(Unequal(1), Unequal) is not None
    assert stored(Picky("a"), Picky) == Picky("a")
    assert stored(Nothing(), Nothing) == Nothing()
    assert identical(stored({"a": [1, {"b": 2.5}]}, dict[str, object]), {"a": [1, {"b": 2.5}]})
    assert stored({Colour.RED: 1}, dict[Colour, int]) == {Colour.RED: 1}


def test_subclasses_of_plain_types_come_back_as_these() -> None:
    value = {"colour": Colour.RED, "level": Level.LOW, "map": OrderedDict(b=1, a=2), Colour.RED: 1}
    back = stored(value, object)
    assert identical(back, {"colour": "red", "level": 1, "map": {"b": 1, "a": 2}, "red": 1})
    assert type(stored(Level.LOW, int)) is int


def test_an_aware_instant_keeps_its_instant_also_in_the_repeated_hour() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    for fold in (0, 1):
        moment = datetime(2024, 10, 27, 2, 30, tzinfo=berlin, fold=fold)
        back = stored(moment, datetime)
        assert isinstance(back, datetime)
        assert back.astimezone(UTC) == moment.astimezone(UTC)
    assert refusal(datetime(1880, 1, 1, tzinfo=berlin), datetime).path == "$", "an offset of 53 min 28 s does not fit"


# What is refused, with the path


CYCLE: list[object] = []
CYCLE.append(CYCLE)
LOOP: dict[str, object] = {}
LOOP["again"] = LOOP


def nested(levels: int) -> object:
    value: object = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.field("L28")
@pytest.mark.ruling("1.35")
@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        ("a\0b", "U+0000"),
        ("\\\0", "U+0000"),
        ("\ud800", "surrogate"),
        ("\udfff text", "surrogate"),
        (math.nan, "NaN"),
        (math.inf, "infinite"),
        (-math.inf, "infinite"),
        ({1: 2}, "not a str"),
        ({None: 2}, "not a str"),
        ({(1, 2): 2}, "not a str"),
        ({True: 2}, "not a str"),
        ((1, 2), "send `list`"),
        ({1}, "send `list`"),
        (frozenset({1}), "send `list`"),
        (b"bytes", "send `str`"),
        (Decimal("1.5"), "declare the type `Decimal`"),
        (Decimal("sNaN"), "NaN"),
        (datetime(2024, 1, 1, tzinfo=UTC), "declare the type `datetime`"),
        (UUID(int=1), "declare the type `UUID`"),
        (Shape.ROUND, "declare the type `Shape`"),
        (Row("a"), "declare the type `Row`"),
        (Model(name="a"), "declare the type `Model`"),
        (UserDict(a=1), "`UserDict`, which cannot be stored"),
        (object(), "`object`, which cannot be stored"),
        (1j, "`complex`, which cannot be stored"),
        (Row, "`type`, which cannot be stored"),
        (10**4300, "digits"),
        (-(10**4299), "digits"),
        (10**9000, "digits"),
    ],
    ids=lambda part: part if isinstance(part, str) and part.isascii() and part.isprintable() else type(part).__name__,
)
def test_what_json_cannot_hold_is_refused_with_its_path(inner: object, reason: str) -> None:
    for value, declared, path in (
        (inner, object, "$"),
        ({"rows": [{"name": 1}, {"name": inner}]}, object, "$.rows[1].name"),
        ({"rows": [0, inner]}, dict[str, Any], "$.rows[1]"),
        (Report("t", extra=[inner]), Report, "$.extra[0]"),
        (Model(name="m", children=[Model(name="c", extra={"k": inner})]), Model, "$.children[0].extra.k"),
    ):
        error = refusal(value, declared)
        assert error.path == path
        assert reason in error.reason


@pytest.mark.field("L28")
@pytest.mark.parametrize(("key", "reason"), [("a\0", "U+0000"), ("\ud800", "surrogate")], ids=["NUL", "surrogate"])
def test_a_key_that_postgres_cannot_hold_is_refused_and_not_shown(key: str, reason: str) -> None:
    error = refusal({"rows": [{key: 1}]})
    assert error.path == "$.rows[0][...]"
    assert reason in error.reason


def test_a_backslash_before_u0000_is_just_text() -> None:
    for text in ("\\u0000", "\\\\u0000", "a\\u0000b"):
        assert stored(text, str) == text


@pytest.mark.parametrize(
    ("value", "declared", "path", "reason"),
    [
        (Row(3), Row, "$.name", "expected `str`, got `int`"),  # type: ignore[arg-type]
        (Row("a", "3"), Row, "$.count", "expected `int`, got `str`"),  # type: ignore[arg-type]
        (Row("a", True), Row, "$.count", "got `bool`"),
        (Row("a", 1.0), Row, "$.count", "got `float`"),  # type: ignore[arg-type]
        (Report("t", [Row("a"), Row("b", None)]), Report, "$.rows[1].count", "got `null`"),  # type: ignore[arg-type]
        (Report("t", (Row("a"),)), Report, "$.rows", "send `list`"),  # type: ignore[arg-type]
        (Report("t", [{"name": "a"}]), Report, "$.rows[0]", "send `Row`"),  # type: ignore[list-item]
        ({"name": "a"}, Row, "$", "send `Row`"),
        (None, Row, "$", "got `null`"),
        (Unequal(1, math.nan), Unequal, "$.note", "NaN"),
        (Page("a", [Page(3)]), Page, "$.parts[0].firstName", "expected `str`"),  # type: ignore[arg-type]
        (Page("a", [Page("\0")]), Page, "$.parts[0].firstName", "U+0000"),
        ({"name": "a", "size": "1"}, Options, "$.size", "expected `int`"),
        ({"size": 1}, Options, "$.name", "required and missing"),
        ({"name": "a", "colour": 1}, Options, "$.colour", "would be lost"),
        ({"name": "a", "two words": 1}, Options, "$[...]", "would be lost"),
        ("2024-01-01T00:00:00Z", datetime, "$", "send `datetime`"),
        (datetime(2024, 1, 1, tzinfo=UTC), date, "$", "RFC3339"),
        ("eA==", bytes, "$", "send `bytes`"),
        (1, Decimal, "$", "send `Decimal`"),
        (Decimal("NaN"), Decimal, "$", "NaN"),
        ("red", Colour, "$", "send `Colour`"),
        (["red"], list[Colour], "$[0]", "send `Colour`"),
        ({"a": 1}, dict[str, Decimal], "$.a", "send `Decimal`"),
        ({"a": 1.0}, dict[str, Decimal], "$.a", "send `Decimal`"),
        ([Odd.NUL], list[Odd], "$[0]", "U+0000"),
        ("blue", Colour, "$", "not one of the values"),
        (1, Level, "$", "send `Level`"),
        ("b", Literal["a"], "$", "not one of the values"),
        (True, int, "$", "got `bool`"),
        (1, bool, "$", "got `int`"),
        ([1], tuple[int, ...], "$", "send `tuple`"),
        ({"a"}, frozenset[str], "$", "send `frozenset`"),
        ({"\0"}, set[str], "$[...]", "U+0000"),
        ({1: "a"}, dict[int, str], "$", "not a str"),
        (3, Annotated[int, msgspec.Meta(ge=5)], "$", "expected `int` >= 5"),
        (Model.model_construct(name=3), Model, "$.name", "string_type"),
        (Model(name="a", children=[Model.model_construct()]), Model, "$.children[0].name", "missing"),
        (Model(name="a", ratio=math.nan), Model, "$.ratio", "NaN"),
        (Model(name="a\0"), Model, "$.name", "U+0000"),
        (Model.model_construct(name="\ud800"), Model, "$.name", "surrogate"),
        ({"name": "a"}, Model, "$", "send `Model`"),
        (Lossy(dropped=1), Lossy, "$.dropped", "does not come back equal"),
        (Vault(password=SecretStr("x")), Vault, "$.password", "does not come back equal"),
        (Holder(Model(name="a"), {"k": Model.model_construct(name=1)}), Holder, "$.models[...].name", "string_type"),
        ([Model(name="a"), Model.model_construct(name=1)], list[Model], "$[1].name", "string_type"),
    ],
)
def test_a_wrong_type_is_refused_with_the_fields_path(value: object, declared: object, path: str, reason: str) -> None:
    error = refusal(value, declared)
    assert error.path == path
    assert reason in error.reason
    assert str(error) == f"{path}: {error.reason}"


def test_a_subclass_of_a_declared_class_is_refused_rather_than_cut() -> None:
    @dataclass
    class Wider(Row):
        more: int = 1

    assert "send `Row`" in refusal(Wider("a"), Row).reason


def test_a_value_with_a_deleted_field_is_refused() -> None:
    row = Row("a")
    del row.name
    assert refusal(row, Row).path == "$.name"


def test_depth_is_bounded_and_a_cycle_is_found() -> None:
    assert stored(nested(MAX_DEPTH), object) == nested(MAX_DEPTH)
    for value in (nested(MAX_DEPTH + 1), nested(3000), CYCLE, LOOP, {"x": [CYCLE]}):
        error = refusal(value)
        assert "nested deeper than 200 levels" in error.reason
        assert len(error.path) < 200
    assert refusal(CYCLE).path.startswith("$[0][0]")
    assert refusal(LOOP).path.startswith("$.again.again")


def test_the_limit_counts_the_bytes_of_the_json() -> None:
    codec = codec_for(object, limit=50)
    assert codec.encode("x" * 48) == f'"{"x" * 48}"'
    assert codec.encode("é" * 24) == f'"{"é" * 24}"'
    for value in ("x" * 49, "é" * 25, [1e308], {"a": "x" * 1000}, ["x" * 49, "\0"]):
        with pytest.raises(PayloadError, match=r"^\$: takes \d+ bytes of JSON, over the limit of 50"):
            codec.encode(value)


@pytest.mark.field("L26")
def test_a_megabyte_is_the_default_limit() -> None:
    assert len(codec_for(str).encode("x" * (1024 * 1024 - 2))) == 1024 * 1024
    assert "over the limit of 1048576" in refusal("x" * (1024 * 1024 - 1), str).reason


# What is unreadable


@pytest.mark.parametrize(
    ("text", "declared", "path", "reason"),
    [
        ('{"name": 1}', Row, "$.name", "expected `str`, got `int`"),
        ("{}", Row, "$.name", "required and missing"),
        (
            '{"title": "t", "rows": [{"name": "a"}, {"name": "b", "count": 1.0}]}',
            Report,
            "$.rows[1].count",
            "got `float`",
        ),
        ("null", Row, "$", "expected `object`, got `null`"),
        ('{"a": "b"}', dict[str, int], "$[...]", "expected `int`"),
        ('{"a": 1}', dict[int, int], "$", "has a key of a wrong type: expected `int`"),
        ("", object, "$", "not valid JSON"),
        ('{"a":', object, "$", "not valid JSON"),
        ("[" * 100_000, object, "$", "nested deeper"),
        ("1" * 5000, object, "$", "out of range"),
        ("1e400", object, "$", "out of range"),
        ('"\ud800"', object, "$", "surrogate"),
        ('{"children": []}', Model, "$.name", "missing"),
        (
            '[{"model": {"name": "a"}, "models": {}}, {"model": {"name": 1}}]',
            list[Holder],
            "$[1].model.name",
            "string_type",
        ),
        ('{"name": "a", "at": "soon"}', Model, "$.at", "datetime"),
        ('{"name": "a", "ratio": "1.5"}', Model, "$.ratio", "float_type"),
        ('"x"', bytes, "$", "base64"),
    ],
    ids=lambda part: part[:40] if isinstance(part, str) and part.isascii() else type(part).__name__,
)
def test_a_text_that_does_not_fit_fails_with_the_path(text: str, declared: object, path: str, reason: str) -> None:
    error = unreadable(text, declared)
    assert error.path == path
    assert reason in error.reason


def test_whatever_a_types_own_code_raises_is_a_payload_error() -> None:
    for word, name in ((SECRET, "ValueError"), (f"{SECRET}!", "KeyError")):
        error = unreadable(json.dumps([{"word": word}]), list[Picky])
        assert name in error.reason
        assert SECRET not in str(error)


# What errors do not tell


@pytest.mark.parametrize(
    ("value", "declared"),
    [
        ([SECRET, math.nan], object),
        ({SECRET: math.nan}, object),
        ({f"{SECRET}\0": 1}, object),
        (f"{SECRET}\0", object),
        (f"{SECRET}\ud800", object),
        ((SECRET,), object),
        ({SECRET}, object),
        (Row(SECRET, SECRET), Row),  # type: ignore[arg-type]
        (Row([SECRET]), Row),  # type: ignore[arg-type]
        ({"name": "a", SECRET: 1}, Options),
        (SECRET, Colour),
        (SECRET, Literal["a"]),
        (SECRET, UUID),
        (SECRET, Decimal),
        (SECRET, datetime),
        ({SECRET: SECRET}, dict[str, int]),
        (Model.model_construct(name=[SECRET]), Model),
        (Model.model_construct(name="a", at=SECRET), Model),
        (Vault(password=SecretStr(SECRET)), Vault),
        (SECRET * 200_000, str),
    ],
    ids=lambda part: type(part).__name__,
)
def test_no_error_shows_a_value_or_a_key_that_may_be_data(value: object, declared: object) -> None:
    error = refusal(value, declared)
    assert SECRET not in f"{error} {error.args} {error.path} {error.reason}"
    assert error.__context__ is None, "the exception behind it may quote the value"
    assert error.__cause__ is None


@pytest.mark.parametrize(
    ("text", "declared"),
    [
        (f'"{SECRET}"', Colour),
        (f'"{SECRET}"', Literal["a"]),
        (f'"{SECRET}"', int),
        (f'"{SECRET}"', UUID),
        (f'{{"{SECRET}": "{SECRET}"}}', dict[str, int]),
        (f'{{"{SECRET}": 1}}', dict[int, int]),
        (f'{{"{SECRET}": 1}}', Closed),
        (f'{{"name": ["{SECRET}"]}}', Model),
        (f'{{"name": "a", "at": "{SECRET}"}}', Model),
        (f'{{"x": "{SECRET}" oops', object),
        (f'{{"word": "{SECRET}"}}', Picky),
        (f'{{"word": "{SECRET}!"}}', Picky),
    ],
    ids=lambda part: type(part).__name__,
)
def test_no_decode_error_shows_a_value(text: str, declared: object) -> None:
    error = unreadable(text, declared)
    assert SECRET not in f"{error} {error.args}"
    assert error.__context__ is None
    assert error.__cause__ is None


# Pydantic


@quick
@given(st.builds(Model, name=texts, at=st.none() | instants, ratio=st.none() | finite, extra=plain))
def test_a_pydantic_model_comes_back(value: Model) -> None:
    back = stored(value, Model)
    assert isinstance(back, Model)
    assert identical(back.extra, value.extra)
    assert back.at is value.at is None or back.at.timestamp() == value.at.timestamp()  # type: ignore[union-attr]
    assert (back.name, back.ratio) == (value.name, value.ratio)


def test_pydantic_models_come_back_inside_of_other_types() -> None:
    value = Holder(Model(name="a", children=[Model(name="b")]), {"k": Model(name="c", ratio=1e300)})
    assert stored(value, Holder) == value
    assert stored([Model(name="a"), None], list[Model | None]) == [Model(name="a"), None]


def test_aliases_and_extra_fields_travel() -> None:
    value = Aliased.model_validate({"userName": "a", "more": 1e16})
    text = codec_for(Aliased).encode(value)
    assert json.loads(text) == {"userName": "a", "more": 1e16}
    back = stored(value, Aliased)
    assert isinstance(back, Aliased)
    assert (back.user_name, back.model_extra) == ("a", {"more": 1e16})
    assert refusal(Aliased.model_validate({"userName": "a", "more": (1,)}), Aliased).path == "$.more"
    assert refusal(Aliased.model_construct(user_name=1), Aliased).path == "$.userName"
    assert refusal(Aliased(userName="\0"), Aliased).path == "$.userName"
    assert refusal(TwiceAliased.model_construct(value="\0"), TwiceAliased).path == "$.theValue"
    twice = TwiceAliased.model_validate({"theValue": "a"})
    assert stored(twice, TwiceAliased) == twice


def test_what_a_model_computes_or_reorders_is_no_loss() -> None:
    assert json.loads(codec_for(Computed).encode(Computed(name="a"))) == {"name": "a"}
    assert stored(Computed(name="a"), Computed) == Computed(name="a")
    assert stored(Sorted(counts={"b": 1, "a": 2}), Sorted) == Sorted(counts={"a": 2, "b": 1})


def test_the_core_imports_pydantic_only_for_a_model() -> None:
    script = """if True:
        import sys
        from dataclasses import dataclass
        from pgworker.payload import codec_for
        @dataclass
        class Row:
            name: str
        codec = codec_for(Row)
        codec.decode(codec.encode(Row("a")))
        loaded = [name for name in sys.modules if name.startswith(("pydantic", "pgworker.contrib"))]
        assert not loaded, loaded
        from pydantic import BaseModel
        class Model(BaseModel):
            name: str
        codec = codec_for(Model)
        assert codec.decode(codec.encode(Model(name="a"))) == Model(name="a")
        assert "pgworker.contrib.pydantic" in sys.modules
    """
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=30)


# What cannot be declared


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (Path, "`Path`"),
        (dict[str, list[Path]], "`Path`"),
        (int | Row | Page, "not supported"),
        (str | datetime, "str-like"),
        (type(lambda: 0), "`function`"),
        ("Row", "not supported"),
        (5, "not supported"),
    ],
)
def test_a_type_that_json_cannot_carry_is_refused_when_it_is_declared(declared: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        codec_for(declared)


def test_a_type_with_an_unknown_name_in_it_is_refused() -> None:
    @dataclass
    class Dangling:
        what: Nowhere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match="Nowhere"):
        codec_for(Dangling)


@pytest.mark.parametrize("limit", [0, -1, 256 * 1024 * 1024])
def test_a_limit_that_jsonb_could_not_keep_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match="limit"):
        codec_for(object, limit=limit)


# Kinds, keys, revisions


@pytest.mark.ruling("2.22")
@pytest.mark.parametrize("name", ["a", "A_z.:-09", "x" * 63])
def test_a_usable_kind(name: str) -> None:
    check_kind(name)


@pytest.mark.ruling("2.22")
@pytest.mark.parametrize("name", ["", "x" * 64, "a b", "é", "a\n", "a\0", 'a"', "a/b"])
def test_an_unusable_kind(name: str) -> None:
    with pytest.raises(ConfigError, match="kind"):
        check_kind(name)


@pytest.mark.ruling("2.22")
@pytest.mark.parametrize(("check", "name", "most"), [(check_key, "key", 512), (check_revision, "revision", 128)])
def test_the_limits_of_keys_and_revisions(check: Any, name: str, most: int) -> None:
    for usable in ("a", " ", "x" * most, "é" * (most // 2), Colour.RED):
        check(usable)
    for unusable, reason in (
        ("", "takes 0 bytes"),
        ("x" * (most + 1), f"takes {most + 1} bytes, must take 1 to {most}"),
        ("é" * (most // 2 + 1), "bytes"),
        (f"{SECRET}\0", "U+0000"),
        (f"{SECRET}\ud800", "surrogate"),
        (3, "must be a str, is `int`"),
        (None, "must be a str"),
        (b"a", "must be a str"),
    ):
        with pytest.raises(PayloadError, match=reason.replace("+", r"\+")) as caught:
            check(unusable)
        assert caught.value.path == name
        assert SECRET not in str(caught.value)
