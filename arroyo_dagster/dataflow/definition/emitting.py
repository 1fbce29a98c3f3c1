"""Write dicts, lists and scalars as deterministic YAML.

Every string is written so that the core schema of YAML 1.2 reads the same string back.
"""

from __future__ import annotations

import io
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*\Z")
_KEYWORDS = {"null", "true", "false"}
_LITERAL = re.compile(
    # No leading blank (it would need an indentation indicator), exactly one newline at the end.
    r"(?!\s)[\t\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\U00010000-\U0010ffff]+(?<!\n)\n\Z"
)
_ONE_LINE = 1 << 30


class _Representer(SafeRepresenter):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> ScalarNode:
        """Write a word plain, multi-line text as a literal, other text in double quotes."""
        if _PLAIN.match(text) and text.lower() not in _KEYWORDS:
            style = None
        else:
            style = "|" if _LITERAL.match(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_multi_representer(str, _Representer.represent_text)


def emit(value: Any) -> str:
    """Return a value as YAML: block style, keys in the given order, multi-line text as literals."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = _ONE_LINE
    text = io.StringIO()
    yaml.dump(value, text)
    return text.getvalue()
