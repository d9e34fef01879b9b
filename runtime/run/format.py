"""Formats records for people: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.markup import escape

from .tables import table, text_of

__all__ = [
    "amount",
    "describe",
    "describe_unsaved",
    "duration",
    "figure",
    "loss_of",
    "of_total",
    "rate",
]


_FIGURES = ("calls", "ms", "share")
_MAX_SECONDS = 1e12
"""Some thirty thousand years, beyond the range of calendars."""


def describe(record: Mapping[str, Any]) -> str | None:
    """Return the line for a record; None for a record that is not shown to people."""
    lines = {
        "run_started": _run_started,
        "resumed": _resumed,
        "step_skipped": _step_skipped,
        "non_finite_found": lambda record: record["text"],
        "loss_spiked": _loss_spiked,
        "rolled_back": _rolled_back,
        "logged": _logged,
        "evaluated": _evaluated,
        "saved": _saved,
        "profiled": _profiled,
        "rank_late": _rank_late,
        "rank_lost": _rank_lost,
        "rejoined": _rejoined,
        "reformed": _reformed,
        "time_spent": _time_spent,
        "warned": lambda record: f"warning: {record['message']}",
        "run_ended": _run_ended,
        "result": _result,
    }
    line = lines.get(str(record["event"]))
    return line(record) if line else None


def _run_started(record: Mapping[str, Any]) -> str:
    world = record["world"]
    ranks = f" on {world['size']} ranks" if world["size"] > 1 else ""
    total = record["total_steps"]
    steps = "an open end" if total is None else f"{total - record['first_step']} steps"
    line = (
        f"{amount(record['num_parameters'])} parameters, {amount(record['num_samples'])} samples, "
        f"{steps} with backend {record['backend']}{ranks} ({world['device']})"
    )
    return f"{line}\nMFU is of {record['peak']}" if record.get("peak") else line


def _resumed(record: Mapping[str, Any]) -> str:
    notes = [f"  {note}" for note in record["notes"]]
    return "\n".join([f"resumed at step {record['step']} from {record['path']}", *notes])


def _step_skipped(record: Mapping[str, Any]) -> str:
    return (
        f"step {record['step']} was not applied: loss {figure(record['loss'])}, gradient norm "
        f"{figure(record['grad_norm'])} ({record['in_a_row']} in a row); it was for "
        f"{record['samples']}"
    )


def _loss_spiked(record: Mapping[str, Any]) -> str:
    return (
        f"step {record['step']}: loss {figure(record['loss'])}, where {figure(record['usual'])} is "
        f"usual, for {record['samples']}"
    )


def _rolled_back(record: Mapping[str, Any]) -> str:
    return (
        f"back at step {record['step']}, from {record['path']}; left out from here on: the samples "
        f"of {record['left_out']} steps"
    )


def _logged(record: Mapping[str, Any]) -> str:
    parts = [
        f"step {of_total(record['step'], record['total_steps'])}",
        loss_of(record),
        f"lr {record['learning_rate']:.2e}",
        f"grad norm {figure(record['grad_norm'])}",
        rate(record),
    ]
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.0%}")
    if record["skipped"]:
        parts.append(f"{record['skipped']} skipped")
    return "  ".join([*parts, f"{duration(record['seconds_left'])} left"])


def _evaluated(record: Mapping[str, Any]) -> str:
    metrics = "  ".join(f"{name} {figure(value)}" for name, value in record["metrics"].items())
    return f"step {record['step']} {record['name']}: {metrics}  ({record['seconds']:.1f} s)"


def _rank_late(record: Mapping[str, Any]) -> str:
    return (
        f"rank {record['rank']} has kept others waiting for {record['seconds']:.0f} s: "
        f"{record['what']}"
    )


def _rank_lost(record: Mapping[str, Any]) -> str:
    dead, left = record["ranks"], record["left"]
    which = f"rank {dead[0]} has" if len(dead) == 1 else f"ranks {', '.join(map(str, dead))} have"
    others = "1 rank continues" if left == 1 else f"{left} ranks continue"
    return f"{which} died after step {record['step']}: {others} with the same batch"


def _rejoined(record: Mapping[str, Any]) -> str:
    spares = record["ranks"]
    joined = "a spare has joined" if len(spares) == 1 else f"{len(spares)} spares have joined"
    return f"{joined} after step {record['step']}: {record['world_size']} ranks share the batch"


def _reformed(record: Mapping[str, Any]) -> str:
    still, back = f"training stood still for {record['seconds']:.2f} s", record["steps_back"]
    if not back:
        return f"{still}, and nothing of it is lost"
    return f"{still}; {back} {'step is' if back == 1 else 'steps are'} made again"


def _saved(record: Mapping[str, Any]) -> str:
    if record["error"]:
        return f"step {record['step']} could not be saved: {record['error']}"
    return f"step {record['step']} saved: {record['path']}"


def _profiled(record: Mapping[str, Any]) -> str:
    costliest = table("costliest operations", "calls", "ms", "share", figures=_FIGURES)
    for name, calls, seconds, share in record["operations"]:
        costliest.add_row(escape(name), str(calls), f"{1000 * seconds:.2f}", f"{share:.0%}")
    steps = f"{record['first']} to {record['step']}"
    return f"steps {steps} profiled: {record['path']}\n{text_of(costliest)}"


def _time_spent(record: Mapping[str, Any]) -> str | None:
    return "\n".join(f"time: {text}" for text in record["news"]) or None


def _run_ended(record: Mapping[str, Any]) -> str:
    lost = record["lost_ranks"]
    died = f", in which {lost} {'rank' if lost == 1 else 'ranks'} died" if lost else ""
    return f"{record['reason']} at step {record['step']} after {duration(record['seconds'])}{died}"


def _result(record: Mapping[str, Any]) -> str:
    sample = f"\n{record['sample']}\n\n" if record["sample"] else ""
    intent = "continue it on another driver" if record["reason"] == "finished" else "resume it"
    report = f"{sample}{_best(record)}{_times(record)}report: {record['report']}"
    return f"{report}\nto {intent}:\n  {record['command']}" if record["command"] else report


def _best(record: Mapping[str, Any]) -> str:
    if not (best := record.get("best")):
        return ""
    value = f"{best['metric']} {figure(best['value'])}"
    text = f"best checkpoint: step {best['step']}, {value}: {best['name']}\n"
    better = record.get("unsaved_best")
    return f"{describe_unsaved(better)}\n{text}" if better else text


def describe_unsaved(best: Mapping[str, Any]) -> str:
    """Describe the best evaluation, which is better than the best checkpoint."""
    return (
        f"best evaluation: step {best['step']}, {best['metric']} {figure(best['value'])}, which no "
        "checkpoint records; checkpoint.save_best=true saves each new best"
    )


def _times(record: Mapping[str, Any]) -> str:
    times = ", ".join(f"{kind} {percent} %" for kind, percent in record.get("time", {}).items())
    return times and f"time: {times}\n"


def loss_of(record: Mapping[str, Any]) -> str:
    """Format the logged loss, and the loss of each turn."""
    turns = ", ".join(f"{name} {figure(loss)}" for name, loss in record.get("losses", {}).items())
    return f"loss {figure(record['loss'])}{turns and f' ({turns})'}"


def rate(record: Mapping[str, Any]) -> str:
    """Format a rate: `12.3k bytes/s`."""
    return f"{amount(record['items_per_second'])} {record['item_name']}/s"


def figure(value: float | None) -> str:
    """Format with four digits; None stands for a value that was not finite."""
    return "not finite" if value is None else f"{value:.4g}"


def amount(value: float | None) -> str:
    """Format an amount: `2.71M`."""
    if value is None:
        return "?"
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def of_total(step: int, total: int | None) -> str:
    """Format `12/100`, or `12` if the end is unknown."""
    return str(step) if total is None else f"{step}/{total}"


def duration(seconds: float | None) -> str:
    """Format a duration: `0:01:20`."""
    if seconds is None:
        return "?"
    if not abs(seconds) < _MAX_SECONDS:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds)))
