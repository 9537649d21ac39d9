"""`python -m pgworker`, and the installed command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit. What nobody foresaw is told in one line as well; --debug shows the traceback."""
    from pgworker.cli import app  # noqa: PLC0415 - nothing of it is loaded by an import of this module

    try:
        app()
    except Exception as error:  # noqa: BLE001 - the last resort: told, and the exit code says so
        from pgworker.cli.errors import report_internal  # noqa: PLC0415 - only if needed

        sys.exit(report_internal(error, debug="--debug" in sys.argv))


if __name__ == "__main__":
    main()
