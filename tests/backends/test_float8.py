"""float8: its numbers, the parts that stay in bfloat16, refusals, and checkpoints that do not
depend on it.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_cases import is_quick
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from drivetrain import Recipe, lora
from drivetrain.backends.common.float8 import Float8Options, compute_in_float8
from drivetrain.checkpoint import CheckpointReader
from drivetrain.conformance import Case, cases
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.jobs import optimizer_called
from drivetrain.conformance.law_1_gradient import ROUNDING
from drivetrain.conformance.runs import run
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.contract import Engine
from drivetrain.kernel.errors import CapabilityRefused, RecipeError
from drivetrain.kernel.plan import Plan
from drivetrain.registry import find_driver, refuse_unpromised
from drivetrain.trainer.settings import PRECISIONS

EMULATED = {"float8_emulated": "true"}
DRIVERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name in ("cpu", "ddp", "fsdp")},
    "rowwise": ("fsdp", {"float8_scaling": "rowwise"}),
    "context": ("mesh", {"context": 2}),
    "expert": ("mesh", {"expert": 2}),
    "pipeline": ("mesh", {"pipeline": 2}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{name}-{case}",
            marks=() if name == "fsdp" and is_quick(case) else pytest.mark.slow,
        )
        for name, (driver, options) in DRIVERS.items()
        for case in cases(driver, options={**EMULATED, **options})
        if "float8" in case.arguments.values()
    ],
)
def test_laws(case: Case) -> None:
    case.check()
    assert case.refused is None


# --- what it computes ---------------------------------------------------------------------------


@contextmanager
def prepared(
    model: Callable[[], nn.Module], precision: str = "float8", **options: Any
) -> Iterator[Engine]:
    """Return the engine of a model on the CPU, with these options of the driver."""
    bench = Bench("cpu", {**EMULATED, **options})
    with bench.open(precision=precision) as session:
        recipe = Recipe(
            model=model,
            loss=lambda module, batch: module(batch).sum(),
            train_data=[0],
            optimizer=optimizer_called("SGD"),
        )
        yield session.prepare(recipe)


def outputs(model: nn.Module, precision: str = "float8", **options: Any) -> Tensor:
    """Return the outputs of a copy of the model for fixed inputs, computed as in training."""
    with prepared(lambda: copy.deepcopy(model), precision, **options) as engine, engine.autocast():
        output: Tensor = engine.module(inputs(16)).detach()
    return output


def inputs(size: int) -> Tensor:
    return torch.randn(7, size, generator=torch.Generator().manual_seed(1))


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))


E4M3 = torch.finfo(torch.float8_e4m3fn)


def rounded(tensor: Tensor) -> Tensor:
    """Round to e4m3 and back, with one scale for the whole tensor."""
    scale = E4M3.max / tensor.abs().max().float().double()
    return (tensor.float() * scale.float()).to(torch.float8_e4m3fn).double() / scale


def test_a_product_is_that_of_rounded_factors() -> None:
    """Compare with rounded factors, and require an error that rounding each factor explains, and
    bfloat16 does not.
    """
    layer, x = nn.Linear(64, 32, bias=False), inputs(64)
    with prepared(lambda: layer, float8_skip="") as engine, engine.autocast():
        seen = engine.module(x).detach()
    assert seen.dtype == torch.bfloat16
    factors = x.bfloat16(), layer.weight.detach()
    by_hand = rounded(factors[0]) @ rounded(factors[1]).T
    torch.testing.assert_close(seen.double(), by_hand, rtol=ROUNDING["bf16"], atol=1e-6)
    weight = layer.weight.detach().double()
    exact, sizes = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    relative = (1 + ROUNDING["float8"]) ** 2 * (1 + ROUNDING["bf16"]) ** 2 - 1
    off = (seen.double() - exact).abs()
    assert bool((off <= relative * sizes).all())
    assert float((off / sizes).max()) > ROUNDING["bf16"]


def test_rowwise_scales_keep_small_rows() -> None:
    """Compute a small row beside a large one. One scale for both would round it to nothing."""
    layer = nn.Linear(16, 16, bias=False)
    x = torch.tensor([[1e-6], [1.0]]).expand(2, 16)
    small = {}
    for scaling in ("tensorwise", "rowwise"):
        options = {"float8_skip": "", "float8_scaling": scaling}
        with prepared(lambda: layer, **options) as engine, engine.autocast():
            small[scaling] = float(engine.module(x)[0].detach().abs().max())
    assert small["tensorwise"] == 0 < small["rowwise"]


def test_outside_of_autocast_nothing_is_different() -> None:
    model = two_layers()
    with prepared(lambda: copy.deepcopy(model)) as engine:
        assert torch.equal(engine.module(inputs(16)), model(inputs(16)))
        assert [type(layer) for layer in engine.module] == [nn.Linear, nn.Linear]  # type: ignore[attr-defined]


def test_the_last_layer_stays_unless_others_are_named() -> None:
    model = two_layers()
    default, all_of_them = outputs(model), outputs(model, float8_skip="")
    assert torch.equal(default, outputs(model, float8_skip="1"))
    assert not torch.equal(default, all_of_them)
    assert not torch.equal(default, outputs(model, "bf16"))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (lambda: nn.Linear(16, 16), {}, "none of 1 linear layers"),
        (lambda: nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3)), {"float8_skip": ""}, "none of"),
        (two_layers, {"float8_skip": "*"}, "none of 2"),
        (two_layers, {"float8_skip": "haed,1"}, "backend.float8_skip=haed matches no linear layer"),
    ],
)
def test_a_model_that_nothing_is_computed_in_float8_of_is_refused(
    model: Callable[[], nn.Module], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words), prepared(model, **options):
        pass


class Doubled(nn.Linear):
    """A subclass of Linear that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_layers_with_a_forward_of_their_own_keep_it() -> None:
    torch.manual_seed(0)
    own, patched = nn.Sequential(Doubled(16, 16), nn.Linear(16, 16)), two_layers()
    patched[1].forward = lambda x: x[:, :16] + 1  # type: ignore[method-assign]
    in_bf16 = outputs(own, "bf16")
    plain = 2 * nn.functional.linear(inputs(16), own[0].weight, own[0].bias)
    expected = nn.functional.linear(plain, own[1].weight, own[1].bias)
    torch.testing.assert_close(outputs(own, float8_skip="").float(), expected, rtol=0.2, atol=0.2)
    torch.testing.assert_close(in_bf16.float(), expected, rtol=0.02, atol=0.02)
    hidden = outputs(nn.Sequential(patched[0]), float8_skip="")
    assert torch.equal(outputs(patched, float8_skip=""), hidden[:, :16] + 1)


def test_a_module_forgets_the_precision_of_an_earlier_run() -> None:
    model = two_layers()
    expected = outputs(model, "bf16")
    with prepared(lambda: model):
        pass
    with prepared(lambda: model, "bf16") as engine, engine.autocast():
        assert torch.equal(engine.module(inputs(16)), expected)


# --- beside what else may be asked for ----------------------------------------------------------

SETTINGS: Mapping[str, Any] = {
    "steps": 6,
    "global_batch": 8,
    "micro_batch": 4,
    "log_every": 1,
    "optimizer.name": "torch.optim.AdamW",
    "optimizer.lr": 0.01,
    "schedule.name": "constant",
}


def losses(
    backend: str, settings: Mapping[str, Any], processes: int = 1, **arguments: Any
) -> list[float]:
    """Return the losses of the language model's training, one for each step."""
    # a busy machine takes minutes to compile the emulation to machine code
    subject = Subject(backend, processes, EMULATED, timeout_seconds=500.0)
    reported = subject.run(
        run, problem="language", samples=22, settings={**SETTINGS, **settings}, **arguments
    )
    return [line["loss"] for line in reported[0]["logged"]]


IN_FLOAT8 = {"precision": "float8"}


def test_recomputed_activations_are_the_same() -> None:
    """Require that recomputed activations are equal. The recomputed linear layers keep their class
    in float8.
    """
    again = losses("cpu", {**IN_FLOAT8, "activation_checkpointing": ["Linear"]})
    assert again == losses("cpu", IN_FLOAT8)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_computes_the_same(backend: str) -> None:
    seen = losses("cpu", {**IN_FLOAT8, "compile": True, "compile_options": {"backend": backend}})
    assert seen == pytest.approx(losses("cpu", IN_FLOAT8), rel=2 * ROUNDING["bf16"])


def test_adapters_learn_beside_layers_in_float8() -> None:
    with prepared(lambda: lora(two_layers(), "0", rank=4), float8_skip="0") as engine:
        engine.param_groups[0]["lr"] = 0.1
        frozen = engine.module[1].weight.detach().clone()  # type: ignore[index]
        with engine.microbatch(True), engine.autocast():
            loss = engine.module(inputs(16)).float().square().sum()
        engine.backward(loss, torch.tensor(1.0))
        before = engine.module[0].lora_b.detach().clone()  # type: ignore[index]
        assert engine.update().applied
        assert not torch.equal(engine.module[0].lora_b, before)  # type: ignore[index]
        assert torch.equal(engine.module[1].weight, frozen)  # type: ignore[index]


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writer", "reader"),
    [(("fsdp", 2), ("cpu", 1)), pytest.param(("cpu", 1), ("ddp", 2), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("other", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_checkpoints_do_not_know_of_it(
    writer: tuple[str, int], reader: tuple[str, int], other: str, tmp_path: Path
) -> None:
    """Save in float8 and resume in another precision on another driver, and the other way round.
    Losses must stay near those of the run that saved, which continued in its own precision.
    """
    for number, (first, second) in enumerate([("float8", other), (other, "float8")]):
        out = str(tmp_path / str(number))
        saving = {"precision": first, "checkpoint.every": 3, "checkpoint.keep_last": 9}
        straight = losses(writer[0], saving, writer[1], out=out)
        source = next(Path(out, "checkpoints").glob("*3"))
        entries = CheckpointReader(source)
        kept = {entries.info("weights", name).dtype for name in entries.names("weights")}
        assert kept == {torch.float32}
        resumed = losses(reader[0], {"precision": second}, reader[1], resume=str(source))
        assert resumed == pytest.approx(straight[3:], rel=4 * ROUNDING["float8"])
        same = losses(reader[0], {"precision": first}, reader[1], resume=str(source))
        assert same == pytest.approx(straight[3:], rel=ROUNDING["float8"])
        assert resumed != same


# --- what is refused ----------------------------------------------------------------------------


def refusal(backend: str, **options: Any) -> str:
    driver = find_driver(backend)
    plan = Plan(precision=PRECISIONS["float8"], options=driver.options_type(**options))
    with pytest.raises(CapabilityRefused) as refused:
        refuse_unpromised(driver, plan)
    assert refused.value.capability == "precisions"
    return str(refused.value)


@pytest.mark.parametrize("backend", ["cpu", "ddp", "fsdp", "mesh"])
def test_a_cpu_is_not_made_slow_without_a_word(backend: str) -> None:
    assert f"{backend!r} refuses precision float8" in refusal(backend)
    assert "backend.float8_emulated=true" in refusal(backend)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_an_old_card_is_refused(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    driver = find_driver("fsdp")
    if capability < (8, 9):
        assert "compute capability 8.0, and it needs 8.9" in refusal("fsdp")
    else:
        refuse_unpromised(driver, Plan(precision=PRECISIONS["float8"]))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'drivetrain[float8]'" in refusal("cpu", float8_emulated=True)


def test_partitioned_layers_are_refused() -> None:
    assert "backend.tensor=1" in refusal("mesh", float8_emulated=True, tensor=2)


@pytest.mark.parametrize("backend", ["deepspeed", "xla", "ipex", "xpu"])
def test_other_drivers_refuse_it(backend: str) -> None:
    assert "it trains in bf16, " in refusal(backend)


# --- as on a card -------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("tokens", [7, 16])
def test_a_card_takes_the_shapes_of_all_products(scaling: Any, tokens: int) -> None:
    """Compute on tensors without data, which pass the checks of `torch._scaled_mm` on CUDA. That
    function sums over multiples of 16 only, so tokens are padded to one.
    """
    options = Float8Options(float8_skip=(), float8_scaling=scaling)
    with FakeTensorMode(), torch.device("cuda"):
        module, x = nn.Linear(32, 48, bias=False), torch.randn(tokens, 32)
        compute_in_float8(module, Plan(precision=PRECISIONS["float8"], options=options))
        with autocast_of_cuda():
            output = module(x)
        assert (output.shape, output.dtype) == ((tokens, 48), torch.bfloat16)
        assert output.grad_fn is not None
        # the engine of autograd would ask for a card
        by_input, by_weight, *_ = output.grad_fn.apply(torch.empty_like(output))  # type: ignore[attr-defined]
    assert (by_input.shape, by_weight.shape) == ((tokens, 32), (32, 48))


@contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """Replace `torch.autocast`, which does nothing without a GPU."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
