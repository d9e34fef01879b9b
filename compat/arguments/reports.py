"""Names of the arguments that request a report on a run."""

from __future__ import annotations

__all__ = ["DIAGNOSTICS", "REPORTS", "TIMES"]

DIAGNOSTICS = ("memory_parts", "stats_steps", "find_nonfinite", "run_records")
TIMES = ("time_parts", "find_synchronisations")
REPORTS = tuple(sorted((*DIAGNOSTICS, *TIMES, "replay_step")))
"""All of them. They change nothing in a run's numbers, and only the loop of our Trainer applies
them."""
