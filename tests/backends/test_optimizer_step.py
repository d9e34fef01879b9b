"""The step of an optimizer: bit-equal to torch's own, with all hooks and changes of its user."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch.optim import optimizer as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.backends.common import optimizer_step
from drivetrain.backends.common.optimizer_step import take_step


def an_optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.AdamW([weight])


def test_a_step_of_an_optimizer_is_taken_with_its_hooks() -> None:
    optimizer, seen = an_optimizer(), list[str]()
    take_step(optimizer)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        hooks.register_optimizer_step_pre_hook,
        hooks.register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: seen.append(register.__name__))  # noqa: B023
        take_step(optimizer)
        handle.remove()
    assert len(set(seen)) == 4
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 5


def test_a_step_of_an_optimizer_is_taken_as_its_user_has_changed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = list[str]()

    def noting(name: str, step: Any) -> Any:
        return functools.wraps(step)(lambda *given: (seen.append(name), step(*given))[1])

    optimizer = an_optimizer()
    monkeypatch.setattr(torch.optim.AdamW, "step", noting("class", torch.optim.AdamW.step))
    take_step(optimizer)
    optimizer.step = noting("own", optimizer.step)
    take_step(optimizer)
    assert seen == ["class", "own", "class"]
    monkeypatch.undo()
    optimizer = an_optimizer()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a schedule that has seen no step
        take_step(optimizer)
        schedule.step()
    optimizer.step = noting("over the schedule's", optimizer.step)
    take_step(optimizer)
    assert seen[3:] == ["over the schedule's"]


def test_a_profiler_sees_the_step_of_an_optimizer() -> None:
    optimizer = an_optimizer()
    with torch.profiler.profile() as profiled:
        take_step(optimizer)
    assert "Optimizer.step#AdamW.step" in {event.key for event in profiled.key_averages()}


class CountUpdates(TorchDispatchMode):
    """Counts the fused updates."""

    updates = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.updates += "_fused_" in str(function)
        return function(*args, **(kwargs or {}))


def two_groups(kind: Any, **second: Any) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (2, 3, 5)]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    groups = [{"params": weights[:1]}, {"params": weights[1:], **second}]
    return kind(groups, lr=0.1, fused=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("second", [{}, {"weight_decay": 0.1}, {"lr": 0.2}])
def test_groups_that_are_alike_are_updated_together_bit_for_bit(
    kind: Any, second: dict[str, Any]
) -> None:
    ours, torchs = (two_groups(kind, **second) for _ in "12")
    with CountUpdates() as counted:
        for _ in range(3):
            take_step(ours)
    for _ in range(3):
        torchs.step()
    assert counted.updates == 3 * (2 if second else 1)
    assert [len(group["params"]) for group in ours.param_groups] == [1, 2]
    assert repr(ours.state_dict()) == repr(torchs.state_dict())
    for mine, other in zip(ours.param_groups, torchs.param_groups, strict=True):
        assert all(map(torch.equal, mine["params"], other["params"]))


def test_groups_stay_as_they_were_where_an_update_fails() -> None:
    optimizer = two_groups(torch.optim.AdamW)
    groups = optimizer.param_groups
    groups[1]["params"][0].grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        take_step(optimizer)
    assert optimizer.param_groups is groups


KINDS = [torch.optim.AdamW, torch.optim.Adam]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def of_layers(kind: Any, dtypes: list[torch.dtype], **settings: Any) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(3, 2, generator=generator).to(dtype)) for dtype in dtypes
    ]
    return kind(weights, lr=0.1, **settings)  # type: ignore[no-any-return]


def trained(optimizer: torch.optim.Optimizer, step: Any, without: int | None = None) -> Any:
    """Return weights, state and rate after some steps. In the third step the weight `without` has
    no gradient.
    """
    generator = torch.Generator().manual_seed(1)
    weights = optimizer.param_groups[0]["params"]
    for number in range(5):
        for index, weight in enumerate(weights):
            weight.grad = torch.randn(3, 2, generator=generator).to(weight.dtype)
            if number == 2 and index == without:
                weight.grad = None
        step(optimizer)
        optimizer.param_groups[0]["lr"] *= 0.9
    return [
        *map(torch.Tensor.detach, weights),
        *optimizer.state.values(),
        optimizer.param_groups[0]["lr"],
    ]


def assert_same_bits(ours: Any, torchs: Any) -> None:
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record, for each step, whether torch's own `step` was skipped."""
    taken = list[bool]()
    update = optimizer_step._update_fused
    noted = functools.wraps(update)(lambda *given: (taken.append(update(*given)), taken[-1])[1])
    monkeypatch.setattr(optimizer_step, "_update_fused", noted)
    return taken


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("setting", [{}, {"maximize": True}, {"weight_decay": 0.1, "eps": 1e-3}])
def test_the_short_way_is_that_of_torch_bit_for_bit(
    kind: Any, dtype: torch.dtype, setting: dict[str, Any], short: list[bool]
) -> None:
    """Compare with torch's own step. The short path begins when the optimizer has state."""
    ours, torchs = (of_layers(kind, [dtype] * 3, fused=True, **setting) for _ in "12")
    assert_same_bits(trained(ours, take_step, without=1), trained(torchs, kind.step, without=1))
    assert short == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("dtypes", "settings"),
    [
        (DTYPES, {"fused": True}),
        (DTYPES[:1], {"fused": True, "amsgrad": True}),
        (DTYPES[:1], {"fused": False}),
        (DTYPES[:1], {"foreach": True}),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_more_than_that_takes_torchs_own_way(
    kind: Any, dtypes: list[torch.dtype], settings: dict[str, Any], short: list[bool]
) -> None:
    ours, torchs = (of_layers(kind, dtypes, **settings) for _ in "12")
    assert_same_bits(trained(ours, take_step), trained(torchs, kind.step))
    assert not any(short)


def test_a_step_that_the_device_decides_on_is_torchs(short: list[bool]) -> None:
    optimizer = two_groups(torch.optim.AdamW)
    take_step(optimizer)
    before = repr(optimizer.state_dict())
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())  # type: ignore[attr-defined]
    take_step(optimizer)
    assert repr(optimizer.state_dict()) == before
    assert short == [False, False]
