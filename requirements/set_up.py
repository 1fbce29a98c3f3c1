"""Set up an environment from a lock file. Whatever fails is one line that names the next step.

    python3 requirements/set_up.py .venv runtime uv==0.13.9

Uses only the standard library. The output of pip and uv is in `set-up.log` in the environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

JAVA = 17
JAVA_STEP = "Next: install it (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME"
NEEDED_BYTES = {"runtime": 1_500_000_000, "dev": 2_000_000_000}
ROOT = Path(__file__).resolve().parents[1]
NO_SPACE = re.compile(r"no space left on device|os error 28|errno 28|disk quota exceeded", re.I)
NO_INDEX = re.compile(
    r"from versions: none|Retrying \(Retry|error sending request|dns error|tcp connect error"
    r"|Failed to fetch|could not connect|connection refused|network is unreachable|timed out"
    r"|name or service not known|name resolution",
    re.I,
)


class Refusal(Exception):
    """What is missing, and the next step, in one line."""


def main(venv: str, lock: str, uv_version: str) -> int:
    """Set up the environment. Returns the exit code."""
    try:
        check_java()
        check_disk(ROOT / venv, NEEDED_BYTES[lock])
        set_up(venv, lock, uv_version)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: the same command continues", file=sys.stderr)
        return 130
    return 0


def check_java() -> None:
    """Refuse a Java that is missing or too old for Spark, which starts that of JAVA_HOME first."""
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else "java"
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    except OSError:
        where = f"JAVA_HOME={home} has no bin/java" if home else "no java on the PATH"
        raise Refusal(f"Java {JAVA} or newer is missing: {where}. {JAVA_STEP}") from None
    text = done.stdout + done.stderr
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    path = shutil.which(java) or java
    if found is None:
        first = (text.strip().splitlines() or ["nothing"])[0]
        raise Refusal(f"`{path} -version` names no version, but: {first}. {JAVA_STEP}")
    if int(found[1]) < JAVA:
        raise Refusal(f"Java {JAVA} or newer is needed; {path} is Java {found[1]}. {JAVA_STEP}")


def check_disk(venv: Path, needed_bytes: int) -> None:
    """Refuse a disk without the space for the environment, unless it is there already."""
    free = shutil.disk_usage(venv.parent).free
    if free < needed_bytes and not (venv / "bin" / "uv").exists():
        raise no_space(
            venv.parent, f"{needed_bytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB free"
        )


def no_space(folder: Path, detail: str) -> Refusal:
    """Return the refusal of a full disk."""
    step = "Next: free some space, or clone onto another disk"
    return Refusal(f"The disk of {folder} is too full: {detail}. {step}")


def set_up(venv: str, lock: str, uv_version: str) -> None:
    """Create the environment, and install what the lock file holds and this project.

    Raises:
        Refusal: a step failed.
    """
    python, uv = f"{venv}/bin/python", f"{venv}/bin/uv"
    requirements = f"requirements/{lock}.txt"
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--retries=1"]
    install = [uv, "pip", "install", "--python", python]
    locked = [*install, "--require-hashes", "-r", requirements]
    steps: list[tuple[str, str | None, list[str]]] = [
        ("an empty environment", python, [sys.executable, "-m", "venv", venv]),
        ("the installer, uv", uv, [*pip, uv_version]),
        (f"the packages of {requirements}", None, locked),
        ("this project", None, [*install, "--no-deps", "--editable", "."]),
    ]
    print(f"Setting up {venv}: once, about a minute.", flush=True)
    begun = time.monotonic()
    for number, (name, product, command) in enumerate(steps, start=1):
        if product is None or not (ROOT / product).exists():
            print(f"  {number} of {len(steps)}: {name}", flush=True)
            run(venv, name, command)
    print(f"Set up in {time.monotonic() - begun:.0f} s.", flush=True)


def run(venv: str, name: str, command: list[str]) -> None:
    """Run one step, and keep its output.

    Raises:
        Refusal: it failed.
    """
    folder = ROOT / venv
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise explained(folder, name, done.stdout)
        folder.mkdir(exist_ok=True)
        with (folder / "set-up.log").open("a") as log:
            log.write(f"{name}:\n{done.stdout}\n")
    except OSError as error:
        if NO_SPACE.search(str(error)):
            raise no_space(folder, str(error)) from None
        raise Refusal(f"Cannot install {name}: {error}") from None


def explained(folder: Path, name: str, output: str) -> Refusal:
    """Return the refusal of a step that failed, by its output, which is kept."""
    if NO_SPACE.search(output):
        return no_space(folder, f"no space is left while installing {name}")
    folder.mkdir(exist_ok=True)
    log = folder / "set-up.log"
    log.write_text(output)
    if NO_INDEX.search(output):
        return Refusal(
            f"No package index answers: cannot download {name}. Next: check the network, the proxy "
            "(HTTPS_PROXY) and the index (`pip config list`, PIP_INDEX_URL, UV_DEFAULT_INDEX), "
            f"then call make again; all output is in {log}"
        )
    if "ensurepip" in output:
        return Refusal(
            "Python's module venv is incomplete. Next: install it (Debian: apt-get install "
            f"python3-venv), remove {folder}, and call make again"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    return Refusal(f"Cannot install {name}: {lines[-1]}. Next: see all output in {log}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
