"""Law 6, files. A checkpoint is JSON and safetensors. Anyone can read it; it has no pickle."""

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
    """Read the files with a few lines of code that do not use the library."""
    with tempfile.TemporaryDirectory() as folder:
        problem = problem_for(subject, "language")
        reported = subject.run(run, problem=problem, samples=12, settings=SETTINGS, out=folder)[0]
        files = sorted(path for path in Path(reported["checkpoint"]).rglob("*") if path.is_file())
        require(any(path.name == "manifest.json" for path in files), "there is no manifest.json")
        for path in files:
            judge_file(path)


def judge_file(path: Path) -> None:
    """Raise `LawBroken` unless the JSON of the file accounts for all of its bytes."""
    content = path.read_bytes()
    try:
        if path.suffix == ".json":
            json.loads(content)
            return
        require(path.suffix == ".safetensors", f"{path.name} is neither JSON nor safetensors")
        # 8 bytes with the length of a JSON header, which holds where each tensor lies after it
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
