"""Names of the columns that every state has, in its tables and in SQL."""

from __future__ import annotations

KEY = "_key"
UPDATED_AT = "_updated_at"
WINDOW_START, WINDOW_END = "_window_start", "_window_end"
