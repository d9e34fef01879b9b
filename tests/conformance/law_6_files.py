"""Law 6. A checkpoint is JSON and safetensors: anyone can read it, and no pickle is in it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from .cases import check
from .judge import LawBroken, require
from .refusal import problem_for
from .runs import run
from .subject import Subject

SETTINGS = {"steps": 2, "global_batch": 6}


@check()
def files_are_json_and_safetensors(subject: Subject) -> None:
    """Read here by a few lines that know nothing of the library."""
    with tempfile.TemporaryDirectory() as folder:
        problem = problem_for(subject, "language")
        told = subject.run(run, problem=problem, samples=12, settings=SETTINGS, out=folder)[0]
        files = sorted(path for path in Path(told["checkpoint"]).rglob("*") if path.is_file())
        require(any(path.name == "manifest.json" for path in files), "there is no manifest.json")
        for path in files:
            judge_file(path)


def judge_file(path: Path) -> None:
    """Raises `LawBroken` unless the file is wholly accounted for by its JSON."""
    content = path.read_bytes()
    try:
        if path.suffix == ".json":
            json.loads(content)
            return
        require(path.suffix == ".safetensors", f"{path.name} is neither JSON nor safetensors")
        # 8 bytes with the length of a JSON header, which tells where each tensor lies behind it
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
    except ValueError as error:
        raise LawBroken(f"{path.name} is not what its name says: {error}") from error
    spans = sorted(
        entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
    )
    end = 0
    for begin, stop in spans:
        require(begin == end, f"{path.name} holds bytes that belong to no tensor")
        end = stop
    require(start + end == len(content), f"{path.name} holds bytes behind its last tensor")
