"""SDF services as pipelines of ours: what is bound to them, and what comes of it.

    pipelines = build_dataflow(
        load_document("dataflow.yaml"),
        store,
        bindings=Bindings(
            sources={"words": JsonLines("words.jsonl")},       # topic -> Source of topic_schema()
            sinks={"counts": JsonLinesSink("file:///out")},    # topic -> Sink of SINK_SCHEMA
            functions={"increment-hits": "app:increment"},     # name -> callable or module:function
        ),
    )
    for service in pipelines:                                  # owners before their readers
        run_pipeline(service, store)

Every service is one job, `{namespace}.{dataflow}` / `{service}`: exactly once, fencing, compaction
and gc are those of every job. Its operators, by their ids:

| id | what | its tables |
|---|---|---|
| `topics` | all sources of the service as one, with the engine's clock (`service_source.ServiceSource`) | the runtime's `offsets` |
| `records` | sources' transforms, transforms, windows, assign-key | `metrics`; of windows `watermark` |
| `states` | keyed by `_key`: partition's transforms, update-state | one a state, `metrics`, `schemas` |
| `flush` | one subtask: flush, once a closed window | `<state>.flushed`, `metrics` |
| `to.<topic>` | a sink's transforms and converter | `metrics` |
| `sink.<topic>` | the sink that was bound | its own |

A topic of the YAML needs a source where a service reads it, and may have a sink where one writes
it; what is put out to a topic without a sink goes nowhere. How one service's sink becomes another's
source is the business of who binds them.

Reading goes on beside: `view.view(store, dataflow, "service.state")`; see there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from arroyo_dagster.state.operators import Sink, Source
from arroyo_dagster.state.pipeline import Pipeline
from arroyo_dagster.state.sdf.definition import Dataflow, Package
from arroyo_dagster.state.storage.store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """What a dataflow needs besides its YAML.

    Attributes:
        sources: by topic; each gives `boundary.topic_schema(...)`.
        sinks: by topic; each takes `boundary.SINK_SCHEMA`.
        functions: by the name of a step's function (`-` and `_` are the same): a callable, or
            `module:function`. For bodies in another language, and functions of packages.
        packages: loaded packages by id, for the bodies written in their YAML.
        env: what user code sees as `env`.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    functions: Mapping[str, Callable[..., Any] | str] = field(default_factory=dict)
    packages: Mapping[str, Package] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def build_dataflow(
    dataflow: Dataflow,
    store: ObjectStore,
    *,
    bindings: Bindings,
    parallelism: int = 1,
    keep_epochs: int | None = None,
    on_error: str = "skip",
    migrate: bool = False,
) -> list[Pipeline]:
    """Every service of a dataflow as a pipeline, owners of states before those who read them.

    Args:
        store: where the states lie; services read each other's from there.
        parallelism, keep_epochs: of every pipeline.
        on_error: `skip` a record whose function fails, or `fail` the run.
        migrate: let a state have more columns than it was stored with.

    Raises:
        InputError: a topic that is read has no source, a source gives other columns; a function
            is not bound (E26) or not to be found.
    """
    raise NotImplementedError
