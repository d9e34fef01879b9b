"""The report: one JSON file a driver, and a page that shows all of them side by side.

Runs that are written to the same folder, at whatever time, share the page.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import Any

__all__ = ["STATUSES", "Run", "write_report"]

STATUSES = ("passed", "refused", "failed", "unavailable")
"""`refused`: not declared, and properly refused. `unavailable`: the driver cannot run there."""


@dataclass
class Run:
    """Results of one driver in one world with one set of options."""

    subject: dict[str, Any]
    laws: dict[str, str] = field(default_factory=dict)
    """Law -> its text."""
    results: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Run:
        return cls(record["subject"])

    def add(self, record: Mapping[str, Any]) -> None:
        self.subject.setdefault("stand_ins", {}).update(record["subject"].get("stand_ins", {}))
        self.laws[record["law"]] = record["statement"]
        kept = ("law", "check", "arguments", "status", "seconds", "message")
        self.results.append({name: record[name] for name in kept})

    @property
    def key(self) -> str:
        """The run's file name; equal for runs that replace each other."""
        return re.sub(r"[^A-Za-z0-9.=_-]+", "-", self.title).lower()

    @property
    def title(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.subject["options"].items())
        return f"{self.subject['backend']} x{self.subject['processes']}{options}"

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(result["status"] for result in self.results)
        return {status: found[status] for status in STATUSES}


def write_report(folder: Path, runs: Iterable[Run]) -> None:
    """Write the runs, and the page over all runs that the folder holds."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        (folder / f"{run.key}.json").write_text(json.dumps(asdict(run), indent=1))
    found = [Run(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    others = sorted(path.name for path in folder.glob("*.html") if path.name != "index.html")
    (folder / "index.html").write_text(page(found, others), encoding="utf-8")


def page(runs: list[Run], others: Sequence[str] = ()) -> str:
    """A page that needs nothing but itself, with links to the other pages of its folder."""
    laws = {law: statement for run in runs for law, statement in run.laws.items()}
    head = "".join(f"<th>{html.escape(run.title)}</th>" for run in runs)
    body = "".join(
        f"<tr><th>{law_cell(law, statement)}</th>"
        + "".join(f'<td data-run="{html.escape(run.title)}">{cell(run, law)}</td>' for run in runs)
        + "</tr>"
        for law, statement in laws.items()
    )
    template = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    links = "".join(f'<p><a href="{name}">{name.removesuffix(".html")}</a></p>' for name in others)
    sections = "".join(map(section, runs))
    return template.substitute(head=head, body=body, runs=sections, links=links)


def law_cell(law: str, statement: str) -> str:
    title, _, rest = statement.partition("\n\n")
    more = f"<small>{html.escape(rest)}</small>" if rest else ""
    return f'<span title="{html.escape(law)}">{html.escape(title)}</span>{more}'


def cell(run: Run, law: str) -> str:
    found = Counter(result["status"] for result in run.results if result["law"] == law)
    shown = [badge(status, f"{found[status]} {status}") for status in STATUSES if found[status]]
    return " ".join(shown) or badge("unavailable", "not run")


def section(run: Run) -> str:
    """Everything about one driver."""
    facts = {**run.subject.get("versions", {}), **run.subject.get("capabilities", {})}
    shown = ", ".join(f"{html.escape(str(k))} {html.escape(str(v))}" for k, v in facts.items())
    devices = html.escape(", ".join(run.subject.get("devices", [])))
    stand_ins = "".join(
        f"<p>In place of {html.escape(problem)}, which is refused, {html.escape(why)}</p>"
        for problem, why in run.subject.get("stand_ins", {}).items()
    )
    rows = "".join(row(result) for result in run.results)
    opened = " open" if run.counts["failed"] else ""
    return (
        f"<details{opened}><summary>{html.escape(run.title)} "
        f"{' '.join(badge(s, f'{n} {s}') for s, n in run.counts.items() if n)}</summary>"
        f"<p>{devices}</p><p><small>{shown}</small></p>{stand_ins}<ul>{rows}</ul></details>"
    )


def row(result: dict[str, Any]) -> str:
    words = result["check"].replace("_", " ")
    arguments = ", ".join(f"{key} {value}" for key, value in result["arguments"].items())
    message = f"<pre>{html.escape(result['message'])}</pre>" if result["message"] else ""
    return (
        f"<li>{badge(result['status'], result['status'])} {html.escape(words)} "
        f"<small>{html.escape(arguments)} {result['seconds']:.2f} s</small>{message}</li>"
    )


def badge(status: str, text: str) -> str:
    return f'<b class="{status}">{html.escape(text)}</b>'
