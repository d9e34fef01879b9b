"""Checkpoints in S3, over a network that fails: nothing is lost, and no save is half visible."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from typer.testing import CliRunner

from drivetrain.checkpoint import CheckpointReader, list_checkpoints, newest, storage_of
from drivetrain.checkpoint.storage import fsspec_storage
from drivetrain.checkpoint.storage.retry import Patience
from drivetrain.cli.app import app
from drivetrain.kernel.errors import OutputError, SaveFailed, StorageFailed
from drivetrain.kernel.events import Event, Request, Saved, StepEnded
from drivetrain.kernel.paths import Place, Url
from drivetrain.kernel.shards import Box
from drivetrain.trainer.fit import fit
from drivetrain.trainer.settings import Settings

from .runs import FORKSERVER, SETTINGS, everything, recipe
from .s3_server import Fault, Proxy, ReceivedRequest, s3_server

FOUR = dataclasses.replace(
    SETTINGS, steps=4, checkpoint=dataclasses.replace(SETTINGS.checkpoint, every=2, keep_last=1)
)
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",  # what is to be seen is our patience, not botocore's
}


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3_server() as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        fs = fsspec.filesystem("s3", use_listings_cache=False)
        fs.mkdir("bucket")
        yield proxy
        fs.clear_instance_cache()


@pytest.fixture
def proxy(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    server.reset()
    quick = Patience(tries=5, first_pause=0.01, longest_pause=0.02)
    monkeypatch.setattr(storage_of(Url("s3://bucket")), "patience", quick)
    yield server
    server.reset()


@pytest.fixture
def out(request: pytest.FixtureRequest) -> Url:
    return Url(f"s3://bucket/{request.node.name.translate(str.maketrans('[] ', '---'))}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the content that an undisturbed run leaves in a folder."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return contents(folder)


def run(out: Place, settings: Settings = FOUR, stop_at: int = 0) -> list[Event]:
    """Run like the same command with `--resume auto`."""
    events: list[Event] = []

    def watch(event: Event) -> Request | None:
        events.append(event)
        ended = isinstance(event, StepEnded) and event.step == stop_at
        return Request.STOP if ended else None

    fit(recipe(), settings, backend="cpu", out=out, resume="auto", observers=[watch])
    return events


def contents(out: Place) -> dict[str, Any]:
    last = newest(out / "checkpoints")
    assert last is not None
    assert CheckpointReader(last).verify() == []
    return {"step": CheckpointReader(last).manifest.step, **everything(last)}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one
    )


def steps(out: Place) -> list[int]:
    listing = list_checkpoints(out / "checkpoints")
    assert not listing.rejected
    return [found.step for found in listing.complete]


@pytest.mark.parametrize(
    "background", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["still", "background"]
)
def test_a_run_saves_to_s3_and_goes_on_from_there(
    proxy: Proxy, out: Url, whole: dict[str, Any], background: bool
) -> None:
    checkpoint = dataclasses.replace(FOUR.checkpoint, background=background)
    settings = dataclasses.replace(FOUR, checkpoint=checkpoint)
    saved = [event for event in run(out, settings, stop_at=3) if isinstance(event, Saved)]
    assert [event.path for event in saved] == [
        out / "checkpoints" / "checkpoint-000002",
        out / "checkpoints" / "checkpoint-000003",
    ]
    assert steps(out) == [3]
    run(out, settings)
    assert steps(out) == [4]  # the last, and the best: it was evaluated after the save
    assert same(contents(out), whole)


def every(number: int, fault: Fault, writes: bool) -> Any:
    """Let every n-th request fail, of those that write or of the others."""
    count = itertools.count(1)
    return lambda request: fault if request.writes == writes and not next(count) % number else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "writes"),
    [
        ("500", True),
        ("cut download", False),
        ("503", False),
        ("slow", True),
        ("cut upload", True),
    ],
)
def test_a_run_over_a_bad_network_ends_as_over_a_good_one(
    proxy: Proxy, out: Url, whole: dict[str, Any], fault: Fault, writes: bool
) -> None:
    proxy.decide = every(3, fault, writes)
    run(out, stop_at=2)
    events = run(out)
    assert not [event for event in events if isinstance(event, Saved) and event.error]
    assert same(contents(out), whole)
    assert len(proxy.faults()) > 3


def test_a_save_that_fails_for_good_is_reported_and_leaves_nothing(proxy: Proxy, out: Url) -> None:
    """Require rank, URL and cause in the message. The run continues, and the checkpoint before
    stays the newest.
    """

    def no_room(request: ReceivedRequest) -> Fault:
        is_shard = "checkpoint-000002" in request.path and "weights" in request.path
        return "500" if is_shard and request.writes else ""

    proxy.decide = no_room
    failed = [e for e in run(out) if isinstance(e, Saved) and e.error]
    assert [event.step for event in failed] == [2]
    url = f"{out}/checkpoints/checkpoint-000002/weights-00000-of-00001.safetensors"
    assert f"rank 0: StorageFailed: {url}: cannot be written, tried 5 times" in failed[0].error
    assert "Internal Server Error" in failed[0].error
    assert storage_of(out).names(out / "checkpoints") == ["checkpoint-000004"]
    strict = dataclasses.replace(FOUR.checkpoint, stop_on_error=True)
    again = Url(f"{out}-strict")
    with pytest.raises(SaveFailed, match="checkpoints before it are untouched"):
        run(again, dataclasses.replace(FOUR, checkpoint=strict))
    assert storage_of(again).names(again / "checkpoints") == []


def test_what_cannot_be_listed_or_read_does_not_count_as_absent(proxy: Proxy, out: Url) -> None:
    run(out, stop_at=2)
    for path in ("prefix=", "manifest.json"):
        proxy.decide = lambda request, path=path: (  # type: ignore[misc]
            "500" if path in request.path and not request.writes else ""
        )
        with pytest.raises(StorageFailed, match=r"s3://bucket/.*tried 5 times"):
            run(out)
    proxy.reset()
    assert steps(out) == [2]


def test_a_missing_bucket_is_reported_before_anything_is_built(proxy: Proxy) -> None:
    with pytest.raises(OutputError, match="s3://no-bucket/run: nothing can be saved there"):
        run(Url("s3://no-bucket/run"))


def in_blocks(data: memoryview) -> list[memoryview]:
    return [data[start : start + (1 << 20)] for start in range(0, len(data), 1 << 20)]


@pytest.mark.parametrize("fault", ["500", "cut upload"])
def test_large_files_go_in_parts_and_a_lost_part_is_sent_again(
    proxy: Proxy, out: Url, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(fsspec_storage, "PART_BYTES", 5 << 20)
    block = torch.randint(0, 255, (12 << 20,), dtype=torch.uint8)
    parts: list[str] = []

    def second_part_twice(request: ReceivedRequest) -> Fault:
        parts.append(request.path)
        if "partNumber=2" in request.path and sum("partNumber=2" in p for p in parts) <= 2:
            return fault
        return ""

    proxy.decide = second_part_twice
    path = out / "large"
    storage = storage_of(out)
    storage.create(path, lambda: in_blocks(memoryview(block.numpy())))
    assert len(proxy.faults()) == 2
    assert storage.sizes(out, ["large"]) == [12 << 20]
    back = bytearray(12 << 20)
    with storage.open(path) as file:
        file.read_into(0, memoryview(back))
    assert bytes(back) == block.numpy().tobytes()


def test_a_file_whose_upload_never_ends_well_is_not_there(
    proxy: Proxy, out: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_storage, "PART_BYTES", 5 << 20)
    proxy.decide = lambda request: "cut upload" if "partNumber=2" in request.path else ""
    with pytest.raises(StorageFailed, match="large: cannot be written, tried 5 times"):
        storage_of(out).create(out / "large", lambda: in_blocks(memoryview(bytes(12 << 20))))
    assert storage_of(out).names(out) == []


def test_ranges_are_read_and_no_more(proxy: Proxy, out: Url) -> None:
    wide = dataclasses.replace(recipe(), model=lambda: torch.nn.Linear(4096, 256, bias=False))
    data = torch.utils.data.TensorDataset(torch.zeros(8, 4096), torch.zeros(8, 256))
    wide = dataclasses.replace(wide, train_data=data, eval_data={})
    one = dataclasses.replace(FOUR, steps=1)
    result = fit(wide, one, backend="cpu", out=out)
    assert result.checkpoint is not None
    reader = CheckpointReader(result.checkpoint)
    reader.names("weights")
    proxy.log.clear()
    read = reader.read("weights", "weight", Box((64, 0), (64, 4096)))
    assert read.shape == (64, 4096)
    assert sum(request.num_bytes for request, _ in proxy.log if request.range) == read.nbytes
    assert all(request.range for request, _ in proxy.log if request.method == "GET")


def train_in_a_process(out: str, settings: Settings, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    run(Url(out), settings)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["still", "background"])
def test_kill_9_in_the_middle_of_an_upload(
    proxy: Proxy, whole: dict[str, Any], out: Url, background: bool
) -> None:
    """Run the same command again. A half uploaded checkpoint counts as missing, and is removed
    later.
    """
    checkpoint = dataclasses.replace(FOUR.checkpoint, background=background)
    settings = dataclasses.replace(FOUR, checkpoint=checkpoint)
    environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
    reported = []
    for victim in (("000002", "optimizer"), ("000004", "manifest")):
        reached, killed = threading.Event(), threading.Event()

        def hold(
            request: ReceivedRequest,
            victim: Any = victim,
            reached: threading.Event = reached,
            killed: threading.Event = killed,
        ) -> Fault:
            if request.writes and all(word in request.path for word in victim):
                reached.set()
                killed.wait(60)
                return "cut upload"
            return ""

        proxy.decide = hold
        process = FORKSERVER.Process(
            target=train_in_a_process, args=(str(out), settings, environment)
        )
        process.start()
        assert reached.wait(60)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        proxy.decide = lambda request: ""
        killed.set()
        last = newest(out / "checkpoints")
        assert last is None or CheckpointReader(last).verify() == []
        reported.append(0 if last is None else CheckpointReader(last).manifest.step)
    assert reported == [0, 2]
    run(out, settings)
    assert storage_of(out).names(out / "checkpoints") == ["checkpoint-000004"]
    assert same(contents(out), whole)


def test_a_folder_and_a_url_hold_the_same_bytes(proxy: Proxy, out: Url, tmp_path: Path) -> None:
    one = dataclasses.replace(FOUR, steps=2)
    run(tmp_path, one)
    run(out, one)
    folder = tmp_path / "checkpoints" / "checkpoint-000002"
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    for path in folder.glob("*.safetensors"):
        assert fs.cat_file(f"{out}/checkpoints/{folder.name}/{path.name}") == path.read_bytes()


RECIPE = """
import torch
from typer.testing import CliRunner
from drivetrain import Recipe, Settings

inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loss(module, batch):
    return (module(batch[0]) - batch[1]).square().sum()


recipe = Recipe(model=lambda: torch.nn.Linear(4, 1), loss=loss, train_data=data)
settings = Settings(epochs=3, global_batch=8, log_every=1)
"""


@pytest.mark.slow
def test_the_command_line_takes_urls(
    proxy: Proxy, out: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(RECIPE)

    def drivetrain(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*words])
        assert done.exit_code == code, done.output
        return done.output

    train = ("train", "my.py", "--backend", "cpu", "--out", str(out))
    drivetrain(*train, "--steps", "3")
    assert steps(out) == [3]
    there = storage_of(out).names(out)
    assert there == ["checkpoints", "config.json", "metrics.jsonl", "report.html"]
    assert "is not empty" in drivetrain(*train, "--steps", "3", code=2)
    drivetrain("train", "--resume", str(out), "--steps", "5")
    assert steps(out) == [3, 5]
    assert "step 5" in drivetrain("checkpoint", "inspect", str(out))
    assert "complete and unaltered" in drivetrain("checkpoint", "verify", str(out))
    drivetrain("checkpoint", "export", str(out), "exported")
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    drivetrain("checkpoint", "import", "exported", f"{out}-start")
    assert steps(Url(f"{out}-start")) == [0]
    assert "install s3fs" in drivetrain("train", "my.py", "--out", "s4://b/run", code=2)
    assert not (tmp_path / "s3:").exists() and not (tmp_path / "s4:").exists()
