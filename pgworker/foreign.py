"""Which module of contrib knows a class of another package."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType


def find_adapter(kind: type, adapters: Mapping[str, str]) -> ModuleType | None:
    """The module of ours for a class or one of its bases, by the package that has it; None if there is none.

    It is loaded when the first such class is met: whoever uses that has imported the package by then.
    """
    for base in kind.__mro__:
        module = adapters.get(base.__module__.partition(".")[0])
        if module is not None:
            return import_module(module)
    return None
