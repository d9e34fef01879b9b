"""The time of a step, from its work and a device's speeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from drivetrain.planning.devices import Device
from drivetrain.planning.estimate import Estimate, estimate, sent_bytes
from drivetrain.symbolic.step import FORWARD, UPDATE, SymbolicStep
from drivetrain.symbolic.trace import Message, Operation

DEVICE = Device(
    name="simple",
    source="",
    memory_bytes=1e9,
    memory_bytes_per_second=100.0,
    flops_per_second={"float32": 1000.0, "bfloat16": 4000.0},
    ranks_per_machine=2,
    machine_bytes_per_second=20.0,
    network_bytes_per_second=10.0,
)
BACKWARD = "backward"


def operation(flops: int, num_bytes: int, phase: str = FORWARD, **changes: Any) -> Operation:
    made = Operation(phase, True, torch.float32, flops, num_bytes)
    return made._replace(**changes)


def message(name: str, num_bytes: int, *ranks: int, **changes: Any) -> Message:
    made = Message(BACKWARD, True, name, num_bytes, ranks, overlaps=False)
    return made._replace(**changes)


def found(*work: Operation | Message, num_microbatches: int = 1) -> Estimate:
    operations = tuple(each for each in work if isinstance(each, Operation))
    messages = tuple(each for each in work if isinstance(each, Message))
    return estimate(SymbolicStep({}, num_microbatches, 1, operations, messages), DEVICE)


def test_operations_and_messages_have_a_least_time() -> None:
    small, large = operation(100, 10), operation(2000, 10)
    slow = replace(DEVICE, operation_seconds=0.5, message_seconds=0.25)
    step = SymbolicStep({}, 1, 1, (small, large), (message("all_reduce", 20, 0, 1),))
    before, after = estimate(step, DEVICE), estimate(step, slow)
    assert (before.memory_seconds, after.memory_seconds) == (0.1, 0.5)
    assert before.compute_seconds == after.compute_seconds == 2.0
    assert after.network_seconds == before.network_seconds + 0.25


@pytest.mark.parametrize(("overlap", "waited"), [(1.0, 0.0), (0.25, 0.75), (0.0, 1.0)])
def test_a_device_may_compute_more_slowly_beside_messages(overlap: float, waited: float) -> None:
    sums = message("all_reduce", 20, 0, 1, overlaps=True)
    step = SymbolicStep({}, 1, 1, (operation(5000, 0, BACKWARD),), (sums,))
    found = estimate(step, replace(DEVICE, overlap=overlap))
    assert (found.compute_seconds, found.network_seconds) == (5.0, waited)


def test_a_large_new_tensor_takes_time_for_its_memory() -> None:
    limit = 32 << 20
    results = [operation(1000, 0, new_bytes=size) for size in (limit, limit + 1, 2 * limit)]
    step = SymbolicStep({}, 1, 1, tuple(results), ())
    assert estimate(step, DEVICE).memory_seconds == 0
    slow = estimate(step, replace(DEVICE, new_byte_seconds=2.0))
    assert (slow.compute_seconds, slow.memory_seconds) == (3.0, 2.0 * (3 * limit + 1))


@pytest.mark.parametrize(
    ("name", "times"), [("all_reduce", 1), ("allgather_base", 4), ("all_gather_into_tensor", 4)]
)
def test_a_kind_of_collective_may_be_slower(name: str, times: int) -> None:
    device = replace(DEVICE, collective_efficiency={"all_gather": 0.25})
    step = SymbolicStep({}, 1, 1, (), (message(name, 40, 0, 1),))
    usual, found = (estimate(step, each).network_seconds for each in (DEVICE, device))
    assert found == times * usual > 0


def test_an_operation_takes_the_longer_of_its_two_times() -> None:
    step = found(operation(2000, 100), operation(100, 300))
    assert (step.compute_seconds, step.memory_seconds) == (2.0, 3.0)
    assert (step.seconds, step.bound, step.flops) == (5.0, "memory", 2100)


def test_each_dtype_has_its_speed() -> None:
    assert found(operation(4000, 0, dtype=torch.bfloat16)).seconds == 1.0


def test_the_first_microbatch_stands_for_all_but_the_last() -> None:
    first, last = operation(1000, 0, is_last=False), operation(3000, 0)
    update = operation(500, 0, UPDATE)
    assert found(first, last, update, num_microbatches=4).seconds == pytest.approx(3 + 3 + 0.5)


def test_a_message_takes_the_link_of_its_ranks() -> None:
    near = found(message("broadcast", 100, 0, 1))
    far = found(message("broadcast", 100, 1, 2))
    assert (near.seconds, far.seconds) == (5.0, 10.0)
    assert near.sent_bytes == {"machine": 100.0, "network": 0.0}
    assert far.sent_bytes == {"machine": 0.0, "network": 100.0}


def test_messages_beside_computations_take_what_is_longer() -> None:
    computing = operation(4000, 0, BACKWARD)
    short = found(computing, message("broadcast", 60, 0, 1, overlaps=True))
    assert (short.seconds, short.network_seconds) == (4.0, 0.0)
    long = found(computing, message("broadcast", 200, 0, 1, overlaps=True))
    assert (long.seconds, long.network_seconds, long.bound) == (10.0, 6.0, "network")


def test_a_forward_hides_no_messages_of_the_backward() -> None:
    sums = message("broadcast", 60, 0, 1, overlaps=True)
    assert found(operation(4000, 0), sums).seconds == 7.0


def test_messages_of_the_update_and_those_that_are_needed_at_once_are_waited_for() -> None:
    computing = operation(4000, 0, BACKWARD)
    needed = found(computing, message("broadcast", 60, 0, 1))
    updating = found(computing, message("broadcast", 60, 0, 1, overlaps=True, phase=UPDATE))
    assert needed.seconds == updating.seconds == 7.0


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("allreduce", 2 * 3 / 4),
        ("all_reduce", 2 * 3 / 4),
        ("allgather_base", 3 / 4),
        ("reduce_scatter_tensor", 3 / 4),
        ("all_to_all_single", 3 / 4),
        ("broadcast", 1),
    ],
)
def test_a_collective_sends_a_part_of_the_whole(name: str, part: float) -> None:
    near = sent_bytes(message(name, 100, 0, 1, 2, 3), 4)
    assert near == {"machine": 100 * part, "network": 0}
    far = sent_bytes(message(name, 100, 0, 4, 8, 12), 4)
    assert far == {"machine": 0, "network": 100 * part}
    assert sent_bytes(message(name, 100, 5), 4) == {"machine": 0, "network": 0}


def test_ranks_of_a_machine_share_its_way_to_the_network() -> None:
    ring = sent_bytes(message("allgather_base", 800, *range(8)), 4)
    assert ring == {"machine": 700, "network": 700 / 4}
    exchange = sent_bytes(message("alltoall_base", 800, *range(8)), 4)
    assert exchange == {"machine": 300, "network": 400}


def test_the_slower_link_decides() -> None:
    gathering = message("allgather_base", 400, 0, 1, 2, 3)  # 300 near, 150 far
    step = SymbolicStep({}, 1, 1, (), (gathering,))
    assert estimate(step, replace(DEVICE, network_bytes_per_second=5.0)).seconds == 30.0
    assert estimate(step, replace(DEVICE, machine_bytes_per_second=5.0)).seconds == 60.0
    assert found(gathering).sent_bytes == {"machine": 300, "network": 150}


def test_utilization_leaves_recomputation_out() -> None:
    forward, backward = operation(1000, 0), operation(2000, 0, BACKWARD)
    assert found(forward, backward).utilization == 1.0
    recomputed = operation(3000, 0, BACKWARD)
    assert found(forward, recomputed).utilization == 0.75
    waiting = message("broadcast", 60, 0, 1)
    assert found(forward, backward, waiting).utilization == 0.5


def test_frozen_weights_are_not_counted_as_trained() -> None:
    assert found(operation(1000, 0), operation(1000, 0, BACKWARD)).utilization == 1.0


def test_a_faster_device_takes_less_time() -> None:
    step = SymbolicStep({}, 1, 1, (operation(1000, 200),), (message("allreduce", 100, 0, 1),))
    faster = replace(DEVICE, memory_bytes_per_second=200.0, machine_bytes_per_second=40.0)
    assert estimate(step, DEVICE).seconds == 2 * estimate(step, faster).seconds
