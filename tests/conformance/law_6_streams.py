"""Law 6, streams. Data that can only be read from the front resumes exactly, on any world size."""

from __future__ import annotations

import tempfile

from . import law_6_resume
from .cases import check
from .judge import require_close, require_same
from .refusal import problem_for
from .resuming import SAMPLES, STEPS, record, recorded
from .subject import Subject

IN_ORDER = [list(range(start, min(start + 8, SAMPLES))) for start in range(0, SAMPLES, 8)]
"""The samples of each update of an epoch."""


@check(data=("stream", "stateful"), stops=((3,), (1, 2, 4, 5, 7)))
def resumed_stream_is_bit_exact(subject: Subject, data: str, stops: tuple[int, ...]) -> None:
    """Resume by the stream's own state, or by reading again, in mid-epoch, at and after its end."""
    law_6_resume.resumed_run_is_bit_exact(subject, stops, data=data)


@check()
def a_stream_read_by_a_worker_resumes(subject: Subject) -> None:
    """Require that samples which the worker had read ahead of the checkpoint are read again."""
    law_6_resume.resumed_run_is_bit_exact(subject, (4,), data="stateful", workers=1)


@check()
def a_stream_keeps_its_order_on_any_world_size(subject: Subject) -> None:
    """Require that each update takes the next samples of the stream, before and after resuming."""
    problem = problem_for(subject, "language")
    for peer in subject.peers:
        with tempfile.TemporaryDirectory() as folder:
            straight = recorded(subject, problem=problem, data="stateful")
            source = straight["checkpoint"].replace(f"{STEPS:06}", "000004")
            on = {"problem": problem, "data": "stateful", "resume": source}
            resumed = record(peer, f"{folder}/on", **on)
        expected = [IN_ORDER[step % len(IN_ORDER)] for step in range(STEPS)]
        require_same(f"samples of each step on {subject}", straight["ids"], expected)
        require_same(f"samples of each step, resumed on {peer}", resumed["ids"], expected[4:])
        losses = [[line["loss"] for line in reported["logged"]] for reported in (resumed, straight)]
        require_close(f"losses, resumed on {peer}", losses[0], losses[1][4:], 1e-5)
