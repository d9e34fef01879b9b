"""What the drivers ask of CUDA, and in which order, seen without a card: who waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.backends.common import prefetch, stepping
from drivetrain.backends.process_group.session import choose_device, probe_devices
from drivetrain.kernel.errors import BackendUnavailable
from drivetrain.kernel.plan import Plan
from drivetrain.kernel.registry import find_driver

CARD = torch.device("cuda", 0)


class Traced(Tensor):
    """A tensor that says what is done with it, and stays on the host."""

    told: list[str]

    def to(self, device: Any, non_blocking: bool) -> Traced:  # type: ignore[override]
        self.told.append(f"to {device} {non_blocking}")
        return self

    def record_stream(self, stream: Any) -> None:
        self.told.append(f"record_stream {stream}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not Tensor.pin_memory:
            return super().__torch_function__(function, types, args, kwargs or {})
        args[0].told.append("pin_memory")
        return args[0]


class Stream:
    """One that a driver makes, or the current one."""

    def __init__(self, told: list[str], name: str) -> None:
        self._told, self._name = told, name

    def __str__(self) -> str:
        return self._name

    def __enter__(self) -> None:
        self._told.append(f"on {self}")

    def __exit__(self, *error: object) -> None:
        self._told.append(f"off {self}")

    def record_event(self) -> str:
        self._told.append(f"event on {self}")
        return f"the event of {self}"

    def wait_event(self, event: str) -> None:
        self._told.append(f"{self} waits for {event}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked for, in order; there are two cards."""
    told: list[str] = []
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(told, f"side of {device}"))
    current = Stream(told, "main")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(f"set {device}"))
    return told


def batches(told: list[str]) -> Iterator[dict[str, Tensor]]:
    for number in range(2):
        told.append(f"pull {number}")
        tensor = torch.zeros(1).as_subclass(Traced)
        tensor.told = told
        yield {"x": tensor}


COPIED = ["pin_memory", "on side of cuda:0", "to cuda:0 True", "event on side of cuda:0"]
ARRIVES = ["main waits for the event of side of cuda:0", "record_stream main"]


def test_a_batch_is_copied_aside_while_the_one_before_is_used(told: list[str]) -> None:
    """From pinned memory; the stream that uses it waits for the copy, and the allocator for the
    stream. The next copy begins before the batch is given."""
    copied = [*COPIED, "off side of cuda:0"]
    fed = prefetch.feed(batches(told), CARD)
    next(fed)
    assert told == ["pull 0", *copied, *ARRIVES, "pull 1", *copied]
    told.clear()
    next(fed)
    assert told == ARRIVES
    assert next(fed, None) is None


def test_on_the_host_batches_are_given_as_they_are(told: list[str]) -> None:
    fed = prefetch.feed(batches(told), torch.device("cpu"))
    next(fed)
    assert told == ["pull 0"]


def test_a_flag_is_waited_for_by_its_own_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy begins at once, into pinned memory; asking waits for it, and for nothing later."""
    told: list[str] = []

    class Host:
        def copy_(self, flag: Any, non_blocking: bool) -> None:
            told.append(f"copy {non_blocking}")

        def __bool__(self) -> bool:
            return True

    def empty(*args: Any, **kwargs: Any) -> Host:
        told.append(f"pinned {kwargs['pin_memory']}")
        return Host()

    class Event:
        def __init__(self, kind: str) -> None:
            told.append(f"event of {kind}")

        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("wait")

    monkeypatch.setattr(stepping.torch, "empty", empty)
    monkeypatch.setattr(stepping.torch, "Event", Event)
    answer = stepping.fetch_flag(SimpleNamespace(device=CARD))  # type: ignore[arg-type]
    assert told == ["pinned True", "copy True", "event of cuda", "record"]
    assert answer()
    assert told[-1] == "wait"


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_a_process_takes_the_card_of_its_local_rank(
    choice: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    assert choose_device(choice) == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BackendUnavailable, match="local rank 2 has no GPU: this machine shows 2"):
        choose_device(choice)


def test_without_a_card_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(BackendUnavailable, match=r"set backend\.device=cpu"):
        choose_device("cuda")


def test_a_probe_tells_of_the_cards(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name=f"card {i}", total_memory=(i + 1) << 30) for i in range(2)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    found = probe_devices(7)
    assert (found.usable, found.reason, found.preference) == (True, "NCCL on 2 GPUs", 7)
    assert (found.devices, found.memory_bytes) == (("card 0", "card 1"), 3 << 30)


class Joined(Exception):
    """Ranks cannot meet over NCCL here."""


@pytest.mark.parametrize("name", ["ddp", "fsdp", "mesh"])
def test_ranks_take_their_card_before_they_meet_over_nccl(
    name: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(backend: str | None, **arguments: Any) -> None:
        told.append(f"meet over {backend or 'the library of the device'}")
        raise Joined

    monkeypatch.setattr(dist, "init_process_group", meet)
    driver = find_driver(name)
    plan = Plan(options=driver.options_type())
    assert driver.capabilities(plan).feeds_ahead
    with pytest.raises(Joined), driver.open(plan):
        pass
    assert told == ["set cuda:0", "meet over the library of the device"]
    told.clear()
    on_host = Plan(options=driver.options_type(device="cpu"))
    assert not driver.capabilities(on_host).feeds_ahead
    with pytest.raises(Joined), driver.open(on_host):
        pass
    assert told == ["meet over gloo"]
