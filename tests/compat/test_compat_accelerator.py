"""The accelerator facade: it behaves like accelerate's own, in one process and in two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import gather, set_seed
from side_by_side import both, ours
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Recipe
from drivetrain.compat import Accelerator, TrainerCallback, TrainingArguments
from drivetrain.compat.accelerate.collectives import exchange_objects
from drivetrain.compat.arguments import backend
from drivetrain.registry import find_driver


@pytest.fixture
def trainer() -> Any:
    """Return a stand-in for a Trainer, with the attributes that the facade reads, on one CPU
    process.
    """
    args = TrainingArguments("o", use_cpu=True)
    with find_driver("cpu").open(backend.planned(args)) as session:
        own = SimpleNamespace(
            session=session, world=session.world, open_world=session.world, prepared=None
        )
        yield SimpleNamespace(args=args, driver_session=own, model=None, _microstep=None)


@pytest.mark.row("A7", "X1", "D26", "X7")
@pytest.mark.slow
def test_two_processes_see_what_accelerate_gives(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    script = Path(__file__).with_name("accelerator_ranks.py")
    command += [str(script), str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert [name for name, equal in found.items() if not equal] == []


def test_one_process_gets_back_what_it_gave(trainer: Any) -> None:
    accelerator = Accelerator(trainer)
    tensor = torch.tensor(2.0)
    assert accelerator.gather(tensor) is tensor
    assert accelerator.gather_for_metrics({"a": tensor, "b": "text"}) == {"a": tensor, "b": "text"}
    assert accelerator.pad_across_processes(tensor) is tensor
    copied = accelerator.reduce(tensor)
    assert copied == tensor and copied is not tensor
    with pytest.raises(TypeError, match="use_gather_object"):
        accelerator.gather(["text"])
    with pytest.raises(ValueError, match="allowed: sum, mean"):
        accelerator.reduce(tensor, "max")


@pytest.mark.row("A7", "W9")
def test_prepare_and_unwrap(trainer: Any) -> None:
    accelerator = Accelerator(trainer)
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    model, optimizer = nn.Linear(1, 1), object()
    prepared = accelerator.prepare(loader, model, optimizer)
    assert [batch[0].tolist() for batch in prepared[0]] == [[0, 1], [2, 3]]
    assert prepared[1:] == (model, optimizer)
    reference = accelerator.prepare_model(nn.Dropout(), evaluation_mode=True)
    assert not reference.training
    recipe = Recipe(
        model=lambda: model,
        loss=lambda module, batch: module(batch).sum(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    engine = trainer.driver_session.session.prepare(recipe)
    trainer.driver_session.prepared = SimpleNamespace(engine=engine, model=model)
    assert accelerator.unwrap_model(engine.module) is model
    wrapped = nn.DataParallel(model)
    assert accelerator.unwrap_model(wrapped) is model
    assert accelerator.get_state_dict(model).keys() == model.state_dict().keys()


def test_the_loop_says_whether_an_update_follows(trainer: Any) -> None:
    accelerator = Accelerator(trainer)
    assert accelerator.sync_gradients
    trainer._microstep = SimpleNamespace(last=False)
    assert not accelerator.sync_gradients


@pytest.mark.row("D21", "A10")
def test_accumulation_may_be_said_in_the_accelerator_s_arguments(trainer: Any) -> None:
    trainer.args.accelerator_config = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    assert Accelerator(trainer).gradient_accumulation_steps == 1
    assert trainer.args.gradient_accumulation_steps == 4
    Accelerator(trainer)
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="give one"):
        Accelerator(trainer)


def test_what_has_no_effect_is_said(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer.args.ddp_static_graph = True
    trainer.args.accelerator_config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    Accelerator(trainer)
    assert "ddp_static_graph has no effect on cpu: one process" in caplog.text
    without_effect = {"adjust_scheduler": True, "sync_with_dataloader": False}
    trainer.args.accelerator_config = {"gradient_accumulation_kwargs": without_effect}
    state = Accelerator(trainer).gradient_state
    assert state.plugin_kwargs == {**without_effect, "num_steps": 1} and state.adjust_scheduler
    trainer.args.accelerator_config = {"gradient_accumulation_kwargs": {"every": 2}}
    with pytest.raises(ValueError, match="has every; allowed: adjust_scheduler, num_steps"):
        Accelerator(trainer)


def test_nothing_is_pickled(trainer: Any, tmp_path: Path) -> None:
    accelerator = Accelerator(trainer)
    with pytest.raises(ValueError, match="pickle"):
        accelerator.save({}, tmp_path / "f", safe_serialization=False)
    with pytest.raises(TypeError, match="a object cannot be sent"):
        exchange_objects(trainer.driver_session.session, [object()])
    accelerator.save({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").exists()


@pytest.mark.slow  # another process imports torch
@pytest.mark.row("A9")
def test_it_needs_no_accelerate() -> None:
    script = """
import sys
from drivetrain.compat import Accelerator, TrainerCallback, TrainingArguments
from drivetrain.compat.arguments.processes import Processes
processes = Processes(TrainingArguments("o"))
assert processes.is_main_process and processes.distributed_type == "NO"
print([name for name in ("accelerate", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_which_process_calls(trainer: Any) -> None:
    accelerator = Accelerator(trainer)
    assert accelerator.on_main_process(len)("ab") == accelerator.on_last_process(len)("ab") == 2
    assert accelerator.on_local_main_process(len)("ab") == 2
    assert accelerator.on_process(process_index=0)(len)("ab") == 2
    assert accelerator.on_process(len, process_index=1)("ab") is None
    assert accelerator.on_local_process(local_process_index=1)(len)("ab") is None
    assert accelerator.is_fsdp2 is accelerator.state.is_fsdp2 is accelerator.multi_device is False
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()


def test_trackers_of_its_own_there_are_none(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(trainer)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.get_tracker("wandb").log({"loss": 1.0})
    assert caplog.text.count("call trainer.log") == 1


class KeepsWeights(TrainerCallback):
    """Saves at the first step, and restores that state after the third."""

    found: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        accelerator, weights = self.trainer.accelerator, kwargs["model"].state_dict()  # type: ignore[attr-defined]
        if state.global_step == 1:
            self.folder = accelerator.save_state()
            self.first = {name: tensor.clone() for name, tensor in weights.items()}
        if state.global_step == 3:
            accelerator.load_state(self.folder)
            self.found = {name: tensor.clone() for name, tensor in weights.items()}


def test_a_state_is_saved_and_loaded_in_a_run(tmp_path: Path) -> None:
    kept = KeepsWeights()
    kept.trainer = ours(tmp_path).trainer(max_steps=3, callbacks=[kept])  # type: ignore[attr-defined]
    made = kept.trainer  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="call it in a callback"):
        made.accelerator.save_state(str(tmp_path))
    made.train()
    assert all(torch.equal(kept.first[n], kept.found[n]) for n in kept.first)
    assert made.lr_scheduler.last_epoch == 1
    made.accelerator.save_model(made.model, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    again = ours(tmp_path).trainer(max_steps=3)
    assert again.train(resume_from_checkpoint=kept.folder).global_step == 3


def test_every_member_of_accelerate_s_is_here_or_refused_by_name(trainer: Any) -> None:
    accelerator = Accelerator(trainer)
    public = [name for name in dir(accelerate.Accelerator) if not name.startswith("_")]
    assert len(public) > 80
    for name in public:
        if not hasattr(accelerator, name):
            with pytest.raises(AttributeError, match=f"no '{name}': it has no model"):
                getattr(accelerator, name)


def test_accelerate_s_functions_work_beside_a_trainer(tmp_path: Path) -> None:
    """Call the functions that libraries call once a Trainer is built; transformers' Trainer has
    made the state by then.
    """
    for side in both(tmp_path):
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            side.trainer(max_steps=1)
            set_seed(1, device_specific=True)
            get_logger(__name__).info("said", main_process_only=True)
            assert gather(torch.ones(2)).tolist() == [1, 1]
            assert AcceleratorState().mixed_precision == "no"
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
