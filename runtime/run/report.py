"""`report.html`: a page without external files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import islice
from string import Template

from ..checkpoint import Best
from .charts import MAX_EVALUATED, Chart, charts
from .curve import Point
from .curves import figure as drawn
from .format import amount, describe_unsaved, duration, figure, of_total
from .heat_map import heat_map
from .html_parts import Cell, Moment, cell, html_table, preformatted, section
from .lost_time import KINDS, whole_percents
from .memory_tables import memory_tables
from .page_script import content_security_policy, data_element, script
from .run_folder import FIT, TRAINER
from .run_history import RunHistory
from .shown_config import ShownConfig
from .unsaved_best import unsaved_best

_MAX_COLUMNS = 50
"""Maximum number of evaluation metrics in a table, and among the key figures."""
_MAX_CELLS = 5000

__all__ = [
    "Outcome",
    "curves_section",
    "evaluations_left_out",
    "fill",
    "key_figures",
    "render",
]

_REFRESH = '<noscript><meta http-equiv="refresh" content="{:g}"></noscript>'
_CONTROLS = (
    '<form id="controls" hidden><span>by '
    '<label><input type="radio" name="axis" id="by-step" value="step" checked> step</label> '
    '<label><input type="radio" name="axis" id="by-time" value="time"> time</label></span>'
    '<label><input type="checkbox" name="log" id="log"> log scale</label>'
    '<label>smoothing <input type="range" name="smoothing" id="smoothing" '
    'min="0" max="0.98" step="0.02" value="0"></label></form>'
)


@dataclass(frozen=True)
class Outcome:
    """The state of the run."""

    text: str
    mood: str = ""
    """`good`, `bad` or empty: sets the colour."""
    command: str = ""
    """The command that continues the run."""
    sample: str = ""
    best: Best | None = None
    """The best checkpoint."""


def render(
    history: RunHistory, config: ShownConfig, outcome: Outcome, every: float | None = None
) -> str:
    """Render the page of one run. `every`: seconds after which a served page reloads itself."""
    sections = [
        curves_section(charts(history, config), [history.clock()]),
        section("Layers", _layers(history)),
        section(
            "Steps that were not finite",
            preformatted("\n".join(each["text"] for each in history.not_finite)),
        ),
        section("Where the time went", _times(history)),
        section("Where the memory goes", memory_tables(history.memory)),
        section("Evaluation", _evaluation_table(history)),
        section("Best checkpoint", preformatted(_best_text(history, config, outcome.best))),
        section("Sample", preformatted(outcome.sample)),
        section("Continue this run", preformatted(outcome.command)),
        section("Started with", preformatted(" ".join(config.command))),
        section("Settings", _settings_table(config)),
        section("Left out", _left_out(history, config)),
    ]
    facts = key_figures(history, outcome.best)
    return fill(config.name, outcome, _subtitle(config), facts, sections, every)


def fill(
    title: str,
    outcome: Outcome,
    subtitle: str,
    facts: Mapping[str, Cell],
    sections: Sequence[str],
    every: float | None = None,
) -> str:
    """Fill the page template; `sections` are HTML."""
    page = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(title),
        mood=outcome.mood,
        outcome=escape(outcome.text),
        subtitle=escape(subtitle),
        facts="".join(
            f"<div><dt>{escape(name)}</dt><dd>{cell(value)}</dd></div>"
            for name, value in facts.items()
        ),
        sections="".join(sections),
        policy=content_security_policy(),
        refresh=_REFRESH.format(every) if every else "",
        every=f' data-every="{every:g}"' if every else "",
        script=script(),
    )


def curves_section(found: Sequence[Chart], clocks: Sequence[Sequence[Point]]) -> str:
    """Return the charts as HTML, with their data for the page's script. `clocks`: see
    `data_element`."""
    if not found:
        return ""
    figures = "".join(drawn(chart, number) for number, chart in enumerate(found))
    held = data_element(found, clocks)
    return section("Curves", f'{_CONTROLS}<div class="curves">{figures}</div>{held}')


def evaluations_left_out(names: Sequence[str]) -> str:
    """Describe the evaluation curves that are not drawn. `names`: the names of all."""
    more = names[MAX_EVALUATED:]
    if not more:
        return ""
    named = ", ".join(more[:10]) + ("" if len(more) <= 10 else f" and {len(more) - 10} more")
    return (
        f"the curves of {len(more)} metrics of evaluations after the first {MAX_EVALUATED}: {named}"
    )


def _best_text(history: RunHistory, config: ShownConfig, best: Best | None) -> str:
    if best is None:
        return ""
    value = f"{best.metric} {figure(best.value)} (checkpoint.best_metric)"
    better = unsaved_best(history, config, best)
    note = "" if better is None else f"\n{describe_unsaved(better)}"
    return f"step {best.step}: {value}\nname it as {best.name}{note}"


def _times(history: RunHistory) -> str:
    """The verdicts, and where the hours of all starts of the run went."""
    seconds = history.lost.seconds()
    percents = whole_percents(seconds)
    rows = [
        [kind, duration(seconds[kind]), f"{percents[kind]} %", about]
        for kind, about in KINDS.items()
        if kind in seconds
    ]
    verdicts = preformatted("\n".join(each["text"] for each in history.verdicts))
    return verdicts + (html_table(["", "time", "share", "counted as that"], rows) if rows else "")


def _layers(history: RunHistory) -> str:
    """The maps of statistics by layer and step, if the run has statistics."""
    found = "".join(heat_map(each) for each in history.layer_maps())
    return f'<div class="curves">{found}</div>' if found else ""


def _subtitle(config: ShownConfig) -> str:
    backend = config.backend + (f" on {config.world_size} ranks" if config.world_size > 1 else "")
    by = config.started_by
    origin = f"started by {by}" if by in (FIT, TRAINER) else "recipe gpt (the default)"
    recipe = f"recipe {config.recipe}" if config.recipe else origin
    return f"backend {backend}, torch {config.torch}, {recipe}"


def key_figures(history: RunHistory, best: Best | None = None) -> dict[str, Cell]:
    """Return the newest value of each key figure, by its display name."""
    facts: dict[str, Cell] = {}
    logged, started, ended = history.logged, history.started, history.ended
    if logged is not None:
        facts["Step"] = of_total(logged["step"], logged.get("total_steps"))
        facts["Training loss"] = figure(logged["loss"])
        if ended is None and logged.get("seconds_left") is not None:
            facts["Time left"] = duration(logged["seconds_left"])
    facts |= dict(islice(_newest(history).items(), _MAX_COLUMNS))
    if best is not None:
        facts["Best checkpoint"] = f"step {best.step}, {best.metric} {figure(best.value)}"
    if logged is not None:
        facts[f"{logged['item_name'].capitalize()} a second"] = amount(logged["items_per_second"])
        if logged.get("mfu") is not None:
            facts["MFU"] = f"{logged['mfu']:.0%}"
    if started is not None:
        facts["Parameters"] = amount(started["num_parameters"])
    if ended is not None:
        facts["Time"] = duration(ended["seconds"])
    if history.updated is not None:
        facts["Last update"] = Moment(history.updated)
    return facts


def _newest(history: RunHistory) -> dict[str, str]:
    """Return the last value of each evaluation metric."""
    found: dict[str, str] = {}
    for record in history.rows:
        found |= {f"{record['name']}: {k}": figure(v) for k, v in record["metrics"].items()}
    return found


def _evaluation_table(history: RunHistory) -> str:
    rows = history.rows[-_shown_rows(history) :]
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))[:_MAX_COLUMNS]
    body = [
        [str(row["step"]), row["name"]]
        + [figure(row["metrics"][name]) if name in row["metrics"] else "" for name in names]
        for row in rows
    ]
    return html_table(["step", "data", *names], body) if rows else ""


def _shown_rows(history: RunHistory) -> int:
    """Return the number of evaluations in the table, which is smaller if they have many metrics."""
    most = max((len(row["metrics"]) for row in history.rows), default=0)
    return max(20, _MAX_CELLS // (2 + min(most, _MAX_COLUMNS)))


def _settings_table(config: ShownConfig) -> str:
    rows = [[key, value, source] for key, (value, source) in config.settings.items()]
    chosen = [row[2] != "default" for row in rows]
    return html_table(["setting", "value", "from"], rows, chosen) if rows else ""


def _left_out(history: RunHistory, config: ShownConfig) -> str:
    """Describe the content of the run folder that the page leaves out."""
    left_out = []
    if history.skipped:
        left_out.append(f"{history.skipped} lines of metrics.jsonl, which are no records of a run")
    if history.left_out:
        left_out.append(f"{history.left_out} figures of evaluations, since there are too many")
    if (more := len(history.rows) - _shown_rows(history)) > 0:
        left_out.append(f"{more} evaluations before those of the table")
    if (more := len(_newest(history)) - _MAX_COLUMNS) > 0:
        left_out.append(f"{more} metrics beside the first {_MAX_COLUMNS}, in the key figures")
    if missing := evaluations_left_out([f"{d}: {n}" for d, n, _ in history.evaluated()]):
        left_out.append(missing)
    if config.skipped:
        left_out.append(f"{config.skipped} values of config.json, which no run writes")
    return preformatted("\n".join(left_out))
