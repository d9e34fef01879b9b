"""The drivers' calls to CUDA and their order, tested without a GPU: each stream waits for the right
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.backends.common import prefetch, stepping
from drivetrain.backends.process_group.devices import choose_device, probe_devices
from drivetrain.kernel.errors import BackendUnavailable
from drivetrain.kernel.plan import Plan
from drivetrain.registry import find_driver

CARD = torch.device("cuda", 0)


class Traced(Tensor):
    """A tensor on the host that records the calls made on it."""

    calls: list[str]

    def to(self, device: Any, non_blocking: bool) -> Traced:  # type: ignore[override]
        self.calls.append(f"to {device} {non_blocking}")
        return self

    def record_stream(self, stream: Any) -> None:
        self.calls.append(f"record_stream {stream}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not Tensor.pin_memory:
            return super().__torch_function__(function, types, args, kwargs or {})
        args[0].calls.append("pin_memory")
        return args[0]


class Stream:
    """A recording stand-in for a stream: one that a driver makes, or the current one."""

    def __init__(self, calls: list[str], name: str) -> None:
        self._calls, self._name = calls, name

    def __str__(self) -> str:
        return self._name

    def __enter__(self) -> None:
        self._calls.append(f"on {self}")

    def __exit__(self, *error: object) -> None:
        self._calls.append(f"off {self}")

    def record_event(self) -> str:
        self._calls.append(f"event on {self}")
        return f"the event of {self}"

    def wait_event(self, event: str) -> None:
        self._calls.append(f"{self} waits for {event}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls to two simulated cards, in order."""
    calls: list[str] = []
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(calls, f"side of {device}"))
    current = Stream(calls, "main")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = "set_device_index"
    monkeypatch.setattr(torch.accelerator, chosen, lambda device: calls.append(f"set {device}"))
    return calls


def batches(calls: list[str]) -> Iterator[dict[str, Tensor]]:
    for number in range(2):
        calls.append(f"pull {number}")
        tensor = torch.zeros(1).as_subclass(Traced)
        tensor.calls = calls
        yield {"x": tensor}


COPIED = ["pin_memory", "on side of cuda:0", "to cuda:0 True", "event on side of cuda:0"]
ARRIVES = ["main waits for the event of side of cuda:0", "record_stream main"]


def test_a_batch_is_copied_aside_while_the_one_before_is_used(calls: list[str]) -> None:
    """Require a copy from pinned memory. The stream that uses the batch waits for the copy, and the
    allocator for that stream. The next copy begins before the batch is given.
    """
    copied = [*COPIED, "off side of cuda:0"]
    fed = prefetch.feed(batches(calls), CARD)
    next(fed)
    assert calls == ["pull 0", *copied, *ARRIVES, "pull 1", *copied]
    calls.clear()
    next(fed)
    assert calls == ARRIVES
    assert next(fed, None) is None


def test_on_the_host_batches_are_given_as_they_are(calls: list[str]) -> None:
    fed = prefetch.feed(batches(calls), torch.device("cpu"))
    next(fed)
    assert calls == ["pull 0"]


def test_a_flag_is_waited_for_by_its_own_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Require that the copy begins at once, into pinned memory, and that reading the flag waits for
    the copy alone.
    """
    calls: list[str] = []

    class Host:
        def copy_(self, flag: Any, non_blocking: bool) -> None:
            calls.append(f"copy {non_blocking}")

        def __bool__(self) -> bool:
            return True

    def empty(*args: Any, **kwargs: Any) -> Host:
        calls.append(f"pinned {kwargs['pin_memory']}")
        return Host()

    class Event:
        def __init__(self, kind: str) -> None:
            calls.append(f"event of {kind}")

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

    monkeypatch.setattr(stepping.torch, "empty", empty)
    monkeypatch.setattr(stepping.torch, "Event", Event)
    answer = stepping.fetch_flag(SimpleNamespace(device=CARD))  # type: ignore[arg-type]
    assert calls == ["pinned True", "copy True", "event of cuda", "record"]
    assert answer()
    assert calls[-1] == "wait"


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_a_process_takes_the_card_of_its_local_rank(
    choice: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    assert choose_device(choice) == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BackendUnavailable, match=r"local rank 2 has no cuda device: .* shows 2"):
        choose_device(choice)


def test_the_type_that_is_asked_for_must_be_there(calls: list[str]) -> None:
    with pytest.raises(BackendUnavailable, match=r"no xpu device: this machine shows 0"):
        choose_device("xpu")
    assert choose_device("auto", only="xpu") == torch.device("cpu")
    assert probe_devices(7, only="xpu").reason == "gloo on the CPU"


def test_an_accelerator_without_collectives_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(BackendUnavailable, match="no mps device: this machine shows 0"):
        choose_device("mps")


def test_without_a_card_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(BackendUnavailable, match=r"backend\.device=cpu"):
        choose_device("cuda")


def test_a_probe_reports_the_cards(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name=f"card {i}", total_memory=(i + 1) << 30) for i in range(2)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    found = probe_devices(7)
    assert (found.usable, found.reason, found.preference) == (True, "nccl on 2 cuda devices", 7)
    assert (found.devices, found.memory_bytes) == (("card 0", "card 1"), 3 << 30)


class Joined(Exception):
    """Raised in place of the start of a process group, which NCCL cannot make here."""


@pytest.mark.parametrize("name", ["ddp", "fsdp", "mesh"])
def test_ranks_take_their_card_before_they_meet_over_nccl_and_gloo(
    name: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(backend: str | None, **arguments: Any) -> None:
        calls.append(f"meet over {backend}")
        raise Joined

    monkeypatch.setattr(dist, "init_process_group", meet)
    driver = find_driver(name)
    plan = Plan(options=driver.options_type())
    assert driver.capabilities(plan).feeds_ahead
    with pytest.raises(Joined), driver.open(plan):
        pass
    assert calls == ["set cuda:0", "meet over cpu:gloo,cuda:nccl"]
    calls.clear()
    on_host = Plan(options=driver.options_type(device="cpu"))
    assert not driver.capabilities(on_host).feeds_ahead
    with pytest.raises(Joined), driver.open(on_host):
        pass
    assert calls == ["meet over gloo"]
