"""Mutation tests of the safety modules with mutmut: run by `make mutants`, not collected by pytest.

Each module is mutated in a copy of the project below `.mutants/`. What decides is mutated, what
people read is not: strings, and all that stands in a `raise` or makes an error.

`results.json` keeps the last result of each module, `reasons.toml` says why a survivor may live,
and `results.md` is made of both. A survivor is named by its function and its changed lines, so that
a reason stays where lines move.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRATCH = ROOT / ".mutants"
RESULTS, REASONS, REPORT = HERE / "results.json", HERE / "reasons.toml", HERE / "results.md"
COPIED = ("arroyo_dagster", "tests", "docs", "README.md")
MESSAGES = ("Error", "refuse", "_taken", "_too_late")
"""Calls of names that end so make errors."""


def main(names: list[str]) -> None:
    """Run some modules, or all, and write the report."""
    modules = tomllib.loads((HERE / "modules.toml").read_text())
    for name in names or list(modules):
        if name not in modules:
            sys.exit(f"no such module: {name}; there are {', '.join(modules)}")
        print(f"== {name}", flush=True)
        scratch = prepare(name, modules[name])
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run(
            [sys.executable, __file__, "--in", str(scratch)], env=environment, check=True
        )
        # Read only now: another module may have been run meanwhile.
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = json.loads((scratch / "found.json").read_text())
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        REPORT.write_text(report({one: results[one] for one in modules if one in results}))


def prepare(name: str, module: dict[str, list[str]]) -> Path:
    """Copy the project, with the settings of mutmut for one module."""
    scratch = SCRATCH / name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for one in COPIED:
        source = ROOT / one
        if source.is_dir():
            shutil.copytree(source, scratch / one, ignore=ignored)
        else:
            shutil.copy(source, scratch / one)
    settings = {
        "source_paths": ["arroyo_dagster"],
        "only_mutate": module["files"],
        "also_copy": ["docs", "README.md"],
        "pytest_add_cli_args_test_selection": module["tests"],
        "track_dependencies": False,
        # A fork of a process that has run tests may inherit locks that nobody releases any more.
        "process_isolation": "forkserver",
        "timeout_multiplier": 5.0,
        "timeout_constant": 2.0,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    project = (ROOT / "pyproject.toml").read_text()
    (scratch / "pyproject.toml").write_text("\n".join([project, "[tool.mutmut]", *lines, ""]))
    return scratch


# ---- in the copy, with mutmut --------------------------------------------------------------------


def run_mutmut(scratch: Path) -> None:
    """Make and test the mutants of one module; write what was found."""
    os.chdir(scratch)
    import libcst as cst
    from mutmut import __main__ as mutmut
    from mutmut.mutation import file_mutation, mutators
    from mutmut.state import state
    from mutmut.workers.isolation import ForkServerRunner

    file_mutation.mutation_operators = [
        (kind, operator)
        for kind, operator in mutators.mutation_operators
        if operator is not mutators.operator_string
    ]
    skips = file_mutation.MutationVisitor._skip_node_and_children

    def skips_messages(self: Any, node: cst.CSTNode) -> bool:
        called = node.func if isinstance(node, cst.Call) else None
        name = called.value if isinstance(called, cst.Name) else ""
        return isinstance(node, cst.Raise) or str(name).endswith(MESSAGES) or skips(self, node)

    file_mutation.MutationVisitor._skip_node_and_children = skips_messages
    submit = ForkServerRunner.submit

    def submit_fast_first(self: Any, mutant: str, tests: list[str], *limits: Any) -> None:
        submit(self, mutant, sorted(tests, key=state().duration_by_test.__getitem__), *limits)

    ForkServerRunner.submit = submit_fast_first
    mutmut._run([], max_children=int(os.environ.get("MUTANTS_WORKERS", "1")))
    found = summary(mutmut)
    (scratch / "found.json").write_text(json.dumps(found))


def summary(mutmut: Any) -> dict[str, Any]:
    """Counts by status, and the survivors by their stable names."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    _, files = mutmut.collect_source_file_mutation_data(mutant_names=())
    counts: Counter[str] = Counter()
    left: list[dict[str, str]] = []
    for path, data in sorted(files.items()):
        for mutant, code in sorted(data.exit_code_by_key.items()):
            status = mutmut.status_by_exit_code[code]
            counts[status] += 1
            if status not in ("killed", "timeout", "caught by type check"):
                function = mutant.rpartition(".")[2].rpartition("__mutmut_")[0]
                function = function.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
                change = " / ".join(changed(get_diff_for_mutant(mutant, path=data.path)))
                key = f"{Path(str(path)).name}:{function}: {change}"
                left.append({"status": status, "mutant": key})
    return {"counts": dict(sorted(counts.items())), "left": left}


def changed(diff: str) -> Iterator[str]:
    """The changed lines of a diff, without what both sides share at their ends."""
    lines = diff.splitlines()
    gone = " ".join(one[1:].strip() for one in lines if one.startswith("-") and one[:3] != "---")
    come = " ".join(one[1:].strip() for one in lines if one.startswith("+") and one[:3] != "+++")
    yield f"`{gone}` → `{come}`"


# ---- the report ----------------------------------------------------------------------------------


def report(results: dict[str, Any]) -> str:
    """All modules as Markdown: a table, then every survivor with its reason."""
    reasons = tomllib.loads(REASONS.read_text()) if REASONS.exists() else {}
    lines = [
        "# Mutants of the safety modules",
        "",
        "Made by `make mutants` (mutmut; see `run.py`). Do not edit: reasons stand in"
        " `reasons.toml`.",
        "",
        "| module | mutants | killed | timeouts | survived | without a reason |",
        "|---|---|---|---|---|---|",
    ]
    sections: list[str] = []
    for name, found in results.items():
        counts, left = found["counts"], found["left"]
        known = {one["mutant"]: reason_of(one["mutant"], reasons) for one in left}
        bare = sum(1 for one in left if known[one["mutant"]] is None)
        killed = counts.get("killed", 0) + counts.get("caught by type check", 0)
        numbers = (sum(counts.values()), killed, counts.get("timeout", 0), len(left), bare)
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
        sections += ["", f"## {name}", ""]
        for one in left:
            reason = known[one["mutant"]] or f"**{one['status']}: no reason yet**"
            sections.append(f"- {one['mutant']}: {reason}")
    stale = sorted(_stale(reasons, results))
    if stale:
        sections += ["", "## Reasons that fit no survivor", "", *(f"- {one}" for one in stale)]
    return "\n".join([*lines, *sections, ""])


def _stale(reasons: dict[str, dict[str, str]], results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Reasons whose mutants are gone or killed: to be taken out."""
    left = [one["mutant"] for found in results.values() for one in found["left"]]
    for file, known in reasons.items():
        for key in known:
            if not any(mutant.startswith(f"{file}:{key}") for mutant in left):
                yield f"{file}:{key}"


def reason_of(mutant: str, reasons: dict[str, dict[str, str]]) -> str | None:
    """Why a mutant may survive: of the longest key that its name begins with."""
    file, _, rest = mutant.partition(":")
    known = reasons.get(file, {})
    fitting = [key for key in known if rest.startswith(key)]
    return known[max(fitting, key=len)] if fitting else None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in"]:
        run_mutmut(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--report"]:
        REPORT.write_text(report(json.loads(RESULTS.read_text())))
    else:
        main(sys.argv[1:])
