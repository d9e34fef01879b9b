"""The trainer's optimizers, compared with those of transformers' Trainer for the same arguments."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from drivetrain.compat.enums import OptimizerNames
from drivetrain.compat.optim import OPTIMIZERS
from drivetrain.compat.optim.layerwise import LayerWiseDummyOptimizer, LayerWiseDummyScheduler
from drivetrain.compat.trainer.optimization import OptimizationMixin

Arguments = Callable[..., Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 6)])
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.final_norm = nn.Linear(6, 6, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.final_norm(hidden)  # type: ignore[no-any-return]


class Trainer(OptimizationMixin):
    """Stand-in for the trainer, with the parts that its optimizer needs."""

    def __init__(self, args: Any, model: nn.Module | None = None) -> None:
        self.args, self.model = args, model or Model()
        self.optimizer = self.lr_scheduler = self.optimizer_cls_and_kwargs = None
        self._created_lr_scheduler = False


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    """Return transformers' arguments on the CPU."""

    def make(**given: Any) -> Any:
        return transformers.TrainingArguments(str(tmp_path), use_cpu=True, **given)

    return make


def train(trainer: OptimizationMixin, steps: int = 3) -> list[torch.Tensor]:
    """Return the model's weights after a few updates, with a schedule if there is one."""
    optimizer: Any = trainer.create_optimizer()
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(steps):
        ids = torch.arange(6).roll(step)
        nn.functional.cross_entropy(trainer.model(ids), ids).backward()
        optimizer.step()
        if trainer.lr_scheduler is not None:
            trainer.lr_scheduler.step()
        optimizer.zero_grad()
    return [one.detach().clone() for one in trainer.model.parameters()]


def described(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    """Describe an optimizer's groups, with parameters by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        {
            key: [names[id(one)] for one in value] if key == "params" else value
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]


LOW_RANK = {"optim_target_modules": ["layers"]}
BUILT: list[tuple[str, dict[str, Any]]] = [
    ("adamw_torch", {"weight_decay": 0.1, "adam_beta1": 0.8}),
    ("adamw_torch_fused", {"weight_decay": 0.1}),
    ("adafactor", {"learning_rate": 1e-2}),
    ("sgd", {"optim_args": "momentum=0.9, nesterov=True", "weight_decay": 0.1}),
    ("adagrad", {"optim_args": "lr_decay=0.1,eps=1e-3"}),
    ("rmsprop", {"optim_args": "momentum=0.5,centered=yes,alpha=0.9"}),
    ("adamw_8bit", {}),
    ("adamw_bnb_8bit", {"adam_epsilon": 1e-6}),
    ("ademamix", {"optim_args": "alpha=3,beta3=0.99,t_alpha=4"}),
    ("ademamix_8bit", {}),
    ("lion_32bit", {}),
    ("lion_8bit", {}),
    ("rmsprop_bnb", {}),
    ("rmsprop_bnb_8bit", {}),
    ("rmsprop_bnb_32bit", {}),
    ("galore_adamw", {**LOW_RANK, "optim_args": "rank=2,update_proj_gap=3,scale=0.5"}),
    ("galore_adafactor", LOW_RANK),
    ("schedule_free_adamw", {"warmup_steps": 2, "weight_decay": 0.1}),
    ("schedule_free_radam", {"optim_args": "r=0.5"}),
    ("schedule_free_sgd", {"learning_rate": 0.1}),
]


@pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning")
@pytest.mark.row("O1", "O7", "O10", "O11", "O12", "O14", "O15", "O25", "N4", "N6")
@pytest.mark.parametrize(("optim", "given"), BUILT)
def test_optimizers_are_those_of_transformers(
    arguments: Arguments, optim: str, given: dict[str, Any]
) -> None:
    args = arguments(optim=optim, **given)
    reference, ours = transformers.Trainer(Model(), args), Trainer(args)
    theirs = reference.create_optimizer()
    mine = ours.create_optimizer()
    assert type(mine) is type(theirs)
    expected = described(theirs, reference.model)
    if optim.startswith("galore"):  # which takes frozen parameters too
        expected[0]["params"] = [name for name in expected[0]["params"] if "frozen" not in name]
    assert described(mine, ours.model) == expected
    for one, other in zip(train(ours), train(reference), strict=True):  # type: ignore[arg-type]
        assert torch.equal(one, other)


@pytest.mark.row("O14", "O15", "N8")
@pytest.mark.parametrize(
    ("optim", "package"),
    [
        ("adamw_torch_4bit", "torchao"),
        ("adamw_torch_8bit", "torchao"),
        ("adamw_torch_npu_fused", "torch_npu"),
        ("adamw_torch_xla", "torch_xla"),
        ("adamw_anyprecision", "torchdistx"),
        ("apollo_adamw", "apollo-torch"),
        ("apollo_adamw_layerwise", "apollo-torch"),
        ("grokadamw", "grokadamw"),
        ("stable_adamw", "torch-optimi"),
        ("lomo", "lomo-optim"),
        ("galore_adamw", "galore-torch"),
        ("schedule_free_sgd", "schedulefree"),
        ("adamw_8bit", "bitsandbytes"),
        ("adafactor", "transformers"),
    ],
)
def test_a_missing_library_is_named_with_its_command(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch, optim: str, package: str
) -> None:
    modules = (
        "apollo_torch bitsandbytes.optim galore_torch grokadamw lomo_optim optimi schedulefree"
        " torch_npu.optim torch_xla.amp.syncfree torchao.optim torchdistx.optimizers"
        " transformers.optimization"
    )
    for module in modules.split():
        monkeypatch.setitem(sys.modules, module, None)
    args = arguments(optim=optim, **LOW_RANK)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        Trainer(args).create_optimizer()


def test_every_name_is_built_by_somebody() -> None:
    gone = {"adamw_hf", "adamw_apex_fused"}
    assert {str(name.value) for name in OptimizerNames} - gone == set(OPTIMIZERS)
    assert {str(name.value) for name in transformers.trainer.OptimizerNames} == set(OPTIMIZERS)


@pytest.mark.row("O13", status="refused", note="gone from transformers too; named what to use")
@pytest.mark.parametrize("optim", ["adamw_hf", "adamw_apex_fused"])
def test_what_is_gone_is_named(arguments: Arguments, optim: str) -> None:
    args = arguments()
    args.optim = optim
    with pytest.raises(ValueError, match=r"is gone.*adamw_torch"):
        Trainer.get_optimizer_cls_and_kwargs(args)


@pytest.mark.row("O9", "O10")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optim": "sgd", "optim_args": "momentum"}, "name=value"),
        ({"optim": "sgd", "optim_args": "momentum=much"}, "momentum is 'much'"),
        ({"optim": "sgd", "optim_args": "nesterov=perhaps"}, "nesterov is 'perhaps'"),
        ({"optim": "adamw_torch", "optim_args": "momentum=0.9"}, "no momentum"),
        ({"optim": "ademamix", "optim_args": "t_alpha=1.5"}, "whole number"),
        ({"optim": "galore_adamw"}, "needs optim_target_modules"),
        ({"optim": "galore_adamw", "optim_target_modules": ["x9"]}, "names no linear layer"),
        ({"optim": "schedule_free_sgd", "warmup_steps": 0.5}, "max_steps"),
    ],
)
def test_wrong_words_are_errors(arguments: Arguments, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Trainer(arguments(**given)).create_optimizer()


@pytest.mark.row("O9")
def test_unknown_names_and_missing_models_are_errors(arguments: Arguments) -> None:
    args = arguments()
    args.optim = "adamvv"
    with pytest.raises(ValueError, match="known are adafactor"):
        Trainer.get_optimizer_cls_and_kwargs(args)
    with pytest.raises(ValueError, match="pass model="):
        Trainer.get_optimizer_cls_and_kwargs(arguments(optim="galore_adamw", **LOW_RANK))


@pytest.mark.row("N5")
@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (["layers.2"], {"layers.2"}),
        (["layers"], {"layers.0", "layers.2"}),
        (r".*\.\d", {"layers.0", "layers.2"}),
        ([r"lay.*\.[02]"], {"layers.0", "layers.2"}),
        ("all-linear", {"layers.0", "layers.2", "final_norm"}),
    ],
)
def test_target_modules(
    arguments: Arguments, caplog: pytest.LogCaptureFixture, targets: Any, names: set[str]
) -> None:
    trainer = Trainer(arguments(optim="galore_adamw", optim_target_modules=targets))
    _, projected = described(trainer.create_optimizer(), trainer.model)
    assert {name.removesuffix(".weight") for name in projected["params"]} == names
    assert ("layers.1 is not a linear layer" in caplog.text) == (targets == ["layers"])


@pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning")
@pytest.mark.row("N7", "O27")
def test_layer_wise_updates_are_those_of_transformers(arguments: Arguments) -> None:
    args = arguments(optim="galore_adamw_layerwise", **LOW_RANK, optim_args="rank=2")
    model = Model()
    del model.frozen  # theirs gives frozen parameters an optimizer, too
    reference = transformers.Trainer(copy.deepcopy(model), args)
    ours = Trainer(args, copy.deepcopy(model))
    for one, other in zip(train(ours), train(reference), strict=True):  # type: ignore[arg-type]
        assert torch.equal(one, other)
    assert isinstance(ours.optimizer, LayerWiseDummyOptimizer)
    assert all(one.grad is None for one in ours.model.parameters())


@pytest.mark.row("N7", "O27")
def test_layer_wise_rates_follow_the_schedule(arguments: Arguments) -> None:
    trainers = []
    for optim in ("galore_adamw", "galore_adamw_layerwise"):
        args = arguments(optim=optim, **LOW_RANK, optim_args="rank=2", learning_rate=1e-2)
        trainers.append(Trainer(args))
        trainers[-1].create_optimizer_and_scheduler(num_training_steps=5)
    plain, layerwise = trainers
    for one, other in zip(train(plain), train(layerwise), strict=True):
        torch.testing.assert_close(one, other)
    assert isinstance(layerwise.lr_scheduler, LayerWiseDummyScheduler)
    assert layerwise._get_learning_rate() == plain._get_learning_rate() == pytest.approx(4e-3)
    state = json.loads(json.dumps(layerwise.lr_scheduler.state_dict()))
    layerwise.lr_scheduler.load_state_dict(state)
    assert layerwise._get_learning_rate() == plain._get_learning_rate()


@pytest.mark.row("N7", "O27", "O26")
@pytest.mark.parametrize("optim", ["galore_adamw_layerwise", "lomo"])
def test_updates_inside_backward_refuse_what_cannot_hold(
    arguments: Arguments, optim: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(optim=optim, gradient_accumulation_steps=2, **LOW_RANK)
    with pytest.raises(ValueError, match="gradient_accumulation_steps is 2"):
        Trainer(args).create_optimizer()
    args.gradient_accumulation_steps, args.fp16 = 1, True
    with pytest.raises(ValueError, match="bf16=True"):
        Trainer(args).create_optimizer()
    args.fp16 = False

    class OnTwo:
        world_size = 2

        def __getattr__(self, name: str) -> Any:
            return getattr(args, name)

    with pytest.raises(NotImplementedError, match="not in 2"):
        Trainer(OnTwo()).create_optimizer()
    Trainer(args).create_optimizer()
    assert "cannot clip" in caplog.text


@pytest.mark.row("O26", "N9")
def test_lomo_updates_in_any_backward_at_the_rate_of_its_group(arguments: Arguments) -> None:
    plain = Trainer(arguments(optim="sgd", learning_rate=0.1))
    fused = Trainer(arguments(optim="lomo", learning_rate=0.1))
    for one, other in zip(train(plain), train(fused), strict=True):
        torch.testing.assert_close(one, other)
    assert all(one.grad is None for one in fused.model.parameters())
    optimizer: Any = fused.create_optimizer()
    optimizer.param_groups[0]["lr"] = 0.0
    before = [one.clone() for one in fused.model.parameters()]
    assert all(map(torch.equal, train(fused), before))
    optimizer.fused_backward(fused.model(torch.arange(6)).sum(), 0.5)
    assert fused.get_learning_rates()[0] == 0.5


@pytest.mark.row("O26", "N9", status="refused", note="lomo-optim's AdaLomo needs a CUDA device")
def test_adalomo_needs_a_gpu(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA"):
        Trainer(arguments(optim="adalomo")).create_optimizer()


@pytest.mark.row("O14")
def test_embeddings_keep_whole_states(arguments: Arguments) -> None:
    trainer = Trainer(arguments(optim="adamw_8bit"))
    trainer.model.embed = nn.Embedding(64, 128)  # small tensors keep 32 bits anyhow
    trainer.model.layers[0] = nn.Linear(128, 64)
    optimizer = trainer.create_optimizer()
    for one in trainer.model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    weights = (trainer.model.embed.weight, trainer.model.layers[0].weight)
    dtypes = [optimizer.state[one]["state1"].dtype for one in weights]
    assert dtypes == [torch.float32, torch.uint8]


@pytest.mark.row("O3", "O5", "O6", "O24")
def test_classes_factories_and_what_is_there_already(arguments: Arguments) -> None:
    trainer = Trainer(arguments(weight_decay=0.1))
    kwargs = {"lr": 0.5, "weight_decay": 0.9}
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, kwargs)
    optimizer = trainer.create_optimizer()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert trainer.create_optimizer() is optimizer and kwargs == {"lr": 0.5, "weight_decay": 0.9}
    scheduler = trainer.create_scheduler(10)
    assert trainer.create_scheduler(num_training_steps=20) is scheduler
    assert trainer._created_lr_scheduler

    class Factory:
        def __call__(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.embed.parameters(), lr=lr)  # type: ignore[union-attr]

    other = Trainer(arguments())
    other.optimizer_cls_and_kwargs = (Factory, {"lr": 0.25})
    other.create_optimizer_and_scheduler(10)
    assert len(other.create_optimizer().param_groups[0]["params"]) == 1
    assert other._get_learning_rate() == 0.25
    with pytest.raises(ValueError, match="create_optimizer first"):
        Trainer(arguments()).create_scheduler(10)


@pytest.mark.row("O2")
def test_what_is_given_is_kept_and_the_other_is_made(arguments: Arguments) -> None:
    trainer = Trainer(arguments(learning_rate=0.5))
    given = torch.optim.SGD(trainer.model.parameters(), lr=0.125)
    trainer.optimizer = given
    trainer.create_optimizer_and_scheduler(10)
    assert trainer.optimizer is given and trainer._get_learning_rate() == 0.125
    other = Trainer(arguments(learning_rate=0.5))
    optimizer = other.create_optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other.lr_scheduler = schedule
    other.create_optimizer_and_scheduler(10)
    assert other.lr_scheduler is schedule and not other._created_lr_scheduler


@pytest.mark.row("O9")
@pytest.mark.parametrize("key", ["params", "optimizer_dict"])
def test_keywords_may_bring_the_groups(arguments: Arguments, key: str) -> None:
    class Own(Trainer):
        def get_optimizer_cls_and_kwargs(  # type: ignore[override]  # as some libraries do it
            self, args: Any, model: nn.Module | None = None
        ) -> tuple[Any, dict[str, Any]]:
            cls, kwargs = OptimizationMixin.get_optimizer_cls_and_kwargs(args, model)
            return cls, {**kwargs, key: [{"params": [self.model.embed.weight], "lr": 0.5}]}

    assert Own(arguments()).create_optimizer().param_groups[0]["lr"] == 0.5


@pytest.mark.row("O7", "O8")
def test_names_that_decay(arguments: Arguments) -> None:
    args = arguments()
    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    for model in (Model(), transformers.LlamaForCausalLM(config)):
        theirs = transformers.Trainer(model, args).get_decay_parameter_names(model)
        assert set(Trainer(args).get_decay_parameter_names(model)) == set(theirs)
    args.profile = "4.47"
    assert "final_norm.weight" in Trainer(args).get_decay_parameter_names(Model())
    decayed = Trainer(args).get_decay_parameter_names(transformers.LlamaForCausalLM(config))
    assert not any("norm" in name for name in decayed)


@pytest.mark.row("O16", "O17", "O18")
def test_facts_about_the_optimizer(arguments: Arguments) -> None:
    trainer = Trainer(arguments(learning_rate=0.25, weight_decay=0.1))
    reference = transformers.Trainer(trainer.model, trainer.args)
    assert trainer.get_num_trainable_parameters() == sum(
        one.numel() for one in trainer.model.parameters() if one.requires_grad
    )
    with pytest.raises(ValueError, match="no optimizer yet"):
        trainer.get_learning_rates()
    trainer.create_optimizer()
    reference.create_optimizer()
    assert trainer.get_learning_rates() == [0.25, 0.25]
    weight = trainer.model.embed.weight
    assert trainer.get_optimizer_group(weight)["weight_decay"] == 0.1
    theirs = reference.get_optimizer_group()
    assert list(map(len, trainer.get_optimizer_group())) == list(map(len, theirs))
    with pytest.raises(ValueError, match="no parameter group"):
        trainer.get_optimizer_group(trainer.model.frozen.weight)


@pytest.mark.row("O22")
def test_the_rate_of_a_schedule_that_follows_a_metric(arguments: Arguments) -> None:
    args = arguments(learning_rate=0.5, eval_strategy="steps")
    args.lr_scheduler_type = "reduce_lr_on_plateau"
    trainer = Trainer(args)
    with pytest.raises(ValueError, match="no scheduler"):
        trainer._get_learning_rate()
    trainer.create_optimizer_and_scheduler(5)
    trainer.create_optimizer().param_groups[0]["lr"] = 0.125
    assert trainer._get_learning_rate() == 0.125
