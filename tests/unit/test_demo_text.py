"""The demo's texts: what counts as one, its words, and lines that may be shown."""

from __future__ import annotations

import random

import pytest

from pgworker.demo.search import Piece, best_lines
from pgworker.demo.text import MARK_OFF, MARK_ON, Indexed, apart, decode, together, words_of
from pgworker.payload import codec_for

# --- bytes to text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        ("grüße\n".encode(), "grüße\n"),
        (b"\xef\xbb\xbfwith a mark", "with a mark"),
        ("zwölf".encode("latin-1"), "zwölf"),
        ("wide".encode("utf-16"), "wide"),
        (b"\x1b[31mred\x1b[0m\ttab\f\r\n", "\x1b[31mred\x1b[0m\ttab\f\r\n"),
    ],
)
def test_text_is_decoded(data: bytes, text: str) -> None:
    assert decode(data) == text


@pytest.mark.parametrize(
    "data",
    [b"a\0b", b"\xff\xfe\x00\xd8", random.Random(1).randbytes(4000).replace(b"\0", b""), bytes(range(1, 32))],  # noqa: S311
    ids=["nul", "broken utf-16", "noise", "control characters"],
)
def test_binary_content_is_none(data: bytes) -> None:
    assert decode(data) is None


# --- words ----------------------------------------------------------------------------------------------------------


def test_words_are_counted() -> None:
    found = Indexed("One two_three, app.ENQUEUE(one)\nÉté 3.11\n")
    assert found == {"characters": 41, "lines": 2, "words": 9, "distinct_words": 8, "left_out": 0}
    assert found.words == "one two three app enqueue one été 3 11"


@pytest.mark.parametrize(("text", "lines"), [("", 0), ("a", 1), ("a\n", 1), ("a\n\nb", 3), ("\n", 1)])
def test_lines_are_counted(text: str, lines: int) -> None:
    assert Indexed(text)["lines"] == lines


def test_the_words_are_no_part_of_the_result() -> None:
    assert "secret" not in codec_for(dict[str, int]).encode(Indexed("secret"))


def test_encoded_data_is_no_word() -> None:
    assert Indexed("a " + "x" * 65 + " b").words == "a b"


def test_more_words_than_a_tsvector_holds_are_left_out_from_the_end_on() -> None:
    many = " ".join(f"{number:x}" for number in range(120_000))
    found = Indexed(many)
    kept = found.words.split()
    assert found["words"] == 120_000
    assert found["left_out"] == 120_000 - len(kept)
    assert 50_000 < len(kept) < 110_000
    assert many.startswith(found.words)


def test_a_question_is_taken_apart_like_a_file() -> None:
    assert words_of("App.enqueue_many (Fast)!") == "app enqueue many fast"
    assert words_of("... _ --") == ""


# --- lines ----------------------------------------------------------------------------------------------------------


def on(word: str) -> str:
    return f"{MARK_ON}{word}{MARK_OFF}"


def test_what_is_taken_apart_can_be_put_together() -> None:
    text = "a.b/c@d:e-f_g<h>&i~j+k\nünd"
    assert together(apart(text)) == text
    assert not set("./@:-_<&~+") & set(apart(text))


def test_a_text_cannot_forge_marks_or_steer_a_terminal() -> None:
    forged = apart(f"{on('x')} \x1b]0;title\x07 \x0e\x9b31m \x7f")
    assert not [letter for letter in together(forged) if not letter.isprintable()]


def test_lines_that_show_the_most_different_matches_come_in_their_order() -> None:
    marked = "\n".join(["none", on("a"), f"{on('a')} {on('A')}", f"{on('b')} {on('a')}", on("b"), on("c")])
    lines = best_lines(marked)
    assert [line.number for line in lines] == [2, 4, 6]
    assert lines[1].pieces == [Piece("b", match=True), Piece(" ", match=False), Piece("a", match=True)]


def test_without_a_match_the_first_line_that_says_something_is_shown() -> None:
    assert [(line.number, line.pieces) for line in best_lines("\n  \n  first  \nsecond")] == [
        (3, [Piece("first", match=False)])
    ]
    assert best_lines("") == []


def test_a_long_line_is_cut_around_its_first_match() -> None:
    (line,) = best_lines("x" * 5000 + on("word") + "y" * 5000)
    text = "".join(piece.text for piece in line.pieces)
    assert len(text) < 300
    assert [piece.text for piece in line.pieces if piece.match] == ["word"]
    assert text.startswith("…")
    assert text.endswith("…")


def test_a_match_that_the_cut_ends_in_stays_one() -> None:
    (line,) = best_lines(on("w" * 400))
    assert line.pieces[0].match
    assert MARK_ON not in "".join(piece.text for piece in line.pieces)


def test_what_does_not_print_is_shown_as_a_dot() -> None:
    (line,) = best_lines("safe \u202e\u2066 \x9b31m")
    assert line.pieces == [Piece("safe ·· ·31m", match=False)]
