"""Logs, metrics, counts, speed and memory, compared with transformers' own."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import trainer_pt_utils, trainer_utils

from drivetrain import compat
from drivetrain.compat import TrainerCallback, TrainerControl, TrainerState
from drivetrain.compat.common.metrics import metrics_format
from drivetrain.compat.logs import set_verbosity
from drivetrain.compat.trainer.memory import memory_tracker
from drivetrain.compat.trainer.reporting import ReportingMixin

FIGURES = {
    "train_runtime": 3725.789,
    "train_loss": 1.23456789,
    "total_flos": 5.0 * 2**30,
    "init_mem_cpu_alloc_delta": 5 << 20,
    "epoch": 3,
    "name": "x",
}


class Watcher(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(kwargs["logs"])


class Teller(ReportingMixin):
    """A stand-in for a Trainer, with the attributes that reporting uses."""

    def __init__(self, folder: Path | str = "", main: bool = True, **changes: Any) -> None:
        self.main = main
        arguments = {"output_dir": str(folder), "include_num_input_tokens_seen": "no"}
        self.args = SimpleNamespace(**{**arguments, **changes})
        self.state, self.control = TrainerState(epoch=1.5, global_step=3), TrainerControl()
        self.watcher = Watcher()
        flow = compat.DefaultFlowCallback
        self.callback_handler = compat.CallbackHandler([flow, self.watcher], None, None, None, None)
        self.driver_session = SimpleNamespace(world=SimpleNamespace(size=1))
        self.model: Any = torch.nn.Linear(2, 2)
        self.processing_class = None
        self.current_flos = 0
        self._initial_num_input_tokens_seen = 0

    def is_world_process_zero(self) -> bool:
        return self.main


@pytest.mark.row("G1", "B14", "B29")
def test_a_log_goes_to_the_history_and_to_callbacks() -> None:
    teller, logs = Teller(), {"loss": 0.123456}
    teller.control.should_log = True
    teller.log(logs)
    assert teller.watcher.logs[0] is logs
    assert logs == {"loss": 0.123456, "epoch": 1.5}
    assert teller.state.log_history == [{"loss": 0.123456, "epoch": 1.5, "step": 3}]
    assert not teller.control.should_log


def test_without_an_epoch_none_is_logged() -> None:
    teller = Teller()
    teller.state.epoch = None
    teller.log({"loss": 1.0})
    assert teller.watcher.logs == [{"loss": 1.0}]


@pytest.mark.row("F5")
def test_tokens_are_logged_with_their_speed() -> None:
    teller = Teller(include_num_input_tokens_seen="all")
    teller.state.num_input_tokens_seen, teller._initial_num_input_tokens_seen = 300, 100
    teller.log({}, time.time() - 2.0)
    [logs] = teller.watcher.logs
    assert logs["num_input_tokens_seen"] == 300
    assert 60 < logs["train_tokens_per_second"] <= 100
    assert logs["train_runtime"] >= 2.0


@pytest.mark.row("F5")
@pytest.mark.parametrize("how", ["no", "all", "non_padding"])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("pad_token_id", [0, None])
def test_tokens_are_counted_as_theirs(how: str, mask: bool, pad_token_id: int | None) -> None:
    batch = {"input_ids": torch.tensor([[5, 0, 0], [5, 6, 7]])}
    if mask:
        batch["attention_mask"] = torch.tensor([[1, 1, 0], [1, 1, 1]])
    ours, theirs = Teller(include_num_input_tokens_seen=how), Teller()
    theirs.args = SimpleNamespace(include_num_input_tokens_seen=how, device="cpu")
    theirs.accelerator = SimpleNamespace(gather=lambda tensor: tensor)  # type: ignore[attr-defined]
    for teller in (ours, theirs):
        teller.processing_class = SimpleNamespace(pad_token_id=pad_token_id)
    for _ in range(2):
        ours._track_num_input_tokens(batch)
        transformers.Trainer._track_num_input_tokens(theirs, batch)
    assert ours.state.num_input_tokens_seen == theirs.state.num_input_tokens_seen
    assert (ours.state.num_input_tokens_seen == 0) == (how == "no")


@pytest.mark.row("F6", status="differs", note="tokens are counted while training, not beforehand")
def test_tokens_a_second_by_its_older_name(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="include_num_input_tokens_seen='all'"):
        args = compat.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, include_tokens_per_second=True
        )
    assert args.include_num_input_tokens_seen == "all"


@pytest.mark.row("F5")
def test_counts_are_summed_over_ranks_and_what_is_missing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    teller = Teller(include_num_input_tokens_seen="all")
    teller.driver_session = SimpleNamespace(
        world=SimpleNamespace(size=2, num_feeders=2),
        session=SimpleNamespace(tally=lambda values: lambda: [values[0] + 10]),
    )
    teller._track_num_input_tokens({"input_ids": torch.ones(2, 3)})
    assert teller.state.num_input_tokens_seen == 16
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            teller._track_num_input_tokens({"pixels": torch.ones(2, 3)})
    assert len(caplog.records) == 1 and "['pixels'] and no 'input_ids'" in caplog.text
    teller.current_flos = 7
    teller.store_flos()
    assert teller.state.total_flos == 17


def tiny_llama() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=11,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.row("F7")
def test_operations_are_estimated_as_theirs() -> None:
    teller, batch = Teller(), {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    assert teller.floating_point_ops(batch) == 0
    teller.model = tiny_llama()
    expected = transformers.Trainer.floating_point_ops(teller, batch)
    assert teller.floating_point_ops(batch) == expected > 0
    assert teller.floating_point_ops({"pixels": batch["input_ids"]}) == 0


def test_parameters_are_counted_once_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    teller, batch = Teller(), {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    teller.model = tiny_llama()
    counted = teller.floating_point_ops(batch)
    monkeypatch.setattr(teller.model, "num_parameters", None)
    assert teller.floating_point_ops(batch) == counted > 0
    teller.model = tiny_llama()
    teller.model.lm_head = torch.nn.Linear(8, 22, bias=False)
    assert teller.floating_point_ops(batch) != counted


@pytest.mark.row("F7")
def test_the_old_profile_asks_the_model() -> None:
    teller, batch = Teller(profile="4.47"), {"input_ids": torch.ones(2, 3)}
    assert teller.floating_point_ops(batch) == 0
    teller.model.floating_point_ops = lambda inputs: inputs["input_ids"].numel()
    assert teller.floating_point_ops(batch) == 6


@pytest.mark.row("F8")
def test_operations_move_into_the_state() -> None:
    teller = Teller()
    teller.state.total_flos, teller.current_flos = 5.0, 3
    teller.store_flos()
    teller.store_flos()
    assert (teller.state.total_flos, teller.current_flos) == (8.0, 0)


@pytest.mark.row("M8")
def test_metrics_are_printed_as_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    Teller().log_metrics("train", FIGURES)
    mine = capsys.readouterr().out
    trainer_pt_utils.log_metrics(Teller(), "train", FIGURES)
    assert mine == capsys.readouterr().out
    Teller(main=False).log_metrics("train", FIGURES)
    assert capsys.readouterr().out == ""


@pytest.mark.row("M9")
def test_metrics_are_written_as_theirs(tmp_path: Path) -> None:
    folders = tmp_path / "ours", tmp_path / "theirs"
    for folder, save in zip(
        folders, (Teller.save_metrics, trainer_pt_utils.save_metrics), strict=True
    ):
        folder.mkdir()
        save(Teller(folder), "train", FIGURES)
        save(Teller(folder), "eval", {"eval_loss": 2.0, "epoch": 4})
        save(Teller(folder), "test", {"test_loss": 3.0}, combined=False)
        save(Teller(folder, main=False), "late", {})
    texts = [{path.name: path.read_text() for path in folder.iterdir()} for folder in folders]
    assert texts[0] == texts[1]
    assert set(texts[0]) == {f"{x}_results.json" for x in ("train", "eval", "test", "all")}
    assert json.loads(texts[0]["all_results.json"])["epoch"] == 4


@pytest.mark.row("K34")
def test_the_state_is_saved_by_the_first_rank(tmp_path: Path) -> None:
    Teller(tmp_path, main=False).save_state()
    assert not list(tmp_path.iterdir())
    Teller(tmp_path).save_state()
    assert TrainerState.load_from_json(tmp_path / "trainer_state.json").global_step == 3


@pytest.mark.row("M10")
def test_metrics_format_is_a_method_and_a_function() -> None:
    theirs = trainer_pt_utils.metrics_format(FIGURES)
    assert metrics_format(FIGURES) == Teller().metrics_format(FIGURES) == theirs
    assert Teller.metrics_format(FIGURES) == compat.metrics_format(FIGURES) == theirs
    assert theirs["train_runtime"] == "1:02:05.78"


@pytest.mark.row("F3")
@pytest.mark.parametrize("passed", [0.0, 1.7])
def test_speed_is_measured_as_theirs(passed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0 + passed)
    for counts in ({}, {"num_samples": 7}, {"num_samples": 7, "num_steps": 3, "num_tokens": 99}):
        ours = compat.speed_metrics("eval", 100.0, **counts)
        assert ours == trainer_utils.speed_metrics("eval", 100.0, **counts)


@pytest.fixture
def verbosity() -> Iterator[None]:
    before = transformers.utils.logging.get_verbosity()
    yield
    transformers.utils.logging.set_verbosity(before)
    logging.getLogger("drivetrain.compat").setLevel(logging.NOTSET)


@pytest.mark.row("G10")
@pytest.mark.usefixtures("verbosity")
def test_the_level_holds_for_both_libraries() -> None:
    set_verbosity(logging.ERROR)
    assert transformers.utils.logging.get_verbosity() == logging.ERROR
    for module in ("callbacks.flow_callbacks", "trainer.training"):
        assert not logging.getLogger(f"drivetrain.compat.{module}").isEnabledFor(logging.WARNING)


@pytest.mark.row("F1")
def test_memory_is_measured_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.TrainerMemoryTracker is trainer_utils.TrainerMemoryTracker
    metrics: dict[str, Any] = {}
    nothing = memory_tracker(skip_memory_metrics=True)
    nothing.start()
    nothing.stop_and_update_metrics(metrics)
    assert metrics == {}
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match="pip install psutil"):
        memory_tracker(skip_memory_metrics=False)
