"""A job of two processes: records of a run, and a replay of one of its steps."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from test_compat_records import trainer

from drivetrain.conformance.bench import Bench


def trained(bench: Bench, *, folder: str, **given: Any) -> dict[str, Any]:
    """Train; return the exit code of a replay, or None, and what was printed."""
    made, printed = trainer(folder, **given), io.StringIO()
    code = None
    try:
        with contextlib.redirect_stdout(printed):
            made.train()
    except SystemExit as ended:
        code = ended.code
    finally:
        made.end()
    return {"code": code, "printed": printed.getvalue()}
