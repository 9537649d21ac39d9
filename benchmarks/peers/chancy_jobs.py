"""chancy's jobs: it looks them up by the module that they are in, which the started script is not."""

from __future__ import annotations

from chancy import job
from driving import note_noop, note_stamp


@job(queue="bench")
async def noop(*, payload: str) -> None:  # noqa: ARG001 - nothing is done with it
    """Do nothing."""
    note_noop()


@job(queue="bench")
async def stamp(*, now: float) -> None:
    """Tell how long it took."""
    note_stamp(now)
