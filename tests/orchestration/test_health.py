"""The asset `health`: what a run reports of every job, and where its links lead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from arroyo_dagster.orchestration.definitions import build_arroyo_definitions
from arroyo_dagster.orchestration.translator import DagsterArroyoTranslator
from arroyo_dagster.state.model.health import HealthLimits
from arroyo_dagster.state.model.layout import JobPaths
from arroyo_dagster.state.model.settings import find_setting
from arroyo_dagster.state.model.verify import AuditSettings
from arroyo_dagster.state.planning.rules import AUDIT_RULES, HEALTH_RULES, RULES, Rule
from tests.fleets import SECOND, Written, protocol_job
from tests.jobs import listing

WORDS = Path("examples/sdf/words/dataflow.yaml")
NAMES = {rule.name for rule in HEALTH_RULES}
CHECKS = {rule.name: rule for rule in RULES}


def job_of(deployed: Any, name: str, epochs: int = 14) -> JobPaths:
    paths = protocol_job(name)
    Written(deployed.store, paths, start=1_700_000_000 * SECOND).epochs(epochs)
    return paths


def checks_of(result: Any) -> dict[str, Any]:
    return {one.check_name: one for one in result.get_asset_check_evaluations()}


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
    found = checks_of(result)
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


def test_the_catalogue_is_brought_up_to_date_first(deployed: Any) -> None:
    job_of(deployed, "good", epochs=3)
    deployed.catalogue.put("x", b"")
    assert deployed.run("arroyo_health").success
    assert any("epoch_catalog" in path for path in listing(deployed.catalogue))


def test_pins_that_do_not_decode_are_a_finding_and_hide_no_other_job(deployed: Any) -> None:
    broken, _ = job_of(deployed, "broken"), job_of(deployed, "good")
    deployed.store.put(broken.job_pins, b"junk")
    found = checks_of(deployed.run("arroyo_health"))
    assert not found["newest_epoch_readable"].passed
    assert f"1 of 2 jobs: {broken.root}: " in found["newest_epoch_readable"].description
    assert "health-unknown" in found["newest_epoch_readable"].description
    assert found["no_epoch_missing"].passed


def test_limits_decide_and_are_shown(deployed: Any) -> None:
    job_of(deployed, "good")
    assert checks_of(deployed.run("arroyo_health"))["epochs_expire"].passed
    deployed.build(health=HealthLimits(epochs=13))
    assert not checks_of(deployed.run("arroyo_health"))["epochs_expire"].passed
    spec = spec_of(deployed.defs, "epochs_expire")
    assert "\n- Limits: `epochs: 13`\n" in spec.description
    assert spec.metadata["arroyo/epochs"] == 13


def test_jobs_that_are_not_judged_do_not_count_as_passed(deployed: Any) -> None:
    job_of(deployed, "good")
    job_of(deployed, "young", epochs=3)
    found = checks_of(deployed.run("arroyo_health"))["durations_usual"]
    assert found.description == "2 jobs: 1 passed, 1 not judged"
    counts = {name: one.value for name, one in found.metadata.items() if "/jobs_" in name}
    assert counts == {"arroyo/jobs_passed": 1, "arroyo/jobs_not_judged": 1}
    judged = checks_of(deployed.run("arroyo_health"))["newest_epoch_readable"]
    assert judged.metadata["arroyo/jobs_passed"].value == 2
    assert "arroyo/jobs_not_judged" not in judged.metadata


def test_one_check_can_be_run_alone(deployed: Any) -> None:
    job_of(deployed, "good")
    key = dg.AssetCheckKey(dg.AssetKey(["arroyo", "health"]), "epochs_expire")
    job = deployed.defs.resolve_implicit_global_asset_job_def()
    alone = job.get_subset(asset_selection=set(), asset_check_selection={key})
    result = alone.execute_in_process(instance=deployed.instance)
    assert checks_of(result).keys() == {"epochs_expire"}
    assert not result.asset_materializations_for_node("arroyo_health_checks")


# ---- what is shown of a check --------------------------------------------------------------------


def spec_of(defs: dg.Definitions, name: str) -> Any:
    graph = defs.resolve_asset_graph()
    (key,) = (key for key in graph.asset_check_keys if key.name == name)
    return graph.get_check_spec(key)


@pytest.fixture(scope="module")
def defined() -> dg.Definitions:
    return build_arroyo_definitions("/does/not/exist")


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


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_check_has_an_example_and_its_limits_in_the_units_of_users(
    name: str, defined: dg.Definitions
) -> None:
    spec = spec_of(defined, name)
    assert f"\n- Example: `{spec.metadata['example']}`\n" in spec.description
    assert not any("micros" in one for one in spec.metadata)
    limits = CHECKS[name].limits
    assert len([one for one in spec.metadata if one.startswith("arroyo/")]) == len(limits)
    assert ("Limits: " in spec.description) == bool(limits)


RUNBOOK = Path("docs/operate/runbook.md").read_text()


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_the_severity_of_a_check_is_the_worst_of_its_findings_in_the_runbook(
    name: str, defined: dg.Definitions
) -> None:
    worst = "error" if "error" in severities(name) else "warning"
    assert CHECKS[name].severity.value == worst
    assert spec_of(defined, name).metadata["severity"] == f"{worst} at worst"
    assert f"\n- Severity: {worst} at worst\n" in spec_of(defined, name).description


def severities(name: str) -> set[str]:
    """The severities of all findings that the entry of a check leads to."""
    entry = RUNBOOK.split(f"\n### {name}\n")[1].split("\n### ")[0]
    codes = re.findall(r"`([a-z-]+)`", entry.split("**Do:**")[1])
    found: set[str] = set()
    for code in codes:
        row = re.search(rf"^\| `{code}` \| ([a-z, ]+) \|", RUNBOOK, re.MULTILINE)
        line = row[1] if row else RUNBOOK.split(f"\n### {code}\n")[1].strip().split("*")[1]
        found |= {one.strip().lower() for one in line.rstrip(".").split(",")}
    return found or {"error"}  # restore_dry_run shows all that no other check does


def line_of(check: Rule) -> str:
    settings = HealthLimits if check.level is None else AuditSettings
    fields = [find_setting(settings, name) for name in check.limits]
    limits = ", ".join(f"`{one.config}: {one.given_default:g}`" for one in fields)
    return f"| `{check.name}` | {check.severity.value} | {limits or '–'} | {check.expects} |"


def test_the_page_lists_every_check_with_its_severity_and_default_limits() -> None:
    lines = Path("docs/dagster.md").read_text().splitlines()
    head = "| Check | At worst | Default limits | Passes if |"
    at = [number for number, line in enumerate(lines) if line == head]
    shown = []
    for start, checks in zip(at, (HEALTH_RULES, AUDIT_RULES), strict=True):
        shown += lines[start + 2 : start + 2 + len(checks)]
        assert not lines[start + 2 + len(checks)]
    assert shown == [line_of(check) for check in CHECKS.values()]
    assert len(shown) >= 25
