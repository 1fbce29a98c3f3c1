"""Check the subject of a commit message: the hook `commit-msg` of .pre-commit-config.yaml."""

import sys
from pathlib import Path

LONGEST = 72

subject = Path(sys.argv[1]).read_text(encoding="utf-8").partition("\n")[0].strip()
if not subject or len(subject) > LONGEST or subject.endswith("."):
    sys.exit(
        f"The subject has {len(subject)} characters: {subject!r}.\n"
        f"Write 1 to {LONGEST} characters in the imperative, without a full stop; say why below it."
    )
