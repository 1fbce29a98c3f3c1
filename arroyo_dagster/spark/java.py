"""The Java that a Spark session starts: where it is, and whether it is new enough."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

OLDEST_JAVA = 17
JAVA_STEP = (
    f"install Java {OLDEST_JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless), "
    "or set JAVA_HOME"
)
_NUMBER = re.compile(r'(?:version |JAVA_VERSION=)"(?:1\.)?(\d+)')


class Java(NamedTuple):
    """A command of Java.

    Attributes:
        command: its path, or `java` if there is none.
        number: its version, for example 17; None if it is unknown.
        problem: why Spark cannot start with it; None if it can.
    """

    command: str
    number: int | None
    problem: str | None


def find_java(java_home: str | None) -> Java:
    """Find the Java that Spark starts, and its version.

    Reads the file `release` of the JDK, which takes microseconds. Without it, Java is asked.

    Args:
        java_home: `JAVA_HOME` of this process, as Spark reads it.
    """
    java = f"{java_home}/bin/java" if java_home else "java"
    path = shutil.which(java)
    if path is None:
        place = f"JAVA_HOME={java_home} has no bin/java" if java_home else "no java on the PATH"
        return Java(java, None, f"Java {OLDEST_JAVA} or newer is missing: {place}")
    try:
        number = _number(Path(path))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Java(path, None, f"{path} does not run ({error})")
    if number is not None and number < OLDEST_JAVA:
        return Java(path, number, f"{path} is Java {number}; Spark needs {OLDEST_JAVA} or newer")
    return Java(path, number, None)


def _number(java: Path) -> int | None:
    release = java.resolve().parent.parent / "release"
    match = _NUMBER.search(release.read_text(errors="replace")) if release.is_file() else None
    if match is None:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
        match = _NUMBER.search(done.stderr + done.stdout)
    return int(match[1]) if match else None
