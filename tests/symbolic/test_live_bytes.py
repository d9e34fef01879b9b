"""The bytes of all tensors that are alive, counted as they come and go."""

from __future__ import annotations

import torch

from drivetrain.symbolic.live_bytes import LiveBytes
from drivetrain.symbolic.modes import fake_mode, without_modes
from drivetrain.symbolic.step import KINDS


def peak(live: LiveBytes) -> dict[str, int]:
    with without_modes():
        return dict(live.trace(KINDS).summary().bytes)


def test_memory_is_counted_until_it_is_freed() -> None:
    with fake_mode(), LiveBytes("cpu") as live:
        live.start()
        kept, gone = torch.empty(100), torch.empty(1000)
        del gone
        view, later = kept[:10], torch.empty(200)
        assert peak(live) == {"temporary": 4 * 1100}
        live.start()
        assert peak(live) == {"temporary": 4 * 300}
        live.name("weights", [view])  # of the same memory as `kept`
        live.name("buffers", [kept, later])
        assert peak(live) == {"weights": 400, "buffers": 800}


def test_memory_that_changes_its_size_is_followed() -> None:
    with fake_mode(), LiveBytes("cpu") as live:
        gathered = torch.empty(100)
        live.start()
        gathered.untyped_storage().resize_(4000)
        assert peak(live) == {"temporary": 4000}
        gathered.untyped_storage().resize_(0)
        live.start()
        assert peak(live) == {}


def test_memory_of_another_device_is_not_counted() -> None:
    with fake_mode(), LiveBytes("cpu") as live:
        elsewhere = torch.empty(100, device="meta")
        live.start()
        assert peak(live) == {}
        moved = torch.empty_like(elsewhere, device="cpu")
        assert peak(live) == {"temporary": moved.nbytes}


def test_what_is_kept_of_a_phase_gets_its_kind() -> None:
    with fake_mode(), LiveBytes("cpu") as live:
        live.phase = "forward"
        kept, used = torch.empty(10), torch.empty(10)
        del used
        live.name_kept("activations", "forward")
        live.phase = "backward"
        live.start()
        later = torch.empty(5)
        assert peak(live) == {"activations": kept.nbytes, "temporary": later.nbytes}
