"""The markers that tie tests to promises: contract("A17"), race(3), field("L07"), ruling("4.1").

A test that names an unknown or a waived id stops the run. With --contract the run ends with the count of what is
covered. Under xdist the workers collect and send what they found; the controller counts, since all reports come to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias, cast

import pytest

from tests.contract.report import MARKERS, Catalogue, CatalogueError, Promise, Tally

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# What a worker sends to the controller: plain lists and strings, as execnet carries nothing else.
Carriers: TypeAlias = "dict[str, list[tuple[str, str]]]"

_KEY: Final = pytest.StashKey["ContractPlugin"]()
_CARRIERS: Final = "contract_carriers"
_FAULTS: Final = "contract_faults"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --contract, and an ini setting for the folder of the two catalogues."""
    parser.getgroup("contract").addoption(
        "--contract", action="store_true", help="end with the count of promises: covered, waived, open"
    )
    parser.addini("contract_folder", "folder of promises.toml and waived.toml", type="paths", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Describe the markers and read the catalogue; a catalogue that contradicts itself is a usage error."""
    for line in (
        "contract(id, ...): asserts these promises, as in contract('A17')",
        "race(number, ...): forces these interleavings, as in race(3)",
        "field(id, ...): replays these faults of other systems, as in field('L07')",
        "ruling(id, ...): asserts these design rulings, as in ruling('4.1')",
    ):
        config.addinivalue_line("markers", line)
    folders = config.getini("contract_folder")
    try:
        catalogue = Catalogue.load(folders[0]) if folders else Catalogue.load()
    except CatalogueError as error:
        raise pytest.UsageError(str(error)) from error
    plugin = config.stash[_KEY] = ContractPlugin(config, Tally(catalogue))
    config.pluginmanager.register(plugin, "contract-tally")


class ContractPlugin:
    """The hooks that need the run's tally."""

    def __init__(self, config: pytest.Config, tally: Tally) -> None:
        self._config = config
        self._tally = tally
        self._faults: list[str] = []
        self._carriers: list[tuple[pytest.Item, list[Promise]]] = []

    @pytest.hookimpl(tryfirst=True)  # before -k and -m: a deselected test carries its promises too, unproved
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Look who carries what, and refuse ids that are unknown or waived."""
        self._carriers = [(item, list(self._promises_of(item))) for item in items]
        if self._faults:  # raised here under xdist it would look like a crash: run nothing, and tell at the end
            items.clear()

    def pytest_collection_finish(self) -> None:
        """Note who carries what, by names that no longer change; an xdist worker leaves it for the controller."""
        carriers: Carriers = {
            item.nodeid: [(promise.table, promise.id) for promise in promises]
            for item, promises in self._carriers
            if promises
        }
        self._note(carriers)
        output = _worker_output(self._config)
        if output is not None:
            output[_CARRIERS] = carriers
            output[_FAULTS] = self._faults

    def _promises_of(self, item: pytest.Item) -> Iterator[Promise]:
        for name, (table, called) in MARKERS.items():
            for mark in item.iter_markers(name):
                wanted = int if name == "race" else str
                if mark.kwargs or not mark.args or not all(type(id_) is wanted for id_ in mark.args):
                    self._faults.append(f"{item.nodeid}: {name} takes ids as {wanted.__name__}: {mark.args!r}")
                    continue
                for id_ in mark.args:
                    promise = Promise(table, str(id_))
                    if promise not in self._tally.catalogue.titles:
                        self._faults.append(f"{item.nodeid}: unknown id {called}{id_}: not in promises.toml [{table}]")
                    elif promise in self._tally.catalogue.waived:
                        self._faults.append(
                            f"{item.nodeid}: {promise} is waived (waived.toml) and has a test: drop one"
                        )
                    else:
                        yield promise

    def _note(self, carriers: Carriers) -> None:
        for test, promises in carriers.items():
            self._tally.carries(test, (Promise(table, id_) for table, id_ in promises))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take over what an xdist worker collected; a worker that crashed sends nothing, the others the same."""
        output: dict[str, object] = getattr(node, "workeroutput", {})
        self._note(cast("Carriers", output.get(_CARRIERS, {})))
        self._faults.extend(fault for fault in cast("list[str]", output.get(_FAULTS, [])) if fault not in self._faults)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the result of one step; an expected failure that passed proves nothing either."""
        passed = report.passed and not hasattr(report, "wasxfail")
        self._tally.step(report.nodeid, str(report.when), passed=passed)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: what is printed here comes after pytest's own last line
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Turn faults into a usage error; print the count when it was asked for."""
        if self._faults:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        yield
        if _worker_output(self._config) is not None:
            return
        terminal = cast("pytest.TerminalReporter | None", self._config.pluginmanager.getplugin("terminalreporter"))
        if terminal is None:
            return
        for fault in self._faults:
            terminal.write_line(f"ERROR: {fault}", red=True)
        if self._config.getoption("contract") and not self._faults:
            terminal.write_sep("=", "contract")
            for line in (*self._tally.open_lines(), *self._tally.count_lines()):
                terminal.write_line(line)


def _worker_output(config: pytest.Config) -> dict[str, object] | None:
    """Where an xdist worker leaves what the controller shall see; None in the controller and without xdist."""
    return getattr(config, "workeroutput", None)
