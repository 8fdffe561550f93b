"""A small model on the disk with one token per character, for the real client."""

from __future__ import annotations

import string
from pathlib import Path

CHARACTERS = string.ascii_letters + string.digits + " \n?!.,:;+-*/=()'\"\\{}<>|_"
CONTEXT = 1024


def write_tiny_model(folder: Path, *, hidden: int = 64, layers: int = 2) -> Path:
    """Write model and tokenizer as a Hugging Face folder."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    known = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}assistant:"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(known),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def teach_arithmetic_format(folder: Path, steps: int = 100) -> None:
    """Train the model of a folder on questions of the arithmetic recipe: half of the answers are a number that
    ends, and half go on without end. So reinforcement has something to choose."""
    import random

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(0)
    start = "<eos>User: What is 4 + 5?\n\nAssistant: 9\n\n"
    for _ in range(steps):
        texts = []
        for _ in range(24):
            answer = f" {rng.randint(0, 200)}\n\nUser:"
            if rng.random() < 0.5:
                answer = " " + "".join(rng.choice("0123456789") for _ in range(14))
            texts.append(
                f"{start}User: What is {rng.randint(0, 100)} + {rng.randint(0, 100)}?\n\nAssistant:{answer}"
            )
        rows = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
        loss = model(**rows, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
