"""State of modules besides parameters and buffers, in a checkpoint."""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.checkpoint import CheckpointReader, CheckpointStore
from drivetrain.checkpoint.extra_state import decode, encode, extra_state, give_extra_state
from drivetrain.kernel.errors import CheckpointDamaged, RecipeError
from drivetrain.kernel.shards import Piece

from .fakes import FakeEngine, FakeSession

HOST = torch.device("cpu")


def stored(folder: Path, value: Any, **changed: Tensor | None) -> CheckpointReader:
    """Save a value as `extra/a/...`; `changed`: its parts to replace, or to leave out."""
    parts = {**encode("a", value), **{name.strip("_"): each for name, each in changed.items()}}
    pieces = [
        Piece("state", f"extra/a/{name}", each, tuple(each.shape))
        for name, each in parts.items()
        if each is not None
    ]
    weight = Piece("weights", "w", torch.ones(1), (1,))
    engine: Any = FakeEngine([weight, *pieces])
    session: Any = FakeSession()
    return CheckpointReader(CheckpointStore(folder).save(1, engine, session, {}))


VALUES: dict[str, Any] = {
    "nothing": None,
    "numbers": [1, -(2**80), 0.1, float("inf"), True, "é\ud800"],
    "tensors": {
        "bf16": torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "complex": torch.ones(1, dtype=torch.complex64),
    },
    "bytes": (b"\x00\xff", bytearray(b"abc"), b""),
    "keys": {1: "a", "1": "b", None: "c", 0.5: {True: []}},
    "ordered": OrderedDict(b=1, a=2),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    value = VALUES[name]
    found = decode(stored(tmp_path, value), "a", 0, HOST)
    if name == "tensors":
        assert found.keys() == value.keys()
        for key, tensor in value.items():
            assert found[key].dtype == tensor.dtype
            assert found[key].shape == tensor.shape
            bits = [each.contiguous().view(torch.uint8).tolist() for each in (found[key], tensor)
                    if each.dim()]  # fmt: skip
            assert all(each == bits[0] for each in bits)
        assert int(found["scalar"]) == 3
    else:
        assert found == value
        assert type(found) is type(value)
        assert list(found) == list(value) if value else not found


def test_an_open_file_comes_back_at_its_beginning(tmp_path: Path) -> None:
    file = io.BytesIO(b"state")
    file.read()
    found = decode(stored(tmp_path, file), "a", 0, HOST)
    assert isinstance(found, io.BytesIO)
    assert found.read() == b"state"


class Custom:
    """A class of the user's own."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"scale": [1, Custom()]}, f"a['scale'][1] is a {Custom.__module__}.Custom"),
        ({(1, 2): 3}, "a has the key (1, 2) of the type tuple"),
        (torch.eye(2).to_sparse(), "a is a tensor that no checkpoint can hold: its layout is"),
        (torch.empty(1, device="meta"), "it has no elements yet"),
        ({1, 2}, "a is a set"),
    ],
)
def test_a_value_that_no_checkpoint_can_hold_is_named(value: Any, named: str) -> None:
    with pytest.raises(RecipeError, match=f"{re.escape(named)}.*get_extra_state"):
        encode("a", value)


def test_a_value_that_contains_itself_is_named() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecipeError, match="nested deeper than 30 levels"):
        encode("a", endless)


def text(json: str) -> Tensor:
    return torch.tensor(list(json.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"_0": None}, "state 'extra/a/0' is missing"),
        ({"json": None}, "state 'extra/a/json' is missing"),
        ({"json": text("{")}, "not valid JSON"),
        ({"json": torch.zeros(2)}, "is torch.float32(2,), and must be bytes"),
        ({"json": text('{"bytes": 0}')}, "'extra/a/0' is torch.float32(2,), and must be bytes"),
        ({"json": text('{"module": 0}')}, "holds {'module': 0}, which is no stored value"),
        ({"json": text('{"dict": [[[], 1]]}')}, "which is no stored value"),
        ({"json": text('{"tensor": "0"}')}, "which is no stored value"),
        ({"json": text("[1]")}, "which is no stored value"),
    ],
)
def test_a_malformed_entry_is_named(
    changed: dict[str, Tensor | None], named: str, tmp_path: Path
) -> None:
    reader = stored(tmp_path, torch.ones(2), **changed)
    with pytest.raises(CheckpointDamaged, match=re.escape(named)):
        decode(reader, "a", 0, HOST)


class Scaled(nn.Linear):
    """A layer with extra state, and another name of its weight in its `state_dict`."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.ones(1)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}kernel"] = module.weight.detach()
        state[f"{prefix}info"] = "a"

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        self.scale = state


def test_other_names_of_weights_are_no_extra_state() -> None:
    model = nn.Sequential(Scaled(), nn.Linear(2, 1))
    assert extra_state(model) == {"0._extra_state": model[0].scale, "0.info": "a"}
    assert extra_state(nn.Linear(1, 1)) == {}


def test_what_nothing_accepts_is_reported_and_weights_stay() -> None:
    model = nn.Sequential(Scaled())
    before = model[0].weight.clone()
    given = {"0._extra_state": torch.tensor([5.0]), "0.info": "b", "9._extra_state": 1}
    assert give_extra_state(model, given) == ["0.info", "9._extra_state"]
    assert model[0].scale.tolist() == [5.0]
    assert torch.equal(model[0].weight, before)
