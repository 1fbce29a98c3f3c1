"""An asset that each pipeline has: one step makes it for the pipelines that a run selects."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.serving import BoundsConfig, Turn, serve
from arroyo_dagster.orchestration.translator import Names, in_layers

AssetWork = Callable[[Turn, dg.AssetKey, Any, dg.AssetExecutionContext], Iterator[Any]]
"""Makes the asset of this key for one pipeline, by the configuration of the run; yields events."""


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """The step that makes the asset `table` of the pipelines that a run selects.

    Attributes:
        config: of the step; one without `BoundsConfig` has the default bounds.
        work: makes the asset of one pipeline.
        pool: of the step.
        resources: keys that the step needs beside those of every step.
        check: raises where a run must not serve the pipelines that it selects.
        in_turn: as of `serve`.
    """

    table: str
    config: type[dg.Config]
    work: AssetWork
    pool: str
    resources: Sequence[str] = ()
    check: Callable[[Sequence[ListedPipeline]], None] = lambda selected: None
    in_turn: bool = False


def build_pipeline_assets(
    names: Names, step: PipelineStep, pipelines: Mapping[ListedPipeline, Sequence[dg.AssetKey]]
) -> list[dg.AssetsDefinition]:
    """Build an asset of pipelines: one step, or several for keys that Dagster cannot tell apart.

    A pipeline for which nothing was to do has made nothing. What waits or fails is an observation
    of its asset.

    Args:
        pipelines: those that have the asset, each with its upstream assets.
    """
    table, config_class = step.table, step.config
    specs = [
        (pipeline, names.spec(table, pipeline, deps=deps).replace_attributes(skippable=True))
        for pipeline, deps in pipelines.items()
    ]

    def build(op: str, layer: Sequence[tuple[ListedPipeline, dg.AssetSpec]]) -> dg.AssetsDefinition:
        @dg.multi_asset(
            name=op,
            specs=[spec for _, spec in layer],
            pool=names.name(step.pool),
            can_subset=True,
            required_resource_keys={*names.resources, *step.resources},
        )
        def make(
            context: dg.AssetExecutionContext,
            config: config_class,  # type: ignore[valid-type]
        ) -> Any:
            bounds = config if isinstance(config, BoundsConfig) else BoundsConfig()
            selected = [listed for listed, spec in layer if spec.key in context.selected_asset_keys]
            step.check(selected)

            def serve_one(turn: Turn) -> Iterator[Any]:
                yield from step.work(turn, names.key(table, turn.pipeline), config, context)

            yield from serve(
                context,
                selected,
                serve_one,
                bounds,
                names.tools(context),
                noted=lambda pipeline: names.key(table, pipeline),
                in_turn=step.in_turn,
            )

        return make

    return in_layers(names.name(f"arroyo_{table}"), specs, build)
