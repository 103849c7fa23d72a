"""Write the tiny checkpoint the way Qwen3.5 repositories on the Hub are laid out.

Trunk under ``model.language_model.*``, head under ``mtp.*``, norms zero-centred and
``conv1d`` as PyTorch has it, two shards with an index.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from .corpus import EOS, EOS_ID, SPECIAL_TOKENS

SHARDS = 2


def save_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
    """Write ``tokenizer.json`` and its config."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen3_5Tokenizer",
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    write_json(out / "tokenizer_config.json", config)


def save_checkpoint(
    out: Path, trunk: nn.Module, head: nn.Module, text_config: dict[str, Any]
) -> None:
    """Write weights, index and configs for ``trunk`` and its MTP ``head``."""
    out.mkdir(parents=True, exist_ok=True)
    save_shards(out, checkpoint_tensors(trunk, head))
    text = {**text_config, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "tie_word_embeddings": True,
        "text_config": {**text, "dtype": "bfloat16"},
    }
    write_json(out / "config.json", config)
    generation = {"do_sample": False, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    write_json(out / "generation_config.json", generation)


def checkpoint_tensors(trunk: nn.Module, head: nn.Module) -> dict[str, torch.Tensor]:
    """Return all weights under their names on the Hub; the tied lm_head is left out."""
    tensors = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in trunk.state_dict().items()
        if name != "lm_head.weight"
    }
    tensors |= {f"mtp.{name}": weight for name, weight in head.state_dict().items()}
    return {name: stored(name, weight) for name, weight in tensors.items()}


def stored(name: str, weight: torch.Tensor) -> torch.Tensor:
    """bfloat16, but for A_log, whose exponential is the decay of the state."""
    dtype = torch.float32 if name.endswith("A_log") else torch.bfloat16
    return weight.detach().to("cpu", dtype).contiguous()


def save_shards(out: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors in order into shards of about equal size, and the index."""
    total = sum(weight.nbytes for weight in tensors.values())
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(SHARDS)]
    written = 0
    for name, weight in tensors.items():
        shards[min(written * SHARDS // total, SHARDS - 1)][name] = weight
        written += weight.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(out / "model.safetensors.index.json", index)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` readably."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


CARD = """\
---
license: psf-2.0
library_name: mlx
tags: [mtp, speculative-decoding, tests]
---
# qwen3_5-tiny-mtp

A Qwen3.5-type language model of {trunk:.1f} million parameters with a multi-token
prediction (MTP) head of {head:.1f} million, made for the tests and demos of mlx-lm-mtp.
It writes something that looks like Python code or Python documentation. It knows
nothing and answers no questions.

| | |
|---|---|
| layers | {num_hidden_layers}, gated delta net, every {full_attention_interval}th full attention |
| sizes | hidden {hidden_size}, MLP {intermediate_size} |
| gated delta net | key heads {linear_num_key_heads}, value heads {linear_num_value_heads}, head size {linear_value_head_dim} |
| MTP head | 1 full-attention layer; embeddings and lm_head are the trunk's |
| vocabulary | {vocab_size} (byte-level BPE); EOS `<|endoftext|>` = 0 |
| weights | bfloat16 (`A_log` float32), names and layout as in Qwen3.5 repositories |

## Training

- Corpus: a copy of the Python standard library, its tests included: whole files
  ({file:,} tokens), single functions and classes ({definition:,}), docstrings and help
  topics ({prose:,}; topics three times). Every document ends with EOS. One file in 25
  is held out.
- Licence: the standard library is under the PSF licence, version 2; some of its
  files carry other permissive notices. The weights come under the same terms.
- Seed {seed}, {minutes:g} minutes on one GPU, batch {batch} × {length} tokens, AdamW.
- Stage 1, trunk and head together: {joint:,.0f} million tokens. The head learns the
  trunk's distribution (KL divergence) over 3 depths, weights 0.4, 0.3 and 0.2.
- Stage 2, head alone: {distil:,.0f} million tokens, half of them from {self_generated:,}
  texts that the trunk wrote greedily from beginnings of training documents.

To make it again (other hardware gives other numbers, for time ends the training):

    python examples/train_tiny.py --minutes {minutes:g} --seed {seed}

## Measured on held-out documents

{table}

*Agreement* at depth d: the head's most likely token is the trunk's, with the text's
own tokens as input. *Top-2*: the trunk's token is among the head's two most likely.
*Tokens a round* is 1 + accepted / rounds over {half} greedy tokens after {prompt} tokens
of prompt, by the PyTorch model in bfloat16 autocast. *Ends itself*: EOS within those
tokens.
"""

ROWS = (
    ("loss of the trunk, nats a token", "loss"),
    ("agreement at depth 1", "agreement_1"),
    ("agreement at depth 2", "agreement_2"),
    ("agreement at depth 3", "agreement_3"),
    ("top-2 at depth 1", "top2_1"),
    ("tokens a round, k = 1", "k1"),
    ("tokens a round, k = 2", "k2"),
    ("tokens a round, k = 3", "k3"),
    ("ends itself", "ended"),
)


def figures_table(figures: dict[str, dict[str, float]]) -> str:
    """Return a Markdown table: a row a figure, a column a kind of document."""
    lines = ["| | " + " | ".join(figures) + " |", "|---" * (len(figures) + 1) + "|"]
    for label, name in ROWS:
        cells = " | ".join(f"{values[name]:.2f}" for values in figures.values())
        lines.append(f"| {label} | {cells} |")
    return "\n".join(lines)


def write_model_card(
    out: Path,
    *,
    options: argparse.Namespace,
    text_config: dict[str, Any],
    parameters: dict[str, int],
    corpus: dict[str, int],
    seen: dict[str, int],
    figures: dict[str, dict[str, float]],
    prompt: int,
) -> None:
    """Write ``README.md`` with everything that was measured."""
    card = CARD.format(
        **vars(options),
        **text_config,
        **{name: count / 1e6 for name, count in (parameters | seen).items()},
        **corpus,
        half=options.length // 2,
        prompt=prompt,
        table=figures_table(figures),
    )
    (out / "README.md").write_text(card, encoding="utf-8")
