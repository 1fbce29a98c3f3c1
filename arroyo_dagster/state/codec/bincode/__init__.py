"""Bincode as Arroyo writes it: values and columns to bytes and back. No table is known here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arroyo_dagster.lazy import lazy_names

if TYPE_CHECKING:
    from arroyo_dagster.state.codec.bincode.codec import Codec, codec_for

__all__ = ["Codec", "codec_for"]

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "codec"))
