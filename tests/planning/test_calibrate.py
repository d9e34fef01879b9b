"""The speeds of this machine, and the file that holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drivetrain.cli.app import app
from drivetrain.cli.settings.measured_device import measure_device
from drivetrain.kernel.errors import SettingError
from drivetrain.planning.calibrate import calibrate, num_local_ranks
from drivetrain.planning.devices import find_device


@pytest.mark.slow
def test_a_plan_for_this_machine_has_speeds_of_ranks_that_share_it(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    words = ["plan", "--world=2", "--backend=ddp", "--set=precision=fp32", "--json"]
    first = CliRunner().invoke(app, [*words, "--calibrate", str(path)])
    assert first.exit_code == 0, first.output
    assert f"{path}: each of " in first.stderr and "GFLOP/s" in first.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["here.json"]
    again = CliRunner().invoke(app, [*words, "--device", str(path)])
    found = json.loads(first.stdout)
    assert found == json.loads(again.stdout)
    device = find_device(str(path))
    assert found["device"] == "here" and found["memory_bytes"] == device.memory_bytes > 0
    assert device.ranks_per_machine == num_local_ranks(2)
    speeds = device.flops_per_second
    assert {"float32", "bfloat16", "float64"} <= {*speeds}
    # bounds that any machine is within
    assert all(1e7 < speed < 1e17 for speed in speeds.values())
    assert 1e8 < device.memory_bytes_per_second < 1e14
    assert 1e6 < device.machine_bytes_per_second < 1e13
    assert 0 < device.operation_seconds < 0.1 and 0 <= device.new_byte_seconds < 1e-6
    assert 0 <= device.overlap <= 1
    if device.ranks_per_machine > 1:
        parts = device.collective_efficiency
        assert {*parts} == {"all_gather", "reduce_scatter", "all_to_all"}
        assert all(0.001 < part < 1000 for part in parts.values())


@pytest.mark.slow
def test_one_rank_sends_no_messages() -> None:
    device = calibrate("alone", 1, 1000)
    assert device.message_seconds == 0 and device.machine_bytes_per_second > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.json", r"mine\.json exists: give another name"),
        ("mine.toml", r"mine\.toml' must end with \.json"),
        ("none/mine.json", "there is no folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "mine.json").write_text(json.dumps("kept"))
    with pytest.raises(SettingError, match=message):
        measure_device(tmp_path / name, 2)
    assert json.loads((tmp_path / "mine.json").read_text()) == "kept"
    assert [each.name for each in tmp_path.iterdir()] == ["mine.json"]
