"""Take the README's pictures of Dagster's UI: the asset graph, and the page of one asset.

    make pictures

Opens the UI as `make ui` does, waits until a compaction is to be seen, and lets a headless Chromium
look. Needs the command `chromium` (Debian: apt-get install chromium).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from browser import asked, chromium, picture

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


def _compacted() -> bool:
    try:
        nodes = asked(URL, MATERIALISED)["assetNodes"]
        return nodes[0]["latestMaterializationByPartition"][0] is not None
    except (OSError, KeyError, IndexError, TypeError):
        return False


def main() -> int:
    """Take every picture. Returns the exit code."""
    chromium()  # a missing one is told before anything is started
    command = [sys.executable, "examples/flights/ui.py", "--port", str(PORT)]
    ui = subprocess.Popen(command, cwd=PROJECT, start_new_session=True)
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while not _compacted():
            if ui.poll() is not None or time.monotonic() > until:
                print("no compaction was seen; look at .demo/live/dagster.log")
                return 1
            time.sleep(2)
        print(asked(URL, REFRESH))
        time.sleep(25)
        for name, (page, size) in PAGES.items():
            picture(f"{URL}{page}", PICTURES / name, size)
    finally:
        os.kill(ui.pid, signal.SIGTERM)
        ui.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
