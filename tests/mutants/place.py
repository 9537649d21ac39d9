"""Puts a mutant in the place of its file, in this process only: the files themselves are never written to."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutants.catalogue import CODE, QUERIES, Mutant


class _Source(importlib.machinery.SourceFileLoader):
    """Loads the mutated text under the module's own name and path; no bytecode is kept of it."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._text, self.path, "exec", dont_inherit=True)


class _Module(importlib.abc.MetaPathFinder):
    """Finds one module as the mutant has it."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != CODE[self._mutant.group].module:
            return None
        source = str(self._mutant.path)
        loader = _Source(fullname, source, self._mutant.text)
        return importlib.util.spec_from_file_location(fullname, source, loader=loader)


class _Queries(importlib.abc.MetaPathFinder):
    """Finds the statements in a copy of their folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "pgworker.queries":
            return None
        init = self._folder / "__init__.py"
        return importlib.util.spec_from_file_location(fullname, init, submodule_search_locations=[str(self._folder)])


class Place:
    """Where mutants are put: a module once, before its import; a statement as often as one likes."""

    def __init__(self) -> None:
        early = sorted(name for name in sys.modules if name.partition(".")[0] == "pgworker")
        if early:
            raise RuntimeError(f"imported before a mutant could be put in: {', '.join(early)}")
        self._folder = tempfile.TemporaryDirectory(prefix="pgworker-mutant-")
        self._queries = Path(self._folder.name) / "queries"
        shutil.copytree(QUERIES, self._queries, ignore=shutil.ignore_patterns("__pycache__"))
        sys.meta_path.insert(0, _Queries(self._queries))

    def put(self, mutant: Mutant) -> None:
        """From now on the mutant is what is run."""
        if mutant.group in CODE:
            sys.meta_path.insert(0, _Module(mutant))
            return
        for path in QUERIES.glob("*.sql"):
            shutil.copyfile(path, self._queries / path.name)
        (self._queries / mutant.path.name).write_text(mutant.text, encoding="utf-8")
        _forget_texts()


def _forget_texts() -> None:
    """Empty the caches of our modules: the statements' texts are in one of them."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "pgworker":
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if clear is not None and getattr(value, "__module__", None) == name:
                    clear()
