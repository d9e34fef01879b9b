"""NEFTune, activation checkpointing, Liger and the detection of NaN."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from side_by_side import ours
from torch import Tensor, nn
from transformers.integrations.neftune import activate_neftune as their_neftune

from drivetrain.compat.integrations.liger import apply_liger_kernel
from drivetrain.compat.integrations.neftune import activate_neftune, deactivate_neftune
from drivetrain.compat.trainer.neftune import NeftuneMixin
from drivetrain.compat.trainer.recompute import enable_recompute

# what PEFT asks of models still has the old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def llama(num_layers: int = 1) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


IDS = torch.arange(12).reshape(2, 6)


class Block(nn.Module):
    """A layer that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.num_forwards = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.num_forwards += 1
        return torch.tanh(self.linear(x)) * scale


class Deep(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(num_blocks))})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks():
            x = block(x, scale=2.0)
        return x

    def blocks(self) -> list[Block]:
        return list(self.body["blocks"])  # type: ignore[arg-type]


@pytest.mark.row("N1", "N2", "N12")
@pytest.mark.parametrize("with_peft", [False, True])
def test_noise_is_that_of_transformers(with_peft: bool) -> None:
    model = llama()
    if with_peft:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    reference, embeddings = copy.deepcopy(model), model.get_input_embeddings()
    clean = embeddings(IDS)
    their_neftune(reference, 5.0)
    handle = activate_neftune(model, 5.0)
    noisy = []
    for one in (model, reference):
        torch.manual_seed(1)
        noisy.append(one.train().get_input_embeddings()(IDS))
    assert torch.equal(*noisy)
    largest = (noisy[0] - clean).abs().max().item()
    assert 0.9 * 5 / math.sqrt(6 * 8) < largest <= 5 / math.sqrt(6 * 8)
    assert torch.equal(model.eval().get_input_embeddings()(IDS), clean)
    deactivate_neftune(model, handle)
    assert torch.equal(model.train().get_input_embeddings()(IDS), clean)
    assert not hasattr(embeddings, "neftune_noise_alpha") and not embeddings._forward_hooks


@pytest.mark.row("N3")
def test_the_trainers_two_methods() -> None:
    class Trainer(NeftuneMixin):
        neftune_noise_alpha = 5.0

    trainer, model = Trainer(), llama()
    embeddings = model.get_input_embeddings()
    assert trainer._activate_neftune(model) is model and embeddings._forward_hooks
    trainer._deactivate_neftune(model)
    trainer._deactivate_neftune(model)
    assert not embeddings._forward_hooks
    with pytest.raises(ValueError, match="get_input_embeddings"):
        trainer._activate_neftune(Deep())


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    outputs = model(batch)
    (outputs if isinstance(outputs, Tensor) else outputs.logits).square().sum().backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


@pytest.mark.row("W7")
@pytest.mark.parametrize("options", [{}, {"every_n_layers": 2}, {"offload": True}])
def test_plain_layers_are_recomputed(options: dict[str, Any]) -> None:
    model = Deep()
    batch = torch.randn(3, 4)
    expected = gradients(model, batch)
    for block in model.blocks():
        block.num_forwards = 0
    enable_recompute(model, options)
    assert all(map(torch.equal, gradients(model, batch), expected))
    seen = [block.num_forwards for block in model.blocks()]
    assert seen == ([2, 1, 2, 1] if "every_n_layers" in options else [2, 2, 2, 2])
    model.eval()
    gradients(model, batch)
    assert model.blocks()[0].num_forwards == 3
    assert all(map(torch.equal, gradients(copy.deepcopy(model).train(), batch), expected))


@pytest.mark.row("W7")
def test_models_with_a_switch_use_it() -> None:
    model = llama(num_layers=2)
    expected = gradients(model.train(), IDS)
    enable_recompute(model, {"every_n_layers": 2, "use_reentrant": False})
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]
    for one, other in zip(gradients(model, IDS), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_older_switches_and_models_without_layers() -> None:
    class Older(nn.Module):
        given: Any = None

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            self.given = gradient_checkpointing_kwargs

    model = Older()
    enable_recompute(model, {"use_reentrant": True})
    assert model.given == {"use_reentrant": True}
    with pytest.raises(ValueError, match="does not take every_n_layers"):
        enable_recompute(model, {"every_n_layers": 3})
    with pytest.raises(ValueError, match="no repeated"):
        enable_recompute(nn.Linear(2, 2))
    enable_recompute(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


@pytest.mark.row("N10", status="refused", note="without a GPU there is nothing to compile for")
def test_liger_needs_its_package_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ImportError, match="pip install liger-kernel"):
        apply_liger_kernel(llama())
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", ModuleType("transformers"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="use_liger_kernel=False"):
        apply_liger_kernel(llama())


@pytest.mark.row("N10", status="refused", note="without a GPU there is nothing to compile for")
def test_liger_is_refused_where_it_would_train_on_a_cpu(tmp_path: Path) -> None:
    """Require that training is refused, and that an evaluation of the loss alone passes
    `skip_logits` to the model.
    """
    seen: list[Any] = []

    class Skips(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor, **more: Any) -> dict[str, Any]:
            seen.append(more.get("skip_logits"))
            return {"loss": nn.functional.cross_entropy(super().forward(x), labels)}

    asked = {"use_liger_kernel": True, "prediction_loss_only": True}
    trainer = ours(tmp_path).trainer(lambda: Skips(4, 3), **asked)
    assert trainer.evaluate()["eval_loss"] > 0 and set(seen) == {True}
    seen.clear()
    with pytest.raises(ValueError, match="use_liger_kernel: these kernels run on GPUs alone"):
        trainer.train()
    assert not seen


@pytest.mark.row("N10")
def test_liger_patches_models_of_transformers_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patched: list[Any] = []
    liger: Any = ModuleType("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance = lambda model, **config: patched.append((model, config))
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    base = llama()
    apply_liger_kernel(get_peft_model(base, LoraConfig(target_modules=["q_proj"])), {"rope": True})
    assert patched == [(base, {"rope": True})]
    apply_liger_kernel(Deep())
    assert len(patched) == 1 and "not a model of transformers" in caplog.text


@pytest.mark.row("L23")
def test_the_first_infinity_is_named_with_what_led_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = ours(tmp_path).trainer(debug="underflow_overflow", max_steps=1)
    with torch.no_grad():
        trainer.model.inner.bias[0] = math.inf
    with pytest.raises(ValueError, match="inf/nan detected"):
        trainer.train()
    assert "inner Linear" in capsys.readouterr().out
