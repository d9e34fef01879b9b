"""Several machines, simulated on this one: a `drivetrain train` for each, which starts its own
ranks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.run.record_file import read_records

RECIPE = """
    import os
    import time

    import torch
    from torch import nn
    from drivetrain import Recipe, Settings
    from drivetrain.trainer.settings import CheckpointSettings

    settings = Settings(
        steps=30, global_batch=8, micro_batch=2, log_every=1,
        checkpoint=CheckpointSettings(every=2),
    )


    class Points:
        def __init__(self, count):
            self.x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return {"x": self.x[index], "y": self.x[index].sum(0, keepdim=True)}


    RANKS = os.environ.get("WORLD_SIZE", "1")
    SECONDS = float(os.environ.get(f"SECONDS_OF_{RANKS}") or os.environ.get("SECONDS", "0"))


    def loss(module, batch):
        time.sleep(SECONDS)
        return ((module(batch["x"]) - batch["y"]) ** 2).sum()


    def model():
        return nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))


    recipe = Recipe(model=model, loss=loss, train_data=Points(101))
"""


def namespaces_allowed() -> bool:
    """Return True if this process may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"drivetrain-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0


@dataclass
class Machine:
    """A machine's launcher, and its output."""

    process: subprocess.Popen[bytes]
    words: Path

    @property
    def all_processes(self) -> list[int]:
        """Return the process ids of the launcher and its ranks."""
        pid = self.process.pid
        found = [pid]
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, listed.read_text().split())
        return found

    def send(self, number: int) -> None:
        """Send a signal to all of its processes."""
        for pid in self.all_processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, seconds: float) -> int:
        """Wait for the launcher's end; return its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {seconds} s:\n{self.text}") from None

    @property
    def text(self) -> str:
        return self.words.read_text()


@dataclass
class Machines:
    """Machines that run in one folder, and are ended with the test."""

    folder: Path
    started: list[Machine] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "small.py").write_text(textwrap.dedent(RECIPE))

    def start(self, *words: str, within: tuple[str, ...] = (), **environment: str) -> Machine:
        path = self.folder / f"words-{len(self.started)}"
        with path.open("wb") as file:
            process = subprocess.Popen(
                [*within, sys.executable, "-m", "drivetrain.cli", "train", "small.py",
                 "--out", "run", *words],
                cwd=self.folder,
                env={**os.environ, **environment},
                stdout=file,
                stderr=file,
            )  # fmt: skip
        self.started.append(Machine(process, path))
        return self.started[-1]

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is logged."""
        deadline = time.monotonic() + 300
        while max(self.curve(), default=0) < step:
            assert time.monotonic() < deadline, "".join(m.text for m in self.started)
            assert any(m.process.poll() is None for m in self.started), self.started[0].text
            time.sleep(0.05)

    @property
    def world_sizes(self) -> list[int]:
        """Return the world sizes of the runs, in order."""
        return [event["world"]["size"] for event in self.events("run_started")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind from all runs in the folder."""
        path = self.folder / "run" / "metrics.jsonl"
        records = read_records(path) if path.is_file() else []
        return [record for record in records if record["event"] == kind]

    def curve(self) -> dict[int, tuple[float, float]]:
        """Return loss and gradient norm by step. The last record of a step counts."""
        return {
            record["step"]: (record["loss"], record["grad_norm"])
            for record in self.events("logged")
        }

    def close(self) -> None:
        for machine in self.started:
            machine.send(signal.SIGKILL)
            machine.process.wait()


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[tuple[tuple[str, ...], ...], Callable[[], None]]]:
    """Make two networks. Yield the words that start a process in each, at 10.77.0.1 and 10.77.0.2,
    and a function that disconnects them.
    """
    names = [f"drivetrain-{os.getpid()}-{number}" for number in (1, 2)]
    cards = [f"dt{os.getpid() % 10**6}-{number}" for number in (1, 2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cards[0], "netns", names[0],
           "type", "veth", "peer", "name", cards[1], "netns", names[1])  # fmt: skip
        for number, (name, card) in enumerate(zip(names, cards, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
            ip("-n", name, "link", "set", "lo", "up")
        within = tuple(
            ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={card}")
            for name, card in zip(names, cards, strict=True)
        )
        yield within, lambda: ip("-n", names[0], "link", "set", cards[0], "down")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
