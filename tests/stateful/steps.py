"""Steps of a machine with weights.

Hypothesis' own rules are all equally likely, and half of them are switched off in each example: with eighteen of them
hardly an example would claim a job and also end it. One rule that draws a step keeps the shrinking and the invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st

F = TypeVar("F", bound=Callable[..., None])
_MARK = "_step"


@dataclass(frozen=True)
class Step:
    """A method of the machine and what to call it with."""

    name: str
    arguments: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def step(weight: int, **arguments: st.SearchStrategy[Any]) -> Callable[[F], F]:
    """Mark a method as a step that is drawn this often."""

    def mark(method: F) -> F:
        setattr(method, _MARK, (weight, arguments))
        return method

    return mark


def steps_of(namespace: Mapping[str, object]) -> st.SearchStrategy[Step]:
    """All marked methods among these attributes of a class."""
    drawn: list[st.SearchStrategy[Step]] = []
    for name, method in namespace.items():
        weight, arguments = getattr(method, _MARK, (0, {}))
        drawn += [st.builds(Step, st.just(name), st.fixed_dictionaries(arguments))] * weight
    return st.sampled_from(drawn).flatmap(lambda each: each)
