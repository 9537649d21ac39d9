"""Which promises are kept: the catalogue, and the count over one run's results. Knows nothing of pytest."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FOLDER: Final = Path(__file__).parent

# Marker name -> (table of promises.toml, how an id is called in messages)
MARKERS: Final = {
    "contract": ("contract", ""),
    "race": ("races", "race "),
    "field": ("field", ""),
    "ruling": ("rulings", "ruling "),
}


class Promise(NamedTuple):
    """One promise: the table that lists it and its id there."""

    table: str
    id: str

    @property
    def system(self) -> str:
        """The group under which it is counted: `contract A`, `races`, ..."""
        return f"{self.table} {self.id[0]}" if self.table == "contract" else self.table

    def __str__(self) -> str:
        prefixes = dict(MARKERS.values())
        return f"{prefixes[self.table]}{self.id}"


class CatalogueError(Exception):
    """A catalogue that contradicts itself; the text says where."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All promises with their titles, and the waived ones with their reasons; both in the order of the files."""

    titles: Mapping[Promise, str]
    waived: Mapping[Promise, str]

    @classmethod
    def load(cls, folder: Path = FOLDER) -> Catalogue:
        """Read promises.toml and waived.toml; raises CatalogueError for a waived id that nobody promised."""
        titles = _read(folder / "promises.toml")
        waived = _read(folder / "waived.toml")
        if strangers := [str(promise) for promise in waived if promise not in titles]:
            msg = f"{folder / 'waived.toml'}: not in promises.toml: {', '.join(strangers)}"
            raise CatalogueError(msg)
        return cls(titles, waived)


def _read(path: Path) -> dict[Promise, str]:
    tables = {table for table, _ in MARKERS.values()}
    found: dict[Promise, str] = {}
    content: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    for table, entries in content.items():
        if table not in tables or not isinstance(entries, dict):
            msg = f"{path}: no such table: [{table}]"
            raise CatalogueError(msg)
        for id_, text in cast("dict[str, object]", entries).items():
            if not isinstance(text, str) or not text.strip() or "\n" in text:
                msg = f"{path}: [{table}] {id_}: one line of text is wanted"
                raise CatalogueError(msg)
            found[Promise(table, id_)] = text
    return found


@dataclass(slots=True)
class Tally:
    """Who carries which promise, and how each test ended."""

    catalogue: Catalogue
    carriers: dict[Promise, set[str]] = field(default_factory=lambda: defaultdict[Promise, set[str]](set))
    _passed_steps: dict[str, set[str]] = field(default_factory=lambda: defaultdict[str, set[str]](set))
    _spoilt: set[str] = field(default_factory=set[str])

    def carries(self, test: str, promises: Iterable[Promise]) -> None:
        """Note that a test asserts these promises, whether it is going to run or not."""
        for promise in promises:
            self.carriers[promise].add(test)

    def step(self, test: str, when: str, *, passed: bool) -> None:
        """Note how one step (setup, call, teardown) of a test ended; anything but a pass spoils the test."""
        if passed:
            self._passed_steps[test].add(when)
        else:
            self._spoilt.add(test)

    def covered(self, promise: Promise) -> bool:
        """Whether at least one test carries it and all of those passed, from setup to teardown."""
        tests = self.carriers.get(promise, set())
        return bool(tests) and all(self._passed(test) for test in tests)

    def _passed(self, test: str) -> bool:
        return test not in self._spoilt and self._passed_steps.get(test, set()) >= {"setup", "call", "teardown"}

    def open_lines(self) -> Iterator[str]:
        """The promises that are neither covered nor waived: a line for each system that has some."""
        for system, promises in self._systems().items():
            missing = [promise.id for promise in promises if self._is_open(promise)]
            if missing:
                yield f"open {system}: {', '.join(missing)}"

    def count_lines(self) -> Iterator[str]:
        """One line a system, like `contract A 71 covered 60 waived 3 open 8`."""
        for system, promises in self._systems().items():
            waived = sum(promise in self.catalogue.waived for promise in promises)
            missing = sum(self._is_open(promise) for promise in promises)
            yield f"{system} {len(promises)} covered {len(promises) - waived - missing} waived {waived} open {missing}"

    def _is_open(self, promise: Promise) -> bool:
        return promise not in self.catalogue.waived and not self.covered(promise)

    def _systems(self) -> dict[str, list[Promise]]:
        systems: dict[str, list[Promise]] = defaultdict(list)
        for promise in self.catalogue.titles:
            systems[promise.system].append(promise)
        return systems
