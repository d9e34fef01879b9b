"""`drivetrain train`: `drivetrain.fit` with a run folder and someone watching."""

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

from ..checkpoint import CHECKPOINTS, storage_of
from ..data.parent import end_with_launcher
from ..kernel.contract import Driver
from ..kernel.errors import EXIT_PREEMPTED, OutputError, RecipeError, SaveFailed
from ..kernel.events import Warned
from ..kernel.paths import Place, place
from ..kernel.registry import usable_driver
from ..trackers import Tracker
from ..trainer.fit import Result, fit
from ..trainer.profiler import Profiler
from .config_files import ConfigFiles
from .deadline import Deadline, parse_duration, set_deadline
from .failure import FINISHED, PREEMPTED, RESTARTS, note_outcome, rank, world_size
from .launch import Launch, adopt_slurm, check_ranks, is_launched, launched_as, run_ranks
from .live import LiveProgress
from .next_command import onward
from .recipe_file import DEFAULT_RECIPE, RecipeFile, load_recipe_file
from .records import record_of
from .resolve_settings import Layer, merge, refuse_early, resolve, resumed_layer
from .run_folder import (
    Earlier,
    check_folder,
    default_folder,
    find_earlier,
    read_config,
    records_folder,
)
from .run_folder_writer import Keeper, configuration, result_record
from .stopping import Stopping
from .watch import Sink, Watcher, print_json, print_lines

__all__ = ["TrainRequest", "train"]


@dataclass(frozen=True)
class TrainRequest:
    """The options of the command line; None for those that were not given."""

    recipe: Path | None
    backend: str | None
    files: ConfigFiles
    given: Layer
    out: Place | None
    resume: str | None
    launch: Launch
    track: Sequence[str] | None = None
    profile: tuple[int, int] | None = None
    stop_after: str | None = None
    json: bool = False


@dataclass(frozen=True)
class _Job:
    """A request after an earlier run, if there is one, has filled the gaps."""

    recipe: Path
    backend: str
    earlier: Mapping[str, Any]
    """The `config.json` of the earlier run, where no recipe is given now."""
    out: Place
    out_is_default: bool
    resume: Place | str | None
    track: Sequence[str]


def train(request: TrainRequest) -> int:
    """Train, or launch the ranks that do; the exit code. Raises `DrivetrainError`."""
    stopping = Stopping()
    with stopping.hearing():
        return _train(request, stopping)


def _train(request: TrainRequest, stopping: Stopping) -> int:
    if request.stop_after is not None:
        set_deadline(parse_duration(request.stop_after), os.environ)
    if request.launch.nnodes is None:  # else each task of srun is a node's launcher
        adopt_slurm(os.environ)
    end_with_launcher()
    request.launch.check()
    job = _fill_gaps(request)
    if rank() == 0:
        check_folder(job.out, resuming=job.resume is not None)
    if is_launched() or not request.launch.wanted:
        check_ranks(request.launch.nproc, usable_driver(job.backend))
        return _train_here(request, job, stopping)
    with launched_as(request.launch.nproc):
        driver = usable_driver(job.backend)
        check_ranks(request.launch.nproc, driver)
        refuse_early(driver, _layers(request, job, driver))
    if not job.recipe.is_file():
        load_recipe_file(job.recipe)  # raises, once instead of on each rank
    arguments = list(sys.argv[1:])
    if job.out_is_default:
        arguments[1:1] = ["--out", str(job.out)]
    if request.launch.may_restart and request.resume is None:
        # who is started anew goes on; the folder was seen to be empty now
        arguments[1:1] = ["--resume", "auto"]
    return run_ranks(request.launch, arguments)


def _fill_gaps(request: TrainRequest) -> _Job:
    earlier, resume = _earlier(request)
    given = request.recipe or request.files.recipe
    config = earlier.config if earlier is not None and given is None else {}
    recipe = given or Path(config.get("recipe") or DEFAULT_RECIPE)
    backend = request.files.backend if request.backend is None else request.backend
    out: Place | None = request.out
    out_is_default = False
    if out is None and earlier is None and request.launch.nnodes not in (None, "1", "1:1"):
        raise OutputError("the machines must agree on a run folder; give --out")
    if out is None:
        out_is_default = earlier is None
        out = earlier.folder if earlier is not None else default_folder(recipe, _run_label())
    started_anew = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if started_anew and storage_of(out).is_folder(out / CHECKPOINTS):
        resume = "auto"  # the launcher started the ranks anew: go on from the newest checkpoint
    return _Job(
        recipe=recipe,
        backend=backend if backend is not None else str(config.get("backend") or "auto"),
        earlier=config,
        out=out,
        out_is_default=out_is_default,
        resume=resume,
        track=_tracked(request, {} if earlier is None else earlier.config),
    )


def _tracked(request: TrainRequest, earlier: Mapping[str, Any]) -> Sequence[str]:
    """The trackers that are asked for, or else those of the earlier run."""
    names = earlier.get("track", ()) if request.track is None else request.track
    return [name for name in names if name != "none"]


def _earlier(request: TrainRequest) -> tuple[Earlier | None, Place | str | None]:
    """The run that is gone on with, and where its state is taken from."""
    if request.resume is None:
        return None, None
    if request.resume != "auto":
        earlier = find_earlier(place(request.resume))
        return earlier, earlier.source
    if request.out is None:
        raise OutputError(
            "--resume auto goes on with the run in --out, which is not given; give --out, or "
            "--resume with the folder of the run"
        )
    return Earlier(request.out, request.out, read_config(request.out)), "auto"


def _run_label() -> str | None:
    """A name of the run that is the same on all ranks of a launcher; None for one rank."""
    if world_size() == 1:
        return None
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        if os.environ.get(name, "none") != "none":
            return os.environ[name]
    raise OutputError("the ranks must agree on a run folder; give --out")


def _train_here(request: TrainRequest, job: _Job, stopping: Stopping) -> int:
    with _clean_stdout() if request.json else nullcontext() as stream:
        return _exit_code(_fit(request, job, stopping, stream))


def _layers(request: TrainRequest, job: _Job, driver: Driver) -> list[Layer]:
    """All that is asked for; of the earlier run, what is for this driver, too."""
    return [resumed_layer(job.earlier, driver), *request.files.layers, request.given]


def _fit(request: TrainRequest, job: _Job, stopping: Stopping, stream: TextIO | None) -> Result:
    recipe_file = load_recipe_file(job.recipe)
    driver = usable_driver(job.backend)
    layers = _layers(request, job, driver)
    resolved = resolve(recipe_file, driver, layers)
    recipe = recipe_file.build(resolved.config)
    embedded = job.recipe == DEFAULT_RECIPE
    keeper = Keeper(
        job.out,
        configuration(
            name=job.out.name,
            recipe=None if embedded else job.recipe,
            given=merge(layers),
            resolved=resolved,
            track=job.track,
        ),
        partial(onward, job.out),
    )
    item_name = recipe_file.item_name or ("items" if recipe.count_items else "samples")
    with _watching(keeper, item_name, stream) as (watcher, show), ExitStack() as stack:
        more = _asked_for(request, job, show)
        for observer in more:
            stack.callback(observer.close)
        stopping.begin()
        try:
            result = fit(
                recipe,
                resolved.settings,
                backend=driver.name,
                backend_options=resolved.backend_options,
                out=job.out,
                resume=job.resume,
                observers=[watcher, *more, Deadline(), stopping],
                finish=partial(_sample, recipe_file, keeper),
            )
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if rank() == 0:
                keeper.fail(f"{type(error).__name__}: {error}")
            raise
        show(result_record(keeper, result))
    return result


def _asked_for(request: TrainRequest, job: _Job, show: Sink) -> list[Tracker | Profiler]:
    """Observers that write files of their own."""

    def warn(message: str) -> None:
        show(record_of(Warned(message)))

    folder, names = records_folder(job.out), job.track if rank() == 0 else ()
    observers: list[Tracker | Profiler] = [
        Tracker(name, folder=folder, warn=warn) for name in names
    ]
    if request.profile is not None:
        steps, tell = request.profile, lambda profiled: show(record_of(profiled))
        observers.append(Profiler(*steps, folder / "profile", tell=tell, warn=warn))
    return observers


def _exit_code(result: Result) -> int:
    if result.save_error and result.reason != "preempted":
        raise SaveFailed(
            f"{result.reason} at step {result.step}, which is not saved: {result.save_error}. The "
            f"newest checkpoint is {result.checkpoint}; make room, and go on with --resume auto"
        )
    if result.reason != "preempted":
        note_outcome(0, FINISHED)
        return 0
    launched_by_us = note_outcome(EXIT_PREEMPTED, PREEMPTED)
    if launched_by_us and RESTARTS not in os.environ:
        return 0  # or the launcher would end the ranks that still have something to write
    return EXIT_PREEMPTED


def _sample(recipe_file: RecipeFile, keeper: Keeper, module: nn.Module) -> None:
    if recipe_file.sample is None:
        return
    text = recipe_file.sample(module)
    if not isinstance(text, str):
        raise RecipeError(f"sample() of {recipe_file.path} returned {type(text).__name__}, not str")
    keeper.sample = text


@contextmanager
def _watching(
    keeper: Keeper, item_name: str, stream: TextIO | None
) -> Iterator[tuple[Watcher, Sink]]:
    """The observer of this rank, and where the last record is shown. `stream`: for JSON lines."""
    with ExitStack() as stack:
        sinks: Sequence[Sink] = ()
        on_step = None
        show: Sink = lambda record: None  # noqa: E731
        if rank() == 0:
            if stream is not None:
                show = print_json(stream)
            elif (console := Console()).is_terminal:
                live = stack.enter_context(LiveProgress(console))
                show, on_step = live.sink, live.step
            else:
                show = print_lines
            sinks = (keeper.sink, show)
            keeper.files.tell = lambda message: show(record_of(Warned(message)))
        yield Watcher(sinks, item_name, on_step), show


@contextmanager
def _clean_stdout() -> Iterator[TextIO]:
    """stdout for us alone; what anyone else prints there, libraries in C too, goes to stderr."""
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
