"""The asset `health`: what a run reports of every job, and where its links lead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg

from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.translator import DagsterArroyoTranslator
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.planning.rules import HEALTH_RULES
from tests.fleets import SECOND, Written, protocol_job
from tests.jobs import listing
from tests.orchestration.results import checks

WORDS = Path("examples/sdf/words/dataflow.yaml")
NAMES = {rule.name for rule in HEALTH_RULES}


def job_of(deployed: Any, name: str, epochs: int = 14) -> JobPaths:
    paths = protocol_job(name)
    Written(deployed.store, paths, start=1_700_000_000 * SECOND).epochs(epochs)
    return paths


def metadata_of(result: Any) -> dict[str, Any]:
    (event,) = result.asset_materializations_for_node("arroyo_health_checks")
    return dict(event.metadata)


def test_every_check_is_evaluated_and_a_sick_job_does_not_hide(deployed: Any) -> None:
    job_of(deployed, "good")
    sick = job_of(deployed, "sick")
    (record,) = (
        p for p in listing(deployed.store) if p.endswith("sick/main/epochs/epoch-0000007.record")
    )
    deployed.store.delete_many([record])
    before = listing(deployed.store)
    result = deployed.run("arroyo_health")
    found = checks(result)
    assert result.success
    assert found.keys() == NAMES
    gap = found["no_epoch_missing"]
    assert not gap.passed
    assert gap.severity is dg.AssetCheckSeverity.WARN
    assert gap.description.startswith(f"1 of 2 jobs: {sick.root}: missing between epochs")
    assert next(dict(row.data)["job"] for row in gap.metadata["jobs"].records) == sick.root
    assert found["durations_usual"].passed
    shown = metadata_of(result)
    assert shown["arroyo/jobs"].value == 2
    assert shown["arroyo/jobs_with_findings"].value >= 1
    assert dict(shown["jobs"].records[0].data)["job"] == sick.root
    assert listing(deployed.store) == before


def test_pins_that_do_not_decode_are_a_finding_and_hide_no_other_job(deployed: Any) -> None:
    broken, _ = job_of(deployed, "broken"), job_of(deployed, "good")
    deployed.store.put(broken.job_pins, b"junk")
    found = checks(deployed.run("arroyo_health"))
    assert not found["newest_epoch_readable"].passed
    assert f"1 of 2 jobs: {broken.root}: " in found["newest_epoch_readable"].description
    assert "health-unknown" in found["newest_epoch_readable"].description
    assert found["no_epoch_missing"].passed


def test_jobs_that_are_not_judged_do_not_count_as_passed(deployed: Any) -> None:
    job_of(deployed, "good")
    job_of(deployed, "young", epochs=3)
    found = checks(deployed.run("arroyo_health"))["durations_usual"]
    assert found.description == "2 jobs: 1 passed, 1 not judged"
    counts = {name: one.value for name, one in found.metadata.items() if "/jobs_" in name}
    assert counts == {"arroyo/jobs_passed": 1, "arroyo/jobs_not_judged": 1}
    judged = checks(deployed.run("arroyo_health"))["newest_epoch_readable"]
    assert judged.metadata["arroyo/jobs_passed"].value == 2
    assert "arroyo/jobs_not_judged" not in judged.metadata


# ---- what is shown of a check --------------------------------------------------------------------


class Served(DagsterArroyoTranslator):
    def docs_url(self) -> str:
        return "https://docs.example.com/"


def test_every_check_leads_to_its_entry_of_the_runbook(tmp_path: Path) -> None:
    runbook = Path("docs/operate/runbook.md").read_text()
    for defs in (
        build_arroyo_definitions(str(tmp_path), dataflows=[WORDS]),
        build_arroyo_definitions(str(tmp_path), dataflows=[WORDS], translator=Served()),
    ):
        graph = defs.resolve_asset_graph()
        for key in graph.asset_check_keys:
            assert f"\n### {key.name}\n" in runbook
            spec = graph.get_check_spec(key)
            shown = spec.metadata["runbook"]
            assert shown in (
                f"docs/operate/runbook.md, {key.name}",
                dg.MetadataValue.url(f"https://docs.example.com/operate/runbook/#{key.name}"),
            )
            # Dagster's pages show nothing of a check's metadata.
            assert spec.description.splitlines()[-1] in (
                f"- Runbook: `{key.name}` in docs/operate/runbook.md",
                f"- Runbook: [{key.name}](https://docs.example.com/operate/runbook/#{key.name})",
            )
