"""What a benchmark runs: a checkpoint, or a shape with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import InvalidOption
from ..heads.head import MTPHead
from . import shapes

RANDOM_PROMPTS = 3


@dataclass(frozen=True)
class Prompt:
    """One prompt, as people and as models see it."""

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Subject:
    """A model with prompts for it.

    Args:
        name: What it is, for people.
        model, tokenizer: As `mlx_lm.load` gives them.
        prompts: At least one.
        head: A head that is not the checkpoint's; None if that one is meant.
    """

    name: str
    model: nn.Module
    tokenizer: TokenizerWrapper
    prompts: list[Prompt]
    head: MTPHead | None = None


class _Ids:
    """Stands in for a tokenizer: prompts are ids already, and nobody reads the text."""

    eos_token_id = bos_token = chat_template = None

    def get_vocab(self) -> dict[str, int]:
        """No token has a text."""
        return {}

    def encode(self, text: str, **more: Any) -> list[int]:
        """No text has a token."""
        return []

    def apply_chat_template(self, messages: Any, **more: Any) -> list[int]:
        """Stock's wrapper looks for it, and has no use for it."""
        return []

    def decode(self, ids: Sequence[int]) -> str:
        """The text of no tokens."""
        return ""


def of_checkpoint(path: str, texts: Sequence[str], *, chat: bool = True) -> Subject:
    """A checkpoint, or a repository of checkpoints, as `mlx_lm.load` takes it.

    Args:
        path: The directory or repository.
        texts: The prompts.
        chat: Put them into the chat template, if there is one, as `mlx_lm.generate`
            does.

    Raises:
        InvalidOption: If it cannot be loaded, or a prompt has no tokens.
    """
    try:
        model, tokenizer = mlx_lm.load(path)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidOption(
            f"MODEL {path} cannot be loaded ({reason}); give a directory or a "
            "repository that mlx_lm.load takes."
        ) from error
    encode = _templated if chat and tokenizer.has_chat_template else _plain
    prompts = [Prompt(text, encode(tokenizer, text)) for text in texts]
    for prompt in prompts:
        if not prompt.tokens:
            raise InvalidOption(f"prompt {prompt.text!r} has no tokens; leave it out.")
    return Subject(path, model, tokenizer, prompts)


def of_shape(name: str, dtype: str, bits: int | None, length: int) -> Subject:
    """A shape with random weights, an MTP head of random weights, and random prompts.

    Args:
        name: One of `shapes.SHAPES`.
        dtype: One of `shapes.DTYPES`.
        bits: Of the quantised weights; None for plain ones.
        length: Tokens a prompt.
    """
    model = shapes.build(name, shapes.DTYPES[dtype], bits)
    weights = f"{bits}-bit, {dtype}" if bits else dtype
    vocabulary = shapes.SHAPES[name]["vocab_size"]
    prompts = []
    for i in range(RANDOM_PROMPTS):
        ids = mx.random.randint(0, vocabulary, (length,), key=mx.random.key(i))
        prompts.append(Prompt(f"random ids {i + 1}", ids.tolist()))
    return Subject(
        f"{name} with random weights ({weights})",
        model,
        TokenizerWrapper(_Ids()),
        prompts,
        shapes.random_head(model),
    )


def _plain(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return list(tokenizer.encode(text))


def _templated(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True))
