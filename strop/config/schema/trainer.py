"""The `trainer` section and what belongs to the machine: Ray and profiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.config.schema.fields import inert, section, setting
from strop.config.schema.model import TorchMemoryTool


@dataclass(eq=False)
class AsyncTraining:
    """Sampling that runs ahead of training. Read by config/asynchrony.py for trainer/window.py; docs/async_training.md."""

    enable: bool = setting(False)
    """Sample and train side by side: the engine has a copy of the weights, and makes answers for later steps while the models
    learn."""
    max_policy_age: int = setting(1, at_least=0)
    """Weight updates of the engine that an answer may be old when it is trained on: 1 is one step off policy, 0 the
    synchronous loop, bit for bit."""
    staleness_threshold: float | None = setting(None, at_least=0)
    """The same bound as a share: (1 + threshold) times the prompts that are trained on between two weight updates may be begun
    between them. Null: max_policy_age."""
    partial_rollout: bool = setting(False)
    """Interrupt answers at a weight update and go on with them under the new weights; false waits for their end. Without
    `enable`: a step ends when its own answers are whole, and those begun for later steps are interrupted and kept."""
    trigger_parameter_sync_step: int = setting(1, at_least=1)
    """Training steps from one weight update of the engine to the next."""
    require_batches: int | None = setting(None, at_least=1)
    """Mini-batches of ppo_mini_batch_size prompts that make a training step. Null: as many as data.train_batch_size holds."""
    use_rollout_log_probs: bool = setting(True)
    """Learn against the policy that sampled. False: as if the weights of the step had sampled all of it."""
    compute_prox_log_prob: bool = setting(True)
    """How: true computes log-probs under the weights of the step, for clipping, and weighs tokens by their ratio to the
    engine's (decoupled PPO; algorithm.rollout_correction says how, by default rollout_is=token). False clips around the
    engine's log-probs, which saves a forward pass and bears less age."""


@dataclass(eq=False)
class Trainer:
    """The run: how long, where it reports, what it keeps. Read by trainer/ and run/."""

    total_epochs: int = setting(30, at_least=1)
    """Passes over the training rows."""
    total_training_steps: int | None = setting(None, at_least=1)
    """Stop after this many steps instead."""
    project_name: str = setting("strop")
    """Name of the project in trackers and paths."""
    experiment_name: str = setting("default")
    """Name of the run in trackers and paths."""
    logger: str | list[str] = setting(["console", "file"])
    """Where metrics go: console, file (jsonl), csv, tensorboard, wandb, swanlab, mlflow, trackio."""
    log_val_generations: int = setting(0, at_least=0)
    """Validation samples sent to trackers each time."""
    rollout_data_dir: str | None = None
    """Folder for a jsonl dump of every training rollout."""
    validation_data_dir: str | None = None
    """Folder for a jsonl dump of every validation rollout."""
    samples_to_keep: int = setting(128, at_least=0)
    """Samples per step, of training and of validation each, that stay in default_local_dir/samples for `strop board`, with the
    numbers of every token: whole groups, spread evenly over the step. About 15 bytes per token on the disk. 0: none."""
    health: bool = setting(True)
    """Watch the metrics for signs of a run that goes wrong: alerts on the console and in alerts.jsonl."""
    seed: int = setting(1)
    """Seeds everything: order of rows, sampling, initial heads, shuffles."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda", "npu"))
    """auto: a GPU where there is one."""
    memory_check: str = setting("refuse", choices=("refuse", "warn", "off"))
    """Before a run, compare what the planner forecasts (`strop plan`) with the memory of this machine's devices. refuse: do not
    start what lacks memory beyond doubt; warn: only say so."""
    runtime: str = setting("auto", choices=("auto", "local", "ray"))
    """local: processes on this machine; ray: a cluster; auto: ray when nnodes > 1."""
    nnodes: int = setting(1, at_least=1)
    """Machines."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices per machine (processes, on CPUs)."""
    save_freq: int = setting(-1)
    """Save every so many STEPS, and at the end. 0 or less: never."""
    test_freq: int = setting(-1)
    """Validate every so many STEPS, and at the end. 0 or less: only before training."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    critic_warmup: int = setting(0, at_least=0)
    """The actor is first updated in this step; earlier steps train the critic alone."""
    balance_batch: bool = True
    """Spread long and short sequences evenly over devices."""
    default_local_dir: str = setting("checkpoints/${trainer.project_name}/${trainer.experiment_name}")
    """Folder of the run: checkpoints, metrics, samples."""
    default_hdfs_dir: str | None = None
    """Any fsspec address to which checkpoints are copied."""
    resume_mode: str = setting("auto", choices=("auto", "disable", "resume_path"))
    """auto: go on from the latest checkpoint in default_local_dir, if any; disable; resume_path: from resume_from_path."""
    resume_from_path: str | None = None
    """A global_step_N folder."""
    max_actor_ckpt_to_keep: int | None = setting(None, at_least=1)
    """Checkpoints of the actor to keep. Null: all."""
    max_critic_ckpt_to_keep: int | None = setting(None, at_least=1)
    """Checkpoints of the critic to keep. Null: all."""
    max_ckpt_mem_gb: float | None = setting(None, above=0)
    """Delete the oldest checkpoints beyond this size."""
    best_metric: str | None = setting(None)
    """Never delete the checkpoint that is best by this validation metric."""
    remove_previous_ckpt_in_save: bool = False
    """Keep only the newest checkpoint."""
    del_local_ckpt_after_load: bool = False
    """Delete a checkpoint once it is loaded."""
    esi_redundant_time: float = setting(0, at_least=0)
    """Seconds to spare when a rented machine's end is near and a checkpoint is due."""
    enable_ema: bool = setting(False)
    """Keep an exponential average of the actor's weights, saved beside it."""
    ema_beta: float = setting(0.992, at_least=0, at_most=1)
    """Weight of the past in that average."""
    async_training: AsyncTraining = section(AsyncTraining)
    """Rollouts that run ahead."""
    max_restarts: int = setting(0, at_least=0)
    """Times a run restarts by itself from the last checkpoint after a worker died or hung."""
    phase_warning: float = setting(1800.0, at_least=0)
    """Seconds after which a phase that has not ended is told of, with the stacks of its worker in workers/. 0: never."""
    phase_timeout: float = setting(0.0, at_least=0)
    """Seconds after which such a phase ends the run, or restarts it (max_restarts). 0: never."""
    ray_wait_register_center_timeout: int = setting(300, at_least=1)
    """Seconds to wait for the cluster's resources."""
    record_steps: list[int] | None = None
    """Steps stored whole, for `strop replay`."""
    wandb_proxy: str | None = None
    """Proxy for wandb alone."""
    npu_profile: dict[str, Any] = inert({}, "Ascend devices are not supported")
    """Ascend profiler."""
    use_legacy_worker_impl: str = inert("auto", "there is one implementation, with exact global loss denominators")
    """Which of two worker implementations."""


@dataclass(eq=False)
class RayKwargs:
    """Ray itself. Read by runtime/ray.py."""

    ray_init: dict[str, Any] = setting({"num_cpus": None})
    """Arguments of ray.init: num_cpus, address, runtime_env ..."""
    timeline_json_file: str | None = None
    """Write Ray's timeline here when the run ends."""


@dataclass(eq=False)
class NsysGlobal:
    discrete: bool = False
    """One capture per phase."""
    controller_nsight_options: dict[str, Any] = setting(
        {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph"}
    )
    """nsys options of the driver."""
    worker_nsight_options: dict[str, Any] = setting(
        {
            "trace": "cuda,nvtx,cublas,ucx",
            "cuda-memory-usage": "true",
            "cuda-graph-trace": "graph",
            "capture-range": "cudaProfilerApi",
            "capture-range-end": None,
            "kill": "none",
        }
    )
    """nsys options of the workers."""


@dataclass(eq=False)
class TorchMemoryGlobal(TorchMemoryTool):
    context: str = "all"
    """Which allocations keep a stack."""
    stacks: str = "all"
    """Python stacks, C++ stacks or both."""
    kw_args: dict[str, Any] = setting({})
    """Further arguments of the recorder."""


@dataclass(eq=False)
class GlobalToolConfig:
    nsys: NsysGlobal = section(NsysGlobal)
    """Nsight Systems."""
    torch_memory: TorchMemoryGlobal = section(TorchMemoryGlobal)
    """Allocator snapshots."""


@dataclass(eq=False)
class GlobalProfiler:
    """Which tool profiles which steps. Read by run/profile.py."""

    tool: str | None = setting(None, choices=(None, "nsys", "npu", "torch", "torch_memory"))
    """Tool."""
    steps: list[int] | None = None
    """Steps to profile."""
    profile_continuous_steps: bool = False
    """Neighbouring steps share one capture."""
    save_path: str = "outputs/profile"
    """Where traces go."""
    global_tool_config: GlobalToolConfig = section(GlobalToolConfig)
    """Settings per tool."""


@dataclass(eq=False)
class TransferQueue:
    enable: bool = inert(False, "batches already stay out of the driver")
    """Separate data plane."""
