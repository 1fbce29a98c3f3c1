"""Generators that several tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from arroyo_dagster.state import (
    Epoch,
    StatePath,
)
from arroyo_dagster.state.model.ids import path_error

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_characters="/\\", exclude_categories=["Cs"]), min_size=1)
PATHS = (
    st.lists(st.from_regex(r"[a-z0-9_\-<>% ]{1,8}", fullmatch=True), min_size=1, max_size=5)
    .map("/".join)
    .filter(lambda text: path_error(text) is None)
    .map(StatePath)
)
EPOCHS = U32.map(Epoch)
