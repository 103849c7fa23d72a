"""A tokenizer for the tiny models, as far as drafters' factories need one."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .models import VOCAB

EOS = "<eos>"


def characters() -> Tokenizer:
    """One printable character a token, and the EOS as the last of all.

    It is byte-level, because transformers puts that under every Qwen model type,
    whatever the file says.
    """
    letters = [chr(i) for i in range(33, 127)] + ["Ġ"]  # Ġ is the space
    vocabulary = {token: i for i, token in enumerate([*letters, EOS])}
    assert len(vocabulary) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


@functools.cache
def tiny_tokenizer() -> Any:
    """The same in stock's wrapper, as `mlx_lm.load` would return it."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=characters(), eos_token=EOS)
    )
