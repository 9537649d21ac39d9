"""Find the App that a command line names."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Final

from pgworker.app import App
from pgworker.errors import AppNotFound, PgworkerError, UnknownKind
from pgworker.kind import Kind

_OURS: Final = str(Path(__file__).parents[1])


def load_app(target: str) -> App:
    """Import `module:attribute`, with the current folder on the path. Raises AppNotFound, which says what to do."""
    module_name, _, attribute = target.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        hint = ""
        if "/" in module_name or module_name.endswith(".py"):
            dotted = ".".join(part for part in module_name.removesuffix(".py").split("/") if part not in {"", "."})
            hint = f"; for that file: {dotted}:{attribute or 'app'}"
        msg = f"{target!r} names no app: write module:attribute, for example myapp.jobs:app{hint}"
        raise AppNotFound(msg)
    here = str(Path.cwd())
    if here not in sys.path:  # `python -m pgworker` has it there, the installed command has not
        sys.path.insert(0, here)
    return _app_in(_import(module_name), attribute)


def known_kind(app: App, name: str) -> Kind:
    """The app's kind of this name. Raises UnknownKind."""
    kinds = app.kinds
    if name not in kinds:
        msg = f"the app has no kind {name!r}; it has {', '.join(sorted(kinds)) or 'none'}"
        raise UnknownKind(msg)
    return kinds[name]


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise AppNotFound(_failure(name, error)) from error
        msg = (
            f"there is no module {error.name!r}, neither in {Path.cwd()} nor installed: "
            f"start in the folder that holds it, or install it"
        )
        raise AppNotFound(msg) from error
    except (Exception, SystemExit) as error:
        raise AppNotFound(_failure(name, error)) from error


def _failure(name: str, error: BaseException) -> str:
    """What the module raised, and where: the innermost line, or the one that called us if it is we who refuse."""
    frames: Iterable[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)[1:]  # the first is _import's
    if isinstance(error, PgworkerError):
        frames = takewhile(lambda frame: not frame.filename.startswith(_OURS), frames)
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith("<frozen")]
    where = places[-1] if places else name
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip().partition("\n")[0]
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"module {name!r} does not import: {said} ({where}); --debug shows the traceback"


def _app_in(module: ModuleType, attribute: str) -> App:
    try:
        value: object = getattr(module, attribute)
    except AttributeError as error:
        apps = [name for name, each in vars(module).items() if isinstance(each, App)]
        hint = f"; did you mean {module.__name__}:{apps[0]}?" if apps else ", and no App under another name"
        msg = f"module {module.__name__!r} has no attribute {attribute!r}{hint}"
        raise AppNotFound(msg) from error
    if not isinstance(value, App):
        msg = f"{module.__name__}:{attribute} is of type {type(value).__name__}, not a pgworker.App"
        raise AppNotFound(msg)
    return value
