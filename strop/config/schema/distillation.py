"""The `algorithm.distillation` section: a teacher scores every sampled token."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.fields import setting


@dataclass(eq=False)
class DistillationConfig:
    """On-policy distillation: the policy samples, and each token is rewarded by the teacher's log-prob minus
    the policy's. The mean of this reward is minus the reverse KL divergence to the teacher."""

    enable: bool = setting(False)
    """Add the teacher's term to the advantages."""
    path: str | None = setting(None)
    """Weights of the teacher: a Hugging Face folder, a hub name or a .gguf file with the tokenizer of the
    policy. It is a frozen model in the trainer's processes; precision, offloading and micro-batches are those
    of actor_rollout_ref.ref."""
    url: str | None = setting(None)
    """Address of a server with the teacher, instead of `path`: the base URL of an OpenAI-compatible API that
    returns log-probs of prompts (vLLM: http://host:8000/v1). It receives token ids, so it must have the
    tokenizer of the policy."""
    model: str | None = setting(None)
    """url: name of the model on the server. Null: the first model that the server lists."""
    api_key_env: str = setting("OPENAI_API_KEY")
    """url: environment variable with the server's API key."""
    max_concurrent: int = setting(32, at_least=1)
    """url: concurrent requests. A request contains one sequence."""
    timeout: float = setting(600.0, above=0)
    """url: timeout of one sequence in seconds, including retries."""
    nnodes: int = setting(0, at_least=0)
    """path: dedicated nodes for the teacher, with a full copy on each device (trainer.runtime=ray). 0: it
    shares the actor's devices."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """path: devices per dedicated node."""
    coef: float = setting(1.0, above=0)
    """Weight of the teacher's term: coef * (log-prob of the teacher - log-prob of the policy) per token."""
    discount: float = setting(0.0, at_least=0, at_most=1)
    """Weight of later tokens in the advantage of a token: the term of the k-th next token is multiplied by
    discount to the power k. 0: only the token itself, which has the least variance. 1: all later tokens too,
    which is the exact gradient of the sequence's reverse KL."""
    max_log_ratio: float | None = setting(None, above=0)
    """Limit of the absolute difference of the log-probs of one token. Null: no limit."""
    task_reward: bool = True
    """Add the teacher's term to the advantages of the task's reward. False: the teacher's term is the whole
    advantage; training rows are not scored, and algorithm.adv_estimator has no effect. Validation is scored
    in both cases."""
