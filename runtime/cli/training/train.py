"""`drivetrain train`: `drivetrain.fit` with a run folder and a display."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from torch import nn

from ...checkpoint import CHECKPOINTS, storage_of
from ...data.parent import end_with_launcher
from ...kernel.contract import Driver
from ...kernel.errors import EXIT_PREEMPTED, OutputError, RecipeError, SaveFailed
from ...kernel.events import Observer
from ...kernel.paths import Place, place
from ...launched import adopt_slurm, is_launched, restarts, shared_folder
from ...registry import usable_driver
from ...run.live import LiveProgress
from ...run.records import record_of
from ...run.run_folder import (
    Earlier,
    check_folder,
    default_folder,
    find_earlier,
    read_config,
    recorded_recipe,
    records_folder,
)
from ...run.run_folder_writer import RunFolderWriter, configuration, result_record
from ...run.shown_run import Display, ShownRun
from ...run.watch import print_json, print_lines
from ...trackers import Tracker
from ...trainer.fit import Result, fit
from ...trainer.preemption_notice import passed_to_ranks
from ...trainer.profiler import Profiler
from ...trainer.recovery import launcher_for
from ...trainer.setting_values import override
from ...trainer.settings import Settings
from ...trainer.signals import StoppedBeforeStart
from ..process.deadline import Deadline, parse_duration, set_deadline
from ..process.early_signals import nothing_done
from ..process.launch import Launch, check_ranks, launched_as, run_ranks
from ..process.outcomes import FINISHED, PREEMPTED, RESTARTS, note_outcome, rank, world_size
from ..process.program import program
from ..process.stopping import StoppedEarly, Stopping
from ..settings.config_files import Requested
from ..settings.recipe_file import DEFAULT_RECIPE, RecipeFile, load_recipe_file
from ..settings.resolve_settings import Layer, merge, refuse_early, resolve, resumed_layer
from .next_command import next_command

__all__ = ["TrainRequest", "train"]


@dataclass(frozen=True)
class TrainRequest:
    """The options of the command line; None for those that were not given."""

    requested: Requested
    out: Place | None
    resume: str | None
    launch: Launch
    track: Sequence[str] | None = None
    profile: tuple[int, int] | None = None
    stop_after: str | None = None
    json: bool = False
    plain: bool = False
    plan: bool = False
    """True if the ways that `auto` chooses from are to be shown."""


@dataclass(frozen=True)
class _Job:
    """A request whose gaps are filled from the earlier run, if there is one, or by defaults."""

    request: TrainRequest
    recipe: Path
    backend: str
    earlier: Mapping[str, Any]
    """The `config.json` of the earlier run, where no recipe is given now."""
    out: Place
    out_is_default: bool
    resume: Place | str | None
    track: Sequence[str]

    def layers(self, driver: Driver) -> list[Layer]:
        """The requested settings over those of the earlier run that apply to this driver."""
        return [resumed_layer(self.earlier, driver), *self.request.requested.layers]


def train(request: TrainRequest) -> int:
    """Train, or launch the ranks that do; return the exit code. Raises `DrivetrainError`."""
    stopping = Stopping()
    with stopping.handling_signals():
        return _train(request, stopping)


def _train(request: TrainRequest, stopping: Stopping) -> int:
    if request.stop_after is not None:
        set_deadline(parse_duration(request.stop_after), os.environ)
    if request.launch.nnodes is None:  # else each task of srun is a node's launcher
        adopt_slurm(os.environ)
    end_with_launcher()
    request.launch.check()
    job = _fill_gaps(request)
    if request.plan and not is_launched():
        from . import automatic  # with all of planning, which most runs do not need

        automatic.check_plan(job.backend, request.launch)
    if rank() == 0:
        check_folder(job.out, resuming=job.resume is not None)
    if is_launched() or not request.launch.wanted:
        check_ranks(request.launch.nproc, usable_driver(job.backend))
        return _train_here(job, stopping)
    with launched_as(request.launch.nproc):
        driver = usable_driver(job.backend)
        check_ranks(request.launch.nproc, driver)
        refuse_early(driver, job.layers(driver))
    if not job.recipe.is_file():
        load_recipe_file(job.recipe)  # raises, once instead of on each rank
    arguments = list(sys.argv[1:])
    if job.out_is_default:
        arguments[1:1] = ["--out", str(job.out)]
    if request.launch.may_restart and request.resume is None:
        # restarted ranks resume; the folder was checked above
        arguments[1:1] = ["--resume", "auto"]
    given = _known_settings(job.layers(driver))
    with passed_to_ranks(given.preemption_notice):
        return run_ranks(request.launch, arguments, launcher_for(given, request.launch.nproc))


def _known_settings(layers: Sequence[Layer]) -> Settings:
    """Return the settings that the launcher follows, as far as they are known without the
    recipe."""
    followed = ("preemption_notice", "recover", "spares")
    return override(Settings(), {k: v for k, v in merge(layers).items() if k in followed})


def _fill_gaps(request: TrainRequest) -> _Job:
    earlier, resume = _earlier(request)
    recipe, backend = request.requested.recipe, request.requested.backend
    config = earlier.config if earlier is not None and recipe is None else {}
    if recipe is None:
        recipe = DEFAULT_RECIPE if earlier is None else recorded_recipe(earlier, DEFAULT_RECIPE)
    out: Place | None = request.out
    out_is_default = False
    if out is None and earlier is None and request.launch.nnodes not in (None, "1", "1:1"):
        raise OutputError("the machines must agree on a run folder; give --out")
    if out is None:
        out_is_default = earlier is None
        out = earlier.folder if earlier is not None else default_folder(recipe, _run_label())
    restarted = restarts() > 0
    if restarted and storage_of(out).is_folder(out / CHECKPOINTS):
        resume = "auto"  # the launcher restarted the ranks: resume from the newest checkpoint
    return _Job(
        request=request,
        recipe=recipe,
        backend=backend if backend is not None else str(config.get("backend") or "auto"),
        earlier=config,
        out=out,
        out_is_default=out_is_default,
        resume=resume,
        track=_tracked(request, {} if earlier is None else earlier.config),
    )


def _tracked(request: TrainRequest, earlier: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the requested trackers, or else those of the earlier run."""
    names = earlier.get("track", ()) if request.track is None else request.track
    return [name for name in names if name != "none"]


def _earlier(request: TrainRequest) -> tuple[Earlier | None, Place | str | None]:
    """Return the run to resume, and the place to restore its state from."""
    if request.resume is None:
        return None, None
    if request.resume != "auto":
        earlier = find_earlier(place(request.resume))
        return earlier, earlier.source
    if request.out is None:
        raise OutputError(
            "--resume auto resumes the run in --out, which is not given; give --out, or "
            "--resume with the folder of the run"
        )
    return Earlier(request.out, request.out, read_config(request.out)), "auto"


def _run_label() -> str | None:
    """Return a name of the run that is equal on all ranks of a launcher; None for one rank."""
    if world_size() == 1:
        return None
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        if os.environ.get(name, "none") != "none":
            return os.environ[name]
    raise OutputError("the ranks must agree on a run folder; give --out")


def _train_here(job: _Job, stopping: Stopping) -> int:
    with _clean_stdout() if job.request.json else nullcontext() as stream:
        return _exit_code(_fit(job, stopping, stream))


def _fit(job: _Job, stopping: Stopping, stream: TextIO | None) -> Result:
    recipe_file = load_recipe_file(job.recipe)
    driver = usable_driver(job.backend)
    layers = job.layers(driver)
    resolved = resolve(recipe_file, driver, layers)
    recipe = recipe_file.build(resolved.config)
    if job.backend == "auto" and not resolved.backend_options and shared_folder() is not None:
        from . import automatic  # see `_train`

        taken = automatic.take(job.recipe, recipe, resolved, layers, job.request.plan)
        if taken is not None:
            driver, layers = usable_driver(taken[0]), [*layers, taken[1]]
            resolved = resolve(recipe_file, driver, layers)
    embedded = job.recipe == DEFAULT_RECIPE
    writer = RunFolderWriter(
        job.out,
        configuration(
            name=job.out.name,
            recipe=None if embedded else job.recipe,
            command=[*program(), *sys.argv[1:]],
            given=merge(layers),
            values=resolved.values,
            sources=resolved.sources,
            track=job.track,
        ),
        partial(next_command, job.out),
    )
    item_name = recipe_file.item_name or ("items" if recipe.count_items else "samples")
    with ExitStack() as stack:
        display = partial(_display, job.request, stream, stack)
        shown = ShownRun(item_name, display, lambda: writer)
        watching = _Watching(job, shown, stack)
        others: list[Observer] = [*recipe_file.observers, Deadline(), stopping]
        stopping.begin()
        try:
            result = fit(
                recipe,
                resolved.settings,
                backend=driver.name,
                backend_options=resolved.backend_options,
                out=job.out,
                resume=job.resume,
                observers=lambda: [*watching.observers(), *others],
                finish=partial(_sample, recipe_file, writer),
            )
        except StoppedBeforeStart as stopped:
            raise StoppedEarly(nothing_done(stopped.number)) from None
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if rank() == 0:
                writer.fail(f"{type(error).__name__}: {error}")
            raise
        shown.show(result_record(writer, result))
    return result


def _display(request: TrainRequest, stream: TextIO | None, stack: ExitStack) -> Display:
    """Return the display: JSON lines in `stream`, a bar on a terminal, else plain lines. `stack`
    closes it at the end."""
    if stream is not None:
        return print_json(stream), None
    if not request.plain and (console := Console()).is_terminal:
        live = stack.enter_context(LiveProgress(console))
        return live.sink, live.step
    return print_lines, None


@dataclass
class _Watching:
    """The observers that show and record a run, and those that write files of their own. A rank
    gets others when it has become rank 0. `stack` closes them at the end."""

    job: _Job
    shown: ShownRun
    stack: ExitStack
    _made: list[Tracker | Profiler] | None = None

    def observers(self) -> list[Observer]:
        """Return the observers of this process by its present rank."""
        if self.shown.begin_if_first() or self._made is None:
            self._made = self._file_writers()
        return [self.shown.watcher, *self._made]

    def _file_writers(self) -> list[Tracker | Profiler]:
        """Return the observers that write files of their own."""
        folder, names = records_folder(self.job.out), self.job.track if rank() == 0 else ()
        shown = self.shown
        observers: list[Tracker | Profiler] = [
            Tracker(name, folder=folder, warn=shown.warn) for name in names
        ]
        if self.job.request.profile is not None:
            steps, report = self.job.request.profile, lambda found: shown.show(record_of(found))
            observers.append(Profiler(*steps, folder / "profile", report=report, warn=shown.warn))
        for observer in observers:
            self.stack.callback(observer.close)
        return observers


def _exit_code(result: Result) -> int:
    if result.save_error and result.reason != "preempted":
        raise SaveFailed(
            f"{result.reason} at step {result.step}, which is not saved: {result.save_error}. The "
            f"newest checkpoint is {result.checkpoint}; make room, and resume with --resume auto"
        )
    if result.reason != "preempted":
        note_outcome(0, FINISHED)
        return 0
    launched_by_us = note_outcome(EXIT_PREEMPTED, PREEMPTED)
    if launched_by_us and RESTARTS not in os.environ:
        return 0  # with another code the launcher would end ranks that still write
    return EXIT_PREEMPTED


def _sample(recipe_file: RecipeFile, writer: RunFolderWriter, module: nn.Module) -> None:
    if recipe_file.sample is None:
        return
    text = recipe_file.sample(module)
    if not isinstance(text, str):
        raise RecipeError(f"sample() of {recipe_file.path} returned {type(text).__name__}, not str")
    writer.sample = text


@contextmanager
def _clean_stdout() -> Iterator[TextIO]:
    """Reserve stdout for JSON. All else that is printed there, also by C libraries, goes to
    stderr."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(ours), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)
