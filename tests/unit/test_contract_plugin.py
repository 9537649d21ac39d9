"""The contract plugin on small test runs of its own: what it refuses, what it counts, what it prints."""

from __future__ import annotations

import pytest

from tests.contract.report import MARKERS, Catalogue, CatalogueError, Promise, Tally

PROMISES = """
[contract]
A1 = "one"
A2 = "two"
A3 = "three"
B1 = "other"
[races]
1 = "race"
[field]
L01 = "fault"
[rulings]
"4.1" = "ruling"
"4.10" = "another"
"""
WAIVED = """
[contract]
A3 = "not wanted here"
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with our plugin, a small catalogue and nothing else."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing those again takes most of a second
    pytester.makeconftest('pytest_plugins = ["tests.plugins.contract"]')
    pytester.makeini("[pytest]\ncontract_folder = .\naddopts = --strict-markers\nxfail_strict = false")
    pytester.path.joinpath("promises.toml").write_text(PROMISES)
    pytester.path.joinpath("waived.toml").write_text(WAIVED)
    return pytester


def make(run: pytest.Pytester, *tests: str) -> None:
    run.makepyfile("import pytest\n" + "\n".join(tests))


def count(result: pytest.RunResult) -> list[str]:
    """The last lines of the output, one a system: nothing may come after them."""
    return result.outlines[-5:]


NOTHING_COVERED = [
    "contract A 3 covered 0 waived 1 open 2",
    "contract B 1 covered 0 waived 0 open 1",
    "races 1 covered 0 waived 0 open 1",
    "field 1 covered 0 waived 0 open 1",
    "rulings 2 covered 0 waived 0 open 2",
]


def test_passing_tests_cover_their_promises_and_the_lines_come_last(run: pytest.Pytester) -> None:
    make(
        run,
        "@pytest.mark.contract('A1', 'B1')\ndef test_a(): pass",
        "@pytest.mark.race(1)\n@pytest.mark.field('L01')\n@pytest.mark.ruling('4.10')\ndef test_b(): pass",
    )
    result = run.runpytest("--contract")
    assert result.ret == pytest.ExitCode.OK
    assert count(result) == [
        "contract A 3 covered 1 waived 1 open 1",
        "contract B 1 covered 1 waived 0 open 0",
        "races 1 covered 1 waived 0 open 0",
        "field 1 covered 1 waived 0 open 0",
        "rulings 2 covered 1 waived 0 open 1",
    ]
    result.stdout.fnmatch_lines(["open contract A: A2", "open rulings: 4.1"])
    result.stdout.no_fnmatch_line("open contract B*")


def test_without_the_option_nothing_is_printed(run: pytest.Pytester) -> None:
    make(run, "@pytest.mark.contract('A1')\ndef test_a(): pass")
    result = run.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*contract*")


def test_one_test_that_does_not_pass_leaves_its_promise_open(run: pytest.Pytester) -> None:
    bodies = {
        "A1": "@pytest.mark.parametrize('n', [1, 2])\n{}def test_fails_once(n): assert n == 1",
        "A2": "{}def test_skips(): pytest.skip('no')",
        "B1": "@pytest.mark.xfail\n{}def test_fails_as_expected(): assert False",
        "C1": "@pytest.mark.xfail\n{}def test_passes_unexpectedly(): pass",
        "C2": "@pytest.mark.skip\n{}def test_is_skipped(): pass",
        "D1": "@pytest.fixture\ndef early(): raise OSError\n{}def test_fails_in_setup(early): pass",
        "D2": "@pytest.fixture\ndef late():\n    yield\n    raise OSError\n{}def test_fails_in_teardown(late): pass",
        "D3": "",
    }
    run.path.joinpath("promises.toml").write_text("[contract]\n" + "\n".join(f"{id_} = 'x'" for id_ in bodies))
    run.path.joinpath("waived.toml").write_text("")
    marks = {id_: f"@pytest.mark.contract({id_!r})\n" for id_ in bodies}
    make(
        run,
        *(body.format(marks[id_]) for id_, body in bodies.items()),
        *(f"{mark}def test_good_{id_}(): pass" for id_, mark in marks.items()),
    )
    result = run.runpytest("--contract")
    assert result.outlines[-4:] == [
        "contract A 2 covered 0 waived 0 open 2",
        "contract B 1 covered 0 waived 0 open 1",
        "contract C 2 covered 0 waived 0 open 2",
        "contract D 3 covered 1 waived 0 open 2",
    ]


@pytest.mark.parametrize("option", ["-k=good", "-x"])
def test_a_test_that_did_not_run_leaves_its_promise_open(run: pytest.Pytester, option: str) -> None:
    make(
        run,
        "@pytest.mark.contract('A1')\ndef test_good(): pass",
        "def test_stop(): assert False",
        "@pytest.mark.contract('A1')\ndef test_other(): pass",
    )
    assert count(run.runpytest("--contract", option)) == NOTHING_COVERED


def test_a_wrong_id_stops_the_run_and_names_the_test(run: pytest.Pytester) -> None:
    complaints = {
        "contract('A9')": "unknown id A9: not in promises.toml [contract]",
        "race(2)": "unknown id race 2: not in promises.toml [races]",
        "field('L9')": "unknown id L9: not in promises.toml [field]",
        "ruling('4.2')": "unknown id ruling 4.2: not in promises.toml [rulings]",
        "contract('A1', 'A3')": "A3 is waived (waived.toml) and has a test: drop one",
        "ruling(4.1)": "ruling takes ids as str: (4.1,)",
        "race('1')": "race takes ids as int: ('1',)",
        "contract()": "contract takes ids as str: ()",
        "field": "field takes ids as str: ()",
    }
    make(
        run,
        *(f"@pytest.mark.{mark}\ndef test_{number}(): assert False" for number, mark in enumerate(complaints)),
    )
    result = run.runpytest("--contract")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.assert_outcomes()
    file = f"{test_a_wrong_id_stops_the_run_and_names_the_test.__name__}.py"
    assert [line for line in result.outlines if line.startswith("ERROR")] == [
        f"ERROR: {file}::test_{number}: {complaint}" for number, complaint in enumerate(complaints.values())
    ]
    assert "covered" not in result.stdout.str()


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("waived.toml", '[contract]\nA9 = "what?"', r"waived.toml: not in promises.toml: A9"),
        ("waived.toml", '[contract]\nA1 = " "', r"waived.toml: \[contract\] A1: one line"),
        ("promises.toml", '[promises]\nA1 = "one"', r"promises.toml: no such table: \[promises\]"),
    ],
)
def test_a_catalogue_that_contradicts_itself_is_refused(
    run: pytest.Pytester, file: str, text: str, complaint: str
) -> None:
    run.path.joinpath(file).write_text(text)
    with pytest.raises(CatalogueError, match=complaint):
        Catalogue.load(run.path)


def test_a_refused_catalogue_stops_the_run(run: pytest.Pytester) -> None:
    run.path.joinpath("waived.toml").write_text('[field]\nL99 = "what?"')
    result = run.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *waived.toml: not in promises.toml: L99"])


def test_a_promise_is_covered_only_from_setup_to_teardown() -> None:
    promise = Promise("contract", "A1")
    tally = Tally(Catalogue({promise: "one"}, {}))
    assert not tally.covered(promise)
    tally.carries("t", [promise])
    for when in ("setup", "call", "teardown"):
        assert not tally.covered(promise)
        tally.step("t", when, passed=True)
    assert tally.covered(promise)
    tally.step("t", "call", passed=False)
    assert not tally.covered(promise)


@pytest.mark.ruling("1.36")
def test_the_catalogue_of_this_project() -> None:
    catalogue = Catalogue.load()
    counts: dict[str, int] = {}
    for promise in catalogue.titles:
        counts[promise.system] = counts.get(promise.system, 0) + 1
    assert counts == {
        "contract A": 71,
        "contract B": 79,
        "contract C": 32,
        "contract D": 90,
        "contract X": 40,
        "races": 14,
        "field": 38,
        "rulings": 92,
    }
    assert {"D87", "D88"} <= {promise.id for promise in catalogue.waived}
    assert {promise.table for promise in catalogue.titles} == {table for table, _ in MARKERS.values()}
