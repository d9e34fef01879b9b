"""Any driver at any world size resumes what any other saved."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path

import pytest
from environments import WORLDS, build_all, python_of_all

from drivetrain.conformance import Subject, matrix
from drivetrain.conformance.crossing import TRAININGS, Saved, crossing, refusal, save, title
from drivetrain.conformance.matrix import main, parse_subject

# the first slow one waits until all have saved; each rank's answer has a limit of its own
pytestmark = pytest.mark.timeout(840)

HUB = "cpu"
NEWEST = ("cpu", "ddp:2", "fsdp:2")
"""Drivers that run on the newest torch as well as on 2.8."""

RING = ("cpu", "ddp:2", "fsdp:2", "deepspeed:2,stage=3", "xla", "ipex")
"""Each driver once, on the newest torch that it runs on. Each resumes the one before it."""

CROSSINGS = [
    (reader, writer, training)
    for reader in reversed(WORLDS)  # the last to save are still up
    for writer in WORLDS
    for training in TRAININGS
    if training == "AdamW" or HUB in (reader, writer)
]
"""Pairs in the order that starts the fewest processes."""


@functools.cache
def subject(text: str, newest: bool = False) -> Subject:
    build_all()
    return parse_subject(text, None if newest else python_of_all())


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="drivetrain-matrix-"))


@functools.cache
def refused(text: str, training: str) -> str:
    return refusal(subject(text), training)


@functools.cache
def saved(text: str, training: str, newest: bool = False) -> Saved:
    return save(subject(text, newest), tempfile.mkdtemp(dir=folder()), training)


@pytest.fixture(scope="module")
def all_saved(request: pytest.FixtureRequest) -> None:
    """Save the checkpoints that the chosen tests read, driver by driver: the ranks of each start
    once.
    """
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    needed = {(each["writer"], each["training"]) for each in chosen if "training" in each}
    for text in WORLDS:
        for training in TRAININGS:
            if (text, training) in needed and not refused(text, training):
                saved(text, training)


@pytest.mark.parametrize(("writer", "reader"), [*itertools.pairwise([*RING, RING[0]])])
@pytest.mark.slow
def test_each_driver_resumes_the_one_before(writer: str, reader: str) -> None:
    """Resume on the newest torch that either driver runs on."""
    old = {"xla", "ipex"}
    crossing(saved(writer, "AdamW", writer not in old), subject(reader, reader not in old))


@pytest.mark.slow
@pytest.mark.usefixtures("all_saved")
@pytest.mark.parametrize(("reader", "writer", "training"), CROSSINGS)
def test_checkpoints_cross(reader: str, writer: str, training: str) -> None:
    words = refused(writer, training) or refused(reader, training)
    if training == "Adafactor" and "deepspeed" in writer + reader:
        # ZeRO partitions tensors into flat ranges, which rows and columns cannot be made of
        assert "Adafactor" in words
        return
    assert not words
    crossing(saved(writer, training), subject(reader))


@pytest.mark.slow
@pytest.mark.parametrize("driver", NEWEST)
@pytest.mark.parametrize("other", WORLDS)
def test_checkpoints_cross_between_versions_of_torch(other: str, driver: str) -> None:
    """Save on the newest torch and resume on 2.8, and the other way round."""
    crossing(saved(driver, "AdamW", newest=True), subject(other))
    crossing(saved(other, "AdamW"), subject(driver, newest=True))


@pytest.mark.slow
def test_the_page_shows_every_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {name: TRAININGS[name] for name in ("AdamW", "AdamW in bf16")}
    monkeypatch.setattr(matrix, "TRAININGS", shown)
    assert main(["--report", str(tmp_path), "cpu", "ddp:2"]) == 0
    text = (tmp_path / "matrix.html").read_text()
    assert text.count("<td data-reader") == 4 * len(shown)
    assert "broken</td>" not in text
    assert str(tmp_path) not in text + (tmp_path / "matrix.csv").read_text()


def test_a_row_of_the_page_names_driver_world_and_options() -> None:
    assert title(parse_subject("deepspeed:3,stage=3")) == "deepspeed x3 stage=3"
