"""Runs a page's Python snippets in one namespace, with `await` at the top level, as `python -m asyncio` does.

Started by the interpreter of whoever reads the page, so it imports the standard library alone. Each line of its input
is a snippet as JSON; each line of its answer is what that printed, and the traceback if it raised.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import sys
import traceback
import types


def main() -> None:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    answers = sys.stdout
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            snippet = json.loads(line)
            printed, error = io.StringIO(), ""
            source = "\n" * snippet["line"] + snippet["text"]  # so that a traceback names the page's own line
            with contextlib.redirect_stdout(printed):
                try:
                    code = compile(source, snippet["page"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                    result = eval(code, vars(module))  # noqa: S307 - that is what it is for
                    if inspect.iscoroutine(result):
                        runner.run(result)
                except Exception:  # noqa: BLE001 - told to the test
                    error = traceback.format_exc()
            print(json.dumps({"printed": printed.getvalue(), "error": error}), file=answers, flush=True)


if __name__ == "__main__":
    main()
