"""The checkpoint of each pipeline between its sources and sinks, which Dagster does not make."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import dagster as dg

from arroyo_dagster.orchestration.pipelines.lineage import mapped, without_cycles
from arroyo_dagster.orchestration.translator import CHECKPOINT, Names

SINKS_GROUP = "arroyo_sinks"
"""Of sinks with several writers."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Which sources and sinks of pipelines are shown.

    Attributes:
        sources, sinks: True = all, False = none, or other keys by keys, as `kafka/orders`; None
            instead of another key leaves it to you: add `deps` of your own.
    """

    sources: bool | Mapping[str, str | None] = True
    sinks: bool | Mapping[str, str | None] = True


def lineage_specs(names: Names, shown: Lineage, freshness: float | None) -> Sequence[dg.AssetSpec]:
    """Return `checkpoint` of each pipeline, downstream of its sources, and each sink once.

    An edge that would close a cycle is left out, and named in the metadata.

    Args:
        freshness: the maximum age of a checkpoint in seconds, as a policy of Dagster.

    Raises:
        InputError: another key has an empty part.
    """
    pipelines = [
        replace(
            item, sources=mapped(item.sources, shown.sources), sinks=mapped(item.sinks, shown.sinks)
        )
        for item in names.pipelines.pipelines
    ]
    edges = without_cycles(pipelines)
    policy = None
    if freshness is not None:
        policy = dg.FreshnessPolicy.time_window(fail_window=timedelta(seconds=freshness))
    specs = []
    for pipeline in pipelines:
        sources = [dg.AssetKey(key) for key in edges.sources.get(pipeline.root, ())]
        spec = names.spec(CHECKPOINT, pipeline, deps=sources)
        if sources:  # Dagster's pages hide keys that nobody defines
            reads = ", ".join(key.to_user_string() for key in sources)
            spec = spec.merge_attributes(metadata={"arroyo/reads": reads})
        left_out = edges.left_out.get(pipeline.root, ())
        if left_out:
            keys = ", ".join("/".join(key) for key in left_out)
            spec = spec.merge_attributes(metadata={"arroyo/edges_that_close_a_cycle": keys})
        if policy is not None:
            spec = spec.replace_attributes(freshness_policy=policy)
        specs.append(spec)
    kinds = {
        end.key: end.connector
        for pipeline in pipelines
        for end in pipeline.sinks
        if end.connector is not None
    }
    for key, roots in edges.sinks.items():
        writers = [names.spec(CHECKPOINT, names.find(root)) for root in roots]
        kind = kinds.get(key)
        specs.append(
            dg.AssetSpec(
                key,
                deps=[writer.key for writer in writers],
                group_name=writers[0].group_name if len(writers) == 1 else SINKS_GROUP,
                kinds={kind.replace("_", "")[:32]} if kind else None,
                description="What these pipelines write; Dagster produces nothing here.",
            )
        )
    return specs
