"""A script for `torchrun`: a run of transformers' own Trainer with sharded checkpoints.

On a CPU accelerate leaves FSDP and DeepSpeed out, so the script makes accelerate believe in another
device.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

KINDS: dict[str, dict[str, Any]] = {
    "zero2": {"deepspeed": 2},
    "zero3": {"deepspeed": 3},
    "fsdp": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    },
}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}


def main(kind: str, model: str, folder: str) -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    import accelerate.state
    import transformers
    from accelerate.utils import DistributedType
    from hf_files_ranks import ASKED, MODELS
    from side_by_side import losses, sentences

    state: Any = accelerate.state.PartialState
    state._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
    given = dict(KINDS[kind])
    if stage := given.get("deepspeed"):
        import deepspeed

        # all of a host's runs share its operator for shared memory, and they hang now and then
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
        given["deepspeed"] = {**DEEPSPEED, "zero_optimization": {"stage": stage}}
    args = transformers.TrainingArguments(
        output_dir=folder, report_to="none", disable_tqdm=True, logging_steps=1, **ASKED, **given
    )
    trainer = transformers.Trainer(MODELS[model](), args, train_dataset=sentences(16))
    trainer.train()
    if args.process_index == 0:
        Path(folder, "losses.txt").write_text("\n".join(map(repr, losses(trainer))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
