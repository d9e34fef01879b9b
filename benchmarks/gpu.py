"""A GPT of a billion parameters on one card: bf16, compiled, AdamW fused.

Where there is no CUDA, `--quick` trains a tiny one on the host: that tries the code, no more.
torchtitan is not beside it, as that trains models of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .harness import Benchmark, Column, Measured, finish, peak_bytes
from .problems import Gpt, GptSize, Tokens, collate, summed_loss
from .trace import overlap_of

__all__ = ["BENCHMARKS"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RATE, CLIP = 1e-4, 1.0
PEAKS = {
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989.4e12,
    "A100": 312e12,
}
"""Dense bf16 operations a second, from NVIDIA's data sheets; the first that a card's name holds."""


@dataclass(frozen=True)
class Job:
    """Model, batch and number of steps, the same for every candidate. The reported loss is the mean
    of the first `timed` steps.
    """

    size: GptSize
    batch: int
    warm: int
    """Steps before the clock starts: the first ones compile."""
    timed: int
    traced: int
    """Steps after the timed ones, under torch.profiler."""
    compiler: str = "inductor"

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.size.sequence

    def operations_per_token(self, num_parameters: int) -> float:
        """6 a parameter, and attention's, forward and backward, as if it were not causal.

        PaLM, appendix B, https://arxiv.org/abs/2204.02311; nothing is counted for recomputing.
        """
        size = self.size
        return 6 * num_parameters + 12 * size.layers * size.width * size.sequence


LARGE = Job(GptSize(50304, 2048, 2048, 16, 18), batch=8, warm=10, timed=30, traced=5)
TINY = Job(GptSize(64, 16, 32, 2, 2), batch=2, warm=2, timed=4, traced=2, compiler="eager")


class Watch:
    """Measures a training; call it at the end of each step."""

    def __init__(self, job: Job, traces: bool = False) -> None:
        self.job, self.traces = job, traces
        self.figures: Measured = {}
        self._started = 0.0
        self._profile: Any = None

    def __call__(self, step: int) -> bool:
        """Note the end of a step. Return True after the last step to be measured."""
        last_timed = self.job.warm + self.job.timed
        last = last_timed + (self.job.traced if self.traces else 0)
        if step == self.job.warm:
            finish()
            self._started = time.perf_counter()
        if step == last_timed:
            finish()
            seconds = time.perf_counter() - self._started
            self.figures["tokens"] = self.job.timed * self.job.tokens / seconds
            self.figures["bytes"] = _most_memory()
            if self.traces:
                self._profile = torch.profiler.profile()
                self._profile.start()
        if step == last and self._profile is not None:
            finish()
            self._profile.stop()
            self.figures |= overlap_of(self._profile.events())
            self._profile = None
        return step == last

    def of(self, num_parameters: int, loss: float) -> Measured:
        """Return all figures, those derived from others included."""
        operations = self.figures["tokens"] * self.job.operations_per_token(num_parameters)
        peak = peak_of(torch.cuda.get_device_name()) if DEVICE == "cuda" else None
        share = {} if peak is None else {"mfu": operations / peak}
        return self.figures | share | {"loss": loss, "parameters": num_parameters}


def _most_memory() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else peak_bytes()


def peak_of(card: str) -> float | None:
    """Return the peak of a card; None for a card that is not in `PEAKS`."""
    return next((peak for name, peak in PEAKS.items() if name in card), None)


# --- candidates -----------------------------------------------------------------------------------


def raw(job: Job) -> Measured:
    """Train with a plain loop, written by hand."""
    module = Gpt(job.size).to(DEVICE)
    module.compile(backend=job.compiler)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    loader = DataLoader(
        Tokens(job.size), batch_size=job.batch, collate_fn=collate, pin_memory=DEVICE == "cuda"
    )
    watch, losses = Watch(job), []
    for step, batch in enumerate(loader, 1):
        on_device = {key: value.to(DEVICE, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = module(**on_device)["loss"]
        loss.backward()
        losses.append(loss.detach())
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if watch(step):
            break
    mean = float(torch.stack(losses[: job.timed]).mean())
    return watch.of(sum(p.numel() for p in module.parameters()), mean)


def kernel(backend: str, job: Job) -> Measured:
    """Behind what is timed and traced it saves twice, since the first save makes the buffers."""
    from drivetrain import (
        CheckpointSettings,
        DataSettings,
        EvaluateSettings,
        OptimizerSettings,
        Recipe,
        ScheduleSettings,
        Settings,
        fit,
    )
    from drivetrain.kernel.events import Logged, Request, RunStarted, Saved, StepEnded

    watch, saves = Watch(job, traces=True), list[Saved]()
    first: dict[type, Any] = {}

    def observe(event: Any) -> Request | None:
        first.setdefault(type(event), event)
        if isinstance(event, StepEnded) and watch(event.step):
            return Request.SAVE
        if isinstance(event, Saved):
            if event.error:
                raise OSError(event.error)
            saves.append(event)
            return Request.SAVE if len(saves) == 1 else Request.STOP
        return None

    settings = Settings(
        steps=100_000,  # it is stopped when all is measured
        global_batch=job.batch,
        precision="bf16",
        max_grad_norm=CLIP,
        compile=True,
        compile_options={"backend": job.compiler},
        log_every=job.timed,
        out_of_memory="stop",
        optimizer=OptimizerSettings(lr=RATE),
        schedule=ScheduleSettings("constant"),
        data=DataSettings(shuffle=False),
        evaluate=EvaluateSettings(at_end=False),
        checkpoint=CheckpointSettings(at_end=False, background=True, keep_last=1),
    )
    recipe = Recipe(
        partial(Gpt, job.size), summed_loss, train_data=Tokens(job.size), collate=collate
    )
    with tempfile.TemporaryDirectory() as out:
        fit(
            recipe,
            settings,
            backend=backend,
            backend_options={"device": DEVICE},
            out=out,
            observers=[observe],
        )
    saved = {"still": saves[-1].seconds, "saved": saves[-1].buffer_bytes}
    return watch.of(first[RunStarted].num_parameters, first[Logged].loss) | saved


def hugging_face(job: Job) -> Measured:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    watch, module = Watch(job), Gpt(job.size)

    class Report(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=job.warm + job.timed,
            per_device_train_batch_size=job.batch,
            learning_rate=RATE,
            weight_decay=0.0,
            max_grad_norm=CLIP,
            lr_scheduler_type="constant",
            bf16=True,
            torch_compile=True,
            torch_compile_backend=job.compiler,
            logging_steps=job.timed,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=DEVICE == "cpu",
        )
        trainer = Trainer(
            model=module,
            args=arguments,
            train_dataset=Tokens(job.size),
            data_collator=collate,
            callbacks=[Report()],
        )
        trainer.train()
    loss = next(each["loss"] for each in trainer.state.log_history if "loss" in each)
    return watch.of(sum(p.numel() for p in module.parameters()), loss)


CANDIDATES: dict[str, Callable[[Job], Measured]] = {
    "raw": raw,
    "kernel": partial(kernel, "ddp"),
    "fsdp": partial(kernel, "fsdp"),
    "deepspeed": partial(kernel, "deepspeed"),
    "hugging_face": hugging_face,
}


def measure(candidate: str, quick: bool) -> Measured:
    if DEVICE == "cpu":
        return CANDIDATES[candidate](TINY)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # or the HF Trainer would take all there are
    return CANDIDATES[candidate](replace(LARGE, warm=3, timed=6) if quick else LARGE)


def missing() -> str:
    no_cuda = "torch sees no CUDA; with --quick a tiny one runs on the host, to try the code"
    return no_cuda if DEVICE == "cpu" else ""


BENCHMARKS = (
    Benchmark(
        "gpu",
        "A GPT of a billion parameters on one GPU",
        "18 layers, width 2,048, sequences of 2,048 tokens, batch 8; bf16 by autocast, compiled, "
        "AdamW fused, clipping at 1.0; 30 steps after 10. MFU: 6 operations a parameter and token "
        "and attention's (PaLM, appendix B, https://arxiv.org/abs/2204.02311), of the card's peak "
        "in dense bf16 as its data sheet has it. Memory: the most that tensors held on the device. "
        "Overlap: the share of the time of copies to the device in which a kernel ran, too, in 5 "
        "steps under torch.profiler. Saving: in the background, of weights and moments; how long "
        "training stood still for the second save. The loss, of the first 30 "
        "steps, shows that all train the same.",
        {
            "raw": "raw loop",
            "kernel": "drivetrain kernel, `ddp`",
            "fsdp": "drivetrain kernel, `fsdp`",
            "deepspeed": "drivetrain kernel, `deepspeed`",
            "hugging_face": "HF Trainer",
        },
        measure,
        (
            Column("tokens/s", "tokens", digits=0),
            Column("of raw", "tokens", ratio=True),
            Column("MFU, %", "mfu", scale=100, digits=1),
            Column("GiB", "bytes", scale=2**-30, digits=1),
            Column("overlap, %", "overlap", scale=100, digits=0),
            Column("standstill, s", "still"),
            Column("GiB saved", "saved", scale=2**-30, digits=1),
            Column("loss", "loss", digits=3),
        ),
        plotted="of raw",
        needs={"deepspeed": "deepspeed", "hugging_face": "transformers"},
        missing=missing,
    ),
)
