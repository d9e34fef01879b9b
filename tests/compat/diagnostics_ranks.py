"""A job of two processes: statistics by parameter, and the first tensor that is not finite."""

from __future__ import annotations

import logging
from typing import Any

from test_compat_diagnostics import Logs, Messages, statistics_of, trainer

from drivetrain.conformance.bench import Bench


def diagnosed(bench: Bench, *, folder: str, **given: Any) -> dict[str, Any]:
    """Train with a batch that is not finite on rank 1; return the statistics and the warnings."""
    logs, messages = Logs(), Messages()
    logging.getLogger("drivetrain").addHandler(messages)
    made = trainer(
        folder,
        callbacks=[logs],
        bad_row=7,
        stats_steps=1,
        find_nonfinite=True,
        memory_parts=True,
        max_steps=3,
        **given,
    )
    try:
        made.train()
    finally:
        logging.getLogger("drivetrain").removeHandler(messages)
        made.end()
    return {"statistics": [statistics_of(log) for log in logs.seen], "messages": messages.texts}
