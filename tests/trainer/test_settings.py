from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NewType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain import CheckpointSettings, Settings
from drivetrain.kernel.errors import SettingError
from drivetrain.trainer.setting_values import flatten, override
from drivetrain.trainer.settings import OptimizerGroup, OptimizerSettings

Token = NewType("Token", int)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("steps", "7", 7),
        ("steps", "none", None),
        ("epochs", "2", 2.0),
        ("optimizer.lr", "3e-4", 3e-4),
        ("compile", "true", True),
        ("compile", "False", False),
        ("precision", "bf16", "bf16"),
        ("activation_checkpointing", "Block,blocks.*", ("Block", "blocks.*")),
        ("optimizer.args", '{"betas": [0.9, 0.95]}', {"betas": [0.9, 0.95]}),
        ("checkpoint.best_mode", "max", "max"),
    ],
)
def test_a_text_becomes_a_value_of_the_fields_type(key: str, text: str, value: Any) -> None:
    assert flatten(override(Settings(), {key: text}))[key] == value


def test_an_entry_of_a_dict_is_set_by_its_own_key() -> None:
    settings = override(Settings(), {"optimizer.args.momentum": "0.9", "optimizer.args.x": "a"})
    assert settings.optimizer.args == {"momentum": 0.9, "x": "a"}


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("optimzer.lr", "1", "did you mean optimizer.lr"),
        ("lr", "1", r"did you mean optimizer\.lr\?"),
        ("name", "adamw", r"did you mean optimizer\.name or schedule\.name\?"),
        ("optimizer.learning_rate", "1", "unknown setting optimizer.learning_rate"),
        ("steps", "many", "steps is 'many', which is not of type int"),
        ("steps", "1.5", "steps is '1.5', which is not of type int"),
        ("steps", "0", "steps is 0; it must be at least 1"),
        ("epochs", "-1", "epochs is -1.0; it must be above 0"),
        ("epochs", "nan", "epochs is nan"),
        ("precision", "fp8", "allowed: fp32, bf16, fp16"),
        ("compile", "1", "compile is '1', which is not of type bool"),
        ("steps.x", "1", "setting steps has no parts"),
        ("checkpoint.best_mode", "best", "allowed: min, max"),
    ],
)
def test_nonsense_is_refused_by_name(key: str, text: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        override(Settings(), {key: text})


@pytest.mark.parametrize("name", ["sgd", "SGD", "torch.optim.SGD"])
def test_an_optimizer_of_torch_may_be_named_alone(name: str) -> None:
    named = override(Settings(), {"optimizer.name": name}).optimizer
    assert named.name == "torch.optim.SGD" and named.factory() is torch.optim.SGD
    assert OptimizerGroup(name=name).name == "torch.optim.SGD"


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=3))
def test_any_text_is_taken_or_refused_by_a_setting_error(values: dict[str, str]) -> None:
    with contextlib.suppress(SettingError):
        override(Settings(), values)


NUMBERS = [
    key
    for key, value in flatten(Settings()).items()
    if (isinstance(value, (int, float)) and not isinstance(value, bool))
    or key in ("steps", "micro_batch", "max_grad_norm", "spikes.factor")
    or key.endswith(("every", "by_length"))
]


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, 1e300])
def test_no_number_may_be_beyond_all_use(key: str, value: float) -> None:
    for given_as in (value, f"{value}"):
        with pytest.raises(SettingError, match=f"^{key} is "):
            override(Settings(), {key: given_as})


@given(st.sampled_from(NUMBERS), st.one_of(st.integers(), st.floats()))
def test_any_number_is_taken_or_refused_by_a_setting_error(key: str, value: float) -> None:
    with contextlib.suppress(SettingError):
        assert flatten(override(Settings(), {key: value}))[key] == value


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("seed", 2**70, "seed is 1180591620717411303424; it must be at most 9223372036854775807"),
        ("seed", -(2**63) - 1, "at least -9223372036854775808"),
        ("data.workers", 5000, r"at most \d+ on a machine with \d+ CPUs"),
        ("optimizer.lr", -1, "optimizer.lr is -1.0; it must be at least 0"),
        ("steps", 10**400, r"about 10\*\*400"),
        ("schedule.decay", 2, "at most 1"),
        ("log_every", True, "not of type int"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_range(key: str, value: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        override(Settings(), {key: value})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"steps": "3"}, "steps is '3', which is not of type int"),
        ({"optimizer": 3}, "optimizer is 3, which is not of type OptimizerSettings"),
        ({"optimizer": OptimizerSettings(lr="a")}, "optimizer.lr is 'a'"),  # type: ignore[arg-type]
        ({"activation_checkpointing": "Block"}, "not of type tuple"),
        ({"checkpoint": {"every": 3}}, "not of type CheckpointSettings"),
    ],
)
def test_types_are_looked_at_in_python_too(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Settings(**wrong)


def test_a_type_that_nothing_can_be_asked_of_is_refused() -> None:
    @dataclass(frozen=True)
    class Config:
        token: Token = Token(3)

    with pytest.raises(SettingError, match="token is '4', which is not of type Token"):
        override(Config(), {"token": "4"})


def test_every_value_survives_a_round_trip_as_text() -> None:
    settings = Settings(steps=5, activation_checkpointing=("Block",))
    texts = {
        key: ",".join(value) if isinstance(value, tuple) else str(value)
        for key, value in flatten(settings).items()
        if value != {}
    }
    assert override(Settings(), texts) == settings


def test_vectors_do_not_decay() -> None:
    module = nn.Linear(3, 3)
    optimizer = OptimizerSettings(weight_decay=0.1).build(module.named_parameters())
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {module.weight: 0.1, module.bias: 0.0}


def test_without_decay_there_is_one_group() -> None:
    module = nn.Linear(3, 3)
    (group,) = OptimizerSettings().build(module.named_parameters()).param_groups
    assert group["params"] == [module.weight, module.bias]
    assert group["weight_decay"] == 0.0


def test_any_torch_optimizer_by_its_dotted_name() -> None:
    settings = OptimizerSettings(name="torch.optim.SGD", lr=0.1, args={"momentum": 0.9})
    optimizer = settings.build(nn.Linear(3, 3).named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("name", ["SGDD", "torch.optim.Nothing", "no.such.module", ""])
def test_an_unknown_optimizer_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match="full dotted name"):
        OptimizerSettings(name=name).build(nn.Linear(3, 3).named_parameters())


def test_an_argument_that_the_optimizer_does_not_take_is_refused() -> None:
    settings = OptimizerSettings(name="torch.optim.SGD", args={"betas": [0.9, 0.95]})
    with pytest.raises(SettingError, match="betas"):
        settings.build(nn.Linear(3, 3).named_parameters())


def test_a_former_name_is_understood_with_a_warning() -> None:
    with pytest.warns(
        FutureWarning, match=r"checkpoint\.behind is called checkpoint\.background now"
    ):
        assert override(Settings(), {"checkpoint.behind": "true"}).checkpoint.background
    with pytest.warns(FutureWarning, match=r"checkpoint\.behind is called"):
        assert CheckpointSettings(every=5, behind=True).background  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="behin"):
        CheckpointSettings(behin=True)  # type: ignore[call-arg]
