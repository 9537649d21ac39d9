"""What the sessions of the stress do by chance: which jobs they enqueue, and what they make of claimed ones."""

from __future__ import annotations

import random
from datetime import timedelta

from pgworker import NewJob
from pgworker.job import Claim
from pgworker.outcome import Settlement, Success
from pgworker.statements import Insert

KEYS = tuple(f"k{number:03}" for number in range(400))
_REVISIONS = (None, "r1", "r2", "r3", "r4")


def job(chance: random.Random, key: str) -> NewJob:
    """A job with this key, whose revision may be the one it has."""
    delay = timedelta(seconds=chance.uniform(0.05, 0.3)) if chance.random() < 0.1 else None
    return NewJob(
        chance.randrange(1000),
        key,
        chance.choice(_REVISIONS),
        delay,
        priority=chance.choice((0, 0, 1)),
        urgency=chance.choice(("fresh", "fresh", "catch_up")),
    )


def insert(job: NewJob) -> Insert:
    """The same as a row of the statement."""
    delay = job.delay.total_seconds() if isinstance(job.delay, timedelta) else 0.0
    urgency = int(job.urgency == "catch_up")
    return Insert(job.key or "", job.revision or "", urgency, job.priority, delay, None, None, str(job.payload))


def value(claim: Claim) -> str:
    """A result that says which claim made it."""
    return f'"{claim.id} {claim.generation} {claim.token}"'


def decide(chance: random.Random, claim: Claim) -> Success | Settlement:
    """What becomes of a claimed job."""
    match chance.random():
        case dice if dice < 0.65:
            return Success(value(claim))
        case dice if dice < 0.75:
            return Success(None)
        case dice if dice < 0.83:
            return Settlement("pending", "again", counts=True, delay_seconds=chance.uniform(0, 0.05))
        case dice if dice < 0.88:
            return Settlement("pending", "parked", delay_seconds=0.02)
        case dice if dice < 0.93:
            return Settlement("pending", None)
        case dice if dice < 0.97:
            return Settlement("failed", "failed", counts=True)
        case _:
            return Settlement("cancelled", "cancelled")
