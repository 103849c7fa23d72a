"""JSON by a schema, with drafts: a logits processor that keeps a state.

The grammar comes from llguidance (``pip install llguidance``). The processor is called
as in plain mlx-lm, with tokens that are certain. Because it can also look ahead, drafts
are chosen under the same grammar, and none that it forbids is ever verified::

    python examples/structured_output.py --max-tokens 120
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.sample_utils import make_sampler

import mlx_lm_mtp

MODEL = Path(__file__).parent / "models" / "qwen3_5-tiny-mtp"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["module", "class", "function"]},
        "arguments": {
            "type": "array",
            "items": {"type": "string", "maxLength": 8},
            "minItems": 1,
            "maxItems": 3,
        },
        "documented": {"type": "boolean"},
    },
    "required": ["name", "kind", "arguments", "documented"],
    "additionalProperties": False,
}


class Grammar:
    """A logits processor that lets only tokens through which a JSON schema allows.

    Args:
        tokenizer: The model's, as `mlx_lm.load` gives it.
        schema: A JSON schema.
        vocabulary: V, the width of the logits.
    """

    def __init__(self, tokenizer: Any, schema: dict[str, Any], vocabulary: int) -> None:
        known = llguidance.hf.from_tokenizer(
            tokenizer._tokenizer,
            n_vocab=vocabulary,
            eos_token=min(tokenizer.eos_token_ids),
        )
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_flexible": False}
        )
        self.matcher = llguidance.LLMatcher(known, grammar)
        self.mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary)
        self.seen: int | None = None  # tokens, the prompt's included

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Go on by the tokens that are new, and forbid what cannot follow them."""
        new = self._new(tokens)
        self.seen = len(tokens)
        if self.matcher.try_consume_tokens(new) < len(new):
            # The text is complete; mlx-lm goes on by one token that nobody reads.
            assert self.matcher.is_stopped(), f"the grammar forbids {new}"
        return self._allowed(logits)

    def look_ahead(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The same for drafts: the matcher is brought back to where it was."""
        new = self._new(tokens)
        consumed = self.matcher.try_consume_tokens(new)
        if consumed == len(new):
            logits = self._allowed(logits)
        else:
            logits = mx.full(logits.shape, -mx.inf)
        self.matcher.rollback(consumed)
        return logits

    def _new(self, tokens: mx.array) -> list[int]:
        return [] if self.seen is None else tokens[self.seen :].tolist()

    def _allowed(self, logits: mx.array) -> mx.array:
        llguidance.numpy.fill_next_token_bitmask(self.matcher, self.mask)
        bits = np.unpackbits(self.mask.view(np.uint8), bitorder="little")
        return mx.where(mx.array(bits[: logits.shape[-1]] != 0), logits, -mx.inf)


def main() -> None:
    """Generate with and without drafts, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--prompt", default="# A description of json.dumps:\n")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--temp", type=float, default=0.0)
    args = parser.parse_args()
    mlx_lm_mtp.install()
    model, tokenizer = mlx_lm.load(args.model)
    vocabulary = model(mx.array([[0]])).shape[-1]

    def generate(**draft: Any) -> list[Any]:
        mx.random.seed(0)
        grammar = Grammar(tokenizer, SCHEMA, vocabulary)
        return list(
            mlx_lm.stream_generate(
                model,
                tokenizer,
                args.prompt,
                max_tokens=args.max_tokens,
                sampler=make_sampler(args.temp),
                logits_processors=[grammar],
                **draft,
            )
        )

    plain, drafted = generate(), generate(draft="mtp")
    print("".join(response.text for response in drafted))
    print(drafted[-1].draft_stats.summary())
    assert [r.token for r in drafted] == [r.token for r in plain]


if __name__ == "__main__":
    main()
