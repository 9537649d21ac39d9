"""An environment for each queue, made once: `.venv-peers/NAME` beside the repository's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.peers.catalogue import Peer

_ROOT: Final = Path(__file__).parents[2] / ".venv-peers"
_STAMP: Final = "installed.txt"
_NEW_ENOUGH: Final = "import sys; sys.exit(sys.version_info < (3, 12))"


def installed(peer: Peer) -> Path:
    """The interpreter that can import the queue; pip is asked when there is none yet, or for other versions."""
    folder = _ROOT / peer.name
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = "\n".join(peer.requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([_interpreter(), "-m", "venv", "--clear", str(folder)], check=True)  # noqa: S603 - our own list
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.requirements]
        subprocess.run(command, check=True)  # noqa: S603 - our own list
        stamp.write_text(wanted)
    return python


def _interpreter() -> str:
    """One that all of them run on: PEERS_PYTHON, our own, or one on the path. Raises FileNotFoundError without."""
    for name in (os.environ.get("PEERS_PYTHON"), sys.executable, "python3.13", "python3.12"):
        found = shutil.which(name) if name else None
        if found and subprocess.run([found, "-c", _NEW_ENOUGH], check=False, stderr=subprocess.DEVNULL).returncode == 0:  # noqa: S603 - our own list
            return found
    raise FileNotFoundError("Python 3.12 or newer is needed, which oban asks for: PEERS_PYTHON=/path/to/python3.12")


def version_of(peer: Peer, python: Path) -> str:
    """The version that was installed."""
    code = f"from importlib.metadata import version; print(version({peer.name!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603 - our own list
