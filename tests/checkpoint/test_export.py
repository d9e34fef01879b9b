"""Weights are exported to, and imported from, the layout that other libraries use."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import safetensors
import safetensors.torch as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import checkpoint
from drivetrain.checkpoint import (
    CheckpointReader,
    CheckpointStore,
    export_weights,
    import_weights,
    newest,
)
from drivetrain.kernel.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    OutputError,
    SettingError,
)
from drivetrain.kernel.shards import Flat

from .fakes import FakeEngine, FakeSession, bits, piece, run_of, save, tensors, tilings


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Load the weights as other readers of this layout do."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return reference.load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    loaded = {name: reference.load_file(folder / name) for name in set(weight_map.values())}
    assert sorted(name for part in loaded.values() for name in part) == sorted(weight_map)
    return {name: loaded[part][name] for name, part in weight_map.items()}


@given(data=st.data(), max_shard_bytes=st.sampled_from([1, 64, 10**9]))
@settings(deadline=None, max_examples=40)
def test_out_and_in_again(tmp_path_factory, data, max_shard_bytes):
    tmp_path = tmp_path_factory.mktemp("export")
    originals = {f"t{i}": data.draw(tensors()) for i in range(data.draw(st.integers(1, 4)))}
    originals = {n: t for n, t in originals.items() if t.dtype in reference._TYPES.values()}
    originals["last"] = torch.arange(3.0)
    ranks = [[], []]
    for name, tensor in originals.items():
        for region in data.draw(tilings(tuple(tensor.shape))):
            data.draw(st.sampled_from(ranks)).append(piece(name, tensor, region))
    path = save(CheckpointStore(tmp_path / "run"), 5, ranks)
    folder = export_weights(path, tmp_path / "hub", max_shard_bytes=max_shard_bytes)
    exported = load(folder)
    assert {n: bits(t) for n, t in exported.items()} == {n: bits(t) for n, t in originals.items()}
    imported = CheckpointReader(import_weights(folder, tmp_path / "start"))
    assert imported.verify() == []
    assert imported.manifest.step == 0
    assert imported.names("weights") == sorted(originals)
    assert imported.names("optimizer") == imported.names("state") == []
    for name, tensor in originals.items():
        assert bits(imported.read("weights", name)) == bits(tensor)


def test_whole_tensors_are_readable_as_they_are(tmp_path):
    """Read the files of a driver that does not shard: they need no export."""
    path = save(CheckpointStore(tmp_path), 1, [[piece("w", torch.arange(6.0).view(2, 3))]])
    file = path / "weights-00000-of-00001.safetensors"
    assert torch.equal(reference.load_file(file)["w"], torch.arange(6.0).view(2, 3))
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_files_of_the_reference_library(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("theirs")
    originals = {f"t{i}": data.draw(tensors()) for i in range(data.draw(st.integers(1, 4)))}
    originals = {n: t for n, t in originals.items() if t.dtype in reference._TYPES.values()}
    reference.save_file(originals, folder / "model.safetensors", {"format": "pt", "é": "☃"})
    reader = CheckpointReader(import_weights(folder, folder / "run"))
    assert reader.names("weights") == sorted(originals)
    for name, tensor in originals.items():
        assert bits(reader.read("weights", name)) == bits(tensor)


def test_tied_weights_go_out_once_and_come_in_by_both_names(tmp_path):
    engine = FakeEngine([piece("embed", torch.arange(3.0))], tied=(("embed", "head"),))
    path = CheckpointStore(tmp_path / "run").save(1, engine, FakeSession(), {})
    folder = export_weights(path, tmp_path / "hub")
    assert list(load(folder)) == ["embed"]
    start = import_weights(folder, tmp_path / "start", tied=[["embed", "head"]])
    assert torch.equal(CheckpointReader(start).read("weights", "head"), torch.arange(3.0))
    assert newest(tmp_path / "start") == start


def test_no_folder_is_overwritten(tmp_path):
    path = save(CheckpointStore(tmp_path / "run"), 1, run_of(1.0))
    (tmp_path / "mine").mkdir()
    export_weights(path, tmp_path / "mine")  # empty: taken
    with pytest.raises(OutputError, match="not an empty folder"):
        export_weights(path, tmp_path / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="not an empty folder"):
        export_weights(path, tmp_path / "file")
    with pytest.raises(SettingError, match="at least 1"):
        export_weights(path, tmp_path / "new", max_shard_bytes=0)
    import_weights(tmp_path / "mine", tmp_path / "start")
    with pytest.raises(OutputError, match="exists"):
        import_weights(tmp_path / "mine", tmp_path / "start")
    assert not list(tmp_path.glob("**/.*"))


def test_a_damaged_checkpoint_is_not_exported_in_part(tmp_path):
    pieces = [piece("a", torch.ones(2)), piece("b", torch.ones(4), Flat(0, 3))]
    path = save(CheckpointStore(tmp_path / "run"), 1, [pieces])
    with pytest.raises(CheckpointDamaged, match="1 elements"):
        export_weights(path, tmp_path / "hub", max_shard_bytes=1)
    assert not list(tmp_path.glob("*hub*"))
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors: .*header"):
        import_weights(tmp_path, tmp_path / "start")


def test_what_cannot_be_imported(tmp_path):
    with pytest.raises(CheckpointNotFound, match="neither"):
        import_weights(tmp_path, tmp_path / "start")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin, a pickle.*save it again"):
        import_weights(tmp_path, tmp_path / "start")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map in (
        {"w": "../x"},
        {"w": "/etc/passwd"},
        {"w": ".."},
        {"w": 7},
        {},
        [],
        {"w": ""},
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointDamaged, match=index.name):
            import_weights(tmp_path, tmp_path / "start")
    reference.save_file({"v": torch.ones(2)}, tmp_path / "part.safetensors")
    index.write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    with pytest.raises(CheckpointDamaged, match="not in part"):
        import_weights(tmp_path, tmp_path / "start")
    assert not (tmp_path / "start").exists()


def test_the_hub_cache_is_made_of_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    reference.save_file({"w": torch.ones(2)}, tmp_path / "blobs" / "hash")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/hash")
    reader = CheckpointReader(import_weights(tmp_path / "snapshot", tmp_path / "start"))
    assert torch.equal(reader.read("weights", "w"), torch.ones(2))


def test_no_pickle_in_or_out():
    folder = Path(checkpoint.__file__).parent
    nodes = [node for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    assert not imported & {"pickle", "marshal", "shelve", "numpy", "torch.distributed"}
    used = {(n.value.id, n.attr) for n in nodes if isinstance(n, ast.Attribute)
            and isinstance(n.value, ast.Name)}  # fmt: skip
    assert not used & {("torch", "load"), ("torch", "save"), ("torch", "cuda")}
