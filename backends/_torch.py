"""What drivers on stock PyTorch share: functions, each of one idea.

A driver calls the ones that are right for its backend; none of them knows which driver calls.
"""

from __future__ import annotations

import fnmatch
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kernel.contract import Batch, Kind, Layout, Outcome, Piece, Plan, Reader, Recipe
from ..kernel.errors import CheckpointMismatch, RecipeError

NO_CONTEXT: AbstractContextManager[None] = nullcontext()
"""Shared: entering it costs nothing and it holds no state."""


# --- building -------------------------------------------------------------------------------


def host_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def build_model(recipe: Recipe, plan: Plan, device: torch.device | None) -> nn.Module:
    """The recipe's model on `device` (None: where the recipe put it), tied as it was, with
    checkpointed activations.
    """
    torch.manual_seed(plan.seed)
    module = recipe.model()
    if not isinstance(module, nn.Module):
        raise RecipeError(
            f"recipe.model returned {type(module).__name__}; it must build a torch.nn.Module"
        )
    if device is not None:
        module.to(device)
    for pattern in plan.activation_checkpointing:
        recompute_activations(module, pattern)
    return module


def recompute_activations(
    module: nn.Module, pattern: str, run: Callable[..., Any] | None = None
) -> None:
    """Recompute in backward what the matching submodules computed in forward. `run(forward, ...)`
    does it; by default `torch.utils.checkpoint`.

    Chen et al., https://arxiv.org/abs/1604.06174. Raises `RecipeError` when nothing matches.
    """
    chosen = [
        part
        for name, part in module.named_modules()
        if name and (type(part).__name__ == pattern or fnmatch.fnmatchcase(name, pattern))
    ]
    if not chosen:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise RecipeError(
            f"activation_checkpointing pattern {pattern!r} matches no submodule; it may be a class "
            f"name ({', '.join(classes)}) or a pattern of names such as 'blocks.*'"
        )
    for part in chosen:
        # the forward is replaced, not the module, so that parameter names stay as they are
        part.forward = _recomputed(part.forward, run or _checkpoint)


def _checkpoint(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _recomputed(forward: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return run(forward, *args, **kwargs)

    return recomputed


def build_optimizer(recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the module's parameters. Raises `RecipeError`."""
    assert recipe.optimizer is not None, "the kernel fills recipe.optimizer in"
    named = list(module.named_parameters())
    if not any(parameter.requires_grad for _, parameter in named):
        raise RecipeError("the model has no parameter that requires a gradient: nothing to train")
    return recipe.optimizer(named)


def tied_groups(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """FQNs that are one parameter; the first of each group is the one `named_parameters` gives."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def autocast(plan: Plan, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What `Engine.autocast` returns under the plan's compute dtype."""
    if plan.precision.compute == plan.precision.params:
        return lambda: NO_CONTEXT
    dtype = plan.precision.compute
    return lambda: torch.autocast(device.type, dtype)


def replicated_layout(
    plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], *, notes: tuple[str, ...] = ()
) -> Layout:
    """The whole of everything on every rank."""
    parameters = list(model.parameters())
    groups = tied_groups(model)
    tied = tuple(f"{' = '.join(group)} is one parameter" for group in groups)
    compute = plan.precision.compute
    casts: tuple[str, ...] = ()
    cast_bytes = 0
    if compute != plan.precision.params:
        casts = (f"matrix products in {compute}; the casts of the weights are kept in a forward",)
        cast_bytes = sum(p.numel() * compute.itemsize for p in parameters if p.dim() >= 2)
    return Layout(
        parameter_bytes=sum(t.nbytes for t in (*parameters, *model.buffers())),
        gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        optimizer_bytes=sum(state_bytes.values()),
        transient_bytes=cast_bytes,
        notes=(*tied, *casts, *notes),
    )


# --- the step -------------------------------------------------------------------------------


class LossScale:
    """Dynamic loss scaling on the device, without waiting for it.

    Micikevicius et al., https://arxiv.org/abs/1710.03740: halve on overflow, double after
    `growth_interval` good steps.
    """

    growth_interval = 2000

    def __init__(self, device: torch.device, initial: float = 2.0**16) -> None:
        self.scale = torch.full((), initial, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, grads: Sequence[Tensor]) -> None:
        torch._foreach_mul_(list(grads), self.scale.double().reciprocal().float())

    def update(self, overflow: Tensor) -> None:
        torch._amp_update_scale_(
            self.scale, self.good_steps, overflow, 2.0, 0.5, self.growth_interval
        )


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm over all tensors, 0-d float32 on their device; NaN or infinite if any element is."""
    if not grads:
        return torch.zeros(())
    norms = torch.stack(torch._foreach_norm(list(grads)))
    return cast(Tensor, torch.linalg.vector_norm(norms).float())


def step_if_finite(
    optimizer: torch.optim.Optimizer,
    grads: Sequence[Tensor],
    norm: Tensor,
    max_norm: float | None,
    loss_scale: LossScale | None = None,
) -> Outcome:
    """Clip to `max_norm`, step unless `norm` is not finite, and clear the gradients.

    `norm` must be equal on all ranks: it decides. On the host it is looked at; on an accelerator
    an optimizer that honours `found_inf` decides on the device, and the answer is fetched behind
    the queued work.
    """
    if norm.device.type != "cpu":
        return _step_on_device(optimizer, grads, norm, max_norm, loss_scale)
    value = norm.item()
    finite = math.isfinite(value)
    if finite:
        if max_norm is not None and value > max_norm:
            torch._foreach_mul_(list(grads), max_norm / (value + 1e-6))
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if loss_scale is not None:
        loss_scale.update(torch.full((), float(not finite)))
    return Outcome(norm, _yes if finite else _no)


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _step_on_device(
    optimizer: torch.optim.Optimizer,
    grads: Sequence[Tensor],
    norm: Tensor,
    max_norm: float | None,
    loss_scale: LossScale | None,
) -> Outcome:
    finite = torch.isfinite(norm)
    overflow = (~finite).float()
    if max_norm is not None:
        torch._foreach_mul_(list(grads), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    applied = fetch_flag(finite)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # the fused kernels skip the update where `found_inf` is set, step count included
        device_optimizer = cast(Any, optimizer)
        device_optimizer.grad_scale, device_optimizer.found_inf = None, overflow
        optimizer.step()
        del device_optimizer.grad_scale, device_optimizer.found_inf
    elif applied():  # this optimizer can only be held back from the host
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if loss_scale is not None:
        loss_scale.update(overflow)
    return Outcome(norm, applied)


def fetch_flag(flag: Tensor) -> Callable[[], bool]:
    """Start to copy a 0-d bool from an accelerator; the returned function waits for the copy only,
    not for work queued after it.
    """
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    copied = torch.Event(flag.device.type)
    copied.record()

    def wait() -> bool:
        copied.synchronize()
        return bool(host)

    return wait


# --- saving and restoring replicated state --------------------------------------------------

_NUMBERS: dict[str, type[int] | type[float]] = {":int": int, ":float": float}


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters (each tied group once) and persistent buffers by FQN, as stored in checkpoints."""
    parameters = dict(module.named_parameters())
    persistent = module.state_dict(keep_vars=True)
    buffers = {name: b for name, b in module.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in {**parameters, **buffers}.items()}


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `<fqn>/<state>`; plain numbers become 0-d tensors that are marked
    in the name, tensors of less than 32 bits become float32.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if (entry := stored_entry(key, value)) is not None:
                tensors[f"{name}/{entry[0]}"] = entry[1]
    return tensors


def stored_entry(key: str, value: Any) -> tuple[str, Tensor] | None:
    """One entry of an optimizer's state as stored; None for what is neither tensor nor number."""
    if isinstance(value, Tensor):
        narrow = value.is_floating_point() and value.element_size() < 4
        return key, value.detach().float() if narrow else value.detach()
    if isinstance(value, (int, float)):
        mark = ":int" if isinstance(value, int) else ":float"
        return key + mark, torch.tensor(value, dtype=torch.float64)
    return None


def loaded_entry(key: str, tensor: Tensor) -> tuple[str, Tensor | float]:
    """What `stored_entry` was given, from what it returned."""
    for mark, number in _NUMBERS.items():
        if key.endswith(mark):
            return key.removesuffix(mark), number(tensor.item())
    return key, tensor


def scale_tensors(loss_scale: LossScale | None) -> dict[str, Tensor]:
    """The loss scaler's state by name; none without a scaler."""
    if loss_scale is None:
        return {}
    return {"loss_scale": loss_scale.scale, "loss_scale_good_steps": loss_scale.good_steps}


def replicated_pieces(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_scale: LossScale | None,
    rank: int,
    size: int,
) -> Iterator[Piece]:
    """Weights, optimizer state and loss scale that every rank holds whole, dealt out."""
    yield from dealt_pieces(
        {
            "weights": named_state(module),
            "optimizer": optimizer_tensors(module, optimizer),
            "state": scale_tensors(loss_scale),
        },
        rank,
        size,
    )


def dealt_pieces(
    replicated: Mapping[Kind, Mapping[str, Tensor]], rank: int, size: int
) -> Iterator[Piece]:
    """Every tensor exactly once over all ranks, dealt out by bytes so that all ranks write."""
    written = [0] * size
    for kind, tensors in replicated.items():
        for name, tensor in tensors.items():
            writer = written.index(min(written))
            written[writer] += tensor.nbytes + 1
            if writer == rank:
                yield Piece(kind, name, tensor, tuple(tensor.shape))


def check_same_model(reader: Reader, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises `CheckpointMismatch` that names the tensors in which checkpoint and model differ."""
    stored = set(reader.names("weights"))
    lines = [f"only in the model: {name} {tuple(shapes[name])}" for name in shapes.keys() - stored]
    lines += [
        f"only in the checkpoint: {name} {reader.info('weights', name).shape}"
        for name in stored - shapes.keys()
    ]
    for name in stored & shapes.keys():
        there, here = reader.info("weights", name).shape, tuple(shapes[name])
        if there != here:
            lines.append(f"{name}: {there} in the checkpoint, {here} in the model")
    if lines:
        shown = "\n  ".join(sorted(lines)[:20])
        more = f"\n  and {len(lines) - 20} more" if len(lines) > 20 else ""
        raise CheckpointMismatch(
            f"the checkpoint is of another model; {len(lines)} tensors differ:\n  {shown}{more}\n"
            "Use the recipe and settings that wrote it, or start anew in another folder"
        )


def restore_replicated(
    reader: Reader,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_scale: LossScale | None,
) -> None:
    """Whole weights, optimizer state and loss scale from any driver's checkpoint."""
    tensors = named_state(module)
    check_same_model(reader, {name: tensor.shape for name, tensor in tensors.items()})
    state = read_optimizer_state(reader, module)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(reader.read("weights", name))
    if state:
        load_optimizer_state(optimizer, state)
    stored = reader.names("state")
    for name, tensor in scale_tensors(loss_scale).items():
        if name in stored:
            tensor.copy_(reader.read("state", name))


def read_optimizer_state(
    reader: Reader,
    module: nn.Module,
    read: Callable[[Reader, str, nn.Parameter], Tensor] | None = None,
) -> dict[nn.Parameter, dict[str, Tensor | float]]:
    """Parameter -> state name -> tensor or number. `read(reader, name, parameter)` reads what
    this rank needs of an entry; by default all of it. Raises `CheckpointMismatch` when the
    checkpoint holds state of parameters that the module does not have.
    """
    parameters = dict(module.named_parameters())
    state: dict[nn.Parameter, dict[str, Tensor | float]] = {}
    for name in reader.names("optimizer"):
        fqn, _, key = name.rpartition("/")
        if fqn not in parameters:
            raise CheckpointMismatch(
                f"the checkpoint holds optimizer state {key!r} of {fqn!r}, which is no parameter "
                "of this model"
            )
        tensor = read(reader, name, parameters[fqn]) if read else reader.read("optimizer", name)
        key, value = loaded_entry(key, tensor)
        state.setdefault(parameters[fqn], {})[key] = value
    return state


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[nn.Parameter, Mapping[str, Tensor | float]],
) -> None:
    """Hand the state over through the optimizer's own `load_state_dict`, which places and casts
    each entry as that optimizer wants it. The hyper-parameters stay those of the recipe.
    """
    order = [p for group in optimizer.param_groups for p in group["params"]]
    packed = optimizer.state_dict()
    packed["state"] = {i: dict(state[p]) for i, p in enumerate(order) if p in state}
    optimizer.load_state_dict(packed)


# --- random state ---------------------------------------------------------------------------


def seed_all(value: int) -> None:
    """Python, torch on every device, and numpy if the process uses it."""
    random.seed(value)
    torch.manual_seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value % 2**32)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of what `seed_all` seeds, as host tensors."""
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        state["numpy_gauss"] = torch.tensor(cached, dtype=torch.float64)
    return state


def set_rng_state(device: torch.device, state: Mapping[str, Tensor]) -> None:
    """Undo draws since `rng_state`; generators that the state does not hold are left alone."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        has_gauss, gauss = state["python_gauss"].tolist()
        random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    if "device" in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        *keys, position, has_gauss = state["numpy"].tolist()
        numpy.random.set_state(("MT19937", keys, position, has_gauss, state["numpy_gauss"].item()))


# --- feeding --------------------------------------------------------------------------------


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor changed; containers keep their type."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(value, change) for key, value in batch.items()}
        return changed if type(batch) is dict else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin(batch: Batch) -> Batch:
    """The batch in page-locked memory, so that copying it can overlap with computing."""
    return map_tensors(batch, Tensor.pin_memory)


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """All tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)


def feed(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """On the CPU the batches themselves; on an accelerator one batch ahead, copied on a side
    stream from page-locked memory.
    """
    if device.type == "cpu":
        return iter(batches)
    return _feed_ahead(iter(batches), device)


def _feed_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    side = torch.Stream(device)

    def start() -> tuple[Batch, torch.Event] | None:
        try:
            batch = pin(next(batches))
        except StopIteration:
            return None
        with side:
            moved = move(batch, device)
            arrived = side.record_event()
        return moved, arrived

    ahead = start()
    while ahead is not None:
        current, arrived = ahead
        stream = torch.accelerator.current_stream(device)
        stream.wait_event(arrived)
        for tensor in tensors_of(current):
            # the allocator must not hand the memory out again while this stream reads it
            tensor.record_stream(stream)
        ahead = start()
        yield current
