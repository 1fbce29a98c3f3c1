"""How fast stored keys and values decode, and keys hash, beside a loop over them in Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arroyo_dagster.state.codec.bincode.codec import Codec, codec_for
from arroyo_dagster.state.codec.hashing.routing import HashVariant, hash_key, hash_keys, key_hashes
from arroyo_dagster.state.model.types import I64, U32, U64, SystemTimeNanos
from arroyo_dagster.state.tables.known.operators import ExpressionWatermarkState
from arroyo_dagster.state.tables.known.sources import KafkaState
from tests.benchmarks.conftest import Comparison

VALUES = 1_000_000
# A loop takes so long that it is measured on a part, and its time scaled up.
PART = 20


@dataclass(frozen=True)
class Counted:
    name: str
    count: U64
    last: bool


def _made() -> dict[str, tuple[Any, Sequence[Any]]]:
    chance = np.random.default_rng(1)
    small = chance.integers(0, 1000, VALUES).tolist()
    large = chance.integers(0, 2**40, VALUES).tolist()
    times = chance.integers(10**18, 2 * 10**18, VALUES).tolist()
    return {
        "keys of 32 bits": (U32, small),
        "numbers of 64 bits": (I64, large),
        "Kafka offsets": (KafkaState, list(map(KafkaState, small, large))),
        "watermarks": (
            ExpressionWatermarkState,
            [ExpressionWatermarkState(at, at + 1) for at in times],
        ),
        "optional times": (SystemTimeNanos | None, [at if at % 3 else None for at in times]),
        "texts": (str, [f"key-{number}" for number in large]),
        "text, number and flag": (
            Counted,
            [Counted(f"key-{number}", number, number % 2 == 0) for number in large],
        ),
    }


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Any, Sequence[Any]]]:
    return _made()


@pytest.mark.parametrize(
    "shape",
    [
        "keys of 32 bits",
        "numbers of 64 bits",
        "Kafka offsets",
        "watermarks",
        "optional times",
        "texts",
        "text, number and flag",
    ],
)
def test_a_million_values_against_a_loop(
    shape: str, made: dict[str, tuple[Any, Sequence[Any]]], comparison: Comparison
) -> None:
    kind, values = made[shape]
    codec: Codec[Any] = codec_for(kind)
    raw = codec.encode_many(values)
    column = pa.array(raw, pa.binary())
    part = raw[: VALUES // PART]
    _compare(
        f"decode {shape}",
        lambda: codec.decode_column(column),
        lambda: codec.decode_many(part),
        comparison,
        goal=10.0,
    )


@pytest.mark.parametrize("variant", HashVariant)
def test_a_million_routing_keys(variant: HashVariant, comparison: Comparison) -> None:
    keys = pa.array([f"key-{number}" for number in range(VALUES)])
    part = keys.slice(0, 200)

    def loop() -> None:
        for row in range(len(part)):
            key_hashes([part.slice(row, 1)], variant=variant)

    _compare(
        f"_key_hash {variant.value}",
        lambda: key_hashes([keys], variant=variant),
        loop,
        comparison,
        goal=10.0 if variant is HashVariant.FALLBACK else 1.0,
        scale=VALUES // len(part),
    )


def test_a_million_keys_of_the_standard_hasher(comparison: Comparison) -> None:
    keys = [f"shardId-{number:012}" for number in range(VALUES // 10)]
    part = keys[:500]
    _compare(
        "hash_key",
        lambda: hash_keys(keys),
        lambda: [hash_key(key) for key in part],
        comparison,
        goal=0.3,
        values=len(keys),
        scale=len(keys) // len(part),
    )


def _compare(
    name: str,
    ours: Callable[[], object],
    loop: Callable[[], object],
    comparison: Comparison,
    *,
    goal: float,
    values: int = VALUES,
    scale: int = PART,
) -> None:
    """Print the ratio to the loop, then values a second; the goal is in millions of them."""
    comparison.name = f"{name}, to a loop in Python"
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(6):
        for kept, call, factor in ((times[0], ours, 1), (times[1], loop, scale)):
            begun = time.perf_counter()
            call()
            if turn:
                kept.append((time.perf_counter() - begun) * factor)
    comparison.report(times[0], times[1], goal=0.1)
    print(f"{name}: {values / min(times[0]) / 1e6:.1f} M values/s, goal {goal}")
