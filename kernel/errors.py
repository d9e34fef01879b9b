"""Every error that drivetrain raises on purpose.

Each message says what was wrong, with the value seen, where, and what to do next.
`exit_code` is what the command line exits with."""

from __future__ import annotations

__all__ = [
    "EXIT_PREEMPTED",
    "BackendUnavailable",
    "CapabilityRefused",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CollectiveFailed",
    "DataError",
    "DataFailed",
    "DrivetrainError",
    "FailedAfterTraining",
    "LibraryUnsupported",
    "NonFiniteTraining",
    "OutOfMemory",
    "OutputError",
    "RecipeError",
    "RecipeFailed",
    "SaveFailed",
    "SettingError",
    "StorageFailed",
    "StorageUnavailable",
    "TrainingDiverged",
    "UnknownBackend",
    "UsageError",
    "WorkerFailed",
    "printable",
]

EXIT_PREEMPTED = 75
"""Exit code of a run that was asked to stop by a signal and saved (`EX_TEMPFAIL`: try again)."""


def printable(text: str) -> str:
    """Text as a terminal may have it: what would steer the terminal (escape sequences, directions
    of writing), or cannot be encoded, is shown as Python writes it. Lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


class DrivetrainError(Exception):
    """The root; catch this to catch everything that drivetrain raises on purpose.

    Its text may quote files, names and messages that others wrote: it is `printable`."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(DrivetrainError):
    """The request cannot be carried out; nothing was started or changed."""

    exit_code = 2


class SettingError(UsageError):
    """An argument is unknown, ill-typed or out of range."""


class RecipeError(UsageError):
    """The recipe lacks a part, or a part returned something unusable."""


class DataError(UsageError):
    """The data cannot be trained or evaluated on as asked."""


class OutputError(UsageError):
    """The run folder cannot be used."""


class UnknownBackend(UsageError):
    """No driver of that name."""


class BackendUnavailable(UsageError):
    """The driver exists and cannot run on this machine; the message holds the reason."""


class LibraryUnsupported(UsageError):
    """The installed version of a library lacks a private name; the message says which one fits."""


class StorageUnavailable(UsageError):
    """No package that is installed can reach such a URL; the message says which could."""


class CapabilityRefused(UsageError):
    """The driver declares that it cannot do what was asked.

    For programs: `asked` and `driver` as in the message; `capability`, the field of `Capabilities`
    that does not promise it, or empty if the driver promises it, but not in this combination."""

    def __init__(self, asked: str, driver: str, remedy: str, capability: str = "") -> None:
        super().__init__(f"driver {driver!r} refuses {asked}: {remedy}")
        self.asked, self.driver, self.capability = asked, driver, capability


class CheckpointError(UsageError):
    """A checkpoint cannot be used."""


class CheckpointNotFound(CheckpointError):
    """No checkpoint, or no complete one."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint is torn, truncated, altered or malformed; it is kept and not loaded."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint belongs to another model or optimizer; the message names what differs."""


class StorageFailed(DrivetrainError, OSError):
    """A storage did not do as asked, however often it was; the message names the URL, or file."""


class SaveFailed(DrivetrainError):
    """A checkpoint could not be written; the last good one is untouched."""


class OutOfMemory(DrivetrainError):
    """A step, or an evaluation, does not fit into memory; the message says what would."""


class NonFiniteTraining(UsageError):
    """Too many steps in a row had a non-finite loss or gradient norm; none was applied."""


class TrainingDiverged(UsageError):
    """The loss spiked again after as many roll-backs as were allowed."""


class RecipeFailed(DrivetrainError):
    """The recipe's file or function raised (the `__cause__`), or what a run calls, `sys.exit`."""


class DataFailed(DrivetrainError):
    """The data set, a stream, a loader or `collate` raised; what it raised is the cause."""


class WorkerFailed(DataFailed):
    """The same in a data worker, with the traceback in the message; or a data worker died."""


class FailedAfterTraining(DrivetrainError):
    """All steps are done and saved; then the last evaluation, an observer or `finish` raised (the
    `__cause__`). For programs: `checkpoint`, where the weights are; empty if nothing is saved."""

    exit_code = 3

    def __init__(self, message: str, checkpoint: str = "") -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


class CollectiveFailed(DrivetrainError):
    """Ranks disagree, or a rank did not arrive in time; the message names rank and call.

    For programs: `late`, the ranks that did not come, as far as this one knows; `records`, what the
    communication library noted of its last calls on this rank, as JSON, or empty."""

    def __init__(self, message: str, late: tuple[int, ...] = (), records: str = "") -> None:
        super().__init__(message)
        self.late, self.records = late, records


_WORDS = ("out of memory", "can't allocate memory", "failed to allocate", "resource_exhausted")


def ran_out(error: BaseException) -> bool:
    """True for an error that says that a device, or the host, has no memory left."""
    import torch  # late, so that importing an error does not import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def out_of_memory_in_update(error: Exception) -> OutOfMemory:
    """Return the error to raise when memory runs out in an update. After a part of an update the
    weights cannot be trusted, and smaller microbatches would not help."""
    return OutOfMemory(
        f"out of memory in the update, where the optimizer's state is made: {error}. Smaller "
        "microbatches do not help; the checkpoints are untouched"
    )
