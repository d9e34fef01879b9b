"""Every argument is applied or refused by name on every driver, and the page says what the code
does.
"""

from __future__ import annotations

from types import ModuleType

import pytest
from programs import program

from drivetrain.kernel.errors import SettingError
from drivetrain.registry import find_driver, known_backends
from drivetrain.trainer.setting_values import flatten, override
from drivetrain.trainer.settings import Settings


@pytest.fixture(scope="module")
def arguments() -> ModuleType:
    return program("arguments")


def test_the_page_is_what_the_code_does(arguments: ModuleType) -> None:
    assert arguments.PAGE.read_text() == arguments.page(), "run: python docs/generate.py arguments"


def test_the_page_of_settings_is_what_the_code_has() -> None:
    settings = program("settings")
    assert settings.PAGE.read_text() == settings.page(), "run: python docs/generate.py settings"
    rows = [line for line in settings.page().splitlines() if line.startswith("| `")]
    assert len(rows) > len(flatten(Settings()))
    assert [row for row in rows if row.endswith("|  |")] == [], "a setting without a text"


def test_every_pair_has_an_answer(arguments: ModuleType) -> None:
    drivers = arguments.shipped()
    table = dict(arguments.rows(drivers))
    settings = {key.strip("`").partition("=")[0] for key in table}
    assert settings == {*flatten(Settings()), "--nproc 2"}
    for answers in table.values():
        assert len(answers) == len(drivers)
        assert all(a == "applied" or a.startswith("refused: ") for a in answers)


def test_what_a_plan_holds_reaches_the_driver() -> None:
    """Require that the plan contains each setting that the driver must apply, under the setting's
    name.
    """
    changed = {
        "max_grad_norm": 3.0,
        "compile": True,
        "compile_options": {"backend": "eager"},
        "activation_checkpointing": ("Linear",),
        "seed": 5,
        "global_batch": 7,
        "micro_batch": 2,
        "timeout_seconds": 9.0,
        "stall_seconds": 8.0,
    }
    plan = override(Settings(), changed).plan()
    assert {key: getattr(plan, key) for key in changed} == changed


@pytest.mark.parametrize("name", known_backends())
def test_an_unknown_argument_of_a_driver_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=r"unknown setting backend\.no_such_thing"):
        override(find_driver(name).options_type(), {"no_such_thing": "1"}, "backend.")
