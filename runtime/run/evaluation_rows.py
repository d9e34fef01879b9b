"""The newest recorded evaluations, by step."""

from __future__ import annotations

from collections.abc import Sequence

from .record_file import Record

__all__ = ["EvaluationRows"]

_MAX_ROWS = 500


class EvaluationRows:
    """The evaluations of the last steps, one for each step and data set."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], Record] = {}
        self._dropped = 0

    def add(self, records: Sequence[Record]) -> None:
        """Add evaluations; a later one of the same step and data set replaces the earlier."""
        for record in records:
            self._rows[record["step"], record["name"]] = record
        if len(self._rows) >= 2 * _MAX_ROWS:  # done seldom, since it sorts all rows
            self._drop()

    def go_back(self, step: int) -> None:
        """Remove all evaluations after a step."""
        self._rows = {key: row for key, row in self._rows.items() if key[0] <= step}

    def newest(self) -> list[Record]:
        """Return the newest evaluations, sorted by step."""
        self._drop()
        return list(self._rows.values())

    @property
    def left_out(self) -> int:
        """Return the number of evaluations that were dropped by the limit."""
        return self._dropped + max(0, len(self._rows) - _MAX_ROWS)

    def _drop(self) -> None:
        kept = sorted(self._rows.items(), key=lambda item: item[0][0])[-_MAX_ROWS:]
        self._dropped += len(self._rows) - len(kept)
        self._rows = dict(kept)
