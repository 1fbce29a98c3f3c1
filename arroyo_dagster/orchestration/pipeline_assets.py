"""An asset that each pipeline has: one step makes it for the pipelines that a run selects."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from arroyo_dagster.orchestration.pipelines.model import ListedPipeline
from arroyo_dagster.orchestration.serving import BoundsConfig, Turn, serve
from arroyo_dagster.orchestration.translator import Names, in_layers

AssetWork = Callable[[Turn, dg.AssetKey, Any, dg.AssetExecutionContext], Iterator[Any]]
"""Makes the asset of this key for one pipeline, by the configuration of the run; yields events."""


def build_pipeline_assets(
    names: Names,
    table: str,
    pipelines: Mapping[ListedPipeline, Sequence[dg.AssetKey]],
    config_class: type[dg.Config],
    work: AssetWork,
    *,
    pool: str,
    more_resources: Sequence[str] = (),
    check: Callable[[Sequence[ListedPipeline]], None] = lambda selected: None,
    in_turn: bool = False,
) -> list[dg.AssetsDefinition]:
    """Build the asset `table` of pipelines: one step, or several for keys that Dagster confuses.

    A pipeline for which nothing was to do has made nothing. What waits or fails is an observation
    of its asset.

    Args:
        pipelines: those that have the asset, each with its upstream assets.
        config_class: of the step; one without `BoundsConfig` has the default bounds.
        pool: of the steps.
        more_resources: keys of resources that the step needs beside those of every step.
        check: raises where a run must not serve the pipelines that it selects.
        in_turn: as of `serve`.
    """
    specs = [
        (pipeline, names.spec(table, pipeline, deps=deps).replace_attributes(skippable=True))
        for pipeline, deps in pipelines.items()
    ]

    def build(op: str, layer: Sequence[tuple[ListedPipeline, dg.AssetSpec]]) -> dg.AssetsDefinition:
        @dg.multi_asset(
            name=op,
            specs=[spec for _, spec in layer],
            pool=names.name(pool),
            can_subset=True,
            required_resource_keys={*names.resources, *more_resources},
        )
        def make(
            context: dg.AssetExecutionContext,
            config: config_class,  # type: ignore[valid-type]
        ) -> Any:
            bounds = config if isinstance(config, BoundsConfig) else BoundsConfig()
            selected = [one for one, spec in layer if spec.key in context.selected_asset_keys]
            check(selected)

            def serve_one(turn: Turn) -> Iterator[Any]:
                yield from work(turn, names.key(table, turn.pipeline), config, context)

            yield from serve(
                context,
                selected,
                serve_one,
                bounds,
                names.tools(context),
                noted=lambda pipeline: names.key(table, pipeline),
                in_turn=in_turn,
            )

        return make

    return in_layers(names.name(f"arroyo_{table}"), specs, build)
