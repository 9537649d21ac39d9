"""What an HTTP provider's answer means for a job: go on, wait for the provider, or give up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

from pgworker.outcome import Pause, Permanent

_OK: Final = 400  # below it: no error
_SERVER_ERROR: Final = 500
_PROVIDERS_FAULT: Final = frozenset({401, 403, 408, 425, 429})
"""Not the request's fault: credentials, quota, timing. The same request may succeed once that is mended."""
_DEFAULT_PAUSE: Final = timedelta(seconds=5)
_LONGEST_PAUSE: Final = timedelta(days=30)  # whatever a broken provider asks for


def judge_response(
    status: int, retry_after: str | None = None, *, pause: timedelta = _DEFAULT_PAUSE, shared: bool = False
) -> Pause | Permanent | None:
    """What to return from the handler after this answer; None when it is no error.

    401, 403, 408, 425, 429 and 5xx are no fault of the job: a Pause of the runner (with `shared`, of the kind in every
    process) for as long as the Retry-After header says, else for `pause`; no attempt is counted. Any other 4xx is
    Permanent. The code is `http_` and the status, never anything of the answer's text.
    """
    if status < _OK:
        return None
    code = f"http_{status}"
    if status in _PROVIDERS_FAULT or status >= _SERVER_ERROR:
        return Pause(parse_retry_after(retry_after) or pause, code, shared=shared)
    return Permanent(code)


def parse_retry_after(value: str | None, *, now: datetime | None = None) -> timedelta | None:
    """The wait that a Retry-After header asks for, given as seconds or as an HTTP date; None if it asks for none.

    What is no such value, or lies in the past, asks for none. At most 30 days. `now` is aware, the present by default.
    """
    text = (value or "").strip()
    if text.isascii() and text.isdigit():
        return min(timedelta(seconds=min(int(text), 10**9)), _LONGEST_PAUSE) or None
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    if until.tzinfo is None:  # "-0000": universal time from a sender that does not tell its zone
        until = until.replace(tzinfo=UTC)
    wait = until - (now or datetime.now(UTC))
    return min(wait, _LONGEST_PAUSE) if wait > timedelta(0) else None
