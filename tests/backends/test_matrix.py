"""Any driver at any world size resumes what any other saved."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
from environments import build_all, python_of_all

from drivetrain.conformance import Subject
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.matrix import OPTIMIZERS, Saved, crossing, parse_subject, save, title

DRIVERS = (
    "cpu",
    "ddp:2",
    "ddp:3",
    "fsdp:2",
    "fsdp:3",
    "deepspeed:2,stage=1",
    "deepspeed:2,stage=2",
    "deepspeed:2,stage=3",
    "deepspeed:3,stage=3",
    "xla",
    "xla,devices=2",
    "ipex",
)
STAR = [("cpu", other) for other in DRIVERS] + [(other, "cpu") for other in DRIVERS[1:]]
NEWEST = ("cpu", "ddp:2", "fsdp:2")


@functools.cache
def subject(text: str, newest: bool = False) -> Subject:
    return parse_subject(text, None if newest else python_of_all())


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="drivetrain-matrix-"))


@functools.cache
def saved(text: str, optimizer: str, newest: bool = False) -> Saved:
    build_all()
    return save(subject(text, newest), tempfile.mkdtemp(dir=folder()), optimizer)


def check(writer: str, reader: str, optimizer: str, *, newest: tuple[bool, bool]) -> None:
    build_all()
    found = saved(writer, optimizer, newest[0])
    crossing(found, subject(reader, newest[1]), tempfile.mkdtemp(dir=folder()))


@pytest.mark.slow
@pytest.mark.parametrize("writer", DRIVERS)
@pytest.mark.parametrize("reader", DRIVERS)
def test_adamw_crosses(reader: str, writer: str) -> None:
    check(writer, reader, "AdamW", newest=(False, False))


@pytest.mark.parametrize(("writer", "reader"), STAR)
def test_adamw_crosses_to_and_from_one_process(reader: str, writer: str) -> None:
    check(writer, reader, "AdamW", newest=(False, False))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "AdamW"])
@pytest.mark.parametrize(("writer", "reader"), STAR)
def test_other_optimizers_cross(reader: str, writer: str, optimizer: str) -> None:
    if optimizer == "Adafactor" and "deepspeed" in writer + reader:
        # ZeRO cuts tensors into flat ranges, which rows and columns cannot be made of
        with pytest.raises(WorkerFailure, match="Adafactor"):
            check(writer, reader, optimizer, newest=(False, False))
        return
    check(writer, reader, optimizer, newest=(False, False))


@pytest.mark.slow
@pytest.mark.parametrize("other", DRIVERS)
@pytest.mark.parametrize("driver", NEWEST)
def test_checkpoints_cross_between_versions_of_torch(driver: str, other: str) -> None:
    """Written on the newest torch, resumed on 2.8, and the other way round."""
    check(driver, other, "AdamW", newest=(True, False))
    check(other, driver, "AdamW", newest=(False, True))


def test_a_row_of_the_page_names_driver_world_and_options() -> None:
    assert title(parse_subject("deepspeed:3,stage=3")) == "deepspeed x3 stage=3"
