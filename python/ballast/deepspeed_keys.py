"""The table from which `import_deepspeed()` takes its treatment of each DeepSpeed key.

A row applies to its key, and for each key below it that has no row of its own. `tests/python/test_deepspeed_keys.py`
compares the table with the keys and the defaults in DeepSpeed's source.
"""

from __future__ import annotations

from typing import Any, NamedTuple

VERSION = "0.19.8"  # of DeepSpeed


class Carried(NamedTuple):
    """A key that becomes an option of `wrap()`, or an item of `to_do`."""

    default: Any = None  # DeepSpeed's default
    if_auto: str = ""  # what the user does if the value is "auto"; empty: the import is refused
    unused: str = "this configuration does not use it"  # the reason, if other keys switch it off


class Dropped(NamedTuple):
    """A key that is not carried over."""

    why: str
    off_by_default: bool = False  # then False, 0, null and an empty section are not reported


Rows = dict[str, Carried | Dropped]


def feature(why: str) -> Dropped:
    """Return the row of a feature that is off unless the key switches it on."""
    return Dropped(why, off_by_default=True)


def below(section: str, rows: Rows) -> Rows:
    """Return the rows with the section in front of their keys."""
    return {f"{section}.{key}": row for key, row in rows.items()}


UNKNOWN = Dropped(f"neither DeepSpeed {VERSION} nor Ballast knows this key")
ALWAYS_ON = Dropped("always on in Ballast")
PLANNED = Dropped("the plan decides it, from the order of use")
KEPT_GATHERED = Dropped("wrap(keep_gathered=...) sets the memory in which parameters stay from forward to backward")
GATHERING = feature("the plan decides how parameters are gathered")
SUMMED_IN_FP32 = "gradients are summed over ranks in fp32, and averaged after that"
STATE_FORMAT = "wrap(state_format=...) sets the format of masters and optimizer state"
CHECKPOINTS = "ballast.save() and ballast.load_checkpoint() have one format, for any number of ranks"
DATA = "sampling, ordering and batching of data stay with the training script"
MODEL_PARALLEL = "the model brings its own parallelism; see process_group and norm_group of wrap()"
UNQUANTIZED = feature("parameters and gradients are not quantized")
TIMELINE = feature("wrap(timeline=True) and optimizer.write_timeline(path) show what ran when")
METRICS = feature("log optimizer.metrics() yourself")
DEBUGGING = feature("it looks into DeepSpeed's own engine")
REMOVED = feature(f"DeepSpeed {VERSION} has removed it, and Ballast does not have it")
CHECKPOINTED_ACTIVATIONS = feature("call torch.utils.checkpoint in the model yourself")
TRAINER = "the Trainer's is TrainingArguments."

TOP_LEVEL: Rows = {
    "train_batch_size": Carried(if_auto="choose the batch of all ranks together"),
    "train_micro_batch_size_per_gpu": Carried(
        if_auto=f"choose the batch of each rank; {TRAINER}per_device_train_batch_size"
    ),
    "gradient_accumulation_steps": Carried(
        if_auto=f"choose how many backward passes each step() takes; {TRAINER}gradient_accumulation_steps"
    ),
    "gradient_clipping": Carried(1.0, if_auto=f"pass max_grad_norm=... to wrap(); {TRAINER}max_grad_norm"),
    "managed_gradient_accumulation": Dropped("each step() updates: call it after the last backward pass"),
    "communication_data_type": Dropped(SUMMED_IN_FP32),
    "prescale_gradients": feature(SUMMED_IN_FP32),
    "gradient_predivide_factor": Dropped(SUMMED_IN_FP32),
    "gradient_allreduce_op": Dropped("gradients are averaged: for their sum multiply the loss by the number of ranks"),
    "disable_allgather": feature("each rank always gets the updated parameters"),
    "allgather_size": PLANNED,
    "zero_allow_untested_optimizer": feature("optimizers that are not known are refused, but for elementwise=True"),
    "zero_force_ds_cpu_optimizer": Dropped("the same update runs wherever the state is"),
    "aio": Dropped("drives are read and written through io_uring; `ballast doctor --drive` measures them"),
    "steps_per_print": Dropped("print optimizer.metrics() when you like"),
    "wall_clock_breakdown": TIMELINE,
    "flops_profiler": TIMELINE,
    "comms_logger": TIMELINE,
    "timers": TIMELINE,
    "memory_breakdown": feature("optimizer.memory() shows what is kept where"),
    "tensorboard": METRICS,
    "wandb": METRICS,
    "csv_monitor": METRICS,
    "comet": METRICS,
    "dump_state": DEBUGGING,
    "log_level": DEBUGGING,
    "disable_python_gc": feature("call gc.disable() yourself"),
    "vocabulary_size": Dropped("DeepSpeed warns of odd sizes, and does nothing else with it"),
    "dataloader_drop_last": feature(DATA),
    "data_efficiency": feature(DATA),
    "activation_checkpointing": CHECKPOINTED_ACTIVATIONS,
    "activation_checkpointing.partition_activations": CHECKPOINTED_ACTIVATIONS,
    "activation_checkpointing.number_checkpoints": CHECKPOINTED_ACTIVATIONS,
    "activation_checkpointing.contiguous_memory_optimization": CHECKPOINTED_ACTIVATIONS,
    "activation_checkpointing.cpu_checkpointing": CHECKPOINTED_ACTIVATIONS,
    "activation_checkpointing.synchronize_checkpoint_boundary": CHECKPOINTED_ACTIVATIONS,
    "activation_checkpointing.profile": CHECKPOINTED_ACTIVATIONS,
    "checkpoint": Dropped(CHECKPOINTS),
    "datastates_ckpt": feature(CHECKPOINTS),
    "torch_autocast": feature("run the forward pass inside of torch.autocast() yourself"),
    "data_types.grad_accum_dtype": Dropped("wrap(gradient_format=...) sets the format of summed gradients"),
    "data_types.param_dtype": Dropped("bf16.enabled and fp16.enabled set it"),
    "data_types.buffer_dtype": Dropped("cast the model's buffers yourself"),
    "data_types.keep_in_fp32_modules": Dropped("cast the model's buffers yourself"),
    "compile": Dropped("call torch.compile() yourself"),
    "hybrid_engine": feature("optimizer.offload() and optimizer.reload() free the device for another engine"),
    "autotuning": feature('`ballast plan` and wrap(stage="auto") choose'),
    "weight_quantization": Dropped(UNQUANTIZED.why),
    "pipeline": Dropped(MODEL_PARALLEL),
    "tensor_parallel": Dropped(MODEL_PARALLEL),
    "expert_parallel": feature(MODEL_PARALLEL),
    "use_data_before_expert_parallelism": feature(MODEL_PARALLEL),
    "data_parallel_size": Dropped(MODEL_PARALLEL),
    "sequence_parallel_size": Dropped(MODEL_PARALLEL),
    "seq_parallel_communication_data_type": Dropped(MODEL_PARALLEL),
    "amp": REMOVED,
    "compression_training": REMOVED,
    "curriculum_learning": REMOVED,
    "eigenvalue": REMOVED,
    "elasticity": REMOVED,
    "graph_harvesting": REMOVED,
    "nebula": REMOVED,
    "progressive_layer_drop": REMOVED,
    "quantize_training": REMOVED,
    "sparse_attention": REMOVED,
    "sparse_gradients": REMOVED,
}

ZERO: Rows = {
    "stage": Carried(0),
    "cpu_offload": Carried(unused="offload_optimizer sets it"),  # older names of offload_optimizer and offload_param
    "cpu_offload_param": Carried(unused="offload_param sets it, or the stage is below 3"),
    "cpu_offload_use_pin_memory": PLANNED,
    "overlap_comm": ALWAYS_ON,
    "contiguous_gradients": ALWAYS_ON,
    "reduce_scatter": ALWAYS_ON,
    "allgather_partitions": ALWAYS_ON,
    "use_multi_rank_bucket_allreduce": PLANNED,
    "round_robin_gradients": feature("gradients are reduced as they come"),
    "reduce_bucket_size": PLANNED,
    "allgather_bucket_size": PLANNED,
    "sub_group_size": PLANNED,
    "parameter_alignment": feature("the plan decides how parameters are laid out"),
    "compute_grad_norm": Dropped("optimizer.metrics() has the norm of each step"),
    "ignore_unused_parameters": Dropped("unused parameters have gradients of zero"),
    "load_from_fp32_weights": Dropped(CHECKPOINTS),
    "elastic_checkpoint": feature(CHECKPOINTS),
    "pipeline_loading_checkpoint": feature(CHECKPOINTS),
    "legacy_stage1": REMOVED,
    "zenflow": Dropped("each step updates all elements"),
    "zero_hpz_partition_size": Dropped('wrap(replicas="host") keeps a copy of the parameters in each host'),
    "zero_quantized_weights": UNQUANTIZED,
    "zero_quantized_nontrainable_weights": UNQUANTIZED,
    "zero_quantized_gradients": UNQUANTIZED,
    "memory_efficient_linear": Dropped("modules stay as they are"),
    "override_module_apply": Dropped("call model.apply() inside of ballast.gather(model)"),
    "leaf_module": Dropped("wrap(units=[...]) names the modules whose parameters are gathered together"),
    "log_trace_cache_warnings": DEBUGGING,
    "enable_sanity_checks": DEBUGGING,
    "save_muon_momentum_buffer_in_memory": feature('wrap(offload={"state": ...}) places it with the rest of the state'),
    "mics_shard_size": REMOVED,
    "mics_hierarchical_params_gather": REMOVED,
    "zeropp_loco_param": REMOVED,
    "stage3_gather_fp16_weights_on_model_save": feature("ballast.export(model, path) gathers them unit by unit"),
}
STAGE3: Rows = {  # with and without the prefix "stage3_"
    "prefetch_bucket_size": Dropped("wrap(prefetch=...) sets how many units are gathered ahead"),
    "param_persistence_threshold": PLANNED,
    "model_persistence_threshold": PLANNED,
    "max_live_parameters": KEPT_GATHERED,
    "max_reuse_distance": KEPT_GATHERED,
    "module_granularity_threshold": PLANNED,
    "gather_16bit_weights_on_model_save": feature("ballast.export(model, path) gathers them unit by unit"),
    "use_all_reduce_for_fetch_params": GATHERING,
    "allgather_sequential": GATHERING,
}
OFFLOAD: Rows = {
    "nvme_path": Carried(unused="the device is not nvme"),
    "pin_memory": PLANNED,
    "buffer_count": PLANNED,
}
OFFLOAD_OPTIMIZER: Rows = {
    **OFFLOAD,
    "device": Carried("none", unused="stage 0 does not partition state"),
    "pipeline_read": feature(PLANNED.why),
    "pipeline_write": feature(PLANNED.why),
    "fast_init": feature(PLANNED.why),
    "ratio": Dropped('wrap(offload={"state": {"device": 0.2, "host": 0.8}}) divides state between tiers'),
    "super_offload": feature(PLANNED.why),
    "cpuadam_cores_perc": Dropped("wrap(threads=...) limits the threads of updates on the host"),
}
OFFLOAD_PARAM: Rows = {
    **OFFLOAD,
    "device": Carried("none", unused="parameters are partitioned in stage 3 only"),
    "buffer_size": PLANNED,
    "max_in_cpu": PLANNED,
}

BF16: Rows = {
    "enabled": Carried(False, if_auto=f"choose whether to cast the model's parameters to bfloat16; {TRAINER}bf16"),
    "immediate_grad_update": feature("gradients are reduced as they come"),
    "check_grad_overflow": ALWAYS_ON,
    "bf16_master_weights_and_grads": feature(STATE_FORMAT),
    "bf16_optimizer_states": feature(STATE_FORMAT),
}
OF_SCALER = Carried(unused="it is for torch.amp.GradScaler, if parameters are float16")
FP16: Rows = {
    "enabled": Carried(
        False, if_auto=f"choose whether to cast the model's parameters to float16, with torch.amp.GradScaler; {TRAINER}fp16"
    ),
    "loss_scale": OF_SCALER._replace(default=0, if_auto="choose init_scale of torch.amp.GradScaler"),
    "initial_scale_power": OF_SCALER._replace(default=16, if_auto="choose init_scale of torch.amp.GradScaler"),
    "loss_scale_window": OF_SCALER._replace(default=1000, if_auto="choose growth_interval of torch.amp.GradScaler"),
    "hysteresis": Dropped("GradScaler lowers its scale at every overflow"),
    "consecutive_hysteresis": feature("GradScaler lowers its scale at every overflow"),
    "min_loss_scale": Dropped("GradScaler has no least scale"),
    "auto_cast": feature("cast inputs yourself, as the parameters are"),
    "fp16_master_weights_and_grads": feature(STATE_FORMAT),
}

ARGUMENT = Carried(if_auto="pass a value to the optimizer", unused="this optimizer does not have the argument")
OPTIMIZER: Rows = {
    "type": Carried(if_auto="choose the optimizer"),
    "params": ARGUMENT,
    "params.lr": ARGUMENT._replace(if_auto=f"pass lr=... to the optimizer; {TRAINER}learning_rate"),
    "params.betas": ARGUMENT._replace(if_auto=f"pass betas=... to the optimizer; {TRAINER}adam_beta1 and adam_beta2"),
    "params.eps": ARGUMENT._replace(if_auto=f"pass eps=... to the optimizer; {TRAINER}adam_epsilon"),
    "params.weight_decay": ARGUMENT._replace(if_auto=f"pass weight_decay=... to the optimizer; {TRAINER}weight_decay"),
    "params.adam_w_mode": ARGUMENT._replace(default=True, if_auto="choose torch.optim.AdamW or torch.optim.Adam"),
    "params.torch_adam": ARGUMENT._replace(default=False, if_auto="choose weight_decay: torch's AdamW has 0.01, DeepSpeed's 0"),
    "params.bias_correction": Dropped("torch's optimizers always do"),
    "params.set_grad_none": Dropped("optimizer.zero_grad() takes set_to_none"),
    "params.fp32_optimizer_states": Dropped(STATE_FORMAT),
    "params.max_grad_norm": Dropped("DeepSpeed refuses it here: gradient_clipping sets it"),
    "params.adamw_mode": Dropped("adam_w_mode sets it"),
    "legacy_fusion": feature("it selects a kernel of DeepSpeed"),
}
SCHEDULER: Rows = {
    "type": Carried(if_auto="choose the learning rate scheduler"),
    "params": Carried(if_auto="choose it; the Trainer computes it", unused="the scheduler has no type"),
}

KEYS: Rows = {
    **TOP_LEVEL,
    **below("zero_optimization", {**ZERO, **STAGE3, **{f"stage3_{key}": row for key, row in STAGE3.items()}}),
    **below("zero_optimization.offload_optimizer", OFFLOAD_OPTIMIZER),
    **below("zero_optimization.offload_param", OFFLOAD_PARAM),
    **below("bf16", BF16),
    **below("bfloat16", BF16),  # the older name
    **below("fp16", FP16),
    **below("optimizer", OPTIMIZER),
    **below("scheduler", SCHEDULER),
}


def row_of(key: str) -> Carried | Dropped:
    """Return the row of the key, or else that of the nearest key above it.

    >>> row_of("flops_profiler.enabled") is KEYS["flops_profiler"]
    True
    >>> row_of("zero_optimization.stages") is UNKNOWN
    True
    """
    while key and key not in KEYS:
        key = key.rpartition(".")[0]
    return KEYS.get(key, UNKNOWN)


def is_section(key: str) -> bool:
    """Return whether keys below this one have rows.

    >>> is_section("bf16"), is_section("gradient_clipping")
    (True, False)
    """
    return any(known.startswith(f"{key}.") for known in KEYS)
