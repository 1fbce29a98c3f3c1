"""A canary: a secret with every character that breaks a parser, and the search for its pieces."""

from __future__ import annotations

import re

PIECE = "KNR"
"""What no text may hold: between any two hostile characters of the canary there is one."""

CANARY = "KNRa@KNRb/KNRc?KNRd#KNRe%41KNRf&KNRx=KNRy:KNRz \"KNRq' KNR\u00fcKNRl\nKNRend"


_RANDOM = re.compile(r"(log_key\W+)[a-z]{8}\b")
"""Names that Dagster draws by chance: one in a thousand runs has a piece in one."""


def assert_no_canary(text: str) -> None:
    """Fail if any piece of the canary is in `text`."""
    text = _RANDOM.sub(r"\1", text)
    at = text.upper().find(PIECE)
    assert at < 0, f"a secret survives: …{text[max(0, at - 200) : at + 200]!r}…"
