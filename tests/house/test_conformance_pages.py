"""The committed pages are the output of the templates for the committed figures, and fit any
window.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from drivetrain.conformance.expected import MEASURED, summed_up
from drivetrain.conformance.matrix import read_table, write_page
from drivetrain.conformance.report import write_report

RUN = "run: python docs/generate.py conformance-pages"

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "conformance"

sys.path.append(str(ROOT / "tests" / "backends"))

from meshes import MESHES  # noqa: E402 - where the tests of them keep it


def test_the_page_of_laws_is_that_of_the_figures(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    write_report(tmp_path, [])
    assert (tmp_path / "index.html").read_text() == (FOLDER / "index.html").read_text(), RUN


@pytest.mark.parametrize("name", ["matrix", "layouts"])
def test_who_resumes_whom_is_that_of_the_figures(name: str, tmp_path: Path) -> None:
    found = read_table(FOLDER / f"{name}.csv")
    write_page(tmp_path, found, name)
    page = (FOLDER / f"{name}.html").read_text()
    assert (tmp_path / f"{name}.html").read_text() == page, RUN


@pytest.mark.parametrize(
    ("page", "column"),
    [("index", "data-run"), ("matrix", "data-reader"), ("layouts", "data-reader")],
)
def test_on_a_narrow_screen_each_cell_names_its_column(page: str, column: str) -> None:
    text = (FOLDER / f"{page}.html").read_text()
    assert text.count("<td") == text.count(f'{column}="') > 50
    assert f"attr({column})" in text
    assert "overflow-x" not in text  # nothing scrolls sideways


def test_the_time_that_is_stated_is_that_of_the_reports() -> None:
    reports = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    assert json.loads(MEASURED.read_text())["seconds"] == summed_up(reports)


def test_all_figures_are_on_the_page() -> None:
    text = (FOLDER / "index.html").read_text()
    for path in FOLDER.glob("*.json"):
        for result in json.loads(path.read_text())["results"][:3]:
            assert f"{result['seconds']:.2f} s" in text


def test_each_mesh_is_on_its_page() -> None:
    """Require every mesh on the page, with deviations within bounds. Weights are compared when the
    page is written.
    """
    lines = (FOLDER / "meshes.md").read_text().partition("---: |\n")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:3] for row in rows] == [
        [str(each.size), each.in_words, each.trained] for each in MESHES
    ]
    assert len(rows) >= 40
    assert all(float(figure) <= 1e-5 for row in rows for figure in row[3:6])
