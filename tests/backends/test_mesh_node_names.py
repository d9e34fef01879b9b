"""Names of autograd nodes that the mesh's checks look for are verified in the installed torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _api

from drivetrain.backends.mesh import node_names, p2p
from drivetrain.backends.mesh.comparing import last_operations
from drivetrain.backends.mesh.parts_in_loss import PartsInLoss
from drivetrain.kernel.errors import LibraryUnsupported


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def checked_again() -> Iterator[None]:
    node_names._check_suffix.cache_clear()
    yield
    node_names._check_suffix.cache_clear()


class Renamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        return tensor.view_as(tensor)


def test_this_torch_has_the_names(mesh: Any) -> None:
    assert node_names.name_of(p2p.RECEIVES_OUTPUT) == "_ReceiveOutputBackward"
    assert node_names.name_of_sharding(mesh) == "_FromTorchTensorBackward"


def test_another_name_of_what_makes_a_dtensor_is_an_error(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_api, "_FromTorchTensor", Renamed)
    with pytest.raises(LibraryUnsupported, match=r"_FromTorchTensorBackward .*RenamedBackward"):
        PartsInLoss([torch.nn.Linear(1, 1)], True, mesh)
    PartsInLoss([torch.nn.Linear(1, 1)], False, mesh)  # looks for no name


def test_another_way_to_name_nodes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_names._Probe, "apply", lambda tensor: tensor * 1)
    with pytest.raises(LibraryUnsupported, match=r"torch 2\.8 to 2\.15"):
        node_names.name_of(p2p.RECEIVES_OUTPUT)


def test_parameters_are_no_operations_of_a_loss() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert last_operations((weight * 2).sum()) == ("SumBackward0", "MulBackward0")
