"""The demo's folders: which files there are, and reading one without being led astray."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pgworker.demo import files
from pgworker.demo.files import (
    LARGEST,
    TOO_LARGE,
    UNREADABLE,
    VANISHED,
    Listing,
    Refused,
    content_revision,
    default_folder,
    from_text,
    list_files,
    read_file,
    real_folder,
    revision,
    stamp_of,
    to_text,
)
from pgworker.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]


def make(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"this is {path}")


def refused(root: Path, path: str) -> str:
    with pytest.raises(Refused) as raised:
        read_file(str(root), path)
    return raised.value.code


# --- listing --------------------------------------------------------------------------------------------------------


def test_files_are_listed_by_their_path_in_the_folder(tmp_path: Path) -> None:
    make(tmp_path, "b.txt", "a/deep/c.txt", ".hidden/d.txt", ".dotfile")
    assert sorted(list_files(str(tmp_path)).files) == [".dotfile", ".hidden/d.txt", "a/deep/c.txt", "b.txt"]


def test_what_tools_leave_is_no_part_of_a_folder(tmp_path: Path) -> None:
    make(tmp_path, "kept.txt", "sub/kept.txt")
    make(tmp_path, *(f"{junk}/x.txt" for junk in (".git", ".venv", "node_modules", "sub/__pycache__", "site-packages")))
    make(
        tmp_path, "my-env/pyvenv.cfg", "my-env/x.txt", "cache/CACHEDIR.TAG", "cache/x.txt", "pg/PG_VERSION", ".DS_Store"
    )
    assert sorted(list_files(str(tmp_path)).files) == ["kept.txt", "sub/kept.txt"]


def test_the_folder_itself_may_be_called_anything(tmp_path: Path) -> None:
    make(tmp_path, "site-packages/pyvenv.cfg", "site-packages/x.txt")
    assert sorted(list_files(str(tmp_path / "site-packages")).files) == ["pyvenv.cfg", "x.txt"]


def test_links_fifos_and_sockets_are_no_files(tmp_path: Path) -> None:
    make(tmp_path, "inside/a.txt", "outside/secret.txt")
    (tmp_path / "inside/link.txt").symlink_to(tmp_path / "outside/secret.txt")
    (tmp_path / "inside/folder").symlink_to(tmp_path / "outside")
    (tmp_path / "inside/loop").symlink_to(tmp_path / "inside")
    os.mkfifo(tmp_path / "inside/fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(tmp_path / "inside")  # the name of a socket is short
        try:
            listening.bind("socket")
        finally:
            os.chdir(here)
        assert list(list_files(str(tmp_path / "inside")).files) == ["a.txt"]


def test_a_folder_that_cannot_be_listed_may_hold_what_was_seen_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "a.txt", "closed/b.txt", "closedness/c.txt")
    scandir = os.scandir

    def guarded(path: str) -> object:
        if path.endswith("/closed"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    listing = list_files(str(tmp_path))
    assert sorted(listing.files) == ["a.txt", "closedness/c.txt"]
    assert listing.closed == ["closed"]
    assert listing.may_hold("closed/b.txt")
    assert listing.may_hold("closed/deeper/b.txt")
    assert not listing.may_hold("closedness/c.txt")


def test_a_root_that_is_gone_is_an_error_and_no_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list_files(str(tmp_path / "nowhere"))
    assert not Listing().files


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * LARGEST)
    (tmp_path / "empty").touch()
    assert read_file(str(tmp_path), "a") == b"x" * LARGEST
    assert read_file(str(tmp_path), "empty") == b""


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * (LARGEST + 1))
    assert refused(tmp_path, "a") == TOO_LARGE


@pytest.mark.timeout(10)
def test_what_is_no_regular_file_by_now_has_vanished_and_blocks_nobody(tmp_path: Path) -> None:
    make(tmp_path, "inside/a.txt", "outside/secret.txt")
    (tmp_path / "inside/file").symlink_to(tmp_path / "outside/secret.txt")
    (tmp_path / "inside/folder").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "inside/fifo")
    (tmp_path / "inside/sub").mkdir()
    for path in ("missing", "missing/deep", "a.txt/below", "file", "folder/secret.txt", "fifo", "sub"):
        assert refused(tmp_path / "inside", path) == VANISHED, path


@pytest.mark.parametrize("path", ["../outside", "a/../../outside", "/etc/hostname", "", "a//b", "./a", "a\0b"])
def test_no_path_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    make(tmp_path, "outside", "root/a")
    assert refused(tmp_path / "root", path) == UNREADABLE


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_unreadable_and_another_one_with_it(tmp_path: Path) -> None:
    make(tmp_path, "a")
    (tmp_path / "a").chmod(0)
    assert refused(tmp_path, "a") == UNREADABLE
    closed = revision(str(tmp_path), "a", present(tmp_path, "a"))
    assert closed == revision(str(tmp_path), "a", present(tmp_path, "a"))
    (tmp_path / "a").chmod(0o600)
    assert revision(str(tmp_path), "a", present(tmp_path, "a")) != closed


# --- revisions ------------------------------------------------------------------------------------------------------


def present(root: Path, path: str) -> files.Stamp:
    stamp = stamp_of(str(root), path)
    assert stamp is not None
    return stamp


def test_the_revision_is_the_contents_hash(tmp_path: Path) -> None:
    make(tmp_path, "a")
    found = revision(str(tmp_path), "a", present(tmp_path, "a"))
    assert found == content_revision(b"this is a")
    os.utime(tmp_path / "a", (0, 0))
    assert revision(str(tmp_path), "a", present(tmp_path, "a")) == found


def test_a_file_that_is_too_large_is_not_read_for_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * (LARGEST + 1))
    monkeypatch.setattr(files, "read_file", None)
    found = revision(str(tmp_path), "a", present(tmp_path, "a"))
    assert found is not None
    os.utime(tmp_path / "a", (0, 0))
    assert revision(str(tmp_path), "a", present(tmp_path, "a")) != found


def test_a_file_that_cannot_be_read_has_a_revision_of_what_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "a")

    def denied(root: str, path: str) -> bytes:
        raise Refused(UNREADABLE)

    monkeypatch.setattr(files, "read_file", denied)
    found = revision(str(tmp_path), "a", present(tmp_path, "a"))
    assert found == revision(str(tmp_path), "a", present(tmp_path, "a"))
    (tmp_path / "a").chmod(0o640)  # the change that may let us in
    assert found != revision(str(tmp_path), "a", present(tmp_path, "a"))


def test_a_file_that_is_gone_has_none(tmp_path: Path) -> None:
    make(tmp_path, "a")
    stamp = present(tmp_path, "a")
    (tmp_path / "a").unlink()
    assert revision(str(tmp_path), "a", stamp) is None
    assert stamp_of(str(tmp_path), "a") is None


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        b"plain.txt",
        "grüße/ü.txt".encode(),
        b"caf\xe9.txt",
        b"back\\slash",
        b"\\xff",
        b"\xff\\xff\\",
        b"new\nline",
        b"\xed\xa0\x80",
    ],
)
def test_any_name_has_a_text_that_leads_back_to_it(name: bytes) -> None:
    text = to_text(os.fsdecode(name))
    assert text.encode()  # no lone surrogate
    assert os.fsencode(from_text(text)) == name


def test_two_names_never_share_a_text() -> None:
    names = [b"\xff", b"\\xff", b"\\\\xff", b"\\\xff"]
    assert len({to_text(os.fsdecode(name)) for name in names}) == len(names)


# --- folders --------------------------------------------------------------------------------------------------------


def test_the_default_folder_is_the_source_tree() -> None:
    assert default_folder() == REPOSITORY


def test_a_folder_is_known_by_its_real_path(tmp_path: Path) -> None:
    make(tmp_path, "real/a")
    (tmp_path / "link").symlink_to("real")
    assert real_folder(tmp_path / "link") == tmp_path / "real"
    with pytest.raises(ConfigError, match="there is no folder"):
        real_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not a folder"):
        real_folder(tmp_path / "real/a")
