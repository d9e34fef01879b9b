"""The ddp driver keeps the laws."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Models, Turns
from drivetrain.backends.common.models import with_synced_batch_norm
from drivetrain.conformance import Case, cases
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.jobs import optimizer_called
from drivetrain.conformance.law_1_turns import LOSSES, models
from drivetrain.conformance.law_6_resume import resumed_run_of_three_ranks_is_bit_exact
from drivetrain.conformance.oracle import batch_of
from drivetrain.conformance.problems import PROBLEMS, Samples
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import CapabilityRefused
from drivetrain.kernel.recipe import Microstep

FINDING = {"find_unused_parameters": True}


@pytest.mark.parametrize("case", cases("ddp", num_processes=2), ids=str)
def test_laws(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(
    "case",
    [case for case in cases("ddp", num_processes=2, options=FINDING) if case.law == "1_absent"],
    ids=str,
)
def test_absent_gradients_where_they_are_looked_for(case: Case) -> None:
    case.check()
    assert case.refused is None


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_each_rank_resumes_with_its_own_buffers(backend: str) -> None:
    resumed_run_of_three_ranks_is_bit_exact(Subject(backend, 3, {"sync_buffers": False}))


def test_a_static_graph_resumes_bit_by_bit_on_three_ranks() -> None:
    resumed_run_of_three_ranks_is_bit_exact(Subject("ddp", 3, {"static_graph": True}))


def refusal_of_accumulation(bench: Bench, *, settings: dict[str, Any]) -> str:
    with bench.open(**settings) as session:
        try:
            engine = session.prepare(
                PROBLEMS["regression"].recipe(optimizer=optimizer_called("SGD"))
            )
            assert not settings, "it was known, and not refused when the run began"
            engine.microbatch(True)
            engine.microbatch(False)
        except CapabilityRefused as refused:
            return str(refused)
    return ""


@pytest.mark.parametrize("settings", [{"global_batch": 8, "micro_batch": 2}, {}])
def test_a_static_graph_refuses_to_accumulate(settings: dict[str, Any]) -> None:
    for message in Subject("ddp", 2, {"static_graph": True}).run(
        refusal_of_accumulation, settings=settings
    ):
        assert (
            "'ddp' refuses backend.static_graph=true in updates of several microbatches" in message
        )


def refusal_of_synced_batch_norm(bench: Bench) -> str:
    with bench.open() as session, pytest.raises(CapabilityRefused) as refused:
        session.prepare(PROBLEMS["normalised"].recipe(optimizer=optimizer_called("SGD")))
    return str(refused.value)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_batch_normalisation_over_ranks_is_refused_on_the_cpu(backend: str) -> None:
    subject = Subject(backend, 2, {"device": "cpu", "sync_batch_norm": True})
    for message in subject.run(refusal_of_synced_batch_norm):
        assert f"{backend!r} refuses backend.sync_batch_norm=true" in message


def test_batch_normalisation_over_ranks_keeps_names_and_weights() -> None:
    own = PROBLEMS["normalised"].model()
    synced = with_synced_batch_norm(own, True, torch.device("cuda"), "ddp")
    assert sum(isinstance(part, torch.nn.SyncBatchNorm) for part in synced.modules()) == 3
    for name, tensor in PROBLEMS["normalised"].model().state_dict().items():
        assert synced.state_dict()[name].shape == tensor.shape


def test_a_static_graph_refuses_turns() -> None:
    for message in Subject("ddp", 2, {"static_graph": True}).run(refusal_of_turns):
        assert "'ddp' refuses backend.static_graph=true in updates that take turns" in message


def refusal_of_turns(bench: Bench) -> str:
    with bench.open() as session:
        try:
            session.prepare(
                PROBLEMS["regression"].recipe(
                    model=models, loss=Turns(LOSSES), optimizer=optimizer_called("SGD")
                )
            )
        except CapabilityRefused as refused:
            return str(refused)
    return ""


def normalising() -> Models:
    made = models()
    critic = nn.Sequential(nn.BatchNorm1d(3), made["critic"])
    return Models({"maker": made["maker"], "critic": critic})


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.5)


def normalised_turns(bench: Bench) -> dict[str, torch.Tensor]:
    """A job: train two turns of each model. The critic normalizes, and is called twice in its own
    turn.
    """
    recipe = PROBLEMS["regression"].recipe(
        model=normalising,
        loss=Turns(LOSSES),
        train_data=Samples("regression", 32),
        optimizer=sgd,
    )
    settings = {"steps": 4, "global_batch": 8, "data.shuffle": False, "schedule.name": "constant"}
    state = bench.fit(recipe, settings, finish=lambda m: copy.deepcopy(m.state_dict())).finish
    return {name: tensor.cpu() for name, tensor in state.items()}


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_a_critic_that_normalises_takes_the_statistics_of_each_rank_s_part(backend: str) -> None:
    """Compare with a plain loop that calls the critic once for each rank's part of the batch."""
    ranks = Subject(backend, 2).run(normalised_turns)
    torch.manual_seed(0)
    built = normalising().double().train()
    for step, name in enumerate(["critic", "maker"] * 2):
        buffers = {n: b.clone() for n, b in built.named_buffers()}
        for start in (8 * step + 4, 8 * step):  # rank 0 is the last, and its buffers stay
            built.load_state_dict(buffers, strict=False)
            batch = batch_of("regression", range(start, start + 4))
            (LOSSES[name](built, batch) / 8).backward()  # type: ignore[no-untyped-call]
        parameters = list(built[name].parameters())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.optim.SGD(parameters, lr=0.5).step()
        built.zero_grad()
    for state in ranks:
        for key, tensor in built.state_dict().items():
            assert torch.allclose(state[key].double(), tensor.double(), atol=1e-6), key


def mean_by_hand(module: nn.Module, batch: Any, microstep: Microstep) -> torch.Tensor:
    with microstep.autocast():
        total = PROBLEMS["regression"].loss(module, batch)
    return microstep.backward(total, microstep.num_feeders / microstep.num_items())


def trained(bench: Bench, *, by_hand: bool) -> dict[str, torch.Tensor]:
    """A job: return the weights after a few updates on parts of different sizes."""
    step = mean_by_hand if by_hand else None
    data = Samples("regression", 21)
    recipe = PROBLEMS["regression"].recipe(step=step, optimizer=sgd, train_data=data)
    settings = {"steps": 3, "global_batch": 7, "micro_batch": 2}
    state = bench.fit(recipe, settings, finish=lambda m: copy.deepcopy(m.state_dict())).finish
    return {name: tensor.cpu() for name, tensor in state.items()}


def test_a_step_of_one_s_own_can_take_the_mean_over_all_feeders() -> None:
    subject = Subject("ddp", 2)
    usual, mine = (subject.run(trained, by_hand=by_hand)[0] for by_hand in (False, True))
    for name, tensor in usual.items():
        assert torch.allclose(mine[name], tensor, atol=1e-6), name
