"""What the scripts of the pictures share: Dagster's GraphQL, and a headless Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any


def chromium() -> str:
    """The command of the browser.

    Raises:
        SystemExit: there is none.
    """
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        raise SystemExit("the command `chromium` is missing (Debian: apt-get install chromium)")
    return found


def asked(url: str, query: str) -> Any:
    """The data of the answer to a GraphQL query."""
    request = urllib.request.Request(
        f"{url}/graphql",
        json.dumps({"query": query}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["data"]


def picture(url: str, path: Path, size: str) -> None:
    """Take a picture of a page.

    Args:
        size: of the window, WIDTH,HEIGHT.
    """
    subprocess.run(
        [
            chromium(),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--window-size={size}", "--virtual-time-budget=30000"),
            *(f"--screenshot={path}", url),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
        timeout=180,
    )
    print(f"took {path}", flush=True)
