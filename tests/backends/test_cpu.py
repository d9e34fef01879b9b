"""The cpu driver keeps the laws."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch.optim import optimizer as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.backends.common.stepping import global_norm, take_step
from drivetrain.conformance import Case, cases


@pytest.mark.parametrize("case", cases("cpu", peers=["cpu", "ddp:2"]), ids=str)
def test_laws(case: Case) -> None:
    case.check()


def test_the_norm_of_gradients_in_16_bits_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(1000, generator=generator).to(dtype) for dtype in (torch.bfloat16,) * 3]
    grads += [torch.randn(7, generator=generator), torch.randn(7, generator=generator).double()]
    expected = torch.cat([grad.double() for grad in grads]).norm()
    torch.testing.assert_close(global_norm(grads).double(), expected, rtol=1e-6, atol=0)


def an_optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.AdamW([weight])


def test_a_step_of_an_optimizer_is_taken_with_its_hooks() -> None:
    optimizer, heard = an_optimizer(), list[str]()
    take_step(optimizer)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        hooks.register_optimizer_step_pre_hook,
        hooks.register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: heard.append(register.__name__))  # noqa: B023
        take_step(optimizer)
        handle.remove()
    assert len(set(heard)) == 4
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 5


def test_a_step_of_an_optimizer_is_taken_as_its_user_has_changed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = list[str]()

    def heard_as(name: str, step: Any) -> Any:
        return functools.wraps(step)(lambda *given: (heard.append(name), step(*given))[1])

    optimizer = an_optimizer()
    monkeypatch.setattr(torch.optim.AdamW, "step", heard_as("class", torch.optim.AdamW.step))
    take_step(optimizer)
    optimizer.step = heard_as("own", optimizer.step)
    take_step(optimizer)
    assert heard == ["class", "own", "class"]
    monkeypatch.undo()
    optimizer = an_optimizer()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a schedule that has seen no step
        take_step(optimizer)
        schedule.step()
    optimizer.step = heard_as("over the schedule's", optimizer.step)
    take_step(optimizer)
    assert heard[3:] == ["over the schedule's"]


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
