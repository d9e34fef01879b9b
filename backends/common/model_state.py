"""Saves and restores models that every rank holds whole: weights, optimizer, loss scaler."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...kernel.errors import CheckpointDamaged, CheckpointMismatch
from ...kernel.shards import Kind, Piece, Reader
from .optimizer_state import OptimizerState
from .stepping import LossScale


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters (each tied group once) and persistent buffers by FQN, as stored in checkpoints."""
    return {**named_parameters(module), **named_buffers(module)}


def named_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by FQN, detached; each tied group once."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by FQN, detached."""
    persistent = module.state_dict(keep_vars=True)
    return {name: b.detach() for name, b in module.named_buffers() if name in persistent}


def copied_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the persistent buffers by FQN."""
    return {name: buffer.clone() for name, buffer in named_buffers(module).items()}


def scale_tensors(loss_scale: LossScale | None) -> dict[str, Tensor]:
    """The loss scaler's state by name; none without a scaler."""
    if loss_scale is None:
        return {}
    return {"loss_scale": loss_scale.scale, "loss_scale_good_steps": loss_scale.good_steps}


def replicated_pieces(
    module: nn.Module,
    optimizer: OptimizerState,
    loss_scale: LossScale | None,
    rank: int,
    size: int,
) -> Iterator[Piece]:
    """Yield this rank's pieces of the weights, optimizer state and loss scale that every rank holds
    whole."""
    yield from buffer_pieces(module, rank)
    yield from partitioned_pieces(
        {
            "weights": named_parameters(module),
            "optimizer": optimizer.tensors(),
            "state": scale_tensors(loss_scale),
        },
        rank,
        size,
    )


def buffer_pieces(module: nn.Module, rank: int) -> Iterator[Piece]:
    """Yield all buffers on rank 0: ranks may differ in them, and rank 0's are the model's."""
    for name, buffer in named_buffers(module).items() if rank == 0 else ():
        yield Piece("weights", name, buffer, tuple(buffer.shape))


def partitioned_pieces(
    replicated: Mapping[Kind, Mapping[str, Tensor]], rank: int, size: int
) -> Iterator[Piece]:
    """Yield the pieces that this rank writes of tensors that every rank holds. Tensors are
    partitioned by bytes, so that all ranks write, and each tensor is written once. One rank writes
    all numbers of a kind, so that resuming, which needs all of them, opens one file for them."""
    written = [0] * size
    for kind, tensors in replicated.items():
        of_numbers: int | None = None
        for name, tensor in tensors.items():
            writer = written.index(min(written))
            if not tensor.dim():
                of_numbers = writer = writer if of_numbers is None else of_numbers
            written[writer] += tensor.nbytes + 1
            if writer == rank:
                yield Piece(kind, name, tensor, tuple(tensor.shape))


def dealt_pieces(
    replicated: Mapping[Kind, Mapping[str, Tensor]], rank: int, size: int
) -> Iterator[Piece]:
    """The former name of `partitioned_pieces`."""
    warnings.warn(
        "dealt_pieces is now partitioned_pieces, in the same module",
        DeprecationWarning,
        stacklevel=2,
    )
    return partitioned_pieces(replicated, rank, size)


def shapes_and_dtypes(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, torch.Size], dict[str, torch.dtype]]:
    """Shapes and dtypes by name, as `check_same_model` takes them."""
    return (
        {name: tensor.shape for name, tensor in tensors.items()},
        {name: tensor.dtype for name, tensor in tensors.items()},
    )


def check_same_model(
    reader: Reader,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Raises `CheckpointMismatch` that names the tensors in which checkpoint and model differ.

    Weights of another precision are taken over; integers, real and complex numbers are not in each
    other's place. `dtypes`: of the model, by name.
    """
    stored = set(reader.names("weights"))
    lines = [f"only in the model: {name} {tuple(shapes[name])}" for name in shapes.keys() - stored]
    lines += [
        f"only in the checkpoint: {name} {reader.info('weights', name).shape}"
        for name in stored - shapes.keys()
    ]
    for name in stored & shapes.keys():
        saved, own = reader.info("weights", name).shape, tuple(shapes[name])
        if saved != own:
            lines.append(f"{name}: {saved} in the checkpoint, {own} in the model")
    for name in stored & (dtypes or {}).keys():
        stored_as, wanted = reader.info("weights", name).dtype, (dtypes or {})[name]
        if _kind(stored_as) != _kind(wanted):
            lines.append(f"{name}: {stored_as} in the checkpoint, {wanted} in the model")
    if lines:
        shown = "\n  ".join(sorted(lines)[:20])
        more = f"\n  and {len(lines) - 20} more" if len(lines) > 20 else ""
        raise CheckpointMismatch(
            f"the checkpoint is of another model; {len(lines)} tensors differ:\n  {shown}{more}\n"
            "Use the recipe and settings that wrote it, or start over in another folder"
        )


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """Real, complex, or neither; none can be read as another."""
    return dtype.is_floating_point, dtype.is_complex


def restore_replicated(
    reader: Reader,
    module: nn.Module,
    optimizer: OptimizerState,
    loss_scale: LossScale | None,
) -> None:
    """Whole weights, optimizer state and loss scale from any driver's checkpoint."""
    tensors = named_state(module)
    check_same_model(reader, *shapes_and_dtypes(tensors))
    state, scale = optimizer.read(reader), read_scale(reader, loss_scale)
    with overwriting(), torch.no_grad():
        optimizer.load(state)
        for name, tensor in tensors.items():
            load_weights(reader, name, tensor)
    load_scale(scale, loss_scale)


@contextmanager
def overwriting() -> Iterator[None]:
    """Enclose code that overwrites weights. If no checksums were compared, damage may show only in
    this code. Some weights are changed by then, and the error says so."""
    try:
        yield
    except CheckpointDamaged as error:
        raise CheckpointDamaged(
            f"{error}. Some weights and optimizer state were taken over by then: this model is a "
            "mixture, and must not be used. Start over in another process, with another "
            "checkpoint, or with checkpoint.verify=true, which finds damage before any change"
        ) from error


def read_scale(reader: Reader, loss_scale: LossScale | None) -> dict[str, Tensor]:
    """The stored state of the loss scaler; none where it has none, or this run has no scaler."""
    stored = set(reader.names("state"))
    return {name: read_number(reader, name) for name in scale_tensors(loss_scale) if name in stored}


def read_number(reader: Reader, name: str) -> Tensor:
    """Read one number of the loss scaler's. Raises `CheckpointDamaged` for a value that no scaler
    can have."""
    tensor = reader.read("state", name)
    if tensor.dim() or not 0 <= float(tensor) < math.inf or (name == "loss_scale" and not tensor):
        shown = f"of shape {tuple(tensor.shape)}" if tensor.dim() else f"{float(tensor)}"
        raise CheckpointDamaged(f"state {name!r} is {shown} in the checkpoint")
    return tensor


def load_scale(stored: Mapping[str, Tensor], loss_scale: LossScale | None) -> None:
    """Give the scaler what `read_scale` returned."""
    for name, tensor in scale_tensors(loss_scale).items():
        if name in stored:
            tensor.copy_(stored[name])


def load_weights(reader: Reader, name: str, tensor: Tensor) -> None:
    """Read into a whole tensor: straight from the file where the stored dtype is the tensor's."""
    same = reader.info("weights", name).dtype == tensor.dtype
    if same and tensor.is_cpu and tensor.is_contiguous():
        reader.read("weights", name, out=tensor)
    else:
        tensor.copy_(reader.read("weights", name))
