"""Somebody who does what a page says: types its commands, saves its files, and looks whether the output is as shown.

sh      runs in bash; the next block goes on in its folder and environment. `python -m pgworker run ...` is left
        running, as in a terminal of its own, until the page starts another one or ends; then Ctrl-C must end it well
python  is a file, if its first line is a comment with a file's name (`# jobs.py`; `# jobs.py, continued` adds to it),
        else a snippet; all snippets of a page share a namespace
sql     is what psql would be given
text    is the output of the block before it, where `...` stands for anything, and names and times of another machine
        for ours; of a worker, the lines to wait for
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import psycopg
from psycopg.pq.abc import PGresult

from tests.docs.markdown import Block

_FILE: Final = re.compile(r"# (\w+\.py)(, continued)?$")
_SESSION: Final = Path(__file__).with_name("session.py")
_RUN: Final = "python -m pgworker run "
_VARYING: Final = {
    re.compile(r"[^\s=]+@\S+:\d+/\w+"): "DATABASE",
    re.compile(r"[^\s=]+:\d+:[0-9a-f]{6}"): "RUNNER",
    re.compile(r"\b[0-9.]+ s\b"): "SECONDS",
    re.compile(r" +"): " ",
    re.compile(r"([─-])\1+"): r"\1",
}
_NUMBERS: Final = {20, 21, 23, 700, 701, 1700}  # the types that psql aligns to the right
_SECONDS: Final = 20.0
_INSTALL_SECONDS: Final = 400.0


class Worker:
    """`python -m pgworker run ...`, and what it prints."""

    def __init__(self, block: Block, cwd: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            shlex.split(block.text, comments=True),
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        self._printed = b""
        self._block = block

    def expect(self, lines: Sequence[str]) -> None:
        """Wait for these lines, in any order: jobs run side by side."""
        until = time.monotonic() + _SECONDS
        for line in lines:
            wanted = re.compile(_pattern(line))
            while not any(map(wanted.fullmatch, _lines(self._text))):
                assert self._read(until), f"{self._block}: no line {line!r} in:\n{self._text}"

    @property
    def _text(self) -> str:
        return self._printed.decode()

    def _read(self, until: float) -> bool:
        if not select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            return False
        piece = os.read(self._pipe.fileno(), 65536)
        self._printed += piece
        return piece != b""

    def stop(self) -> None:
        """As Ctrl-C does; it must end well."""
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(_SECONDS)
        while self._read(time.monotonic() + _SECONDS):
            pass
        assert code == 0, f"{self._block} exited with {code}:\n{self._text}"

    def end(self) -> None:
        """Kill it if it still runs, and close its pipe."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._pipe.close()


class Reader:
    """One reader of one page. `env` must hold PGWORKER_DSN, and the PATH on which `python` is the one to be used."""

    def __init__(self, cwd: Path, env: Mapping[str, str]) -> None:
        self.cwd = cwd
        self.env = dict(env)
        self._session: subprocess.Popen[str] | None = None
        self._workers: list[Worker] = []

    def follow(self, page: Sequence[Block], skipped: Callable[[Block], bool] = lambda _: False) -> None:
        """Do what the blocks say, in order. Raises AssertionError with the block that failed."""
        before: Block | None = None
        output = ""
        for block in page:
            if block.language == "text":
                assert before is not None, f"{block}: output of what?"
                if not skipped(before):
                    self._compare(block, before, output)
                continue
            before = block
            if not skipped(block):
                output = self._do(block)
        for worker in self._workers[-1:]:
            worker.stop()

    def close(self) -> None:
        """End whatever still runs."""
        for worker in self._workers:
            worker.end()
        if self._session is not None:
            self._session.kill()
            self._session.communicate()

    # --- do ---------------------------------------------------------------------------------------------------------

    def _do(self, block: Block) -> str:
        match block.language:
            case "sh" if block.text.startswith(_RUN):
                return self._start_worker(block)
            case "sh":
                return self._shell(block)
            case "sql":
                return self._sql(block)
            case "python":
                return self._save(block) if _FILE.match(block.first_line) else self._snippet(block)
            case _:
                raise AssertionError(f"{block}: nobody knows how to run {block.language!r}")

    def _start_worker(self, block: Block) -> str:
        for worker in self._workers[-1:]:
            worker.stop()
        self._workers.append(Worker(block, self.cwd, self.env))
        return ""

    def _shell(self, block: Block) -> str:
        """The block, and after it its folder and environment, on a descriptor of their own."""
        read, write = os.pipe()
        try:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", f"{block.text}\n{{ pwd && env -0; }} >&{write}"],
                cwd=self.cwd,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[write],
                timeout=_INSTALL_SECONDS if "pip install" in block.text else _SECONDS * 2,
                check=False,
            )
            os.close(write)
            write = -1
            with os.fdopen(read, "rb") as pipe:
                after = pipe.read().decode()
            read = -1
        finally:
            for end in (read, write):
                if end >= 0:
                    os.close(end)
        assert done.returncode == 0, f"{block} exited with {done.returncode}:\n{done.stdout}"
        folder, _, environment = after.partition("\n")
        self.cwd = Path(folder)
        self.env = dict(entry.split("=", 1) for entry in environment.split("\0") if entry)
        return done.stdout

    def _sql(self, block: Block) -> str:
        printed: list[str] = []
        with psycopg.connect(self.env["PGWORKER_DSN"], autocommit=True) as connection:
            cursor = connection.execute(block.text.encode())
            while True:
                if cursor.description:
                    assert cursor.pgresult is not None
                    printed += _as_psql(cursor.pgresult)
                if not cursor.nextset():
                    return "\n".join(printed)

    def _save(self, block: Block) -> str:
        found = _FILE.match(block.first_line)
        assert found
        with (self.cwd / found[1]).open("a" if found[2] else "x", encoding="utf-8") as file:
            file.write(("\n\n" if found[2] else "") + block.text + "\n")
        return ""

    def _snippet(self, block: Block) -> str:
        if self._session is None:
            script = _SESSION.read_text(encoding="utf-8")  # run as a file, it would have its own folder on the path
            self._session = subprocess.Popen(
                ["python", "-c", script],
                cwd=self.cwd,
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._session.stdin is not None
        assert self._session.stdout is not None
        print(json.dumps(vars(block)), file=self._session.stdin, flush=True)
        answer = cast("dict[str, str]", json.loads(self._session.stdout.readline()))
        assert not answer["error"], f"{block}:\n{answer['error']}"
        return answer["printed"]

    # --- compare ----------------------------------------------------------------------------------------------------

    def _compare(self, shown: Block, block: Block, output: str) -> None:
        if block.language == "sh" and block.text.startswith(_RUN):
            self._workers[-1].expect(_lines(shown.text))
            return
        wanted = re.compile("\n".join(_pattern(line) for line in _lines(shown.text)))
        until = time.monotonic() + _SECONDS
        while not wanted.fullmatch("\n".join(_lines(output))):
            patient = _looks(block) and time.monotonic() < until
            assert patient, f"{block} printed\n{output}\nand not what {shown} shows"
            time.sleep(0.1)
            output = self._do(block)


def _looks(block: Block) -> bool:
    """Whether it only looks, so that it may look again: what it waits for is another process's doing."""
    if block.language == "sql":
        return block.text.startswith("select ") and "enqueue(" not in block.text
    return block.text.startswith("python -m pgworker status")


def _lines(text: str) -> list[str]:
    """The lines that say something, without what is another on each machine: names, times, and so columns' widths."""
    for varies, instead in _VARYING.items():
        text = varies.sub(instead, text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _pattern(line: str) -> str:
    """The line as a regular expression, `...` being anything in it, or any number of lines if it stands alone."""
    if line.strip() == "...":
        return r"(?:.*\n)*?.*"
    return ".*".join(re.escape(part) for part in line.split("..."))


def _as_psql(result: PGresult) -> Iterator[str]:
    """A result as psql prints it: the texts that the server sent."""
    names = [(result.fname(at) or b"").decode() for at in range(result.nfields)]
    rows = [[(result.get_value(row, at) or b"").decode() for at in range(len(names))] for row in range(result.ntuples)]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    sides = [">" if result.ftype(at) in _NUMBERS else "<" for at in range(len(names))]
    yield "|".join(f" {name:^{width}} " for name, width in zip(names, widths, strict=True))
    yield "+".join("-" * (width + 2) for width in widths)
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        yield "|".join(f" {text:{side}{width}} " for text, side, width in cells)
    yield f"({len(rows)} row{'' if len(rows) == 1 else 's'})"


@contextmanager
def reading(cwd: Path, env: Mapping[str, str]) -> Iterator[Reader]:
    """A reader in this folder; whatever they left running is ended."""
    reader = Reader(cwd, env)
    try:
        yield reader
    finally:
        reader.close()
