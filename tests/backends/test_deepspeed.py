"""The deepspeed driver keeps the laws at every ZeRO stage, and has tests of its own
peculiarities.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_cases import is_quick
from torch import Tensor, nn
from torch.utils import cpp_extension

from drivetrain.backends.deepspeed import operators, twins, zero_config
from drivetrain.backends.deepspeed.options import DeepspeedOptions
from drivetrain.checkpoint import CheckpointReader, CheckpointStore
from drivetrain.conformance import Case, cases
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.law_1_absent import train as train_absent
from drivetrain.conformance.state import State, assemble, pieces, read_all
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import (
    BackendUnavailable,
    CapabilityRefused,
    DrivetrainError,
    SettingError,
)
from drivetrain.kernel.plan import Plan
from drivetrain.kernel.recipe import Recipe
from drivetrain.trainer.settings import PRECISIONS

# Stages differ only in what they shard. Laws on reassembled tensors are quick at every stage, the
# others at stage 3 alone.
OF_WHAT_IS_SHARDED = (
    "1_gradient-clipped_adamw_equals_one_process-language-micro_batch=2",
    "2_norm-norm_under_adamw_is_that_of_one_process-language",
    "6_resume-resumed_run_is_bit_exact-stops=3",
    "6_resume-checkpoints_move_between_drivers_and_worlds-to",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=str(case),
            marks=[]
            if (stage == 3 and is_quick(case)) or str(case).startswith(OF_WHAT_IS_SHARDED)
            else pytest.mark.slow,
        )
        for stage, peers in (
            (1, ["cpu", "deepspeed:3"]),  # a peer's stage is 2
            (2, ["cpu", "ddp:2"]),
            (3, None),  # itself in other world sizes
        )
        for case in cases(
            "deepspeed",
            num_processes=2,
            options={"stage": stage},
            peers=peers,
        )
    ],
)
def test_laws(case: Case) -> None:
    case.check()


# --- jobs, run on every rank ------------------------------------------------------------------


class Awkward(nn.Module):
    """A model whose constructors change its parts in every way that could break under early
    sharding.
    """

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        layer = nn.Linear(width, width)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width)
        self.shift = nn.Parameter(0.1 * torch.randn(3, width))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((width,), 1.5))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
        self.layers[0].weight.data.mul_(0.5)
        with torch.no_grad():
            self.layers[1].bias.fill_(0.25)
            self.frozen.weight += torch.randn(self.frozen.weight.shape)
        self.frozen.requires_grad_(False)
        self.apply(self._spread)

    @staticmethod
    def _spread(part: nn.Module) -> None:
        if isinstance(part, nn.LayerNorm):
            nn.init.uniform_(part.weight, 0.9, 1.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.shift.mean(0)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * self.scale
        y: Tensor = self.head(self.norm(self.frozen(hidden)))
        return y


READY = Awkward()
MODELS = {
    "inside": Awkward,
    "outside": lambda: READY,
    "wide": lambda: Awkward(600),
}


def summed(module: nn.Module, x: Tensor) -> Tensor:
    logits = module(x).float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, (3 * x.flatten() + 1) % 11, reduction="sum")


def made(name: str, arguments: Mapping[str, Any]) -> Any:
    def build(named: Any) -> torch.optim.Optimizer:
        trained = [p for _, p in named if p.requires_grad]
        groups = [  # by shape: a recipe must see whole shapes
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=0.05, **arguments)
        return optimizer

    return build


def carry_on(
    bench: Bench,
    *,
    steps: int,
    folder: str,
    first: int = 0,
    source: str | None = None,
    optimizer: str = "AdamW",
    arguments: Mapping[str, Any] | None = None,
    model: str = "inside",
    nan_at: int | None = None,
    look: bool = False,
    precision: str = "fp32",
    **settings: Any,
) -> dict[str, Any]:
    """A job: restore a checkpoint, return the restored tensors, train on (two ragged microbatches),
    and save.
    """
    with bench.open(precision=precision, max_grad_norm=0.5, **settings) as session:
        world = session.world
        recipe = Recipe(MODELS[model], summed, optimizer=made(optimizer, arguments or {}))
        engine = session.prepare(recipe)
        if source:
            engine.restore(CheckpointReader(source))
        taken = pieces(engine)
        figures, applied, unchanged, alone = [], [], True, 0.0
        for step in range(first, first + steps):
            total = torch.zeros((), device=world.device)
            for micro, rows in enumerate((6, 5)):
                generator = torch.Generator().manual_seed(10 * step + micro)
                x = torch.randint(11, (rows, 4), generator=generator)
                x = x[world.feeder_index :: world.num_feeders].to(world.device)
                with engine.microbatch(bool(micro)):
                    with engine.autocast():
                        loss = summed(engine.module, x) * (world.num_feeders / 44)
                    spoilt = step == nan_at and world.rank == world.size - 1 and not micro
                    engine.backward(loss, torch.tensor(float("nan") if spoilt else 1.0))
                total += loss.detach()
            before = pieces(engine) if step == nan_at else []
            outcome = engine.update()
            for old, new in zip(before, pieces(engine), strict=False):
                if old["kind"] != "state":
                    unchanged &= torch.equal(old["tensor"], new["tensor"])
            applied.append(outcome.applied())
            mean = float(session.reduce(total)) / world.num_feeders
            figures.append((mean, float(outcome.grad_norm)))
            if look:
                with engine.full_params() as module:
                    assert type(module) is Awkward
                    for _ in range(1 + world.rank):  # as often as each likes
                        alone = float(module(torch.arange(11, device=world.device)[None]).sum())
        path = CheckpointStore(folder).save(first + steps, engine, session, {})
        return {
            "taken": taken,
            "figures": figures,
            "applied": applied,
            "unchanged": unchanged,
            "alone": alone,
            "path": str(path),
            "tied": [list(group) for group in engine.tied],
            "final": pieces(engine),
        }


def refused(bench: Bench, **arguments: Any) -> tuple[str, str]:
    try:
        carry_on(bench, steps=1, folder="unused", **arguments)
    except DrivetrainError as error:
        return type(error).__name__, str(error)
    return "", ""


# --- what only the driver can get wrong --------------------------------------------------------

CPU = Subject("cpu")


def zero(stage: int, num_processes: int = 2, **options: Any) -> Subject:
    return Subject("deepspeed", num_processes, {"stage": stage, **options})


def whole(answers: Sequence[dict[str, Any]], key: str) -> State:
    return assemble([answer[key] for answer in answers])


def same_bits(actual: State, expected: State) -> None:
    for kind in ("weights", "optimizer"):
        assert sorted(actual[kind]) == sorted(expected[kind])
        for name, tensor in expected[kind].items():
            assert torch.equal(actual[kind][name], tensor), name


def follow(subjects: Sequence[Subject], folder: Path, **arguments: Any) -> list[Any]:
    """Train two steps with each subject. Each resumes the one before, and restores its tensors bit
    by bit.
    """
    source, figures = None, []
    for turn, subject in enumerate(subjects):
        answers = subject.run(
            carry_on,
            steps=2,
            first=2 * turn,
            source=source,
            folder=str(folder / f"{turn}"),
            **arguments,
        )
        if source:
            same_bits(whole(answers, "taken"), read_all(CheckpointReader(source)))
        source = answers[0]["path"]
        figures += answers[0]["figures"]
    return figures


@pytest.mark.parametrize("construct", ["sharded", "whole"])
def test_weights_are_those_of_one_process(construct: str, tmp_path: Path) -> None:
    expected = CPU.run(carry_on, steps=4, folder=str(tmp_path / "a"))
    subject = zero(3, construct=construct)
    actual = subject.run(carry_on, steps=4, folder=str(tmp_path / "b"), look=True)
    same_bits(whole(actual, "taken"), whole(expected, "taken"))
    torch.testing.assert_close(actual[0]["figures"], expected[0]["figures"], rtol=1e-6, atol=0)
    assert actual[0]["tied"] == expected[0]["tied"]
    assert actual[0]["alone"] == actual[1]["alone"]


@pytest.mark.slow  # a law moves checkpoints between drivers and worlds in each run
@pytest.mark.parametrize(
    ("optimizer", "arguments"), [("AdamW", {"fused": True}), ("SGD", {"momentum": 0.9})]
)
def test_a_checkpoint_goes_round_bit_by_bit(
    optimizer: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    common = {"optimizer": optimizer, "arguments": arguments}
    reference = CPU.run(carry_on, steps=12, folder=str(tmp_path / "r"), **common)[0]
    subjects = (CPU, zero(1), zero(3, 3), zero(2), Subject("ddp", 2), zero(3))
    figures = follow(subjects, tmp_path, **common)
    # over 12 steps AdamW enlarges the last bit of the smallest gradients
    torch.testing.assert_close(figures, reference["figures"], rtol=1e-5, atol=0)


OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "fp32 offloaded": ("fp32", {"config": OFFLOADED}),
    "bf16 autocast": ("bf16", {}),
    "bf16 weights": ("bf16", {"config": {"bf16": {"enabled": "auto"}}}),
    "fp16 autocast": ("fp16", {}),
    "fp16 weights": (
        "fp16",
        {"config": {"fp16": {"enabled": "auto", "initial_scale_power": 10, "hysteresis": 1}}},
    ),
    "an optimizer of the JSON": (
        "fp32",
        {"config": {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}},
    ),
}


QUICK = [(2, "fp32"), (3, "bf16 autocast"), (3, "an optimizer of the JSON")]


@pytest.mark.parametrize(
    ("stage", "variant"),
    [
        pytest.param(stage, variant, marks=[] if quick else pytest.mark.slow)
        for stage in (2, 3)
        for variant in VARIANTS
        for quick in [variant == "fp16 weights" or (stage, variant) in QUICK]
    ],
)
def test_not_a_number_on_one_rank_changes_nothing_on_any(
    variant: str, stage: int, tmp_path: Path
) -> None:
    precision, options = VARIANTS[variant]
    subject = zero(stage, **options)
    if variant == "fp16 weights" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        for kind, message in subject.run(refused, precision=precision):
            assert kind == "CapabilityRefused"
            assert "this cpu has no arithmetic of torch.float16. Take precision=bf16" in message
        return
    arguments = {"steps": 4, "nan_at": 2, "precision": precision}
    expected = CPU.run(carry_on, folder=str(tmp_path / "a"), **arguments)[0]
    answers = subject.run(carry_on, folder=str(tmp_path / "b"), **arguments)
    tolerance = 1e-6 if precision == "fp32" else 3e-2
    for answer in answers:
        assert answer["applied"] == [True, True, False, True]
        assert answer["unchanged"]
        for step in (0, 1, 3):
            seen, right = answer["figures"][step], expected["figures"][step]
            torch.testing.assert_close(seen, right, rtol=tolerance, atol=0)
    stored = read_all(CheckpointReader(answers[0]["path"]))
    same_bits(whole(answers, "final"), stored)
    assert stored["weights"]["shift"].dtype == torch.float32
    if precision == "fp16":
        assert float(stored["state"]["loss_scale"]) in (2.0**9, 2.0**15)
        assert int(stored["state"]["loss_scale_good_steps"]) == 1
    arguments = {"steps": 1, "first": 4, "source": answers[0]["path"], "precision": precision}
    again = subject.run(carry_on, folder=str(tmp_path / "c"), **arguments)
    same_bits(whole(again, "taken"), stored)
    scaler = whole(again, "taken")["state"]
    assert bool(scaler) == (precision == "fp16")
    for name, tensor in scaler.items():
        assert torch.equal(stored["state"][name], tensor)


def test_what_cannot_be_sharded_is_refused() -> None:
    for kind, message in zero(3).run(refused, model="outside"):
        assert kind == "RecipeError"
        assert "construct=whole" in message
    for stage in (2, 3):
        kind, message = zero(stage).run(refused, optimizer="Adafactor")[0]
        assert kind == "CapabilityRefused"
        assert "Adafactor" in message


def test_only_optimizers_of_single_elements_pass() -> None:
    def check(name: str, **arguments: Any) -> None:
        parameters = [nn.Parameter(torch.ones(2, 3))]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.0, **arguments)
        twins.refuse_unless_elementwise(optimizer, torch.device("cpu"))

    for name in ("Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"):
        check(name)
    check("AdamW", fused=True, amsgrad=True)
    for name in ("Adafactor", "LBFGS", *(("Muon",) if hasattr(torch.optim, "Muon") else ())):
        with pytest.raises(CapabilityRefused, match=name):
            check(name)


class Drawing(torch.optim.SGD):
    """Multiplies gradients by random numbers: one an element, one a row, one for all, or one of
    Python's for all.
    """

    def __init__(self, parameters: Any, draw: str, **arguments: Any) -> None:
        super().__init__(parameters, lr=0.1, **arguments)
        self.draw = draw

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            drawn: Any = {
                "element": torch.rand_like,
                "mask": lambda grad: torch.bernoulli(torch.full_like(grad, 0.5)),
                "rounding": lambda grad: torch.randint_like(grad, 1 << 16, dtype=torch.int32),
                "row": lambda grad: torch.rand(len(grad), *[1] * (grad.dim() - 1)),
                "weight": lambda grad: torch.rand(()),
                "python": lambda grad: random.random(),
            }[self.draw]
            parameter.grad = parameter.grad * drawn(parameter.grad)
        super().step()


@pytest.mark.parametrize("draw", ["element", "mask", "rounding", "row", "weight", "python"])
def test_optimizers_that_draw_a_number_for_each_element_pass(draw: str) -> None:
    """Require that nothing else passes, and that a trial leaves all generators as they are."""
    optimizer = Drawing([nn.Parameter(torch.ones(2, 3))], draw)
    device = torch.device("cpu")
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(4), random.random()
    torch.manual_seed(0)
    random.seed(0)
    if draw in ("element", "mask", "rounding"):
        twins.refuse_unless_elementwise(optimizer, device)
        assert not twins.first_update_differs(optimizer, optimizer.param_groups[0], device)
        dampened = Drawing([nn.Parameter(torch.ones(3))], draw, momentum=0.9, dampening=0.5)
        assert twins.first_update_differs(dampened, dampened.param_groups[0], device)
    else:
        with pytest.raises(CapabilityRefused, match="draws random numbers, and not one by torch"):
            twins.refuse_unless_elementwise(optimizer, device)
    torch.testing.assert_close((torch.rand(4), random.random()), expected, rtol=0, atol=0)


def test_state_that_was_never_updated_is_as_the_optimizer_begins_it() -> None:
    """Compare with the optimizers' initial state. Some of it is not zeros, and weight decay does
    not change it.
    """

    def fresh(name: str, **arguments: Any) -> dict[str, Any]:
        weights = torch.tensor([1.0, -2.0])
        optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(3))], **arguments)
        found = twins.fresh_state(optimizer, optimizer.param_groups[0], weights)
        assert weights.tolist() == [1.0, -2.0]
        return {key: tensor.tolist() for key, tensor in found.items()}

    assert fresh("SGD", lr=0.1, momentum=0.9, weight_decay=0.5) == {"momentum_buffer": [0.0, 0.0]}
    assert fresh("Rprop", lr=0.25) == {"prev": [0.0, 0.0], "step_size": [0.25, 0.25]}


# --- the JSON -----------------------------------------------------------------------------------


def resolve(config: Any, stage: int | None = None, **plan: Any) -> dict[str, Any]:
    options = DeepspeedOptions(stage=stage, config=config)
    plan = {"global_batch": 12, "micro_batch": 2, "max_grad_norm": 1.0, **plan}
    return zero_config.resolve(options, Plan(**plan), 2)


def test_auto_is_filled_in() -> None:
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 3,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale_window": 100},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True},
        "wall_clock_breakdown": True,
    }
    given = copy.deepcopy(config)
    made = resolve(config, precision=PRECISIONS["bf16"])
    assert config == given
    assert made["bf16"] == {"enabled": True}
    assert made["fp16"] == {"enabled": False, "loss_scale_window": 100}
    assert made["gradient_clipping"] == 1.0
    assert (made["train_batch_size"], made["train_micro_batch_size_per_gpu"]) == (4, 2)
    assert made["zero_optimization"]["stage"] == 3
    assert made["zero_optimization"]["overlap_comm"]
    assert "reduce_bucket_size" not in made["zero_optimization"]
    assert made["wall_clock_breakdown"]


ON_DISK = {"device": "nvme", "nvme_path": "/"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"train_batch_size": 16}, "16.*global_batch.*12"),
        ({"train_micro_batch_size_per_gpu": 3}, "3.*micro_batch.*2"),
        ({"gradient_accumulation_steps": 2}, "2.*3"),
        ({"gradient_clipping": 0.5}, r"0\.5.*max_grad_norm.*1\.0"),
        ({"bf16": {"enabled": True}}, "bf16.*precision.*fp32"),
        ({"fp16": {"enabled": True}}, "fp16.*precision.*fp32"),
        ({"zero_optimization": {"stage": 1}}, r"1.*backend\.stage.*3"),
        ({"gradient_allreduce_op": "sum"}, "sum.*mean"),
        ({"scheduler": {"type": "WarmupLR"}}, "schedule"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.*nvme"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme_path is None"),
        ({"zero_optimization": {"offload_optimizer": {**ON_DISK, "pipeline_read": True}}}, "pipe"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio"),
        ("missing.json", "missing.json"),
    ],
)
def test_contradictions_are_refused_with_both_values(config: Any, named: str) -> None:
    with pytest.raises((SettingError, CapabilityRefused), match=named):
        resolve(config, stage=3)


def test_files_hold_the_optimizer_at_stage_3_alone() -> None:
    config = {"zero_optimization": {"offload_optimizer": ON_DISK}}
    assert resolve(config, stage=3)["zero_optimization"]["offload_optimizer"] == ON_DISK
    with pytest.raises(CapabilityRefused, match=r"stage 2.*take stage 3"):
        resolve(config, stage=2)


def test_the_optimizer_section_follows_the_recipe() -> None:
    base = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.3, weight_decay=0.1, eps=1e-5)
    section = {"type": "AdamW", "params": {"lr": "auto", "eps": "auto", "betas": [0.9, 0.99]}}
    filled = zero_config.fill_optimizer(section, base)["params"]
    assert filled == {"lr": 0.3, "weight_decay": 0.1, "eps": 1e-5, "betas": [0.9, 0.99]}
    with pytest.raises(SettingError, match=r"0\.1.*optimizer\.lr.*0\.3"):
        zero_config.fill_optimizer({"type": "AdamW", "params": {"lr": 0.1}}, base)
    with pytest.raises(CapabilityRefused, match="Lamb"):
        zero_config.fill_optimizer({"type": "Lamb"}, base)


def test_a_lock_left_by_a_killed_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "FileBaton", object, raising=False)  # as in torch 2.8
    operators.refuse_stale_locks()
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    long_ago = time.time() - 2 * operators.LONGEST_BUILD_SECONDS
    os.utime(lock, (long_ago, long_ago))
    with pytest.raises(BackendUnavailable, match="lock"):
        operators.refuse_stale_locks()
    monkeypatch.delattr(cpp_extension, "FileBaton")
    operators.refuse_stale_locks()  # that lock is the system's, its file means nothing


def warned_of_counts(bench: Bench, *, optimizer: str) -> list[str]:
    """A job: return the warnings about parameters of one group that were updated different numbers
    of times.
    """
    reported: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reported.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain").addHandler(handler)
    try:
        train_absent(bench, updates=["all", "none", "all"], microbatch=1, optimizer=optimizer)
    finally:
        logging.getLogger("drivetrain").removeHandler(handler)
    return [line for line in reported if "count of steps" in line]


@pytest.mark.parametrize(("optimizer", "times"), [("AdamW", 1), ("SGD", 0)])
def test_a_warning_names_parameters_that_share_a_count_of_steps(optimizer: str, times: int) -> None:
    for reported in Subject("deepspeed", 2, {"stage": 3}).run(
        warned_of_counts, optimizer=optimizer
    ):
        assert len(reported) == times
        assert all("spare.0.0.bias, spare.0.0.weight" in line for line in reported)


COMPILER = "torch._functorch.aot_autograd"  # one of its slow parts


def compilers(bench: Bench, *, folder: str) -> list[bool]:
    """A job: return whether torch's compiler is imported, first after training, then after a call
    of Muon's.
    """
    carry_on(bench, steps=1, folder=folder)
    imported = [COMPILER in sys.modules]
    from deepspeed.runtime.zero.muon import original_muon

    with torch.compiler.set_stance("force_eager"):
        original_muon.zeropower_via_newtonschulz5(torch.eye(2), steps=1)
    return [*imported, COMPILER in sys.modules]


@pytest.mark.slow
def test_the_compiler_is_imported_by_who_compiles(tmp_path: Path) -> None:
    subject = Subject("deepspeed", 1, {"stage": 1})
    assert subject.run(compilers, alone=True, folder=str(tmp_path)) == [[False, True]]


UNASKED = """
import sys, torch
from drivetrain.backends.deepspeed.initialize import import_deepspeed
import_deepspeed(torch.device("cpu"))
assert "mlflow" not in sys.modules
import mlflow
mlflow.set_experiment
"""


@pytest.mark.slow
def test_a_tracker_is_not_imported_by_who_does_not_track() -> None:
    subprocess.run([sys.executable, "-c", UNASKED], check=True)
