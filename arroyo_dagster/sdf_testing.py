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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arroyo_dagster.dataflow.definition.loading import load_package
from arroyo_dagster.dataflow.testing.in_process import DataflowTrial
from arroyo_dagster.dataflow.testing.package_tests import PackageTest, read_tests, run_test
from arroyo_dagster.dataflow.testing.runner import Trial

__all__ = ["DataflowTrial", "OnePackageTest", "Trial", "load_trial", "package_tests"]


@dataclass(frozen=True, slots=True)
class OnePackageTest:
    """One entry of a package's section `tests`; `check` runs it on fresh states."""

    test: PackageTest
    fresh: Callable[[], Trial]

    def check(self) -> None:
        """Run it.

        Raises:
            AssertionError: the outcome differs from the expected one.
        """
        outcome = run_test(self.test, self.fresh())
        assert outcome.passed, f"{outcome.function}: {outcome.problem}"

    def __str__(self) -> str:
        return f"{self.test.function}: {self.test.name}"


def package_tests(
    path: str | Path, *, functions: Mapping[str, Callable[..., Any] | str] | None = None
) -> list[OnePackageTest]:
    """Return the tests of a package, for `pytest.mark.parametrize`.

    Args:
        path: an sdf-package.yaml, or its folder.
        functions: Python functions for bodies that are not Python in the YAML, by name.

    Raises:
        InvalidDefinition: the package, or its section `tests`, has errors. Other errors as in
            `load_package`.
    """
    package, packages = load_package(path)

    def fresh() -> Trial:
        return Trial(package, functions=functions, packages=packages)

    return [OnePackageTest(test, fresh) for test in read_tests(package)]


def load_trial(path: str | Path, **options: Any) -> Trial:
    """Return a trial of a package, from its file or folder. `options`: arguments of `Trial`."""
    package, packages = load_package(path)
    return Trial(package, packages=packages, **options)
