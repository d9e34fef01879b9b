"""docs/compat-matrix.md agrees with the tests' markers, and every marker can be read."""

from __future__ import annotations

from types import ModuleType

import pytest
from programs import program


@pytest.fixture(scope="module")
def compat_matrix() -> ModuleType:
    return program("compat_matrix")


def test_the_page_is_current(compat_matrix: ModuleType) -> None:
    page = compat_matrix.page(compat_matrix.matrix(compat_matrix.all_markers()))
    assert compat_matrix.PAGE.read_text() == page, "run: python docs/generate.py compat-matrix"


def test_every_row_has_a_status(compat_matrix: ModuleType) -> None:
    groups = compat_matrix.matrix(compat_matrix.all_markers())
    rows = [row for group in groups.values() for row in group]
    assert len(rows) == 400
    assert {row.status for row in rows} <= set(compat_matrix.STATUSES)
    assert all(row.notes for row in rows if row.status in ("differs", "refused"))
    assert all(row.title for row in rows)


def test_a_row_is_as_good_as_its_tests(compat_matrix: ModuleType) -> None:
    text = """
@pytest.mark.row("C1", "C2")
def test_a(): ...

@pytest.mark.row("C2", status="differs", note="in a way")
class TestB:
    @pytest.mark.row("C3", status="refused", note="no such thing")
    @pytest.mark.other("C5")
    def test_c(self): ...
"""
    shown = list(compat_matrix.markers("tests/test_x.py", text))
    rows = {row.name: row for group in compat_matrix.matrix(shown).values() for row in group}
    assert [rows[f"C{n}"].status for n in range(1, 6)] == [
        "works",
        "differs",
        "refused",
        "open",
        "open",
    ]
    assert rows["C2"].notes == "in a way"
    page = compat_matrix.page(compat_matrix.matrix(shown))
    assert "differs: in a way | `tests/test_x.py::test_a` and 1 more |" in page


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('"Q1"', "no row 'Q1'"),
        ("name", "takes plain strings"),
        ('"C1", state="works"', "takes plain strings"),
        ('"C1", status="good"', "status 'good'"),
        ('"C1", status="differs"', "a note says why"),
        ('"C1", note="so"', "a note says why"),
    ],
)
def test_a_bad_marker_is_named(compat_matrix: ModuleType, marker: str, message: str) -> None:
    text = f"@pytest.mark.row({marker})\ndef test_a(): ..."
    with pytest.raises(ValueError, match=f"test_x.py::test_a: .*{message}"):
        compat_matrix.matrix(list(compat_matrix.markers("test_x.py", text)))
