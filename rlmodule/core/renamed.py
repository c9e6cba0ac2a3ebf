"""Words of earlier versions and of other frameworks, and ours: an error names the key to use.

A key of an earlier version is refused for one version, never read in silence. Leaves out keys that are misspelt
(``errors.did_you_mean``).
"""

from __future__ import annotations

from collections.abc import Mapping

# Earlier keys, whole or the first parts of them -> today's.
EARLIER_KEYS: Mapping[str, str] = {
    "task": "command",
    "parity": "command",
    "parity.longest": "command.max_length",
    "command.longest": "command.max_length",
    "warm_start.shared": "warm_start.cache_dir",
    "data.task": "environment",
    "data.task_args": "environment",
    "logger.name": "logger",
    "callbacks.samples.text_rows": "callbacks.samples.num_text_samples",
}

# Field -> earlier value -> what to write today.
EARLIER_VALUES: Mapping[str, Mapping[str, str]] = {
    "old_logprob": {"sampler": "algorithm.old_logprob=rollout"},
    "value": {"only": "model.kind=reward_model"},
}

# Metric of an earlier version, where a run logs none of that name -> today's.
EARLIER_METRICS: Mapping[str, str] = {
    "val/accuracy": "val/reward/mean, which is logged whatever rewards are; accuracy is where all are 0 or 1",
}

# What a value of the wrong type is most likely meant to be.
HINTS: Mapping[str, str] = {
    "trainer.devices": "It is the number of processes on this machine: trainer.devices=1",
}

# What other trainers call it: Hugging Face and TRL, Lightning, verl, OpenRLHF.
FOREIGN_KEYS: Mapping[str, str] = {
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.max_grad_norm",
    "gradient_clip_val": "optimizer.max_grad_norm",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "num_generations": "rollout.n",
    "n_samples_per_prompt": "rollout.n",
    "group_size": "rollout.n",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "max_completion_length": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "max_tokens": "data.max_response_length",
    "generate_max_len": "data.max_response_length",
    "max_prompt_length": "data.max_prompt_length",
    "prompt_max_len": "data.max_prompt_length",
    "batch_size": "batching.mini_batch_size",
    "train_batch_size": "algorithm.train_batch_size",
    "per_device_train_batch_size": "batching.mini_batch_size",
    "gradient_accumulation_steps": "batching.max_token_len_per_gpu",
    "micro_train_batch_size": "batching.micro_batch_size_per_gpu",
    "ppo_mini_batch_size": "batching.mini_batch_size",
    "ppo_micro_batch_size_per_gpu": "batching.micro_batch_size_per_gpu",
    "ppo_max_token_len_per_gpu": "batching.max_token_len_per_gpu",
    "use_dynamic_bsz": "batching.use_dynamic_bsz",
    "ulysses_sequence_parallel_size": "strategy.sp_size",
    "sp_size": "strategy.sp_size",
    "cp_size": "strategy.cp_size",
    "context_parallel_size": "strategy.cp_size",
    "ep_size": "strategy.ep_size",
    "expert_model_parallel_size": "strategy.ep_size",
    "pp_size": "strategy.pp_size",
    "pipeline_model_parallel_size": "strategy.pp_size",
    "tp_size": "strategy.tp_size",
    "tensor_model_parallel_size": "strategy.tp_size",
    "num_train_epochs": "trainer.max_epochs",
    "epochs": "trainer.max_epochs",
    "max_epochs": "trainer.max_epochs",
    "max_steps": "trainer.max_epochs",
    "total_epochs": "trainer.max_epochs",
    "num_iterations": "algorithm.ppo_epochs",
    "ppo_epochs": "algorithm.ppo_epochs",
    "beta": "algorithm.kl_loss_coef",
    "kl_coef": "algorithm.kl_loss_coef",
    "init_kl_coef": "algorithm.kl_loss_coef",
    "epsilon": "loss.clip_ratio_low",
    "epsilon_high": "loss.clip_ratio_high",
    "clip_ratio": "loss.clip_ratio_low",
    "cliprange": "loss.clip_ratio_low",
    "loss_type": "loss",
    "adv_estimator": "advantage",
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "pretrain": "model.path",
    "lora_r": "model.lora.r",
    "lora_rank": "model.lora.r",
    "lora_alpha": "model.lora.alpha",
    "torch_dtype": "model.precision",
    "dtype": "model.precision",
    "bf16": "model.precision",
    "precision": "model.precision",
    "gradient_checkpointing": "model.activation_checkpointing",
    "dataset": "data.train_files",
    "dataset_name": "data.train_files",
    "train_files": "data.train_files",
    "val_files": "data.val_files",
    "eval_dataset": "data.val_files",
    "val_kwargs": "val",
    "eval_n_samples_per_prompt": "val.n",
    "n_val": "val.n",
    "devices": "trainer.devices",
    "n_gpus_per_node": "trainer.devices",
    "num_gpus": "trainer.devices",
    "num_processes": "trainer.devices",
    "nnodes": "trainer.num_nodes",
    "num_nodes": "trainer.num_nodes",
    "accelerator": "trainer.accelerator",
    "save_steps": "callbacks.checkpoint.every_n_iterations",
    "save_freq": "callbacks.checkpoint.every_n_iterations",
    "eval_steps": "callbacks.validation.every_n_iterations",
    "test_freq": "callbacks.validation.every_n_iterations",
    "ckpt_path": "resume",
    "resume_from_checkpoint": "resume",
    "resume_mode": "resume",
    "output_dir": "run_dir",
    "default_local_dir": "run_dir",
    "logging_dir": "run_dir",
    "report_to": "logger",
    "wandb": "logger",
    "reward_funcs": "reward",
    "reward_model_path": "reward",
    "random_seed": "seed",
}

# Sections of other frameworks whose keys end in a word of the table above.
FOREIGN_SECTIONS = ("actor_rollout_ref", "actor", "ref", "trainer_args", "training_args", "args", "grpo", "ppo")


def todays_key(key: str) -> str | None:
    """The key of ours that ``key`` of an earlier version or of another framework stands for; None where none does."""
    for length in range(key.count(".") + 1, 0, -1):
        head, rest = ".".join(key.split(".")[:length]), ".".join(key.split(".")[length:])
        if head in EARLIER_KEYS:
            return f"{EARLIER_KEYS[head]}.{rest}" if rest else EARLIER_KEYS[head]
    first, _, _ = key.partition(".")
    if key in FOREIGN_KEYS or first in FOREIGN_SECTIONS:
        return FOREIGN_KEYS.get(key.rpartition(".")[2])
    return None


def instead_of(key: str) -> str | None:
    """A sentence that names today's key for another one; None where there is no such word."""
    found = todays_key(key)
    if found is None or found == key:
        return None
    return f"It is called {found} here: {found}=..."
