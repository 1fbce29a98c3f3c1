"""The names of the engine's columns of states, in tables and in SQL."""

from __future__ import annotations

KEY = "_key"
UPDATED_AT = "_updated_at"
WINDOW_START, WINDOW_END = "_window_start", "_window_end"
