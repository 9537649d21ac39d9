"""The mutants of pure Python code: one row of a table, one branch or one constant of a decision changed at a time.

Only inside the definitions that are named, and only what decides: no messages, annotations, docstrings or log lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Final

from tests.mutants.sqltext import Edit, shortened

_COMPARISONS: Final[dict[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OPERATORS: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.Pow: ("**", "*"),
}
_SWAPPED: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_MESSAGES: Final = frozenset({"msg", "what", "message", "problem"})


@dataclass(frozen=True, slots=True)
class Change:
    """A stretch of the source, and what stands there instead."""

    start: int
    end: int
    new: bytes
    name: str


class Source:
    """A module's text, by its syntax tree; positions are in bytes, as the tree's columns are."""

    def __init__(self, text: str) -> None:
        self.bytes = text.encode()
        self.tree = ast.parse(text)
        self._lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node: ast.expr | ast.pattern | ast.keyword | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.pattern | ast.keyword | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def shown(self, start: int, end: int) -> str:
        return " ".join(self.bytes[start:end].decode().split())

    def line(self, start: int) -> int:
        return self.bytes.count(b"\n", 0, start) + 1

    def line_text(self, start: int) -> str:
        """The line around a position: what tells one constant from the next."""
        end = self.bytes.find(b"\n", start)
        line = self.bytes[self.bytes.rfind(b"\n", 0, start) + 1 : end if end >= 0 else None].decode()
        return line.split("  #")[0].strip().rstrip(",")

    def definition(self, name: str) -> ast.stmt:
        """What a dotted name defines: a function, a class, or an assignment to the name."""
        body: Sequence[ast.stmt] = self.tree.body
        found: ast.stmt | None = None
        for part in name.split("."):
            found = next((node for node in body if part in _defined(node)), None)
            if found is None:
                raise LookupError(f"no definition of {name}")
            body = found.body if isinstance(found, ast.ClassDef) else ()
        assert found is not None
        return found


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


class _Finder:
    """Walks one definition and collects its changes."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def walk(self, node: ast.AST, above: ast.AST) -> Iterator[Change]:
        if self._tells(node):
            return
        yield from self.changes(node, above)
        for child in self._children(node):
            yield from self.walk(child, node)

    @staticmethod
    def _tells(node: ast.AST) -> bool:
        """Whether this only says something to people, or to a type checker."""
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Expr(value=ast.Constant()):
                return True
            case ast.Assign(targets=[ast.Name(id=name)]):
                return name in _MESSAGES and isinstance(node.value, (ast.Constant, ast.JoinedStr, ast.IfExp))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="_log"))):
                return True
            case ast.keyword(arg=str(name)):
                return name in _MESSAGES
            case _:
                return False

    @staticmethod
    def _children(node: ast.AST) -> Iterator[ast.AST]:
        match node:
            case ast.AnnAssign(value=value):
                yield from [value] if value else []
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from node.body
            case ast.ClassDef():
                yield from (each for each in node.body if isinstance(each, (ast.AnnAssign, ast.Assign)))
            case ast.Call(func=ast.Name(id="cast"), args=[_, value]):
                yield value
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, classes]):
                yield classes
            case ast.Subscript(slice=ast.Constant()):
                yield node.value
            case _:
                yield from ast.iter_child_nodes(node)

    def _shown(self, node: ast.expr | ast.pattern | ast.keyword) -> str:
        return self.source.shown(self.source.start(node), self.source.end(node))

    def _change(self, start: int, end: int, new: str, about: str) -> Change:
        return Change(start, end, new.encode(), about)

    def _replace(self, node: ast.expr | ast.pattern, new: str) -> Change:
        return self._change(self.source.start(node), self.source.end(node), new, f"{self._shown(node)} -> {new}")

    def _constant(self, node: ast.Constant, new: str) -> Change:
        start = self.source.start(node)
        about = f"{self.source.line_text(start)}: {self._shown(node)} -> {new}"
        return self._change(start, self.source.end(node), new, about)

    @singledispatchmethod
    def changes(self, node: ast.AST, above: ast.AST) -> Iterator[Change]:
        """The changes at this node itself, not below it."""
        del node, above
        yield from ()

    @changes.register
    def _(self, node: ast.Constant, above: ast.AST) -> Iterator[Change]:
        if isinstance(above, (ast.Tuple, ast.List, ast.Set)):
            return  # it is left out, which is change enough
        match node.value:
            case bool(value):
                if not isinstance(above, ast.keyword):
                    yield self._constant(node, str(not value))
            case int(value) | float(value):
                yield self._constant(node, str(value + 1))
            case str():
                if self._is_value(node, above):
                    yield self._constant(node, '"mutant"')
            case _:
                pass

    @staticmethod
    def _is_value(node: ast.Constant, above: ast.AST) -> bool:
        """Whether this text is what comes of the code, not a name in it."""
        match above:
            case ast.Call(func=ast.Name(id=name)):
                return name[0].isupper()
            case ast.Dict(values=values):
                return node in values
            case _:
                return isinstance(above, (ast.Return, ast.IfExp, ast.AnnAssign, ast.Assign))

    @changes.register
    def _(self, node: ast.Compare, above: ast.AST) -> Iterator[Change]:
        operands = [node.left, *node.comparators]
        for index, operator in enumerate(node.ops):
            if isinstance(above, ast.BoolOp) and not isinstance(operator, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
                continue  # left out as a term
            old, new = _COMPARISONS[type(operator)]
            start = self.source.end(operands[index])
            between = self.source.bytes[start : self.source.start(operands[index + 1])].decode()
            at = start + between.index(old)
            yield self._change(at, at + len(old), new, f"{self._shown(node)}: {old} -> {new}")

    @changes.register
    def _(self, node: ast.BinOp, above: ast.AST) -> Iterator[Change]:
        if type(node.op) in _OPERATORS:
            old, new = _OPERATORS[type(node.op)]
            at = self.source.bytes.index(old.encode(), self.source.end(node.left))
            yield self._change(at, at + len(old), new, f"{self._shown(node)}: {old} -> {new}")

    @changes.register
    def _(self, node: ast.BoolOp, above: ast.AST) -> Iterator[Change]:
        for value in node.values:
            yield self._replace(value, str(isinstance(node.op, ast.And)))

    @changes.register
    def _(self, node: ast.UnaryOp, above: ast.AST) -> Iterator[Change]:
        if isinstance(node.op, ast.Not) and not isinstance(above, ast.BoolOp):
            start = self.source.start(node)
            inner = self.source.bytes[start + len("not") : self.source.end(node)].decode()
            yield self._replace(node, inner.strip())

    @changes.register(ast.If)
    @changes.register(ast.IfExp)
    def _(self, node: ast.If | ast.IfExp, above: ast.AST) -> Iterator[Change]:
        if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):  # those are changed inside
            yield self._replace(node.test, f"not {self._shown(node.test)}")

    @changes.register
    def _(self, node: ast.match_case, above: ast.AST) -> Iterator[Change]:
        if isinstance(node.pattern, ast.MatchAs) and node.pattern.pattern is None:
            return  # the one that type checkers prove to be impossible
        start = self.source.start(node.pattern)
        end = self.source.end(node.guard or node.pattern)
        yield self._change(start, end, "_ if False", f"no case {self.source.shown(start, end)}")

    @changes.register
    def _(self, node: ast.Call, above: ast.AST) -> Iterator[Change]:
        name = self._shown(node.func)
        if name in _SWAPPED:
            yield self._replace(node.func, _SWAPPED[name])
        for keyword in node.keywords:
            number = isinstance(keyword.value, ast.Constant) and type(keyword.value.value) in (int, float)
            if keyword.arg is None or keyword.arg in _MESSAGES or number or name in ("_check", "timedelta"):
                continue
            start = self.source.start(keyword)
            about = f"{self.source.line_text(start)}: no {self._shown(keyword)}"
            yield self._removal(start, self.source.end(keyword), about)

    @changes.register(ast.Tuple)
    @changes.register(ast.List)
    @changes.register(ast.Set)
    def _(self, node: ast.Tuple | ast.List | ast.Set, above: ast.AST) -> Iterator[Change]:
        if isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(above, (ast.Tuple, ast.List)):
            return  # names that are bound; a row that a loop unpacks, which is left out as a whole
        if len(node.elts) == 1 and isinstance(node, ast.Set):
            yield self._replace(node, "()")
        for each in node.elts if len(node.elts) > 1 else ():
            about = f"{self._shown(node)} without {self._shown(each)}"
            if isinstance(node, ast.Tuple) and len(node.elts) == 2:  # one that is left needs its comma
                (other,) = (other for other in node.elts if other is not each)
                yield self._change(self.source.start(node), self.source.end(node), f"({self._shown(other)},)", about)
            else:
                yield self._removal(self.source.start(each), self.source.end(each), about)

    @changes.register
    def _(self, node: ast.Dict, above: ast.AST) -> Iterator[Change]:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None and len(node.keys) > 1:
                about = f"no row {self._shown(key)}"
                yield self._removal(self.source.start(key), self.source.end(value), about)

    def _removal(self, start: int, end: int, about: str) -> Change:
        """An element, and the comma after it, or before it where it is the last."""
        text = self.source.bytes
        after = re.compile(rb"\s*,[^\S\n]*").match(text, end)
        before = re.compile(rb",\s*$").search(text[:start])
        if after:
            end = after.end()
        elif before:
            start = before.start()
        return Change(start, end, b"", about)


def mutants(text: str, names: Sequence[str]) -> Iterator[Edit]:
    """All mutants of these definitions of a module, named apart."""
    source = Source(text)
    seen: dict[str, int] = {}
    for definition in names:
        for change in _Finder(source).walk(source.definition(definition), source.tree):
            name = f"{definition}: {shortened(change.name)}"
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                name += f" #{seen[name]}"
            mutated = source.bytes[: change.start] + change.new + source.bytes[change.end :]
            yield Edit(name, source.line(change.start), mutated.decode())
