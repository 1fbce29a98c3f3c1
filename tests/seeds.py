"""Seeds of tests that go through other cases in every run; SOAK_SEED repeats a run."""

from __future__ import annotations

import os


def run_seed() -> int:
    """The seed of this run, a new one unless SOAK_SEED gives one.

    It is left in the environment, so that every process of the run has the same.
    """
    new = str(int.from_bytes(os.urandom(3), "big"))
    return int(os.environ.setdefault("SOAK_SEED", new))


def soak_seeds(count: int) -> list[int]:
    """Seeds for soak tests: other ones in every run. The names of the tests tell them."""
    return [run_seed() + at for at in range(count)]
