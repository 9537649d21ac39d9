"""The contract plugin when the tests run in several processes: slow to start, so not among the unit tests."""

from __future__ import annotations

import pytest

from tests.unit.test_contract_plugin import count, make, run

__all__ = ["run"]  # a fixture


def test_workers_are_counted_together(run: pytest.Pytester) -> None:
    make(
        run,
        "@pytest.mark.parametrize('n', range(6))\n@pytest.mark.contract('A1')\ndef test_a(n): pass",
        "@pytest.mark.parametrize('n', range(6))\n@pytest.mark.contract('A2')\ndef test_b(n): assert n != 3",
        "@pytest.mark.field('L01')\ndef test_deselected(): pass",
        "@pytest.mark.race(1)\ndef test_race(): pass",
        "@pytest.mark.ruling('4.1')\ndef test_crash():\n    import os\n    os._exit(1)",
    )
    result = run.runpytest("--contract", "-pxdist", "-n2", "-k", "not deselected")
    assert count(result) == [
        "contract A 3 covered 1 waived 1 open 1",
        "contract B 1 covered 0 waived 0 open 1",
        "races 1 covered 1 waived 0 open 0",
        "field 1 covered 0 waived 0 open 1",
        "rulings 2 covered 0 waived 0 open 2",
    ]


def test_groups_which_change_the_names_of_tests_are_counted(run: pytest.Pytester) -> None:
    make(run, "@pytest.mark.contract('B1')\n@pytest.mark.xdist_group('one')\ndef test_a(): pass")
    result = run.runpytest("--contract", "-pxdist", "-n1", "--dist=loadgroup")
    assert count(result)[1] == "contract B 1 covered 1 waived 0 open 0"


def test_workers_stop_at_a_wrong_id(run: pytest.Pytester) -> None:
    make(run, "@pytest.mark.contract('A9')\ndef test_wrong(): pass", "def test_other(): assert False")
    result = run.runpytest("--contract", "-pxdist", "-n2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.assert_outcomes()
    assert [line for line in result.outlines if line.startswith("ERROR")] == [
        "ERROR: test_workers_stop_at_a_wrong_id.py::test_wrong: unknown id A9: not in promises.toml [contract]"
    ]
