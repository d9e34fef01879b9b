"""Prediction of a run's length, printed at its start and based on measured runs.

`measured.json` holds the seconds of the runs that made docs/conformance, on two cores. A folder of
reports holds the seconds measured on this machine, which take precedence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cases import Case

__all__ = ["MEASURED", "expected", "summed_up"]

MEASURED = Path(__file__).with_name("measured.json")
Seconds = Mapping[str, float]
"""Seconds of one case, by law."""


def expected(cases: Sequence[Case], folder: Path | None) -> str:
    """Return one line: the number of cases, about how long they take, and the source of that
    figure.
    """
    subject = cases[0].subject
    start = f"{subject.backend} x{subject.num_processes or ''}"
    own = _like(start, summed_up(_reports(folder))) if folder is not None else {}
    known = json.loads(MEASURED.read_text(encoding="utf-8"))
    alike = own or _like(start, known["seconds"])
    times = [_sum(cases, seconds) for seconds in (alike or known["seconds"]).values()]
    about = f"about {_words(min(times))}"
    if max(times) > 1.5 * min(times):
        about += f" to {_words(max(times))}"
    if own:
        how = f"by the report in {folder}"
    else:
        whose = ", ".join(alike) if alike else "the drivers that come with drivetrain"
        how = f"by what {whose} took on {known['machine']} (this one has {os.cpu_count()} CPUs)"
    return f"{len(cases)} cases of {subject.backend}: {about} when its processes are up, {how}"


def summed_up(reports: Iterable[Mapping[str, Any]]) -> dict[str, Seconds]:
    """Return the seconds of one case of each law, by the title of the run."""
    from .report import Run

    found: dict[str, Seconds] = {}
    for report in reports:
        laws: dict[str, list[float]] = {}
        for result in report["results"]:
            laws.setdefault(result["law"], []).append(result["seconds"])
        found[Run(**report).title] = {
            law: round(sum(times) / len(times), 3) for law, times in laws.items()
        }
    return found


def _reports(folder: Path) -> list[Mapping[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def _like(start: str, known: Mapping[str, Seconds]) -> dict[str, Seconds]:
    return {title: seconds for title, seconds in known.items() if title.startswith(start)}


def _sum(cases: Sequence[Case], seconds: Seconds) -> float:
    """Add up the seconds of all cases. A law that was not measured counts as the mean of the
    others.
    """
    usual = sum(seconds.values()) / len(seconds)
    return sum(seconds.get(case.law, usual) for case in cases)


def _words(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"
