from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.kernel.errors import SettingError
from drivetrain.trainer.schedule import SCHEDULES, build_schedule


@pytest.mark.parametrize("warmup", [4, 0.25])
def test_warmup_is_linear_by_steps_or_by_share(warmup: float) -> None:
    factor = build_schedule("constant", total_steps=16, warmup=warmup)
    assert [factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_reaches_its_final_factor() -> None:
    factor = build_schedule("linear", total_steps=10, final=0.2)
    assert factor(0) == 1.0
    assert factor(5) == pytest.approx(0.6)
    assert factor(10) == pytest.approx(0.2)


def test_cosine_is_half_way_in_the_middle() -> None:
    factor = build_schedule("cosine", total_steps=10, final=0.0)
    assert [factor(0), factor(5), factor(10)] == pytest.approx([1.0, 0.5, 0.0])


def test_warmup_stable_decay_decays_in_the_last_share_only() -> None:
    factor = build_schedule("warmup_stable_decay", total_steps=100, final=0.1, decay=0.2)
    assert factor(80) == 1.0
    assert factor(90) == pytest.approx(0.55)
    assert factor(100) == pytest.approx(0.1)


def test_inverse_sqrt_falls_with_the_root_of_the_step() -> None:
    factor = build_schedule("inverse_sqrt", total_steps=1000, warmup=16)
    assert factor(15) == 1.0
    assert factor(63) == pytest.approx(math.sqrt(16 / 64))


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 500),
    st.floats(0, 0.9) | st.integers(1, 600),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_factors_stay_between_zero_and_one(
    name: str, total: int, warmup: float, final: float, decay: float
) -> None:
    factor = build_schedule(name, total_steps=total, warmup=warmup, final=final, decay=decay)
    values = [factor(step) for step in range(total + 2)]
    assert all(0.0 <= value <= 1.0 + 1e-12 for value in values)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "cosin"}, "'cosin'; it must be one of constant, cosine"),
        ({"name": "linear", "warmup": -1}, "warmup is -1"),
        ({"name": "linear", "decay": 0.0}, "decay is 0.0"),
    ],
)
def test_nonsense_is_refused_by_name(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        build_schedule(total_steps=10, **arguments)  # type: ignore[arg-type]
