"""A model's own multi-token prediction head as drafter: its numbers against the definition, greedy tokens, the
policy's distribution, and what is refused."""

from __future__ import annotations

import gc
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from strop.config.schema.rollout import SpeculationConfig
from strop.models.load import load_config, load_language_model, resolve
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.speculation.mtp import MtpDrafts
from tests.rollout import tiny
from tests.rollout.test_native_speculation import REQUESTS, assert_same

_SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, Any] = {
    "glm4_moe": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**_SIZES, num_key_value_heads=2, head_dim=16)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **_SIZES,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        )
    ),
}
PREFIX = "model.layers.2."


def save(model: Any, folder: Path, *, noise: float = 0.3) -> None:
    """The model with a head of random weights, as the published checkpoints have it: as one more layer."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    draw = torch.Generator().manual_seed(5)
    for name in list(tensors):
        if name.startswith("model.layers.1."):
            random = torch.randn(tensors[name].shape, generator=draw) * noise
            tensors[name.replace("layers.1", "layers.2")] = tensors[name] + random
    size = model.config.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{PREFIX}{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=draw)
    tensors[f"{PREFIX}eh_proj.weight"] = noise * torch.randn(size, 2 * size, generator=draw)
    tensors[f"{PREFIX}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{PREFIX}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})


def change(folder: Path, **tensors: Tensor | None) -> None:
    file = folder / "model.safetensors"
    found = load_file(file)
    for name, tensor in tensors.items():
        del found[name]
        if tensor is not None:
            found[name] = tensor
    save_file(found, file, metadata={"format": "pt"})


def load(folder: Path) -> Any:
    source = resolve(str(folder))
    return load_language_model(source, load_config(source)).eval()


def drafted(model: Any, **settings: Any) -> NativeEngine:
    speculation = {"enable": True, "num_tokens": 3, "mtp": True} | settings
    return NativeEngine(model, max_num_seqs=64, speculation=SpeculationConfig(**speculation))


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save(FAMILIES[request.param](), tmp_path)
    return tmp_path


def test_greedy_tokens_are_those_without(folder: Path) -> None:
    """Rows finish, move and are admitted while others run."""
    model = load(folder)
    expected = NativeEngine(model, max_num_seqs=64).generate(REQUESTS, Sampling(temperature=0))
    engine = drafted(model)
    assert_same(engine.generate(REQUESTS, Sampling(temperature=0)), expected)
    stats = engine.stats()
    assert stats["speculation/share_of_steps"] == 1 and 0 <= stats["speculation/acceptance"] < 1
    engine.close()
    del engine
    gc.collect()
    assert not model.model._forward_hooks, "the policy is as it was"


def test_drafts_have_the_distributions_of_the_definition(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all drafts of a row, in passes after one to four kept tokens."""
    passes: list[tuple[list[int], Tensor, Tensor]] = []
    propose = MtpDrafts.propose

    def recorded(self: MtpDrafts, rows: Any, *arguments: Any) -> Tensor:
        known = rows.fields["tokens"][0, : int(rows.fields["length"][0])].tolist()
        drafts = propose(self, rows, *arguments)
        passes.append((known, drafts[0].clone(), self._chances[0].clone()))
        return drafts

    monkeypatch.setattr(MtpDrafts, "propose", recorded)
    model = load(folder)
    prompt = [3, 9, 27, 81]
    [[answer]] = drafted(model).generate([Request(prompt, seed=2)], Sampling(max_tokens=60))
    steps = [len(later[0]) - len(known[0]) for known, later in itertools.pairwise(passes)]
    assert max(steps) > 1 and min(steps) == 1
    assert bool((passes[0][1] == -1).all()), "the first pass has no hidden state to draft from"
    reference = Reference(folder, model)
    for known, drafts, chances in passes[1:]:
        expected = reference.chances(known, drafts.tolist(), begin=len(prompt))
        valid = int((drafts >= 0).sum())
        torch.testing.assert_close(chances[:valid], expected[:valid], rtol=1e-3, atol=1e-5)
    assert len(answer.ids) == 60


class Reference:
    """The head by its definition, over whole sequences; its layer is the third of a model with three."""

    def __init__(self, folder: Path, policy: Any) -> None:
        config = load_config(resolve(str(folder)))
        config.num_hidden_layers = 3
        for kinds in ("layer_types", "mlp_layer_types"):
            if getattr(config, kinds, None):
                setattr(config, kinds, [*getattr(config, kinds), getattr(config, kinds)[-1]])
        self.deeper = load_language_model(resolve(str(folder)), config).eval()
        self.deeper.set_attn_implementation("eager")
        self.policy = policy
        policy.set_attn_implementation("eager")
        self.tensors = load_file(folder / "model.safetensors")

    def norm(self, name: str, states: Tensor) -> Tensor:
        scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + self.policy.config.rms_norm_eps)
        return states * scale * self.tensors[f"{PREFIX}{name}.weight"]

    @torch.no_grad()
    def chances(self, known: list[int], drafts: list[int], begin: int) -> Tensor:
        hidden = self.policy.model(input_ids=torch.tensor([known])).last_hidden_state[0, begin:-1]
        following = known[begin + 1 :]
        found = []
        for draft in drafts:
            out = self.layer(hidden, torch.tensor(following), begin)
            found.append(self.policy.lm_head(out[-1]).softmax(-1))
            hidden = torch.cat([hidden, out[-1:]])
            following = [*following, max(0, draft)]
        return torch.stack(found)

    def layer(self, hidden: Tensor, following: Tensor, begin: int) -> Tensor:
        embedded = self.tensors["model.embed_tokens.weight"][following]
        both = torch.cat([self.norm("enorm", embedded), self.norm("hnorm", hidden)], -1)
        states = (both @ self.tensors[f"{PREFIX}eh_proj.weight"].t())[None]
        count = len(following)
        positions = torch.arange(begin, begin + count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        angles = self.deeper.model.rotary_emb(states, position_ids=positions)
        out = self.deeper.model.layers[2](
            states, attention_mask=mask, position_ids=positions, position_embeddings=angles
        )
        return self.norm("shared_head.norm", out[0])


# --- a model with known probabilities -----------------------------------------------------------------------

CHANCES = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])
"""Of the tokens 3, 4, 5 after each of them."""


def known_model(folder: Path, turn: int) -> Any:
    """A model whose next token depends on the last one by CHANCES, with a head that takes the token for the
    one `turn` further."""
    model = FAMILIES["glm4_moe"]()
    size = model.config.hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = -20
        for token, row in enumerate(CHANCES, 3):
            model.model.embed_tokens.weight[token, token] = 1
            model.lm_head.weight[token, 0] = 0
            model.lm_head.weight[3:6, token] = row.log() / (size / 2) ** 0.5
    save(model, folder, noise=0)
    own = torch.eye(size)
    own[3:6] = own[3:6].roll(turn, 0)
    ones = torch.ones(size)
    names = {f"{PREFIX}{name}.weight": ones.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    eh_proj = torch.cat([own, torch.zeros(size, size)], 1)
    change(folder, **names, **{f"{PREFIX}eh_proj.weight": eh_proj})
    return load(folder)


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_distribution_is_the_policys(tmp_path: Path, turn: int) -> None:
    """Pairs of tokens are those of the policy, whatever the head predicts, and as many drafts are kept as the
    two have in common: nearly all of a head that is right."""
    engine = drafted(known_model(tmp_path, turn))
    answers = engine.generate([Request([3], n=64, seed=s) for s in range(3)], Sampling(max_tokens=33))
    acceptance = engine.stats()["speculation/acceptance"]
    tokens = torch.tensor([one.ids for group in answers for one in group]) - 3
    assert set(tokens.flatten().tolist()) == {0, 1, 2}
    counts = torch.bincount((tokens[:, :-1] * 3 + tokens[:, 1:]).flatten(), minlength=9).double().view(3, 3)
    expected = counts.sum(1, keepdim=True) * CHANCES.double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 22.5  # 0.1% of 6 degrees of freedom
    if turn == 0:
        assert acceptance > 0.9  # the first pass of a row and the end of an answer have fewer drafts
    else:
        assert 0.1 < acceptance < 0.6


@pytest.mark.gpu
def test_the_head_drafts_on_a_gpu(tmp_path: Path) -> None:
    """With recorded passes, in pages, in bf16."""
    model = known_model(tmp_path, 0).to("cuda", torch.bfloat16)
    engine = drafted(model)
    for _ in range(2):
        answers = engine.generate([Request([3], n=16, seed=s) for s in range(3)], Sampling(max_tokens=65))
        assert engine.stats()["speculation/acceptance"] > 0.8
    tokens = torch.tensor([one.ids for group in answers for one in group]) - 3
    counts = torch.bincount((tokens[:, :-1] * 3 + tokens[:, 1:]).flatten(), minlength=9).double().view(3, 3)
    expected = counts.sum(1, keepdim=True) * CHANCES.double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 22.5


# --- what is refused ----------------------------------------------------------------------------------------


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        drafted(load(folder)).generate([Request([3])], Sampling(max_tokens=2))
    return str(caught.value)


def test_models_without_such_a_head_are_refused_with_their_family(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    tiny.make().save_pretrained(plain)
    assert "(llama) has no weights of one" in refusal(plain)
    other = tmp_path / "other"
    tiny.make().save_pretrained(other)
    file = other / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    assert "(llama) has weights of another layout (mtp.fc.weight)" in refusal(other)


def test_a_head_that_does_not_fit_or_has_8_bits_is_refused(tmp_path: Path) -> None:
    save(FAMILIES["glm4_moe"](), tmp_path)
    change(tmp_path, **{f"{PREFIX}self_attn.q_proj.weight": None})
    assert "does not fit a layer of Glm4MoeModel: ['layers.0.self_attn.q_proj.weight']" in refusal(tmp_path)
    file = tmp_path / "model.safetensors"
    scale = {f"{PREFIX}self_attn.k_proj.weight_scale_inv": torch.ones(1)}
    save_file(load_file(file) | scale, file, metadata={"format": "pt"})
    assert "stored in 8 bits" in refusal(tmp_path)


def test_the_head_is_found_in_several_files(tmp_path: Path) -> None:
    """As large models are stored, with an index."""
    save(FAMILIES["glm4_moe"](), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    places = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {key: tensor for i, (key, tensor) in enumerate(sorted(tensors.items())) if i % 2 == number - 1}
        save_file(part, tmp_path / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    model = load(tmp_path)
    way = Sampling(max_tokens=20)
    expected = drafted(model).generate([Request([3, 4], n=2, seed=1)], way)
    file.unlink()
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert_same(drafted(load(tmp_path)).generate([Request([3, 4], n=2, seed=1)], way), expected)
