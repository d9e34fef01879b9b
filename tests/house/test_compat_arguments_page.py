"""Every argument of compat, on every driver: applied, without effect and documented so,
or refused.
"""

from __future__ import annotations

import ast
import dataclasses
from types import ModuleType
from typing import Any

import pytest
from house_rules import ROOT
from programs import program

from drivetrain.compat import Seq2SeqTrainingArguments

FIELDS = {item.name: item for item in dataclasses.fields(Seq2SeqTrainingArguments)}
READ_BY_THEIR_CALLBACKS = ("project", "run_name", "trackio_")
"""Beginnings of arguments that transformers' own callbacks read. `trackers.py` passes the arguments
on to them.
"""


DOCUMENTS = program("compat_arguments")
APPLIED_BY: dict[str, str] = DOCUMENTS.APPLIED_BY


@pytest.fixture(scope="module")
def documents() -> ModuleType:
    return DOCUMENTS


@pytest.fixture(scope="module")
def answers(documents: ModuleType) -> dict[str, dict[str, str]]:
    return {item.name: reported for item, reported in documents.rows()}


def test_the_page_is_what_the_code_does(documents: ModuleType) -> None:
    assert documents.PAGE.read_text() == documents.page(), (
        "run: python docs/generate.py compat-arguments"
    )


def test_every_pair_has_an_answer(documents: ModuleType, answers: Any) -> None:
    assert answers.keys() == FIELDS.keys()
    for reported in answers.values():
        assert reported.keys() == set(documents.shipped())
        for text in reported.values():
            assert text == "applied" or text.startswith(("no effect: ", "refused: "))
            assert not text.endswith(": ")


def test_what_is_tried_is_not_the_default(documents: ModuleType) -> None:
    for name, item in FIELDS.items():
        if name != "local_rank":  # any other one contradicts the launcher
            assert documents.example(item) != item.default, name


def test_some_answers_that_must_hold(answers: Any) -> None:
    assert "refused" in answers["fp16"]["xla"] and answers["fp16"]["ddp"] == "applied"
    assert "refused" in answers["fsdp"]["ddp"] and answers["fsdp"]["fsdp"] == "applied"
    assert "refused" in answers["use_cpu"]["xpu"]
    assert "no effect" in answers["ddp_static_graph"]["cpu"]
    assert answers["ddp_static_graph"]["ddp"] == "applied"
    assert set(answers["learning_rate"].values()) == {"applied"}


def test_every_argument_has_somebody_who_applies_it() -> None:
    assert APPLIED_BY.keys() | set(DOCUMENTS.SCRIPTS_ONLY) == FIELDS.keys()


@pytest.mark.parametrize("module", sorted(set(APPLIED_BY.values())))
def test_who_is_said_to_apply_an_argument_reads_it(module: str) -> None:
    tree = ast.parse((ROOT / "compat" / module).read_text())
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read |= {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    unread = {
        name
        for name, home in APPLIED_BY.items()
        if home == module and name not in read and not name.startswith(READ_BY_THEIR_CALLBACKS)
    }
    assert not unread
