"""Models that bitsandbytes has quantized, with adapters on them, compared with transformers'
Trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from side_by_side import LIBRARIES, arguments, assert_same_history, sentences
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

# what PEFT asks of models still has the old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

BITS = [4, 8]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small language model, to be loaded with fewer bits."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantized(stored: Path, bits: int) -> Any:
    """Return a quantized model with adapters, which alone are trained."""
    if bits == 4:
        fewer = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    else:
        fewer = BitsAndBytesConfig(load_in_8bit=True)
    model = LlamaForCausalLM.from_pretrained(stored, quantization_config=fewer, device_map="cpu")
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(2)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


def trainer(library: Any, folder: Path, model: Any, **changes: Any) -> Any:
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **changes}
    return library.Trainer(model, arguments(library, folder, **given), train_dataset=sentences())


@pytest.mark.row("N16")
@pytest.mark.parametrize("bits", BITS)
def test_adapters_on_quantized_models_train_as_theirs(
    tmp_path: Path, stored: Path, bits: int
) -> None:
    ours, theirs = (
        trainer(library, tmp_path / name, quantized(stored, bits))
        for name, library in LIBRARIES.items()
    )
    frozen = {n: p.detach().clone() for n, p in ours.model.named_parameters() if "lora" not in n}
    for each in (ours, theirs):
        each.train()
    assert_same_history(ours.state.log_history, theirs.state.log_history)
    after = dict(ours.model.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in frozen.items())
    again = trainer(LIBRARIES["ours"], tmp_path / "again", quantized(stored, bits))
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_same_history(again.state.log_history[:-1], ours.state.log_history[:-1])


@pytest.mark.row("N15")
@pytest.mark.parametrize("bits", BITS)
def test_quantized_models_stay_where_they_were_loaded_to(
    tmp_path: Path, stored: Path, bits: int
) -> None:
    made = trainer(LIBRARIES["ours"], tmp_path, quantized(stored, bits), max_steps=1)
    before = {name: weight.data_ptr() for name, weight in made.model.named_parameters()}
    made._move_model_to_device(made.model, torch.device("meta"))
    made.train()
    assert {name: weight.data_ptr() for name, weight in made.model.named_parameters()} == before
    assert not isinstance(made.model_wrapped, torch.nn.DataParallel)
