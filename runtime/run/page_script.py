"""The script of a page, and the data that it draws.

The page forbids every other script by a hash of this one, so that no text from a run can be
executed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from .charts import Chart, Series
from .curve import Point, fewer

__all__ = ["content_security_policy", "data_element", "script"]

_MAX_CLOCK_POINTS = 500


@cache
def script() -> str:
    """Return the text of the script element."""
    return files(__package__).joinpath("page.js").read_text(encoding="utf-8")


@cache
def content_security_policy() -> str:
    """Return the policy of a page: it may run its own script, and reload itself from its own
    server."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def data_element(charts: Sequence[Chart], clocks: Sequence[Sequence[Point]]) -> str:
    """Return the curves as JSON in an element that no browser executes. `clocks`: seconds of
    training by step, for each run."""
    held = {
        "charts": [
            {
                "title": chart.title,
                "lines": [_line(line) for line in chart.lines],
                **({"stacked": True} if chart.stacked else {}),
            }
            for chart in charts
        ],
        "clocks": [_columns(fewer(clock, _MAX_CLOCK_POINTS)) for clock in clocks],
    }
    text = json.dumps(held, separators=(",", ":"), allow_nan=False)  # ASCII alone
    for sign in "<>&":  # no text in the JSON can end the element
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="curves-data">{text}</script>'


def _line(line: Series) -> dict[str, Any]:
    steps, values = _columns(line.points)
    best = None if line.best is None else [line.best[0], _rounded(line.best[1])]
    return {
        "name": line.name,
        "colour": line.colour,
        "clock": line.clock,
        "steps": steps,
        "values": values,
        "best": best,
    }


def _columns(points: Sequence[Point]) -> tuple[list[int], list[float | None]]:
    return [step for step, _ in points], [_rounded(value) for _, value in points]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}")
