"""`report.html`: one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from .curves import curves
from .format import amount, duration, figure, of_total
from .records import Record, last

__all__ = ["Outcome", "fill", "html_table", "key_figures", "render", "section"]


@dataclass(frozen=True)
class Outcome:
    """The state of the run."""

    text: str
    mood: str = ""
    """`good`, `bad` or empty: how it is coloured."""
    command: str = ""
    """The command that continues it."""
    sample: str = ""


def render(records: Sequence[Record], config: Mapping[str, Any], outcome: Outcome) -> str:
    """The page. `records`: the history that led here; `config`: what `config.json` holds."""
    drawn = [
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
        for title, svg in curves(records).items()
    ]
    sections = [
        section("Curves", f'<div class="curves">{"".join(drawn)}</div>' if drawn else ""),
        section("Evaluation", _evaluation_table(records)),
        section("Sample", _pre(outcome.sample)),
        section("Go on with this run", _pre(outcome.command)),
        section("Started with", _pre(" ".join(config.get("command", ())))),
        section("Settings", _settings_table(config)),
    ]
    return fill(
        str(config.get("name", "run")), outcome, _subtitle(config), key_figures(records), sections
    )


def fill(
    title: str, outcome: Outcome, subtitle: str, facts: Mapping[str, str], sections: Sequence[str]
) -> str:
    """The page with these texts; `sections` are HTML."""
    page = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(title),
        mood=outcome.mood,
        outcome=escape(outcome.text),
        subtitle=escape(subtitle),
        facts="".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in facts.items()
        ),
        sections="".join(sections),
    )


def section(title: str, content: str) -> str:
    """HTML; nothing where there is no content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _pre(text: str) -> str:
    return f'<pre class="wrap">{escape(text)}</pre>' if text else ""


def _subtitle(config: Mapping[str, Any]) -> str:
    ranks = config.get("world_size", 1)
    backend = config.get("backend", "?") + (f" on {ranks} ranks" if ranks > 1 else "")
    recipe = config.get("recipe") or "gpt (the default)"
    return f"backend {backend}, torch {config.get('torch', '?')}, recipe {recipe}"


def key_figures(records: Sequence[Record]) -> dict[str, str]:
    """The newest of each, by what a reader calls it."""
    facts: dict[str, str] = {}
    if (logged := last(records, "logged")) is not None:
        facts["Step"] = of_total(logged["step"], logged["total_steps"])
        facts["Training loss"] = figure(logged["loss"])
    for record in records:
        if record["event"] == "evaluated":  # the last of each data set stays
            facts |= {f"{record['name']}: {k}": figure(v) for k, v in record["metrics"].items()}
    if logged is not None:
        facts[f"{logged['item_name'].capitalize()} a second"] = amount(logged["items_per_second"])
        if logged.get("mfu") is not None:
            facts["MFU"] = f"{logged['mfu']:.0%}"
    if (started := last(records, "run_started")) is not None:
        facts["Parameters"] = amount(started["num_parameters"])
    if (ended := last(records, "run_ended")) is not None:
        facts["Time"] = duration(ended["seconds"])
    return facts


def _evaluation_table(records: Sequence[Record]) -> str:
    rows = [record for record in records if record["event"] == "evaluated"]
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    body = [
        [str(row["step"]), row["name"]]
        + [figure(row["metrics"][name]) if name in row["metrics"] else "" for name in names]
        for row in rows
    ]
    return html_table(["step", "data", *names], body) if rows else ""


def _settings_table(config: Mapping[str, Any]) -> str:
    settings = config.get("settings", {})
    rows = [[key, str(entry["value"]), entry["source"]] for key, entry in settings.items()]
    chosen = [row[2] != "default" for row in rows]
    return html_table(["setting", "value", "from"], rows, chosen) if rows else ""


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[bool] = ()
) -> str:
    """Texts in a table that scrolls by itself; `chosen` rows stand out."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    marks = [*chosen, *[False] * (len(rows) - len(chosen))]
    body = "".join(
        f"<tr{' class=chosen' * mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row, mark in zip(rows, marks, strict=True)
    )
    return f'<div class="scroll"><table><tr>{heads}</tr>{body}</table></div>'
