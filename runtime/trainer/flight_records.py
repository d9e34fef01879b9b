"""What the communication library noted of its last calls, kept in the run folder when one fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..checkpoint import storage_of
from ..kernel.errors import CollectiveFailed
from ..kernel.paths import Place

__all__ = ["flight_records_kept"]


@contextlib.contextmanager
def flight_records_kept(folder: Place | None) -> Iterator[None]:
    """While it is open, a `CollectiveFailed` leaves `flight-records-rank-N.json` there, if the
    library has noted anything, and there is room."""
    try:
        yield
    except CollectiveFailed as error:
        if folder is not None and error.records:
            name = f"flight-records-rank-{os.environ.get('RANK', '0')}.json"
            with contextlib.suppress(OSError):
                storage_of(folder).replace(folder / name, error.records.encode())
        raise
