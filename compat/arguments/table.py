"""Who applies each argument. What a driver does with it, `backend` is asked.

`docs/compat-arguments.md` is made from both, and a test holds that a module named here reads the
argument.
"""

from __future__ import annotations

__all__ = ["APPLIED_BY", "SCRIPTS_ONLY"]

SCRIPTS_ONLY = ("do_train", "do_eval", "do_predict", "resume_from_checkpoint")
"""Read by scripts; the Trainer is told by its methods."""

_MODULES: dict[str, str] = {
    "accelerator.py": "accelerator_config",
    "arguments/backend.py": """backend backend_options bf16 ddp_timeout deepspeed fp16 fsdp
        local_rank torch_compile torch_compile_backend torch_compile_mode use_cpu""",
    "arguments/fsdp.py": "fsdp_config",
    "arguments/members.py": """log_level log_level_replica log_on_each_node
        per_device_eval_batch_size per_device_train_batch_size save_on_each_node warmup_steps""",
    "arguments/options.py": """ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
        ddp_find_unused_parameters ddp_static_graph parallelism_config sortish_sampler""",
    "arguments/settle.py": "tf32",
    "checkpoints.py": "checkpoint_format save_only_model save_total_limit",
    "trainer/step_callbacks.py": "logging_nan_inf_filter",
    "debugging.py": "debug",
    "evaluation.py": """batch_eval_metrics eval_accumulation_steps eval_do_concat_batches
        eval_use_gather_object greater_is_better include_for_metrics metric_for_best_model
        prediction_loss_only""",
    "flow.py": "eval_delay eval_strategy logging_first_step logging_strategy save_strategy",
    "hub.py": """hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy
        hub_token""",
    "loading.py": """data_seed dataloader_drop_last dataloader_in_order
        dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
        dataloader_pin_memory dataloader_prefetch_factor length_column_name remove_unused_columns
        train_sampling_strategy""",
    "optim/inside.py": "optim_target_modules",
    "optim/request.py": "adam_beta1 adam_beta2 adam_epsilon learning_rate",
    "optim/table.py": "optim optim_args",
    "optimization.py": "lr_scheduler_kwargs lr_scheduler_type profile weight_decay",
    "preparation.py": """activation_checkpointing activation_checkpointing_kwargs bf16_full_eval
        fp16_full_eval gradient_checkpointing gradient_checkpointing_kwargs liger_kernel_config
        use_liger_kernel""",
    "reporting.py": "include_num_input_tokens_seen",
    "resuming.py": "restore_callback_states_from_checkpoint",
    "seq2seq.py": """generation_config generation_max_length generation_num_beams
        predict_with_generate""",
    "state.py": "eval_steps logging_steps save_steps",
    "trackers.py": """disable_tqdm project report_to run_name trackio_bucket_id trackio_space_id
        trackio_static_space_id""",
    "trainer.py": """full_determinism label_names label_smoothing_factor neftune_noise_alpha
        output_dir push_to_hub seed skip_memory_metrics use_cache""",
    "training.py": """auto_find_batch_size average_tokens_across_devices enable_jit_checkpoint
        eval_on_start gradient_accumulation_steps ignore_data_skip load_best_model_at_end
        max_grad_norm max_steps num_train_epochs torch_empty_cache_steps""",
}

APPLIED_BY: dict[str, str] = {
    name: module for module, names in _MODULES.items() for name in names.split()
}
"""Argument -> the module of `drivetrain.compat` that applies it, or that hands it on."""
