"""The `trainer` section, and the sections of Ray and of profiling."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.fields import MAX_SEED, FreeForm, inert, section, setting
from strop.config.schema.model import TorchMemoryToolConfig


@dataclass(eq=False)
class AsyncTrainingConfig:
    """Asynchronous training: rollouts run ahead of training."""

    enable: bool = setting(False)
    """Sample and train concurrently: the engine has its own copy of the weights, and generates responses for
    later steps during training."""
    max_policy_age: int = setting(1, at_least=0)
    """Maximum staleness of a response when it is trained on, in weight syncs of the engine. 1: one step
    off-policy; 0: the same numbers as the synchronous loop."""
    staleness_threshold: float | None = setting(None, at_least=0)
    """The same limit as a fraction: between two weight syncs, at most (1 + threshold) times as many prompts
    may be started as are trained on. Null: max_policy_age."""
    partial_rollout: bool = setting(False)
    """Interrupt responses at a weight sync and continue them with the new weights; false waits until they are
    complete. Without `enable`: a step ends when its own responses are complete, and responses that were
    started for later steps are interrupted and kept."""
    trigger_parameter_sync_step: int = setting(1, at_least=1)
    """Training steps between two weight syncs of the engine."""
    require_batches: int | None = setting(None, at_least=1)
    """Mini-batches of ppo_mini_batch_size prompts per training step. Null: data.train_batch_size divided by
    ppo_mini_batch_size."""
    use_rollout_log_probs: bool = setting(True)
    """Correct for the policy that sampled the responses. False: treat all responses as sampled by the weights
    of the step."""
    compute_prox_log_prob: bool = setting(True)
    """True: compute log-probs under the weights of the step for clipping, and weight tokens by the ratio to
    the engine's log-probs (decoupled PPO; algorithm.rollout_correction sets the weights, by default
    rollout_is=token). False: clip around the engine's log-probs, which saves a forward pass in a step of
    several updates but tolerates less staleness."""


@dataclass(eq=False)
class TrainerConfig:
    """Length, logging, checkpoints and devices of the run."""

    total_epochs: int = setting(30, at_least=1)
    """Passes over the training rows. With dynamic sampling there are as many steps as without it, so dropped
    prompts mean more passes."""
    total_training_steps: int | None = setting(None, at_least=1)
    """Number of training steps; overrides total_epochs."""
    project_name: str = setting("strop")
    """Name of the project in trackers and paths."""
    experiment_name: str = setting("default")
    """Name of the run in trackers and paths."""
    logger: str | list[str] = setting(["console", "file"])
    """Trackers of the metrics: console, file (jsonl), csv, tensorboard, wandb, swanlab, mlflow, trackio."""
    console: str = setting("short", choices=("short", "full"))
    """What the logger `console` prints for each step. short: on a terminal a live view; otherwise one line
    with step, reward, response length, KL, seconds and ETA. full: one line with all metrics, as in verl. If
    `console` is the only logger, lines are always full, because no file has the other metrics."""
    log_val_generations: int = setting(0, at_least=0)
    """Validation samples to send to trackers at each validation."""
    rollout_data_dir: str | None = None
    """Folder for a jsonl dump of every training rollout."""
    validation_data_dir: str | None = None
    """Folder for a jsonl dump of every validation rollout."""
    samples_to_keep: int = setting(128, at_least=0)
    """Number of training samples, and of validation samples, that are saved per step in
    default_local_dir/samples for `strop board`, with the values of every token: whole groups, spread evenly
    over the step. About 15 bytes per token on disk. 0: none."""
    health: bool = setting(True)
    """Check the metrics for signs of a failing run, with alerts on the console and in alerts.jsonl."""
    seed: int = setting(1, at_least=0, at_most=MAX_SEED)
    """Seed of everything: row order, sampling, initial heads, shuffles."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda", "npu"))
    """auto: a GPU if there is one, else the CPU."""
    memory_check: str = setting("refuse", choices=("refuse", "warn", "off"))
    """Before a run, compare the memory estimate (`strop plan`) with the memory of this machine's devices.
    refuse: do not start a run that certainly lacks memory; warn: only log a warning."""
    runtime: str = setting("auto", choices=("auto", "local", "ray"))
    """local: processes on this machine; ray: a Ray cluster; auto: ray if nnodes > 1."""
    nnodes: int = setting(1, at_least=1)
    """Number of nodes."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices per node; on CPUs, processes per node."""
    save_freq: int = setting(-1)
    """Save a checkpoint every N STEPS, and at the end. 0 or less: never."""
    test_freq: int = setting(-1)
    """Validate every N STEPS, and at the end. 0 or less: only before training."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate, and do not train."""
    critic_warmup: int = setting(0, at_least=0)
    """Step of the first actor update; earlier steps train only the critic."""
    balance_batch: bool = True
    """Distribute long and short sequences evenly over devices."""
    default_local_dir: str = setting("checkpoints/${trainer.project_name}/${trainer.experiment_name}")
    """Folder of the run: checkpoints, metrics, samples."""
    default_hdfs_dir: str | None = None
    """An fsspec address to which checkpoints are copied."""
    resume_mode: str = setting("auto", choices=("auto", "disable", "resume_path"))
    """auto: resume from the latest checkpoint in default_local_dir, if there is one; disable: start from
    scratch; resume_path: resume from resume_from_path."""
    resume_from_path: str | None = None
    """A global_step_N folder."""
    max_actor_ckpt_to_keep: int | None = setting(None, at_least=1)
    """Number of actor checkpoints to keep. Null: all."""
    max_critic_ckpt_to_keep: int | None = setting(None, at_least=1)
    """Number of critic checkpoints to keep. Null: all."""
    max_ckpt_mem_gb: float | None = setting(None, above=0)
    """Total size of checkpoints in GB, beyond which the oldest are deleted."""
    best_metric: str | None = setting(None)
    """Validation metric whose best checkpoint is never deleted, among those of steps with a validation."""
    remove_previous_ckpt_in_save: bool = False
    """Keep only the newest checkpoint."""
    del_local_ckpt_after_load: bool = False
    """Delete a checkpoint after it is loaded."""
    esi_redundant_time: float = setting(0, at_least=0)
    """Seconds to reserve for a checkpoint before a rented instance expires."""
    enable_ema: bool = setting(False)
    """Keep an exponential moving average of the actor's weights, and save it with the actor."""
    ema_beta: float = setting(0.992, at_least=0, at_most=1)
    """Decay of the moving average."""
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig)
    """Asynchronous training."""
    max_restarts: int = setting(0, at_least=0)
    """Number of automatic restarts from the last checkpoint after a worker died or hung."""
    grace_seconds: float = setting(120.0, at_least=0)
    """Seconds after SIGTERM or SIGINT in which a run drops or finishes its step, writes a checkpoint (if
    save_freq is above 0) and exits with code 79. After this time, or on a second signal, it exits
    immediately. Set it below the grace period of the machine (Kubernetes terminationGracePeriodSeconds and
    Slurm KillWait: 30 by default). 0: signals end the run immediately."""
    phase_warning: float = setting(1800.0, at_least=0)
    """Seconds after which a phase that is still running is reported, with the stacks of its worker in
    workers/. 0: never."""
    phase_timeout: float = setting(0.0, at_least=0)
    """Seconds after which a phase that is still running ends the run, or restarts it (max_restarts). 0:
    never."""
    ray_wait_register_center_timeout: int = setting(300, at_least=1)
    """Seconds to wait for the cluster's resources."""
    record_steps: list[int] | None = None
    """Steps to record completely, for `strop replay`."""
    wandb_proxy: str | None = None
    """Proxy for wandb only."""
    npu_profile: FreeForm = inert({}, "Ascend devices are not supported")
    """Ascend profiler."""
    use_legacy_worker_impl: str = inert(
        "auto", "there is one implementation, with exact global loss denominators"
    )
    """Which of two worker implementations."""


@dataclass(eq=False)
class RayKwargsConfig:
    """Settings of Ray."""

    ray_init: FreeForm = setting({"num_cpus": None})
    """Arguments of ray.init: num_cpus, address, runtime_env ..."""
    timeline_json_file: str | None = None
    """File for Ray's timeline, written when the run ends."""


@dataclass(eq=False)
class NsysGlobalConfig:
    discrete: bool = False
    """One capture per phase."""
    controller_nsight_options: FreeForm = setting(
        {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph"}
    )
    """nsys options of the driver."""
    worker_nsight_options: FreeForm = setting(
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
class TorchMemoryGlobalConfig(TorchMemoryToolConfig):
    trace_alloc_max_entries: int = setting(100_000, at_least=1)
    """Number of allocations to record."""
    context: str = "all"
    """Allocations whose stack is recorded."""
    stacks: str = "all"
    """Python stacks, C++ stacks or both."""
    kw_args: FreeForm = setting({})
    """Further arguments of the recorder."""


@dataclass(eq=False)
class GlobalToolConfig:
    nsys: NsysGlobalConfig = section(NsysGlobalConfig)
    """Nsight Systems."""
    torch_memory: TorchMemoryGlobalConfig = section(TorchMemoryGlobalConfig)
    """Allocator snapshots."""


@dataclass(eq=False)
class GlobalProfilerConfig:
    """Which tool profiles which steps."""

    tool: str | None = setting(None, choices=(None, "nsys", "npu", "torch", "torch_memory"))
    """Profiling tool."""
    steps: list[int] | None = None
    """Steps to profile."""
    profile_continuous_steps: bool = False
    """Put consecutive steps into one capture."""
    save_path: str = "outputs/profile"
    """Folder for traces."""
    global_tool_config: GlobalToolConfig = section(GlobalToolConfig)
    """Settings per tool."""


@dataclass(eq=False)
class TransferQueueConfig:
    enable: bool = inert(False, "batches already stay out of the driver")
    """A separate data plane."""
