"""Names of pipelines as parts of keys, and lists of them: no key is given twice or changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import dagster as dg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from toposort import CircularDependencyError

from arroyo_dagster.errors import InputError
from arroyo_dagster.orchestration import PipelineList
from arroyo_dagster.orchestration.pipelines.lineage import End, without_cycles
from arroyo_dagster.orchestration.pipelines.listing import EpochEnds, Facts, RootListing, merged
from arroyo_dagster.orchestration.pipelines.model import (
    LineageEndpoint,
    ListedPipeline,
    group_names,
    key_part,
    layers,
    with_id,
)

HARD = st.sampled_from("a-_.~ /%ü#'\"\\\n\0\ud800😀-_2")
NAMES = st.one_of(st.text(min_size=1), st.text(HARD, min_size=1, max_size=6))
ROOTS = ["a", "b", "ab/main", "a/b", "orders", "pl_1/orders"]


# ---- names ---------------------------------------------------------------------------------------


@given(st.lists(NAMES, unique=True))
@example(["a-", "a--2d", "-", "--", "---", "a-b", "a_b", "a.b", "a--2eb", "ü" * 255, "😀" * 255])
def test_parts_of_keys_are_injective(names: list[str]) -> None:
    parts = [key_part(name) for name in names]
    assert len({*parts}) == len(names)
    for name, part in zip(names, parts, strict=True):
        assert re.fullmatch(r"[A-Za-z0-9_-]+", part)
        assert "---" not in part
        assert "---" in with_id(part, name)


@given(st.from_regex(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*", fullmatch=True))
def test_ordinary_names_stay(name: str) -> None:
    assert key_part(name) == name


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("orders hourly", "orders--20hourly"),
        ("a/b", "a--2fb"),
        ("größe.v1", "gr--f6--dfe--2ev1"),
        ("日", "--u65e5"),
        ("😀", "--U01f600"),
    ],
)
def test_other_characters_are_escaped(name: str, part: str) -> None:
    assert key_part(name) == part


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        key_part("")


@given(st.lists(st.lists(NAMES.map(key_part), min_size=1, max_size=3).map(tuple), unique=True))
@example([("a-b",), ("a_b",), ("a", "b"), ("a__b",), ("a--2eb",), ("fleet",)])
def test_dagster_loads_each_layer_of_keys(keys: list[tuple[str, ...]]) -> None:
    found = layers(keys)
    assert sorted(key for layer in found for key in layer) == sorted(keys)
    for layer in found:
        order = [keys.index(key) for key in layer]
        assert order == sorted(order)
    groups = group_names(keys, taken=["fleet"])
    assert len({*groups.values(), "fleet"}) == len(keys) + 1

    def assets(number: int, layer: list[tuple[str, ...]]) -> dg.AssetsDefinition:
        specs = [
            dg.AssetSpec([*key, "made"], deps=[[*key, "checkpoint"]], group_name=groups[key])
            for key in layer
        ]
        return dg.multi_asset(name=f"op_{number}", specs=specs, can_subset=True)(lambda: None)

    made = [assets(number, layer) for number, layer in enumerate(found)]
    graph = dg.Definitions(assets=made).resolve_asset_graph()
    assert {tuple(key.path[:-1]) for key in graph.materializable_asset_keys} == {*keys}


# ---- lists ---------------------------------------------------------------------------------------

FACTS = st.builds(
    Facts,
    name=st.sampled_from([None, "", "a", "orders", "a b", "\ud800"]),
    sql=st.sampled_from([None, "CREATE TABLE t WITH (connector='kafka', topic='x')"]),
    newest=st.none()
    | st.builds(
        EpochEnds,
        st.integers(1, 3),
        st.booleans(),
        st.sampled_from([(), (End("source", "source_t_0", "t"),)]),
    ),
    deleted=st.sampled_from([None, None, "the API: no such pipeline"]),
)
STEPS = st.tuples(
    st.sets(st.sampled_from(ROOTS)).map(sorted).map(tuple),
    st.sampled_from([None, None, None, "the listing failed"]),
    st.fixed_dictionaries(dict.fromkeys(ROOTS, FACTS)),
    st.sets(st.sampled_from([*ROOTS, "a b"]), max_size=1),
)


NAMED_A = dict.fromkeys(ROOTS, Facts(name="a"))


@given(st.lists(STEPS, max_size=8))
@example([(("a", "a/b", "b"), None, NAMED_A | {"a": Facts()}, set())])
def test_a_pipeline_keeps_its_key_and_leaves_on_proof_only(steps: list) -> None:
    last: PipelineList | None = None
    for at, (roots, problem, facts, gone) in enumerate(steps):
        listing = RootListing(url="u", roots=roots, listed_at_micros=at, problem=problem)
        found = merged(last, listing, facts, gone)
        before = last or PipelineList("u")
        assert PipelineList.from_json(found.to_json()) == found
        assert before.keys.items() <= found.keys.items()
        assert len({*found.keys.values()}) == len(found.keys)
        assert [one.key for one in found.pipelines] == [
            found.keys[root] for root in sorted(found.by_root, key=lambda root: found.keys[root])
        ]
        if found.problem is not None:
            assert (found.pipelines, found.keys) == (before.pipelines, before.keys)
            assert found.listed_at_micros == before.listed_at_micros
        else:
            assert problem is None
            assert {*roots} - gone <= found.by_root.keys()
            assert {*found.missing} == found.by_root.keys() - {*roots}
            for root in before.by_root.keys() - found.by_root.keys():
                proof = facts[root].deleted if root not in roots else None
                assert proof or before.by_root[root].texts & gone
            for root in before.by_root.keys() & found.by_root.keys():
                old, new = before.by_root[root], found.by_root[root]
                assert old.name == new.name
                assert facts[root].newest or len(new.sources) >= len(old.sources)
        last = found


# ---- edges ---------------------------------------------------------------------------------------

KEYS = st.sets(st.sampled_from([(name,) for name in "uvwxyz"]), max_size=3)


@given(st.lists(st.tuples(KEYS, KEYS), max_size=6), st.randoms())
def test_edges_have_no_cycle_and_depend_on_no_order(ends: list, random) -> None:
    pipelines = [
        ListedPipeline(
            str(number),
            (str(number),),
            sources=tuple(LineageEndpoint(key, "source_t_0") for key in sorted(sources)),
            sinks=tuple(LineageEndpoint(key, "sink_t_1") for key in sorted(sinks)),
        )
        for number, (sources, sinks) in enumerate(ends)
    ]
    lineage = without_cycles(pipelines)
    assert without_cycles(random.sample(pipelines, len(pipelines))) == lineage
    assert _resolves(lineage.sources, lineage.sinks)
    for pipeline in pipelines:
        root = pipeline.root
        kept = {*lineage.sources.get(root, ())} | {*lineage.left_out.get(root, ())}
        kept |= {key for key, roots in lineage.sinks.items() if root in roots}
        assert kept == {end.key for end in (*pipeline.sources, *pipeline.sinks)}
    reads = {one.root: [end.key for end in one.sources] for one in pipelines}
    writes: dict[tuple[str, ...], list[str]] = {}
    for pipeline in pipelines:
        for end in pipeline.sinks:
            writes.setdefault(end.key, []).append(pipeline.root)
    assert _resolves(reads, writes) is (not lineage.left_out)


def _resolves(reads: Mapping[str, Any], writes: Mapping[tuple[str, ...], Any]) -> bool:
    """Whether Dagster takes these edges."""
    specs = [
        dg.AssetSpec(["pipeline", root], deps=[["key", *key] for key in keys])
        for root, keys in reads.items()
    ]
    specs += [
        dg.AssetSpec(["key", *key], deps=[["pipeline", root] for root in roots])
        for key, roots in writes.items()
    ]
    try:
        _ = dg.Definitions(assets=specs).resolve_asset_graph().toposorted_asset_keys
    except CircularDependencyError:
        return False
    return True
