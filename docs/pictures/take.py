"""Take the README's pictures of Dagster's UI: the asset graph, and the page of one asset.

    make pictures

Opens the UI as `make ui` does, waits until a compaction is to be seen, and lets a headless Chromium
look. Needs the command `chromium` (Debian: apt-get install chromium).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

PICTURES = Path(__file__).resolve().parent
PROJECT = PICTURES.parents[1]
PORT = 3199
URL = f"http://127.0.0.1:{PORT}"
PATIENCE_SECONDS = 300
PAGES = {
    "asset-graph.png": (
        "/assets/arroyo/checkpoint?view=lineage&lineageScope=downstream&lineageDepth=5",
        "1600,1000",
    ),
    "epoch-catalog.png": (
        "/assets/arroyo/epoch_catalog?view=partitions&partition=flights%2Flive",
        "1500,1250",
    ),
}
MATERIALISED = """{ assetNodes(assetKeys: [{path: ["arroyo", "compacted_state"]}]) {
  latestMaterializationByPartition(partitions: ["flights/live"]) { timestamp } } }"""
REFRESH = """mutation { launchRun(executionParams: {
  selector: {repositoryLocationName: "arroyo", repositoryName: "__repository__",
             jobName: "arroyo_refresh"},
  executionMetadata: {tags: [{key: "dagster/partition", value: "flights/live"}]}})
  { __typename ... on LaunchRunSuccess { run { runId } } } }"""


def _query(text: str) -> dict[str, object]:
    request = urllib.request.Request(
        f"{URL}/graphql",
        json.dumps({"query": text}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        data: dict[str, object] = json.load(answer)["data"]
        return data


def _compacted() -> bool:
    try:
        nodes = _query(MATERIALISED)["assetNodes"]
        return nodes[0]["latestMaterializationByPartition"][0] is not None  # type: ignore[index]
    except (OSError, KeyError, IndexError, TypeError):
        return False


def _take(chromium: str, name: str, page: str, size: str) -> None:
    subprocess.run(
        [
            chromium,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--window-size={size}", "--virtual-time-budget=30000"),
            *(f"--screenshot={PICTURES / name}", f"{URL}{page}"),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
        timeout=180,
    )


def main() -> int:
    """Take every picture. Returns the exit code."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("the command `chromium` is missing (Debian: apt-get install chromium)")
        return 1
    command = [sys.executable, "examples/flights/ui.py", "--port", str(PORT)]
    ui = subprocess.Popen(command, cwd=PROJECT, start_new_session=True)
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while not _compacted():
            if ui.poll() is not None or time.monotonic() > until:
                print("no compaction was seen; look at .demo/live/dagster.log")
                return 1
            time.sleep(2)
        print(_query(REFRESH))
        time.sleep(25)
        for name, (page, size) in PAGES.items():
            _take(chromium, name, page, size)
            print(f"took {PICTURES / name}")
    finally:
        os.kill(ui.pid, signal.SIGTERM)
        ui.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
