"""Peculiarities of fsdp; the conformance suite tests the rest."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import python_of_all
from few_cases import only_quick
from quick_cases import is_quick
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.backends.fsdp import wrap_units
from drivetrain.backends.fsdp.driver import FsdpOptions, driver
from drivetrain.backends.process_group import shm_tally
from drivetrain.checkpoint import CheckpointReader, CheckpointStore
from drivetrain.conformance import Case, cases
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.jobs import optimizer_called
from drivetrain.conformance.state import State, assemble, pieces, read_all
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.contract import Engine, Session
from drivetrain.kernel.errors import RecipeError, SettingError
from drivetrain.kernel.plan import Plan
from drivetrain.kernel.recipe import Recipe

CPU, DDP_2 = Subject("cpu"), Subject("ddp", 2)
TRAINED = ("SGD", "AdamW", "Adafactor", "schedule-free")


# --- jobs, run on every rank ----------------------------------------------------------------


class Tied(nn.Module):
    """Blocks between an embedding and a head that share one weight, with normalization and without
    dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))
            for _ in range(3)
        )
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        hidden = hidden * self.scale.to(hidden.dtype)  # CPU norms refuse to mix dtypes
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def summed(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).float().square().mean((1, 2)).sum()


def recipe(optimizer: Any, model: Any = Tied) -> Recipe:
    return Recipe(model, summed, optimizer=optimizer)


def momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


def schedule_free(named: Any) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree([p for _, p in named], lr=0.05, warmup_steps=2)
    optimizer.train()
    return optimizer


def build(name: str) -> Any:
    if name == "schedule-free":
        return schedule_free
    return momentum if name == "SGD" else optimizer_called(name)


def step(session: Session, engine: Engine, index: int, rows: int = 12) -> tuple[float, float]:
    """Do one update on this feeder's part of a batch, in two microbatches."""
    world = session.world
    batch = torch.randint(11, (rows, 4), generator=torch.Generator().manual_seed(index))
    mine = batch.tensor_split(world.num_feeders)[world.feeder_index].to(world.device)
    total = torch.zeros(())
    for last, part in enumerate((mine[:1], mine[1:])):
        with engine.microbatch(bool(last)), engine.autocast():
            loss = summed(engine.module, part) * (world.num_feeders / rows)
        engine.backward(loss, torch.ones(()))
        total += loss.detach().cpu() / world.num_feeders
    for group in engine.param_groups:
        group["lr"] = 0.01
    outcome = engine.update()
    return float(session.reduce(total)), float(outcome.grad_norm)


def carry_on(
    bench: Bench,
    *,
    optimizer: str,
    source: str | None,
    folder: str,
    first: int,
    steps: int,
    precision: str = "fp32",
    max_grad_norm: float | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A job: restore a checkpoint, return the restored tensors, train on, and save."""
    with bench.open(precision=precision, max_grad_norm=max_grad_norm, **settings) as session:
        engine = session.prepare(recipe(build(optimizer)))
        if source:
            engine.restore(CheckpointReader(source))
        taken = pieces(engine)
        figures = [step(session, engine, index) for index in range(first, first + steps)]
        path = CheckpointStore(folder).save(first + steps, engine, session, {})
        return {"taken": taken, "figures": figures, "path": str(path), "tied": engine.tied}


def look_whole(bench: Bench) -> dict[str, Any]:
    """A job: return the content of `full_params`, its outputs on one rank alone, and the state
    afterwards.
    """
    with bench.open(precision="fp32") as session:
        engine = session.prepare(recipe(build("AdamW")))
        with engine.autocast(), torch.no_grad():
            engine.module(torch.zeros(1, 4, dtype=torch.long))  # leaves the root's weights whole
        step(session, engine, 0)
        before = pieces(engine)
        with engine.full_params() as module:
            names = {name: p.detach().clone() for name, p in module.named_parameters()}
            copied = copy.deepcopy(module)
            kind, tied = type(module).__name__, module.head.weight is module.embedding.weight
            alone = None
            if session.world.rank == 0:
                alone = module(torch.arange(11)[None]).detach().clone()
        with engine.full_params(["head.weight"]) as module:
            one = module.head.weight.detach().clone()
        return {
            "before": before,
            "after": pieces(engine),
            "more": step(session, engine, 1),
            "whole": names,
            "kind": kind,
            "tied": tied,
            "one": one,
            "alone": alone,
            "copied": copied(torch.arange(11)[None]).detach().clone(),
        }


class Live(TorchDispatchMode):
    """A dispatch mode that records the most bytes that tensors made under it took at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor) and type(tensor) is Tensor and not tensor.is_meta:
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))


def weigh(bench: Bench) -> dict[str, int]:
    with bench.open(precision="fp32") as session:
        with Live() as live:
            engine = session.prepare(recipe(build("SGD"), Deep))
            pieces_of_it = sum(piece.tensor.nbytes for piece in engine.shards())
        return {"most": live.most, "own": pieces_of_it}


def optimize(bench: Bench, *, name: str) -> dict[str, Any]:
    """A job: do three updates by one of torch's optimizers."""

    def make(named: Any) -> torch.optim.Optimizer:
        chosen = [p for _, p in named if p.dim() == 2 or name != "Muon"]  # which is for matrices
        fused = {"fused": True} if name.startswith("fused ") else {}
        made = getattr(torch.optim, name.removeprefix("fused "))(chosen, lr=0.01, **fused)
        assert isinstance(made, torch.optim.Optimizer)
        return made

    with bench.open(precision="fp32") as session:
        engine = session.prepare(recipe(make))
        for index in range(3):
            step(session, engine, index)
        return {"final": pieces(engine)}


def refused(bench: Bench, *, model: str) -> str:
    models: dict[str, Any] = {"bare": Bare}
    with bench.open(precision="fp32") as session:
        try:
            engine = session.prepare(recipe(build("SGD"), models[model]))
            with engine.autocast():
                pass
        except RecipeError as error:
            return str(error)
    return ""


class MixedBlock(nn.Module):
    """A block that normalizes in another dtype than its other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x.double()).to(self.up.weight.dtype))
        return self.down(hidden.tanh()).to(x.dtype)


class Mixed(Tied):
    """A model with two dtypes within a unit, one unit of another dtype, and a parameter without
    dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale_of_all = nn.Parameter(torch.tensor(0.5))
        self.gain = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.blocks = nn.ModuleList((MixedBlock(), MixedBlock().double(), MixedBlock()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) * self.scale_of_all
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head((hidden.double() * self.gain).float())


def train_mixed(bench: Bench, *, source: str | None, folder: str) -> dict[str, Any]:
    """A job: restore a checkpoint, if there is one; do two clipped updates; save."""
    with bench.open(precision="fp32", max_grad_norm=1.0) as session:
        engine = session.prepare(recipe(build("AdamW"), Mixed))
        if source:
            engine.restore(CheckpointReader(source))
        taken = pieces(engine)
        figures = [step(session, engine, index) for index in range(2)]
        path = CheckpointStore(folder).save(2, engine, session, {})
        return {"taken": taken, "figures": figures, "path": str(path)}


def count(bench: Bench) -> str:
    """A job: return the error for an optimizer that counts in its groups."""
    with bench.open(precision="fp32") as session:
        engine = session.prepare(recipe(optimizer_called("Counting"), Mixed))
        try:
            step(session, engine, 0)
        except RecipeError as error:
            return str(error)
    return "taken"


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(3, 2))


# --- tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    only_quick(cases("fsdp", num_processes=2, peers=["cpu", "ddp:2", "fsdp:3"]), is_quick),
    ids=str,
)
def test_laws(case: Case) -> None:
    case.check()


@pytest.mark.slow
@pytest.mark.usefixtures("environment_of_all")
@pytest.mark.parametrize(
    "case",
    [
        each
        for each in cases("fsdp", num_processes=2, python=python_of_all())
        if "1_absent" in str(each) or "a_spare" in str(each)
    ],
    ids=str,
)
def test_what_differs_on_the_oldest_torch(case: Case) -> None:
    case.check()


def whole(answers: Sequence[dict[str, Any]], key: str) -> State:
    return assemble([answer[key] for answer in answers])


def same_bits(actual: State, expected: State) -> None:
    for kind in ("weights", "optimizer"):
        assert sorted(actual[kind]) == sorted(expected[kind])
        for name, tensor in expected[kind].items():
            assert torch.equal(actual[kind][name], tensor), name


@pytest.mark.parametrize("optimizer", only_quick(TRAINED, ("AdamW",)))
def test_a_checkpoint_goes_round_bit_by_bit(optimizer: str, tmp_path: Path) -> None:
    """Pass a checkpoint from cpu to fsdp x2, fsdp x3, ddp x2 and back to cpu. Losses and norms must
    be those of cpu alone.
    """
    reference = CPU.run(
        carry_on, optimizer=optimizer, source=None, folder=str(tmp_path / "r"), first=0, steps=10
    )[0]
    source, figures = None, []
    for turn, subject in enumerate((CPU, Subject("fsdp", 2), Subject("fsdp", 3), DDP_2, CPU)):
        answers = subject.run(
            carry_on,
            optimizer=optimizer,
            source=source,
            folder=str(tmp_path / str(turn)),
            first=2 * turn,
            steps=2,
        )
        if source:
            same_bits(whole(answers, "taken"), read_all(CheckpointReader(source)))
        source = answers[0]["path"]
        figures += answers[0]["figures"]
        assert [list(group) for group in answers[0]["tied"]] == [
            ["embedding.weight", "head.weight"]
        ]
    torch.testing.assert_close(figures, reference["figures"], rtol=1e-6, atol=0)


VARIANTS: dict[str, dict[str, Any]] = {
    "by class": {"wrap": ("Linear", "LayerNorm")},
    "by pattern": {"wrap": ("blocks.*",)},
    "by size": {"min_unit_params": 40},
    "kept": {"reshard_after_forward": False, "reshard_after_backward": False},
    "reduced each time": {"sync_each_microbatch": True},
    "hybrid": {"shard_size": 1},
    "offloaded": {"cpu_offload": True},
    "whole tensors": {"optimizer_step": "whole"},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_options_change_no_number(variant: str, tmp_path: Path) -> None:
    options = VARIANTS[variant]
    if variant == "by class":  # the tied weights are an Embedding and a Linear
        options = {"wrap": ("blocks.*.1", "LayerNorm")}
    arguments = {"optimizer": "AdamW", "source": None, "first": 0, "steps": 4, "max_grad_norm": 1.0}
    expected = CPU.run(carry_on, folder=str(tmp_path / "a"), **arguments)[0]
    actual = Subject("fsdp", 2, options).run(carry_on, folder=str(tmp_path / "b"), **arguments)[0]
    torch.testing.assert_close(actual["figures"], expected["figures"], rtol=1e-6, atol=0)
    one, other = (read_all(CheckpointReader(run["path"])) for run in (expected, actual))
    for name, tensor in one["optimizer"].items():
        torch.testing.assert_close(other["optimizer"][name], tensor, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_hybrid_sharding_on_two_by_two(tmp_path: Path) -> None:
    arguments = {"optimizer": "SGD", "source": None, "first": 0, "steps": 4}
    expected = CPU.run(carry_on, folder=str(tmp_path / "a"), **arguments)[0]
    hybrid = Subject("fsdp", 4, {"shard_size": 2})
    actual = hybrid.run(carry_on, folder=str(tmp_path / "b"), **arguments)
    torch.testing.assert_close(actual[3]["figures"], expected["figures"], rtol=1e-6, atol=0)
    whole(actual, "taken")  # each element once


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("gather_dtype", ["params", "compute"])
def test_low_precision_stays_near(precision: str, gather_dtype: str, tmp_path: Path) -> None:
    arguments = {"optimizer": "SGD", "source": None, "first": 0, "steps": 4}
    expected = CPU.run(carry_on, folder=str(tmp_path / "a"), **arguments)[0]
    subject = Subject("fsdp", 2, {"gather_dtype": gather_dtype})
    actual = subject.run(carry_on, folder=str(tmp_path / "b"), precision=precision, **arguments)[0]
    steps = list(zip(actual["figures"], expected["figures"], strict=True))
    if precision == "fp16":  # the first scale is too large: no update, and all ranks say so
        assert steps[0][0][1] == float("inf")
        steps = [(seen[:1], right[:1]) for seen, right in steps[:1]]
    for seen, right in steps:
        torch.testing.assert_close(seen, right, rtol=3e-2, atol=0)
        assert seen != right


@pytest.mark.parametrize("settings", [{"activation_checkpointing": ["Sequential"]}])
def test_recomputed_activations_change_no_number(settings: Any, tmp_path: Path) -> None:
    arguments = {"optimizer": "SGD", "source": None, "first": 0, "steps": 3}
    expected = CPU.run(carry_on, folder=str(tmp_path / "a"), **arguments)[0]
    actual = Subject("fsdp", 2).run(carry_on, folder=str(tmp_path / "b"), **arguments, **settings)
    torch.testing.assert_close(actual[0]["figures"], expected["figures"], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_compiled_units_compute_the_same(tmp_path: Path) -> None:
    arguments = {"optimizer": "SGD", "source": None, "first": 0, "steps": 3}
    settings = {"compile": True, "activation_checkpointing": ["blocks.1"]}
    expected = CPU.run(carry_on, folder=str(tmp_path / "a"), **arguments)[0]
    actual = Subject("fsdp", 2).run(carry_on, folder=str(tmp_path / "b"), **arguments, **settings)
    torch.testing.assert_close(actual[0]["figures"], expected["figures"], rtol=1e-5, atol=0)


def test_whole_weights_can_be_looked_at() -> None:
    answers = Subject("fsdp", 2, {"gather_dtype": "compute"}).run(look_whole)
    same_bits(whole(answers, "before"), whole(answers, "after"))
    for answer in answers:
        assert answer["kind"] == "Tied"
        assert answer["tied"]
        torch.testing.assert_close(answer["copied"], answers[0]["alone"], rtol=0, atol=0)
        for name, tensor in answer["whole"].items():
            assert torch.equal(tensor, whole(answers, "before")["weights"][name])
        assert torch.equal(answer["one"], answer["whole"]["embedding.weight"])


def test_no_rank_holds_the_whole_model_under_meta() -> None:
    total = sum(p.nbytes for p in Deep().parameters())
    for answer in Subject("fsdp", 2, {"meta": True}).run(weigh):
        assert answer["own"] <= 0.51 * total
        assert answer["most"] <= 0.51 * total + 2 * 65 * 64 * 4  # and a layer or two
    for answer in Subject("fsdp", 2).run(weigh):
        assert answer["most"] >= total


@pytest.mark.parametrize("fresh", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_meta_trains_alike_at_any_world_size(fresh: bool, tmp_path: Path) -> None:
    source, first = None, 0
    if not fresh:
        saved = CPU.run(
            carry_on,
            optimizer="AdamW",
            source=None,
            folder=str(tmp_path / "0"),
            first=0,
            steps=2,
        )
        source, first = saved[0]["path"], 2
    runs = [
        subject.run(
            carry_on,
            optimizer="AdamW",
            source=source,
            folder=str(tmp_path / name),
            first=first,
            steps=3,
        )[0]
        for name, subject in {
            "a": Subject("fsdp", 1, {"meta": True}),
            "b": Subject("fsdp", 3, {"meta": True}),
            "c": Subject("fsdp", 2, {"meta": fresh}),
        }.items()
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run["figures"], runs[0]["figures"], rtol=1e-6, atol=0)


def weights_of_rank_0(bench: Bench) -> list[float]:
    """A job: return the sum of all weights on each rank, for a model that rank 0 alone has read."""
    with bench.open(precision="fp32") as session:

        def model() -> nn.Module:
            module = Tied()
            if session.world.rank > 0:
                nn.init.zeros_(module.blocks[0][1].weight)
                nowhere = nn.Parameter(torch.empty(11, 6, device="meta"))
                module.head.weight = module.embedding.weight = nowhere
            return module

        engine = session.prepare(recipe(momentum, model))
        with engine.full_params() as whole:
            return session.exchange(sum(float(p.double().sum()) for p in whole.parameters()))


def test_ranks_take_the_weights_of_rank_0() -> None:
    (alone,) = Subject("fsdp", 1).run(weights_of_rank_0)[0]
    both = Subject("fsdp", 2, {"from_rank_0": True}).run(weights_of_rank_0)[0]
    assert both == [alone, alone]
    refused = Plan(options=FsdpOptions(from_rank_0=True, meta=True))
    with pytest.raises(SettingError, match="both true"), driver.open(refused):
        pass


OPTIMIZERS = (
    *("Adam", "Adamax", "NAdam", "RAdam", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop"),
    *(
        "Adafactor",
        "SGD",
        "AdamW",
        "fused AdamW",
        "fused SGD",
        *(("Muon",) if hasattr(torch.optim, "Muon") else ()),
    ),
)


@pytest.mark.parametrize("name", only_quick(OPTIMIZERS, ("Adafactor", "AdamW", "SGD")))
def test_every_optimizer_of_torch_updates_as_in_one_process(name: str) -> None:
    """Update with every optimizer of torch. Adafactor updates whole tensors: on sharded ones it
    raises, or is silently wrong.
    """
    expected = whole(CPU.run(optimize, name=name), "final")
    actual = whole(Subject("fsdp", 2).run(optimize, name=name), "final")
    for kind in ("weights", "optimizer"):
        assert sorted(actual[kind]) == sorted(expected[kind])
        for key, tensor in expected[kind].items():
            torch.testing.assert_close(actual[kind][key], tensor, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.slow
def test_models_that_cannot_be_sharded_are_refused() -> None:
    assert "position" in Subject("fsdp", 2, {"meta": True}).run(refused, model="bare")[1]


@pytest.mark.parametrize("options", [{}, {"meta": False, "optimizer_step": "whole"}])
def test_dtypes_may_differ_in_a_model(options: dict[str, Any], tmp_path: Path) -> None:
    """Require that parameters of no dimension, or of another dtype than their unit, are whole on
    every rank.
    """
    source, expected_source = None, None
    for turn in range(2):
        expected = CPU.run(train_mixed, source=expected_source, folder=str(tmp_path / f"a{turn}"))
        actual = Subject("fsdp", 2, options).run(
            train_mixed, source=source, folder=str(tmp_path / f"b{turn}")
        )
        torch.testing.assert_close(actual[0]["figures"], expected[0]["figures"], rtol=1e-5, atol=0)
        if source:
            same_bits(whole(actual, "taken"), read_all(CheckpointReader(source)))
        source, expected_source = expected[0]["path"], actual[0]["path"]


@pytest.mark.parametrize("how", ["parts", "tensors"])
def test_who_counts_in_groups_is_called_once_a_step(how: str) -> None:
    """Require a refusal where an optimizer would step more often than once an update: once for each
    group of like parts, or for each tensor.
    """
    for reported in Subject("fsdp", 2, {"optimizer_step": how}).run(count):
        assert "Counting changes k, started, weight_sum in its parameter groups" in reported


def test_ties_stay_in_one_unit() -> None:
    model = Tied()
    assert wrap_units.choose_units(model, (), None) == list(reversed(model.blocks))
    by_size = wrap_units.choose_units(model, (), 60)
    assert by_size
    assert not {model.embedding, model.head} & set(by_size)
    with pytest.raises(RecipeError, match=r"embedding\.weight = head\.weight"):
        wrap_units.choose_units(model, ("Embedding",), None)
    with pytest.raises(RecipeError, match="Blok"):
        wrap_units.choose_units(model, ("Blok",), None)


def test_shard_groups_divide_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        pytest.raises(SettingError, match="shard_size"),
        driver.open(Plan(options=FsdpOptions(shard_size=2))),
    ):
        pass


def test_the_layout_is_what_is_held() -> None:
    model = Deep()
    layout = driver.layout(Plan(global_batch=8), model, {}, 2)
    own = max(answer["own"] for answer in Subject("fsdp", 2).run(weigh))
    assert layout.parameter_bytes == own
    assert len(layout.units) == 16


class OwnBlock(nn.Module):
    """Two blocks. With `skips`, each rank skips a different one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.rank, self.skips = rank, False

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks[self.rank :][:1] if self.skips else self.blocks:
            x = x + block(x)
        return x


def skipping(bench: Bench, *, evaluates: bool) -> dict[str, Any]:
    """A job without shared memory: return the next exchange between ranks after an even and after
    an uneven update, or after such forwards without gradients.
    """
    with pytest.MonkeyPatch.context() as patch, bench.open() as session:
        patch.setattr(shm_tally, "opened", lambda *_: None)
        rank = session.world.rank
        engine = session.prepare(recipe(momentum, lambda: OwnBlock(rank)))
        reported = []
        for skips in (False, True):
            engine.module.skips = skips
            session.tally([1.0])()
            with engine.microbatch(True), torch.set_grad_enabled(not evaluates):
                loss = engine.module(torch.ones(2, 4)).square().sum()
            if not evaluates:
                engine.backward(loss, torch.ones(()))
                engine.update()
            try:
                reported.append(session.tally([1.0])() if evaluates else session.exchange(rank))
            except RecipeError as error:
                reported.append(str(error))
        return {"even": reported[0], "uneven": reported[1]}


@pytest.mark.parametrize("evaluates", [False, True])
def test_uneven_layers_are_reported_before_a_save_without_shared_memory(evaluates: bool) -> None:
    for rank, reported in enumerate(Subject("fsdp", 2).run(skipping, evaluates=evaluates)):
        assert reported["even"] == ([2.0] if evaluates else [0, 1])
        assert "ranks used different layers in one step" in reported["uneven"]
        assert (
            f"rank {rank} used" in reported["uneven"] and f"'blocks.{rank}'" in reported["uneven"]
        )


class OftenInside(OwnBlock):
    """Two layers whose weights are not gathered. Each rank calls them in another order
    and number.
    """

    def forward(self, x: Tensor) -> Any:
        first, second = (part[0] for part in self.blocks)
        for layer in (first, second) if self.rank else (second, first, second, second):
            x = torch.tanh(layer(x))
        return x


def training_often_inside(bench: Bench) -> list[float]:
    """A job: return the gradient norms of two updates."""
    with bench.open() as session:
        rank, norms = session.world.rank, []
        engine = session.prepare(recipe(momentum, lambda: OftenInside(rank)))
        for _ in range(2):
            session.tally([1.0])()
            with engine.microbatch(True):
                engine.backward(engine.module(torch.ones(2, 4)).square().sum(), torch.ones(()))
            norms.append(float(engine.update().grad_norm))
        return norms


def test_what_is_used_inside_a_unit_is_a_rank_s_own_matter() -> None:
    first, second = Subject("fsdp", 2, {"min_unit_params": 10**6}).run(training_often_inside)
    assert first == second and all(norm > 0 for norm in first)
