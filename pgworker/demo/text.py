"""From bytes to text, and from text to the words that are indexed."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from typing import Final

BINARY: Final = "binary"

_WORD: Final = re.compile(r"[^\W_]+")
_LONGEST_WORD: Final = 64  # longer ones are encoded data, and Postgres has a limit, too
# A tsvector holds at most 1 MiB: each word once, four bytes beside it, two for each of its first 256 places.
_MOST_BYTES: Final = 900_000
_WORD_BYTES, _PLACE_BYTES, _MOST_PLACES = 4, 2, 256

_UTF16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_IN_NO_TEXT: Final = bytes({*range(0x20), 0x7F} - {*b"\b\t\n\v\f\r\x1b"})
_BINARY_SHARE: Final = 0.02


class Indexed(dict[str, int]):
    """A file's statistics, which become its job's result. `words` go along to the app's own write, and no further."""

    __slots__ = ("words",)

    def __init__(self, text: str) -> None:
        spoken = [word for word in _WORD.findall(text.lower()) if len(word) <= _LONGEST_WORD]
        counts = Counter(spoken)
        kept = _fitting(spoken, counts)
        super().__init__(
            characters=len(text),
            lines=text.count("\n") + (not text.endswith("\n") and text != ""),
            words=len(spoken),
            distinct_words=len(counts),
            left_out=len(spoken) - len(kept),
        )
        self.words = " ".join(kept)


def _fitting(spoken: list[str], counts: Counter[str]) -> list[str]:
    """As many of the words, from the first on, as surely fit into a tsvector."""
    while (size := _tsvector_bytes(counts)) > _MOST_BYTES:
        spoken = spoken[: len(spoken) * _MOST_BYTES // size]
        counts = Counter(spoken)
    return spoken


def _tsvector_bytes(counts: Counter[str]) -> int:
    return sum(
        len(word.encode()) + _WORD_BYTES + _PLACE_BYTES * min(count, _MOST_PLACES) for word, count in counts.items()
    )


def decode(data: bytes) -> str | None:
    """The text of a file, None for binary content. What is no UTF-8 (or UTF-16 that says so) is read as Latin-1."""
    if data.startswith(_UTF16):
        try:
            return data.decode("utf-16")
        except UnicodeDecodeError:
            return None
    if b"\0" in data or len(data) - len(data.translate(None, _IN_NO_TEXT)) > _BINARY_SHARE * len(data):
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def words_of(text: str) -> str:
    """The words of a question, told apart as those of a file are."""
    return " ".join(_WORD.findall(text.lower()))


# --- for ts_headline ------------------------------------------------------------------------------------------------

MARK_ON, MARK_OFF = "\x02", "\x03"
# Characters that Postgres' parser joins words by (app.enqueue a host, a/b a file, <b> a tag), each with a stand-in that
# it takes for a gap. These are control characters, so a text's own are blanked first: it cannot forge a mark.
_JOINING: Final = "./@:-_<&~+"
_STAND_INS: Final = "\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17"
_BLANKED: Final = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n")}, ord(" "))
_APART: Final = _BLANKED | str.maketrans(_JOINING, _STAND_INS)
_TOGETHER: Final = str.maketrans(_STAND_INS, _JOINING)


def apart(text: str) -> str:
    """A text whose words Postgres' parser tells apart as we do, without control characters of its own."""
    return text.translate(_APART)


def together(text: str) -> str:
    """What `apart` was given, but for the control characters."""
    return text.translate(_TOGETHER)
