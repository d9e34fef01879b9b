"""`fit` in cells that a real kernel of a notebook runs: its output, and its interruption."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

FIRST_CELL = """
import sys, time, torch
from torch import nn
from drivetrain import Recipe, Settings, fit

DATA = [{"x": torch.full((2,), float(i % 3)), "y": torch.ones(1)} for i in range(16)]


def recipe(seconds=0.0):
    def loss(module, batch):
        if seconds > 10:
            print("in a loss", file=sys.stderr, flush=True)
        time.sleep(seconds)
        return (module(batch["x"]) - batch["y"]).square().sum()

    return Recipe(lambda: nn.Linear(2, 1), loss, DATA, eval_data={"held_out": DATA})


def settings(steps, **others):
    return Settings(steps=steps, global_batch=4, log_every=2, **others)
"""
SECONDS = 120


@dataclass
class Shown:
    """Messages that a cell sent to the notebook."""

    displays: list[str] = field(default_factory=list)
    """Ids of displays, in the order in which they were made."""
    pages: list[str] = field(default_factory=list)
    """All states of the displays, in order."""
    stdout: str = ""
    stderr: str = ""
    error: str = ""
    """Name and text of the exception that the cell raised."""

    def add(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
        elif kind == "error":
            self.error = f"{content['ename']}: {content['evalue']}"
        elif kind in ("display_data", "update_display_data"):
            self.pages.append(content["data"]["text/html"])
            if kind == "display_data":
                self.displays.append(content["transient"]["display_id"])


class Notebook:
    """A kernel that runs cells."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._manager = AsyncKernelManager(transport="ipc", ip=str(folder / "k"))
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = KernelSpec(argv=argv, language="python")
        self._loop.run_until_complete(self._start(folder))

    async def _start(self, folder: Path) -> None:
        environment = os.environ | {"IPYTHONDIR": str(folder)}
        await self._manager.start_kernel(cwd=str(folder), env=environment)
        self._client = self._manager.client()
        self._client.start_channels()
        await self._client.wait_for_ready(timeout=SECONDS)

    def close(self) -> None:
        """End the kernel."""
        self._client.stop_channels()
        self._loop.run_until_complete(self._manager.shutdown_kernel(now=True))
        self._loop.close()

    def run(self, cell: str, interrupts: tuple[str, ...] = ()) -> Shown:
        """Run a cell. Interrupt it when it has shown the first of the texts, and again for the
        next.
        """
        shown, left, interrupted = Shown(), list(interrupts), []

        async def interrupt(seconds: float) -> None:
            await asyncio.sleep(seconds)
            await self._manager.interrupt_kernel()

        def receive(message: dict[str, Any]) -> None:
            shown.add(message)
            if left and left[0] in shown.stderr + "".join(shown.pages[-1:]):
                left.pop(0)  # signals that come within a second are one
                interrupted.append(self._loop.create_task(interrupt(1.2 if interrupted else 0)))

        self._loop.run_until_complete(
            self._client.execute_interactive(cell, output_hook=receive, timeout=SECONDS)
        )
        if interrupted:  # a cell may end before the manager knows that its signal was sent
            self._loop.run_until_complete(asyncio.wait(interrupted, timeout=SECONDS))
        assert len(interrupted) == len(interrupts) and all(task.done() for task in interrupted)
        return shown


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    started = Notebook(tmp_path_factory.mktemp("n"))
    try:
        assert not started.run(FIRST_CELL).error
        yield started
    finally:
        started.close()


def test_a_cell_has_one_display_and_an_interrupt_saves(notebook: Notebook) -> None:
    shown = notebook.run(
        'r = fit(recipe(0.05), settings(4000), backend="cpu", out="run"); r.reason',
        interrupts=("<td>2</td>",),
    )

    assert len(shown.displays) == 1 and len(shown.pages) > 3
    assert (shown.stdout, shown.error) == ("", "")
    assert shown.stderr == "SIGINT: saving after this step; press again to stop without saving\n"
    page = shown.pages[-1]
    step = re.search(r'<progress value="(\d+)" max="4000">', page)
    assert step and "samples/s" in page and "<th>training loss</th>" in page
    assert any("left<table>" in page for page in shown.pages)
    checkpoint = f"run/checkpoints/checkpoint-{int(step[1]):06d}"
    assert f"step {step[1]} saved: {checkpoint}" in page
    assert "fit(recipe, settings, out=&quot;run&quot;, resume=&quot;auto&quot;)" in page

    steps = int(step[1]) + 2
    again = notebook.run(
        f'r = fit(recipe(), settings({steps}), backend="cpu", out="run", resume="auto")\n'
        "print(r.reason, r.step)"
    )
    assert again.stdout == f"finished {steps}\n" and len(again.displays) == 1
    assert f"resumed at step {step[1]}" in again.pages[-1]
    assert "<th>held_out loss</th>" in again.pages[-1]


def test_a_second_interrupt_ends_the_run_and_not_the_kernel(notebook: Notebook) -> None:
    cell = 'r = fit(recipe(0.05), settings(4000), backend="cpu"); print(r.reason)'
    shown = notebook.run(cell, interrupts=("<td>2</td>",))
    assert shown.stdout == "preempted\n"
    assert "nothing is saved: fit was given no out" in shown.pages[-1]

    notebook.run('fit(recipe(), settings(2), backend="cpu", out="slow")')
    cell = 'fit(recipe(100), settings(40), backend="cpu", out="slow", resume="auto")'
    shown = notebook.run(cell, interrupts=("in a loss", "press again"))
    assert (
        shown.error == "KeyboardInterrupt: interrupted once more: stopped at once, without saving"
    )
    assert (
        "stopped without saving; to resume from slow/checkpoints/checkpoint-000002:\n  fit("
        in (shown.pages[-1])
    )
    cell = 'r = fit(recipe(), settings(4), backend="cpu", out="slow", resume="auto"); print(r.step)'
    assert notebook.run(cell).stdout == "4\n"


@pytest.mark.slow
def test_two_ranks_fill_the_same_table(notebook: Notebook) -> None:
    on_two = 'nproc=2, backend="ddp"'
    cell = f'r = fit(recipe(0.05), settings(4000), {on_two}, out="two"); print(r.reason)'
    shown = notebook.run(cell, interrupts=("<td>2</td>",))
    assert len(shown.displays) == 1 and len(shown.pages) > 3
    assert (shown.stdout, shown.error) == ("preempted\n", "")
    assert shown.stderr == "SIGINT: saving after this step; press again to stop without saving\n"
    page = shown.pages[-1]
    assert "<th>training loss</th>" in page and "with backend ddp on 2 ranks" in page
    assert "saved: two/checkpoints/checkpoint-" in page
    assert "fit(recipe, settings, out=&quot;two&quot;, resume=&quot;auto&quot;)" in page

    cell = f"fit(recipe(100), settings(40), {on_two})"
    shown = notebook.run(cell, interrupts=("40 steps with", "press again"))
    assert (
        shown.error == "KeyboardInterrupt: interrupted: the ranks stopped at once, without saving"
    )
    shown = notebook.run(f"r = fit(recipe(), settings(4), {on_two}); print(r.step)")
    assert shown.stdout == "4\n" and '<progress value="4" max="4">' in shown.pages[-1]
    assert "<th>held_out loss</th>" in shown.pages[-1]
