"""A job of two processes: the facade compared with accelerate's own Accelerator, call by call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator as Theirs
from accelerate import PartialState
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.compat import TrainingArguments
from drivetrain.compat.accelerate.accelerator import Accelerator
from drivetrain.compat.arguments import backend
from drivetrain.registry import find_driver

NAMES = (
    "num_processes",
    "process_index",
    "local_process_index",
    "is_main_process",
    "mixed_precision",
    "is_local_main_process",
    "is_last_process",
    "distributed_type",
    "use_distributed",
    "split_batches",
    "even_batches",
    "sync_gradients",
)


def same(mine: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return bool(mine.shape == wanted.shape and mine.dtype == wanted.dtype) and torch.equal(
            mine, wanted
        )
    if isinstance(wanted, dict):
        return mine.keys() == wanted.keys() and all(same(mine[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        return len(mine) == len(wanted) and all(map(same, mine, wanted))
    return bool(mine == wanted)


def main(out: str) -> None:
    args = TrainingArguments("o", use_cpu=True)
    assert backend.chosen(args).driver == "ddp"
    plan = backend.planned(args)
    with find_driver("ddp").open(plan) as session:
        own = SimpleNamespace(
            session=session, world=session.world, open_world=session.world, prepared=None
        )
        args._driver_session = own
        made: Any = SimpleNamespace(args=args, driver_session=own, model=None, _microstep=None)
        ours: Any = Accelerator(made)
        assert PartialState._shared_state == {}
        state = args.distributed_state
        theirs = Theirs(cpu=True)
        assert isinstance(state, PartialState) and state.num_processes == 2
        rank = state.process_index
        found = {name: getattr(ours, name) == getattr(theirs, name) for name in NAMES}
        tensor = torch.arange(4.0).view(2, 2) + rank
        nested = {"a": tensor, "b": (tensor.long(), [torch.tensor(rank)])}
        ragged = torch.ones(2, 3 + rank)
        for name, call in {
            "gather": lambda a: a.gather(nested),
            "gather a scalar": lambda a: a.gather(torch.tensor(1.5 + rank)),
            "pad": lambda a: a.pad_across_processes({"x": ragged}, dim=1, pad_index=-100),
            "pad in front": lambda a: a.pad_across_processes(ragged, dim=1, pad_first=True),
            "pad dimension 0": lambda a: a.pad_across_processes(ragged.T, pad_index=-1),
            "sum": lambda a: a.reduce(nested["a"], "sum"),
            "mean": lambda a: a.reduce(nested["a"], reduction="mean"),
            "objects": lambda a: a.gather_for_metrics([{"text": f"r{rank}"}, rank]),
            "objects by request": lambda a: a.gather_for_metrics([tensor], use_gather_object=True),
            "no loader": lambda a: a.gather_for_metrics(tensor),
        }.items():
            found[name] = same(call(ours), call(theirs))
        arrays = ours.gather_for_metrics([np.arange(3) + rank, (np.float32(1.5), None)])
        found["arrays"] = [type(item).__name__ for item in arrays] == ["ndarray", "tuple"] * 2
        for length in (7, 8, 5):
            data = DataLoader(TensorDataset(torch.arange(length)), batch_size=2)
            seen = [
                [accelerator.gather_for_metrics(batch[0]) for batch in accelerator.prepare(data)]
                for accelerator in (ours, theirs)
            ]
            found[f"metrics over {length}"] = same(*seen)
            found[f"none twice of {length}"] = torch.cat(seen[0]).tolist() == list(range(length))
        with (
            ours.split_between_processes([1, 2, 3], apply_padding=True) as part,
            theirs.split_between_processes([1, 2, 3], apply_padding=True) as wanted,
        ):
            found["split"] = part == wanted
        try:
            ours.prepare(torch.nn.Linear(1, 1))
            found["a second model"] = True  # the Trainer has none yet
            ours._trainer.model = torch.nn.Linear(1, 1)
            ours.prepare(torch.nn.Linear(1, 1))
            found["a second model"] = False
        except ValueError as error:
            found["a second model"] = "evaluation_mode" in str(error)
        ours.wait_for_everyone()
        done = Path(out).with_suffix(".done")
        with args.main_process_first():
            found["main first"] = done.exists() == (rank > 0)
            done.touch()
        verdicts = session.exchange(found)
        del args._driver_session
        if rank == 0:
            merged = {name: all(each[name] for each in verdicts) for name in found}
            Path(out).write_text(json.dumps(merged))


if __name__ == "__main__":
    main(sys.argv[1])
