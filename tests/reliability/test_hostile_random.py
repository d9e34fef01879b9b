"""Random hostile inputs, new ones in each run: files, records, words of a command, and requests.
Each must be accepted, or refused by an error of drivetrain.
"""

from __future__ import annotations

import io
import json
import random
import shlex
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.cli.jobs import slurm
from drivetrain.cli.jobs.job import Job
from drivetrain.cli.jobs.kubernetes import to_yaml
from drivetrain.cli.report.compare import page, read_run
from drivetrain.cli.report.serve import refusal
from drivetrain.cli.settings.config_files import read_config_files
from drivetrain.data.tar_shards import TarShards
from drivetrain.data.token_shards import INDEX, TokenShards
from drivetrain.kernel.errors import DrivetrainError

yaml = pytest.importorskip("yaml")

TIMES = settings(max_examples=400, deadline=5000, suppress_health_check=list(HealthCheck))
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -1, 1 << 63, 1e300, -1e308, 5e-324, float("nan"), float("inf")]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["\ud800", "<script>", "\x1b[2J", "x" * 100_000]),
)
VALUES = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
RECORDS: tuple[dict[str, Any], ...] = (
    {"event": "run_started", "first_step": 0, "num_parameters": 7, "total_steps": 9},
    {
        "event": "logged",
        "step": 3,
        "total_steps": 9,
        "loss": 0.5,
        "learning_rate": 0.1,
        "grad_norm": None,
        "items_per_second": 7.0,
        "item_name": "samples",
        "losses": {"a": 1.0},
        "mfu": 0.4,
    },
    {"event": "evaluated", "step": 3, "name": "held_out", "metrics": {"loss": 1.0}},
    {"event": "run_ended", "step": 3, "reason": "finished", "seconds": 1.0},
    {"event": "saved", "step": 3, "path": "a", "error": None},
)
CONFIG: dict[str, Any] = {
    "name": "a",
    "backend": "cpu",
    "world_size": 1,
    "torch": "2.8",
    "recipe": "a.py",
    "command": ["drivetrain", "train"],
    "settings": {"seed": {"value": 1, "source": "default"}},
    "given": {},
    "track": [],
}


@st.composite
def altered(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """Draw the value with some fields, or fields in them, changed, added or removed."""
    found = json.loads(json.dumps(value))
    for name in draw(st.sets(st.sampled_from(sorted(found)), max_size=3)):
        act = draw(st.sampled_from(["other", "gone", "inside"]))
        if act == "gone":
            del found[name]
        elif act == "inside" and isinstance(found[name], dict):
            found[name][draw(st.text(max_size=5))] = draw(VALUES)
        else:
            found[name] = draw(VALUES)
    return found


def taken_or_refused(act: Callable[[], object]) -> None:
    reported = "taken"
    try:
        act()
    except DrivetrainError as error:
        reported = str(error)
    assert 0 < len(reported) < 3000


@pytest.mark.slow
@TIMES
@given(records=st.lists(st.sampled_from(RECORDS).flatmap(altered), max_size=6), data=st.data())
def test_a_run_is_shown(records: list[dict[str, Any]], data: st.DataObject, tmp_path: Path) -> None:
    config = data.draw(altered(CONFIG))
    garbage = data.draw(st.binary(max_size=50))
    lines = [json.dumps(record) for record in (*records, *RECORDS)]
    (tmp_path / "metrics.jsonl").write_bytes(garbage + "\n".join(["", *lines, ""]).encode())
    (tmp_path / "config.json").write_text(json.dumps(config))

    def show() -> None:
        run = read_run(tmp_path)
        for text in (page([run]), page([run, run])):
            assert text.count("<script") <= 2, "the page's own, and its data"
            assert text.count("<script>") <= 1 and "held_out" in text
            text.encode()

    taken_or_refused(show)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["json", "yaml", "toml"])
@TIMES
@given(text=st.text(), value=st.dictionaries(st.text(max_size=5), VALUES), seed=st.integers())
def test_a_configuration_is_taken_or_refused(
    kind: str, text: str, value: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{kind}"
    written = json.dumps(value) if kind != "toml" else 'a.b = 1\n[c]\nd = [1, "x", {e = 2.5}]\n'
    changed = bytearray(written.encode())
    draw = random.Random(seed)
    for _ in range(draw.randrange(4)):
        place = draw.randrange(len(changed) + 1)
        changed[place:place] = draw.choice(
            [b"&a ", b"*a", b"[", b"{", b"<<: ", b".", b"0x", b"\xff"]
        )
    for raw in (text.encode(errors="replace"), bytes(changed)):
        path.write_bytes(raw)
        taken_or_refused(lambda: read_config_files([path]))


def a_tar(form: int) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=form) as tar:
        for name in ("a.txt", "folder/" * 30 + "b.txt", "ü.txt"):
            made = tarfile.TarInfo(name)
            made.size = 600
            tar.addfile(made, io.BytesIO(bytes(600)))
    return raw.getvalue()


TARS = [a_tar(form) for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]


@pytest.mark.slow
@TIMES
@given(raw=st.sampled_from(TARS), seed=st.integers(), signed=st.booleans())
def test_a_tar_shard_is_read_or_refused(
    raw: bytes, seed: int, signed: bool, tmp_path: Path
) -> None:
    """Alter bytes of a header, with or without a new checksum that matches."""
    draw, made = random.Random(seed), bytearray(raw)
    headers = [at for at in range(0, len(made), 512) if made[at + 257 : at + 262] == b"ustar"]
    for _ in range(draw.randrange(1, 4)):
        at = draw.choice(headers)
        made[at + draw.choice([124, 128, 135, 156, draw.randrange(512)])] = draw.randrange(256)
        if signed:
            made[at + 148 : at + 156] = b" " * 8
            made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
    (tmp_path / "a.tar").write_bytes(made[: draw.choice([len(made), draw.randrange(len(made))])])
    taken_or_refused(lambda: list(TarShards([tmp_path / "a.tar"])))


@pytest.mark.slow
@TIMES
@given(data=st.data())
def test_an_index_of_tokens_is_taken_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    shard: dict[str, Any] = {"tokens": 4, "crc32": 0}
    index: dict[str, Any] = {"format": 1, "dtype": "uint16", "shards": [shard]}
    index["shards"] = [data.draw(altered(shard))]
    (tmp_path / INDEX).write_text(json.dumps(data.draw(altered(index))))
    (tmp_path / "tokens-00000.bin").write_bytes(bytes(8))
    taken_or_refused(lambda: TokenShards(tmp_path, 2)[0])


@pytest.mark.slow
@TIMES
@given(
    words=st.lists(
        st.lists(
            st.sampled_from(
                ["$(", "`", "'", '"', "\\", "\n", "$host", "${", "!", "x", " ", "\u2028"]
            ),
            max_size=12,
        ).map("".join),
        min_size=1,
        max_size=4,
    )
)
def test_words_mean_themselves(words: list[str]) -> None:
    """Require that words are unchanged in bash, which prints them, and in YAML."""
    text = slurm.script(Job("a", tuple(words), "a"), [], seconds=None, grace=60, gpus=0, options=())
    command = text[text.index("\nsrun ") + 6 : text.index("\ncode=$?")]
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True
    )
    assert done.stdout.decode().split("\0")[1:-1] == words
    assert shlex.split(command)[1:] == words
    assert yaml.safe_load(to_yaml({"a": words})) == {"a": words}


@pytest.mark.slow
@TIMES
@given(head=st.binary(max_size=200), name=st.text(max_size=30))
def test_a_request_is_answered_by_a_status(head: bytes, name: str) -> None:
    refusal(head, "127.0.0.1")
    sent = f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()
    known = {"localhost", "127.0.0.1", "::1", "[::1]"}
    if name.partition(":")[0].strip("[] .\t\r\n").lower() not in {*known, ""}:
        assert refusal(sent, "127.0.0.1") is not None
