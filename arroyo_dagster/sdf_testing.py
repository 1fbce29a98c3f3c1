"""Test functions of SDF packages and whole dataflows in memory.

from arroyo_dagster.sdf_testing import DataflowTrial, Trial, package_tests

def test_words_are_counted():
    flow = DataflowTrial("dataflow.yaml")
    flow.send("sentences", "to be or not", "to be").run()
    assert flow.state("count-words.hits") == {"to": 2, "be": 2, "or": 1, "not": 1}
    assert flow.failed == {}

@pytest.mark.parametrize("test", package_tests("sdf-package.yaml"), ids=str)
def test_package(test):                     # every entry of the section `tests` of the package
    test.check()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.definition.loading import load_dataflow, load_package
from arroyo_dagster.dataflow.testing.dataflow_tests import DataflowTest
from arroyo_dagster.dataflow.testing.in_process import DataflowTrial
from arroyo_dagster.dataflow.testing.package_tests import PackageTest
from arroyo_dagster.dataflow.testing.runner import Trial
from arroyo_dagster.dataflow.testing.section import TestOutcome
from arroyo_dagster.dataflow.testing.suite import Functions, find_tests, run_tests

__all__ = [
    "DataflowTrial",
    "OneDataflowTest",
    "OnePackageTest",
    "Trial",
    "dataflow_tests",
    "load_trial",
    "package_tests",
]


@dataclass(frozen=True, slots=True)
class OnePackageTest:
    """One entry of a package's section `tests`; `check` runs it on fresh states."""

    test: PackageTest
    run: Callable[[], TestOutcome]

    def check(self) -> None:
        """Run it.

        Raises:
            AssertionError: the outcome differs from the expected one.
        """
        outcome = self.run()
        assert outcome.passed, f"{outcome.function}: {outcome.problem}"

    def __str__(self) -> str:
        return f"{self.test.function}: {self.test.name}"


@dataclass(frozen=True, slots=True)
class OneDataflowTest:
    """One entry of a dataflow's section `tests`; `check` runs it without any state from before."""

    test: DataflowTest
    run: Callable[[], TestOutcome]

    def check(self) -> None:
        """Run it.

        Raises:
            AssertionError: the outcome differs from the expected one.
        """
        outcome = self.run()
        assert outcome.passed, outcome.problem

    def __str__(self) -> str:
        return self.test.name


def package_tests(path: str | Path, *, functions: Functions | None = None) -> list[OnePackageTest]:
    """Return the tests of a package, for `pytest.mark.parametrize`.

    Args:
        path: an sdf-package.yaml, or its folder.
        functions: Python functions for bodies that are not Python in the YAML, by name.

    Raises:
        InvalidDefinition: the package, or its section `tests`, has errors. Other errors as in
            `load_package`.
    """
    package, packages = load_package(path)
    return [
        OnePackageTest(test, _runner(package, packages, test, functions))
        for test in find_tests(package, packages)
        if isinstance(test, PackageTest)
    ]


def dataflow_tests(
    path: str | Path, *, functions: Functions | None = None
) -> list[OneDataflowTest]:
    """Return the tests of a dataflow, for `pytest.mark.parametrize`.

    Args:
        path: a dataflow.yaml.
        functions: Python functions for bodies that are not Python in the YAML, by name.

    Raises:
        InvalidDefinition: the dataflow, or its section `tests`, has errors. Other errors as in
            `load_dataflow`.
    """
    dataflow, packages = load_dataflow(path)
    return [
        OneDataflowTest(test, _runner(dataflow, packages, test, functions))
        for test in find_tests(dataflow, packages)
        if isinstance(test, DataflowTest)
    ]


def _runner(
    document: Dataflow | Package,
    packages: dict[str, Package],
    test: PackageTest | DataflowTest,
    functions: Functions | None,
) -> Callable[[], TestOutcome]:
    def run() -> TestOutcome:
        (outcome,) = run_tests(document, packages, [test], functions=functions)
        return outcome

    return run


def load_trial(path: str | Path, **options: Any) -> Trial:
    """Return a trial of a package, from its file or folder. `options`: arguments of `Trial`."""
    package, packages = load_package(path)
    return Trial(package, packages=packages, **options)
