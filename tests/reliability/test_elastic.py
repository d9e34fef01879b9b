"""Machines that join, leave and are cut off: the run continues with the remaining ones, or reports
why it cannot.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.conformance.ports import free_port
from drivetrain.kernel.events import Logged
from drivetrain.trainer.fit import fit

from .machines import Machine, Machines, listens, namespaces_allowed, two_networks

STEPS = 30
NAMESPACES = namespaces_allowed()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    found.close()


def uninterrupted(folder: Path) -> dict[int, tuple[float, float]]:
    """The curve of the same recipe in one process."""
    from drivetrain.cli.settings.recipe_file import load_recipe_file

    loaded = load_recipe_file(folder / "small.py")
    events: list[Logged] = []

    def observe(event: object) -> None:
        if isinstance(event, Logged):
            events.append(event)

    recipe = loaded.build(loaded.config)
    fit(recipe, loaded.settings, backend="cpu", observers=[observe])
    return {event.step: (event.loss, event.grad_norm) for event in events}


def assert_same_curve(machines: Machines) -> None:
    whole, curve = uninterrupted(machines.folder), machines.curve()
    assert list(whole) == sorted(curve) == list(range(1, STEPS + 1))
    for step, figures in whole.items():
        assert curve[step] == pytest.approx(figures, rel=1e-6), step


def elastic(
    machines: Machines, backend: str, port: int, nodes: str, *more: str, **environment: str
) -> Machine:
    """Start a machine with one rank, which trains with as many machines as there are.

    Beside other tests a machine may need seconds to join, or to say that it is alive.
    """
    conf = "last_call_timeout=20,keep_alive_interval=3,keep_alive_max_attempt=5"
    machine = machines.start(
        f"--backend={backend}", "--nproc=1", f"--nnodes={nodes}", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", f"--rdzv-conf={conf}",
        "--local-addr=127.0.0.1", "--max-restarts=3", "--monitor-interval=0.1", *more,
        SECONDS="0.03", **environment,
    )  # fmt: skip
    while not listens(port):  # the first machine holds the store of the rendezvous
        assert machine.process.poll() is None, machine.text
        time.sleep(0.05)
    return machine


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_three_of_four_continue(machines: Machines, backend: str) -> None:
    """Divide the global batch of 8 into 2, 2, 2, 2 first, then into 3, 3, 2."""
    port = free_port()
    four = [elastic(machines, backend, port, "3:4") for _ in range(4)]
    machines.wait_for_step(7)
    four[3].send(signal.SIGKILL)
    assert [machine.end(300) for machine in four[:3]] == [0, 0, 0], four[0].text
    assert machines.world_sizes == [4, 3]
    (resumed,) = machines.events("resumed")
    assert resumed["step"] >= 6
    assert "world size was 4, is 3" in resumed["notes"]
    assert_same_curve(machines)


@pytest.mark.slow
def test_one_that_comes_later_is_taken_in(machines: Machines) -> None:
    port = free_port()
    # alone it is slow, so that it does not end before the other has imported torch
    first = elastic(machines, "ddp", port, "1:2", SECONDS_OF_1="0.5")
    machines.wait_for_step(5)
    second = elastic(machines, "ddp", port, "1:2", "--resume=auto")
    assert [first.end(300), second.end(300)] == [0, 0], first.text
    assert machines.world_sizes == [1, 2]
    assert_same_curve(machines)


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again(machines: Machines) -> None:
    machine = machines.start("--backend=ddp", "--nproc=2", "--max-restarts=1", SECONDS="0.05")
    machines.wait_for_step(7)
    os.kill(machine.all_processes[-1], signal.SIGKILL)
    assert machine.end(300) == 0, machine.text
    assert machines.world_sizes == [2, 2]
    assert_same_curve(machines)


def two(machines: Machines, address: str, port: int, within: tuple[tuple[str, ...], ...]) -> None:
    for number, prefix in enumerate(within):
        machines.start(
            "--backend=ddp", "--nproc=1", "--nnodes=2", f"--node-rank={number}",
            f"--master-addr={address}", f"--master-port={port}", "--steps=100000",
            "--set=stall_seconds=6",
            within=prefix, SECONDS="0.03",
        )  # fmt: skip
    machines.wait_for_step(5)


@pytest.mark.slow
@pytest.mark.skipif(not NAMESPACES, reason="networks of one's own are not allowed here")
def test_a_partition_is_named_on_both_sides(machines: Machines) -> None:
    with two_networks() as (within, part):
        two(machines, "10.77.0.1", "29500", within)
        part()
        first, second = machines.started
        assert [first.end(90), second.end(90)] == [1, 1]
        assert "rank 1 stands still after" in first.text
        assert "the store at 10.77.0.1:29500" in second.text
        assert "does not answer; rank 1 waits in" in second.text
        machines.close()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=[pytest.mark.slow] * NAMESPACES),
    ],
)
def test_a_machine_that_stands_still_is_named(machines: Machines, number: int) -> None:
    """Stop all processes of a machine; their connections stay open."""
    two(machines, "127.0.0.1", free_port(), ((), ()))
    stopped, other = machines.started[number], machines.started[1 - number]
    stopped.send(signal.SIGSTOP)
    assert other.end(90) == 1
    said = "does not answer; rank 1 waits in" if number == 0 else "rank 1 stands still after"
    assert said in other.text
