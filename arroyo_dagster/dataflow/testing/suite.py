"""Run the tests of a definition: of a package function by function, of a dataflow as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from arroyo_dagster.dataflow.definition.definition import Dataflow, Package
from arroyo_dagster.dataflow.runtime.functions import unbound_error
from arroyo_dagster.dataflow.runtime.service import DEAD_LETTER
from arroyo_dagster.dataflow.testing import dataflow_tests, package_tests
from arroyo_dagster.dataflow.testing.dataflow_tests import DataflowTest
from arroyo_dagster.dataflow.testing.in_process import DataflowTrial
from arroyo_dagster.dataflow.testing.package_tests import PackageTest
from arroyo_dagster.dataflow.testing.runner import Trial
from arroyo_dagster.dataflow.testing.section import TestOutcome

Functions = Mapping[str, Callable[..., Any] | str]
Tests = Sequence[PackageTest] | Sequence[DataflowTest]


def find_tests(
    document: Dataflow | Package, packages: Mapping[str, Package], *, only: Sequence[str] = ()
) -> list[PackageTest | DataflowTest]:
    """Return the tests of a definition; empty if it has none.

    Args:
        document: the definition.
        packages: the packages that it imports, by id.
        only: the names of the tests; empty = all.

    Raises:
        InvalidDefinition: the section `tests` has errors; with all of them.
    """
    found: Iterable[PackageTest | DataflowTest] = (
        dataflow_tests.read_tests(document)
        if isinstance(document, Dataflow)
        else package_tests.read_tests(document, packages)
    )
    return [test for test in found if not only or test.name in only]


def run_tests(
    document: Dataflow | Package,
    packages: Mapping[str, Package],
    tests: Iterable[PackageTest | DataflowTest],
    *,
    functions: Functions | None = None,
    env: Mapping[str, str] | None = None,
) -> list[TestOutcome]:
    """Run tests, each without any state from before.

    Args:
        document: the definition.
        packages: the packages that it imports, by id.
        tests: tests of this definition.
        functions: Python functions for bodies in other languages, by name.
        env: the environment that functions see as `env`.

    Raises:
        UnboundOperatorError: a package's tests call functions that are not bound (E26), with all.
        InputError: a function cannot be loaded.
    """
    if isinstance(document, Dataflow):
        whole = (document, dict(packages))

        def dataflow() -> DataflowTrial:
            return DataflowTrial(whole, functions=functions, env=env, on_error=DEAD_LETTER)

        return [
            dataflow_tests.run_test(test, dataflow)
            for test in tests
            if isinstance(test, DataflowTest)
        ]

    def package() -> Trial:
        return Trial(document, functions=functions, packages=packages, env=env)

    chosen = [test for test in tests if isinstance(test, PackageTest)]
    unbound = package().unbound({test.function for test in chosen})
    if unbound:
        raise unbound_error({name: f"function `{name}`" for name in unbound})
    return [package_tests.run_test(test, package()) for test in chosen]
