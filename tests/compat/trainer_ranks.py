"""A job of two processes: a Trainer of either library on several ranks."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from side_by_side import (
    LIBRARIES,
    QUIET,
    arguments,
    classifier,
    llama,
    losses,
    samples,
    sentences,
    without_times,
)
from test_compat_memory_limits import Cramped, Shrink
from test_compat_seq2seq import model as t5
from test_compat_seq2seq import texts
from torch import Tensor, nn
from transformers import TrainerCallback

from drivetrain import Mix, TokenShards, compat
from drivetrain.conformance.bench import Bench
from drivetrain.kernel.errors import RecipeError


class Watch(TrainerCallback):
    """Records the gradient and the random state of this rank at the events of the updates."""

    def __init__(self) -> None:
        self.gradients: dict[str, list[list[float]]] = {"substep": [], "update": []}
        self.random: list[list[float]] = []

    def on_step_begin(self, *event: Any, **kwargs: Any) -> None:
        before = torch.get_rng_state()
        self.random.append(torch.rand(3).tolist())
        torch.set_rng_state(before)

    def on_substep_end(self, *event: Any, model: Any, **kwargs: Any) -> None:
        self.gradients["substep"].append(model.outer.bias.grad.tolist())

    def on_pre_optimizer_step(self, *event: Any, model: Any, **kwargs: Any) -> None:
        self.gradients["update"].append(model.outer.bias.grad.tolist())


class Lines(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Boxes(nn.Module):
    """A model that outputs several boxes for each sample, and a text if `worded`."""

    def __init__(self, worded: bool) -> None:
        super().__init__()
        self.worded, self.weight = worded, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        boxes = [{"boxes": torch.full((int(count) + 1, 4), float(count))} for count in labels]
        if self.worded:
            for row, each in zip(x, boxes, strict=True):
                each["word"] = f"{float(row[0]):.2f}"
        return {"loss": (x * self.weight).mean(), "scores": x * self.weight, "boxes": boxes}


MADE: list[Any] = []
"""The Trainers that a job has made, which it ends."""


def made(kind: Any, model: nn.Module, args: Any, **given: Any) -> Any:
    MADE.append(kind(model, args, **given))
    return MADE[-1]


def accumulating(library: Any, folder: Path) -> dict[str, Any]:
    """Train with dropout and two microbatches an update; return which ranks are first, the batch
    size, and gradients.
    """
    reported = Lines()
    logger = logging.getLogger("drivetrain")
    logger.addHandler(reported)
    try:
        args = arguments(
            library, folder, gradient_accumulation_steps=2, max_steps=3, log_level="info"
        )
        given = {"train_dataset": samples(), "callbacks": [Watch()]}
        trainer = made(library.Trainer, classifier(0.5), args, **given)
        trainer.train()
    finally:
        logger.removeHandler(reported)
        logger.setLevel(logging.WARNING)
    watch = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Watch))
    return {
        "first": [trainer.is_world_process_zero(), trainer.is_local_process_zero()],
        "state first": [trainer.state.is_world_process_zero, trainer.state.is_local_process_zero],
        "global batch": trainer.get_total_train_batch_size(args),
        "reported": [line for line in reported.lines if "Total train batch size" in line],
        "losses": losses(trainer),
        "random": watch.random,
        "gradients": watch.gradients,
    }


def counting(library: Any, folder: Path, average: bool) -> dict[str, Any]:
    """Train a language model, and return the label count that each microbatch receives."""
    counts: list[int] = []

    class Counting(library.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            counts.append(int(num_items_in_batch))
            return super().training_step(model, inputs, num_items_in_batch)

    args = arguments(
        library,
        folder,
        gradient_accumulation_steps=2,
        max_steps=2,
        average_tokens_across_devices=average,
    )
    trainer = made(Counting, llama(), args, train_dataset=sentences())
    trainer.train()
    return {"counts": counts, "losses": losses(trainer)}


def gathering(
    library: Any, folder: Path, concatenated: bool, worded: bool = False, times: int = 1
) -> list[Any]:
    """Evaluate a model whose outputs are lists, an item a sample; return the inputs of metrics."""
    seen: list[Any] = []

    def measure(prediction: Any) -> dict[str, float]:
        seen.append(plain([prediction.predictions, prediction.label_ids]))
        return {}

    args = arguments(
        library,
        folder,
        per_device_eval_batch_size=2,
        eval_use_gather_object=True,
        eval_do_concat_batches=concatenated,
    )
    given = {"eval_dataset": samples(5), "compute_metrics": measure}
    trainer = made(library.Trainer, Boxes(worded), args, **given)
    for _ in range(times):
        seen.append(trainer.evaluate()["eval_loss"])
    return seen


def measuring(library: Any, folder: Path, batched: bool) -> dict[str, Any]:
    """Return metrics of a number of samples that ranks do not divide. With `batched` they are
    summed batch by batch.
    """
    right: list[Any] = []

    def measure(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        labels = torch.as_tensor(prediction.label_ids)
        right.append(torch.as_tensor(prediction.predictions).argmax(-1) == labels)
        if not compute_result:
            return {}
        every = torch.cat(right)
        return {"accuracy": float(every.float().mean()), "samples": len(every)}

    asked = {"per_device_eval_batch_size": 2, "batch_eval_metrics": batched}
    given = {"eval_dataset": samples(7), "compute_metrics": measure}
    trainer = made(library.Trainer, classifier(), arguments(library, folder, **asked), **given)
    return without_times(trainer.evaluate())


def token_shards(folder: Path) -> TokenShards:
    """Write twenty windows of eight tokens, in two files."""
    folder.mkdir(parents=True)
    words = torch.randint(16, (160,), generator=torch.Generator().manual_seed(0))
    shards = []
    for number, part in enumerate(words.to(torch.uint16).split(100)):
        raw = part.numpy().tobytes()
        (folder / f"tokens-{number:05}.bin").write_bytes(raw)
        shards.append({"tokens": len(part), "crc32": zlib.crc32(raw)})
    index = {"format": 1, "dtype": "uint16", "shards": shards}
    (folder / "tokens.json").write_text(json.dumps(index))
    return TokenShards(folder, 8)


def mixed(folder: Path, batch: int = 2) -> dict[str, Any]:
    """Return the batches of this rank, from tokens on disk mixed with other data, and those of a
    run resumed within the second epoch.
    """
    seen: list[Any] = []

    def collate(rows: list[Any]) -> Any:
        batch = labelled(rows)
        seen.append(batch["input_ids"].tolist())
        return batch

    tokens = token_shards(folder / f"tokens-{os.environ.get('RANK')}")
    runs, batches = [], []
    for checkpoint in (None, str(folder / "checkpoint-4")):
        data = Mix({"tokens": (tokens, 0.7), "more": (sentences(5), 0.3)}, length=12)
        asked = {"per_device_train_batch_size": batch, "max_steps": 8, "save_steps": 4}
        args = arguments(compat, folder, **asked, save_strategy="steps")
        trainer = made(compat.Trainer, llama(), args, train_dataset=data, data_collator=collate)
        seen.clear()
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(losses(trainer))
        batches.append(list(seen))  # one is read ahead
    first, rest = batches
    return {"whole": runs[0], "resumed": runs[1], "batches": first[:8], "rest": rest[:4]}


def sharded(folder: Path, batch: int = 2) -> list[float]:
    """Return the losses of an epoch on tokens on disk, and of an evaluation on them."""
    tokens = token_shards(folder / f"tokens-{os.environ.get('RANK')}")
    given = {"train_dataset": tokens, "eval_dataset": tokens, "data_collator": labelled}
    sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch * 5}
    trainer = made(
        compat.Trainer, llama(), arguments(compat, folder, num_train_epochs=1, **sizes), **given
    )
    trainer.train()
    return [*losses(trainer), trainer.evaluate()["eval_loss"]]


def labelled(rows: list[Any]) -> Any:
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def cramped(folder: Path, shrink_at: int, **asked: Any) -> dict[str, Any]:
    """Let memory run out on all ranks after that step; return the messages and the losses."""
    reported = Lines()
    logger = logging.getLogger("drivetrain")
    logger.addHandler(reported)
    torch.manual_seed(1)
    try:
        args = arguments(compat, folder, max_steps=5, auto_find_batch_size=True, **asked)
        given = {"train_dataset": samples(24), "callbacks": [Shrink(shrink_at, room=1)]}
        trainer = made(compat.Trainer, Cramped(), args, **given)
        trainer.train()
    finally:
        logger.removeHandler(reported)
    said = [line for line in reported.lines if "out of memory" in line]
    return {"losses": losses(trainer), "reported": said}


def plain(value: Any) -> Any:
    """Return nested values as lists of numbers and texts."""
    if isinstance(value, dict):
        return [plain(each) for each in value.values()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def generating(library: Any, folder: Path) -> dict[str, Any]:
    """Return predictions for a number of texts that two ranks do not divide."""
    asked = {**QUIET, "per_device_eval_batch_size": 2, "predict_with_generate": True}
    args = library.Seq2SeqTrainingArguments(str(folder), **asked)
    trainer = made(library.Seq2SeqTrainer, t5(), args, eval_dataset=texts(count=5))
    output = trainer.predict(texts(count=5), max_length=6)
    return {"labels": output.label_ids.tolist(), "texts": output.predictions.tolist()}


def without_targets(folder: Path) -> str:
    """Train with a loss that the model has no part in; return what the error says."""

    class Bare(compat.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return torch.zeros((), requires_grad=True)

    trainer = made(Bare, classifier(), arguments(compat, folder), train_dataset=samples(8))
    try:
        trainer.train()
    except RecipeError as error:
        return str(error)
    return "nothing"


def preempted(library: Any, folder: Path) -> dict[str, Any]:
    """Send SIGTERM to one rank in the second update."""

    class Killer(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    asked = {"gradient_accumulation_steps": 2, "max_steps": 6, "enable_jit_checkpoint": True}
    before = signal.getsignal(signal.SIGTERM)
    args, data = arguments(library, folder, **asked), {"train_dataset": samples(24)}
    stopped = made(library.Trainer, classifier(0.5), args, **data, callbacks=[Killer()])
    stopped.train()
    resumed = made(library.Trainer, classifier(0.5), args, **data)
    resumed.train(resume_from_checkpoint=True)
    whole = made(library.Trainer, classifier(0.5), args, **data)
    whole.train()
    return {
        "stopped": stopped.state.global_step,
        "restored": signal.getsignal(signal.SIGTERM) == before,
        "resumed": losses(resumed),
        "whole": losses(whole),
    }


def stopped(
    library: Any, folder: Path, after: dict[int, int], epoch: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Let callbacks stop training after these steps, by rank, or the epoch on the ranks of `epoch`.
    An epoch has three steps.
    """
    reported, events = Lines(), []

    class Stopper(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == after.get(args.process_index):
                control.should_epoch_stop = args.process_index in epoch
                control.should_training_stop = not control.should_epoch_stop

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append("epoch")

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(f"step {state.global_step}")

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(f"epoch's end {state.global_step}")

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append(f"train's end {state.global_step}")

    logging.getLogger("drivetrain").addHandler(reported)
    try:
        asked = {"num_train_epochs": 2, "save_strategy": "epoch", "logging_steps": 1}
        args = arguments(library, folder, **asked, average_tokens_across_devices=False)
        given = {"train_dataset": sentences(12), "callbacks": [Stopper()]}
        trainer = made(library.Trainer, llama(), args, **given)
        trainer.train()
    finally:
        logging.getLogger("drivetrain").removeHandler(reported)
    return {
        "events": events,
        "saved": sorted(path.name for path in folder.glob("checkpoint-*")),
        "reported": [line for line in reported.lines if "alone stopped" in line],
        "losses": losses(trainer),
    }


STOPS_OF_SOME: list[tuple[str, dict[int, int], tuple[int, ...]]] = [
    ("training by one", {1: 1}, ()),
    ("training at an epoch's end", {1: 3}, ()),
    ("epoch by one", {1: 1}, (1,)),
    ("epoch, and training later", {0: 2, 1: 1}, (1,)),
    ("epoch and training at once", {0: 1, 1: 1}, (1,)),
]
"""Cases in which ranks want different things: the steps after which ranks ask to stop, and the
ranks that only end an epoch.
"""


class Table(TrainerCallback):
    """Records the rows of a notebook's table after the last evaluation of a run."""

    def __init__(self, notebook: Any) -> None:
        self.notebook, self.rows = notebook, []

    def on_evaluate(self, *event: Any, **kwargs: Any) -> None:
        if self.notebook.training_tracker is not None:
            self.rows = [list(row) for row in self.notebook.training_tracker.inner_table]


def in_a_notebook(library: Any, folder: Path) -> dict[str, Any]:
    """Train as in a notebook; return what each rank shows, and the metrics of an evaluation
    afterwards.
    """
    shown: list[Any] = []
    display = SimpleNamespace(HTML=str, display=lambda *given, **kwargs: shown.append(given))
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    ipython = SimpleNamespace(display=display, get_ipython=lambda: shell)
    with patch.dict(sys.modules, {"IPython": ipython, "IPython.display": display}):
        asked = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "disable_tqdm": False}
        given = {"train_dataset": samples(), "eval_dataset": samples(6)}
        trainer = made(library.Trainer, classifier(), arguments(library, folder, **asked), **given)
        if library is not compat:  # which looked when it was imported
            from transformers.utils.notebook import NotebookProgressCallback

            trainer.remove_callback(library.trainer_callback.ProgressCallback)
            trainer.add_callback(NotebookProgressCallback)
        kinds = [type(each).__name__ for each in trainer.callback_handler.callbacks]
        table = Table(trainer.callback_handler.callbacks[-1])
        trainer.add_callback(table)
        trainer.train()
        again = sorted(trainer.evaluate())
    return {"kinds": kinds, "table": table.rows, "again": again, "shown": bool(shown)}


def ended() -> list[bool]:
    """End all Trainers. Return whether there is a process group after the first one, and after the
    last.
    """
    seen = []
    while MADE:
        MADE.pop().end()
        seen.append(torch.distributed.is_initialized())
    return [seen[0], seen[-1]]


def everything(bench: Bench, *, library: str, folder: str) -> dict[str, Any]:
    """A job: run all scenarios in one process group."""
    lib, at = LIBRARIES[library], Path(folder) / library
    found: dict[str, Any] = {
        "accumulating": accumulating(lib, at / "accumulating"),
        "counting": counting(lib, at / "counting", True),
        "counting alone": counting(lib, at / "alone", False),
        "boxes": gathering(lib, at / "boxes", False),
        "metrics": measuring(lib, at / "metrics", False),
        "metrics of batches": measuring(lib, at / "metrics of batches", True),
        "generating": generating(lib, at / "generating"),
        "notebook": in_a_notebook(lib, at / "notebook"),
        "training by all": stopped(lib, at / "training by all", {0: 1, 1: 1}),
        "epoch by all": stopped(lib, at / "epoch by all", {0: 1, 1: 1}, (0, 1)),
    }
    if library == "ours":
        found["joined"] = gathering(lib, at / "joined", True, worded=True, times=2)
        found["cramped"] = cramped(at / "cramped", 2)
        small = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        found["small"] = cramped(at / "small", 0, **small)
        found["mixed"] = mixed(at / "mixed")
        found["sharded"] = sharded(at / "sharded")
        found["without targets"] = without_targets(at / "without targets")
        found["preempted"] = preempted(lib, at / "preempted")
        for name, after, epoch in STOPS_OF_SOME:
            found[name] = stopped(lib, at / name, after, epoch)
    found["group"] = ended()
    return found
