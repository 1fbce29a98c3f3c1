"""Opening of data files, with the footers of those that were opened last."""

from __future__ import annotations

import io
from collections import OrderedDict
from threading import Lock

from arroyo_dagster.state.codec.row_groups import DataFile, KnownFooter
from arroyo_dagster.state.model.ids import StatePath
from arroyo_dagster.state.storage.store import ObjectStore, open_by_ranges

WHOLE_BYTES = 1 << 18
"""Files up to this size are read as a whole: another request costs more than the saved bytes."""
SLICE_ROWS = 1 << 15
"""The maximum number of rows in a piece of a file; a multiple of Arroyo's record batches."""


def open_data_file(store: ObjectStore, path: StatePath) -> DataFile:
    """Open a data file to read parts of it; a small file is read as a whole.

    Raises:
        NotFoundError: the file does not exist.
        FormatError: the file is not Parquet.
    """
    source = store.open_input(path)
    if source.seek(0, io.SEEK_END) > WHOLE_BYTES:
        return DataFile(source, path)
    with source:
        source.seek(0)
        return DataFile(source.read(), path)


class FooterCache:
    """Opens data files of a store, and keeps the footers of the last ones; safe for threads.

    A data file never changes, so that a footer stays valid. A copy in another process is empty.

    Args:
        most: how many footers are kept.
    """

    def __init__(self, store: ObjectStore, most: int = 256) -> None:
        self._store = store
        self._most = most
        self._footers: OrderedDict[StatePath, KnownFooter] = OrderedDict()
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[FooterCache], tuple[ObjectStore, int]]:
        return FooterCache, (self._store, self._most)

    def open(self, path: StatePath) -> DataFile:
        """Open a data file as `open_data_file`, without a request if its footer is known."""
        with self._lock:
            footer = self._footers.get(path)
            if footer is not None:
                self._footers.move_to_end(path)
        if footer is not None:
            return DataFile(open_by_ranges(self._store, path, footer.size_bytes), path, footer)
        data = open_data_file(self._store, path)
        if data.size_bytes > WHOLE_BYTES:
            with self._lock:
                self._footers[path] = data.footer
                while len(self._footers) > self._most:
                    self._footers.popitem(last=False)
        return data
