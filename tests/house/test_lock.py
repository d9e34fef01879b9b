"""The lock's pins are complete, and uv has installed exactly the locked packages."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import chain

import pytest
from house_rules import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_packaging import PYPROJECT

Locked = dict[tuple[str, str], set[str]]  # (name, version) -> hashes


def locked(text: str) -> Locked:
    """Parse `name==version ; marker \\` and the `--hash=` lines that follow it."""
    found: Locked = {}
    for entry in re.split(r"\n(?=\w)", text):
        if match := re.match(r"([\w.-]+)==([^\s;\\]+)", entry):
            key = (match[1], match[2])
            found[key] = set(re.findall(r"--hash=(\S+)", entry))
    return found


def constraints() -> list[Requirement]:
    return [Requirement(line) for line in PYPROJECT["tool"]["uv"]["constraint-dependencies"]]


def committed() -> Locked:
    return locked((ROOT / "locks" / "requirements.txt").read_text())


def unpinned(lock: Locked, pins: list[Requirement]) -> list[str]:
    """List the locked versions that no constraint names."""
    ends = {(pin.name, part.version) for pin in pins for part in pin.specifier}
    return sorted(f"{name}=={version}" for name, version in lock if (name, version) not in ends)


def differences(here: Locked, there: Locked) -> list[str]:
    """List the differences of `here` from `there`: packages that are missing, added, or taken from
    other files.

    Hashes may be added upstream, when a wheel for one more platform is published; none may go.
    """
    moved = [f"{name}=={version}" for name, version in sorted(here.keys() ^ there.keys())]
    return moved + [
        f"{key[0]}=={key[1]} has other files"
        for key in sorted(here.keys() & there.keys())
        if not there[key] <= here[key]
    ]


def test_every_locked_package_is_pinned_and_hashed() -> None:
    lock = committed()
    assert len(lock) > 50
    assert unpinned(lock, constraints()) == []
    assert [name for name, hashes in lock.items() if not hashes] == []


def test_every_direct_dependency_is_pinned() -> None:
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {canonicalize_name(Requirement(line).name) for line in asked} - {"drivetrain"}
    assert names <= {canonicalize_name(pin.name) for pin in constraints()}


def test_the_lock_that_uv_made_here_is_the_committed_one() -> None:
    uv = shutil.which("uv")
    if uv is None or not (ROOT / "uv.lock").exists():
        pytest.skip("this environment was not made by `uv run`")
    command = [uv, "export", "--frozen", "--quiet", "--no-emit-project", "--extra", "test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert differences(locked(done.stdout), committed()) == []


def test_a_difference_is_seen() -> None:
    lock = locked(
        "a==1 ; sys_platform == 'linux' \\\n    --hash=sha256:x \\\n    --hash=sha256:y\nb==2\n"
    )
    assert lock == {("a", "1"): {"sha256:x", "sha256:y"}, ("b", "2"): set()}
    assert differences(lock, {("a", "1"): {"sha256:x"}, ("b", "2"): set()}) == []
    assert differences(lock, {("a", "1"): {"sha256:z"}, ("b", "2"): set()})
    assert differences(lock, {("a", "2"): {"sha256:x"}, ("b", "2"): set()})
    assert unpinned(lock, [Requirement("a==1"), Requirement("b<=3")]) == ["b==2"]
