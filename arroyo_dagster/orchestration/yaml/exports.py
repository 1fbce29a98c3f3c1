"""The section `exports` of the component's YAML."""

from typing import Literal

from pydantic import Field

from arroyo_dagster.orchestration.yaml.model import YamlModel
from arroyo_dagster.orchestration.yaml.texts import ExportName, Options
from arroyo_dagster.state.planning.exports import TableExport, TargetOptions


class Export(YamlModel):
    """A table that is exported to Parquet, Delta or Iceberg, each epoch once."""

    name: ExportName = Field(description="The name of the asset.", examples=["order_counts"])
    jobs: str = Field(
        description="The jobs whose table is exported: a name as pipeline/job, or a pattern.",
        examples=["shop/main", "shop/*"],
    )
    operator: str = Field(description="The operator that has the table.", examples=["count"])
    table: str = Field(description="The table.", examples=["counts"])
    target: str = Field(
        description="A folder, a URL, or namespace.table of Iceberg. {pipeline} and {job} stand "
        "for those of the job.",
        examples=["s3://lake/{pipeline}/counts"],
    )
    format: Literal["parquet", "delta", "iceberg"] = Field(
        default="parquet", description="What the target is."
    )
    epochs: Literal["newest", "every", "changes"] = Field(
        default="newest",
        description="Export the newest epoch of each run, every visible epoch, or what changed "
        "from each visible epoch to the next.",
    )
    unsigned: Literal["decimal", "long"] | None = Field(
        default=None, description="Unsigned numbers of 64 bits: as decimal(20,0), or as long."
    )
    nanos: Literal["exact", "floor", "long"] | None = Field(
        default=None,
        description="Times with nanoseconds: refuse what microseconds do not hold, round down, or "
        "write numbers.",
    )
    epoch_column: str = Field(
        default="epoch",
        description="The column of a Delta or Iceberg table with the number of the epoch.",
    )
    catalog: Options = Field(
        default_factory=dict,
        repr=False,
        description="Properties of pyiceberg's catalog. For secrets, name environment variables: "
        "{env: NAME}.",
        examples=[{"name": "lake", "type": "rest", "uri": "https://catalog.example.com"}],
    )
    options: Options = Field(
        default_factory=dict,
        repr=False,
        description="Options of the target's store, in the form of storage_options.",
        examples=[{"secret_access_key": {"env": "S3_SECRET"}}],
    )

    def settings(self) -> TableExport:
        """Return the same export for `build_arroyo_definitions`."""
        to = {
            name: getattr(self, name)
            for name in ("format", "unsigned", "nanos", "epoch_column", "catalog", "options")
        }
        what = {
            name: getattr(self, name)
            for name in ("name", "jobs", "operator", "table", "target", "epochs")
        }
        return TableExport(**what, to=TargetOptions(**to))
