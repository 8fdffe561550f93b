"""The `algorithm.distillation` section: a teacher scores every sampled token."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.fields import setting

TOPK = "forward_kl_topk"
REVERSE_KL = ("k1", "kl")
"""Loss modes that are the policy's log-prob minus the teacher's."""
LOSS_MODES = (*REVERSE_KL, "abs", "k2", "mse", "k3", "low_var_kl", TOPK)


@dataclass(eq=False)
class DistillationConfig:
    """On-policy distillation: the policy samples, and a teacher rates the tokens. By default each token is
    rewarded by the teacher's log-prob minus the policy's, whose mean is minus the reverse KL divergence to
    the teacher; with use_policy_gradient=false a divergence from the teacher is a loss."""

    enable: bool = setting(False)
    """Add the teacher's term to the advantages, or to the loss."""
    use_policy_gradient: bool = setting(True)
    """The teacher's term is a reward (loss_mode=k1). False: it is a loss of its own, whose gradient flows
    through the log-probs of the policy."""
    loss_mode: str = setting("k1", choices=LOSS_MODES)
    """Divergence of policy and teacher per token. forward_kl_topk: KL(teacher, policy) over the teacher's
    `topk` likeliest tokens. The other modes estimate KL(policy, teacher) from the sampled token alone, with
    the noise of one sample (docs/algorithms.md)."""
    topk: int = setting(32, at_least=1)
    """forward_kl_topk: tokens per position. Those that the policy does not have are left out. A vLLM server
    needs --max-logprobs of at least this."""
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
    """Weight of the teacher's term."""
    discount: float = setting(0.0, at_least=0, at_most=1)
    """use_policy_gradient: weight of later tokens in the advantage of a token. The term of the k-th next
    token is multiplied by discount to the power k. 0: only the token itself, which has the least variance. 1:
    all later tokens too, which is the exact gradient of the sequence's reverse KL."""
    loss_max_clamp: float | None = setting(None, above=0)
    """Limit of the absolute divergence of one token. Null: no limit."""
    log_prob_min_clamp: float | None = setting(None)
    """forward_kl_topk: lower limit of the log-probs of teacher and policy, below 0. Null: no limit."""
    task_reward: bool = True
    """Add the teacher's term to that of the task's reward. False: the teacher's term is all there is;
    training rows are not scored, and algorithm.adv_estimator has no effect. Validation is scored in both
    cases."""

    @property
    def is_reward(self) -> bool:
        """Whether the teacher's term is part of the advantages."""
        return self.enable and self.use_policy_gradient

    @property
    def is_loss(self) -> bool:
        """Whether the teacher's term is a loss of its own."""
        return self.enable and not self.use_policy_gradient
