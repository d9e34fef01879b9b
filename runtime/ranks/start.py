"""Starts ranks from a process that goes on afterwards: torch's elastic agent, and forks.

A fork has all that the process has, so that recipes and closures of a notebook's cells need not be
imported or pickled. What a fork has not is threads: GNU's OpenMP waits for those of its parent for
ever, so ranks compute on one thread, which is torchrun's default, too; and CUDA refuses.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..data.user_frames import last_line, user_frames
from ..kernel import errors
from ..kernel.errors import EXIT_PREEMPTED, DrivetrainError, RecipeFailed, SettingError

__all__ = ["run_on_ranks"]

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")


def run_on_ranks(nproc: int, act: Callable[[], T]) -> T:
    """Call `act` on so many ranks; the result of rank 0. Raises what the rank raised that failed
    first, where that is an error of drivetrain's, else `RecipeFailed`."""
    _check(nproc)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="fork",
    )
    try:
        with _as_it_was():
            results = elastic_launch(config, _rank)(act)
    except ChildFailedError as error:
        raise _as_raised(*error.get_first_failure()) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(EXIT_PREEMPTED) from None
    return cast(T, results[0])


def _check(nproc: int) -> None:
    if nproc < 1:
        raise SettingError(f"nproc is {nproc}; it must be at least 1")
    if "RANK" in os.environ:
        raise SettingError(
            f"nproc is {nproc}, and this process is rank {os.environ['RANK']} of a launcher that "
            "started as many as it was to: leave nproc out"
        )
    for name in ("cuda", "xpu"):
        if getattr(torch, name).is_initialized():
            raise SettingError(
                f"nproc is {nproc}, and this process has used a device ({name}), after which it "
                "cannot be forked into ranks: restart it (the notebook's kernel) and call fit "
                "before anything touches the device, or put the recipe into a file and run "
                f"`drivetrain train FILE --nproc {nproc}`"
            )


class _Word(Exception):
    """How a rank failed, as JSON: the agent hands over the text of what a rank raises."""


def _rank(act: Callable[[], T]) -> T:
    torch.set_num_threads(1)
    try:
        return act()
    except BaseException as error:
        raise _Word(_word(error)) from error


def _word(error: BaseException) -> str:
    ours = isinstance(error, DrivetrainError)
    blamed = error.__cause__ if ours else error
    word = {
        "kind": type(error).__name__ if ours else RecipeFailed.__name__,
        "message": str(error) if ours else last_line(error),
        "frames": user_frames(blamed) if blamed is not None else "",
    }
    return json.dumps(word)


def _as_raised(rank: int, failure: ProcessFailure) -> DrivetrainError:
    try:
        told: Any = failure.message
        word = json.loads(told["message"].removeprefix(f"{_Word.__name__}: "))
        kind = getattr(errors, word["kind"], DrivetrainError)
        message = f"rank {rank}: {word['message']}\n{word['frames']}".rstrip()
    except (ValueError, KeyError, TypeError):
        kind, code = RecipeFailed, failure.exitcode
        died = f"signal {-code}" if code < 0 else f"exit code {code}"
        message = f"rank {rank} ended with {died} and left no message"
    return cast(DrivetrainError, kind(message))


@contextmanager
def _as_it_was() -> Iterator[None]:
    """The agent's signal handlers, words and environment end with it."""
    loggers, environment = [*map(logging.getLogger, _LOGGERS)], dict(os.environ)
    levels = [logger.level for logger in loggers]
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    # a rank that was asked to stop finishes its step and saves: give it the time
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, cast(Any, handler))
