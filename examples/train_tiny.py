"""Train the tiny Qwen3.5-type checkpoint with an MTP head that the examples use.

    pip install torch "transformers>=5.24" tokenizers safetensors
    python examples/train_tiny.py

The corpus is the standard library of a Python installation, so nothing is
downloaded. One GPU is meant; ``--minutes 1 --batch 2 --length 128`` runs anywhere
and learns little.

The trunk is transformers' own ``Qwen3_5ForCausalLM``. The head follows Qwen3-Next,
which took it from DeepSeek-V3 (arXiv:2412.19437, section 2.2). With h_j the trunk's
hidden state after its final norm and t_j the token at position j, depth 1 is

    x_j = fc([norm_e(embed(t_{j+1})); norm_h(h_j)])
    m_j = norm(layer(x_j))                         # layer: full attention
    p(t_{j+2}) = softmax(lm_head(m_j))             # the trunk's own lm_head

and each further depth takes m_j in place of h_j and the next token in place of
t_{j+1}. DeepSeek-V3 trains one module a depth; here, as in Qwen3.5, one module is
unrolled over all depths.

Training has two stages:

1. *Joint*. The trunk learns the text (cross-entropy). The head learns the trunk's
   distribution (KL divergence, trunk detached), because a draft is accepted when it
   agrees with the trunk, not when it agrees with the text.
2. *Self-distillation*. The trunk is frozen and writes greedily from the beginnings
   of documents; the head goes on learning, half on that and half on the corpus.
   Greedy decoding shows the head what the trunk writes, and that is not the corpus
   (FastMTP, arXiv:2509.18362, does this with a large model).
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny.corpus import (
    EOS_ID,
    KINDS,
    Mixture,
    TokenStream,
    read_corpus,
    train_tokenizer,
)
from tiny.export import save_checkpoint, save_tokenizer, write_model_card
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5RMSNorm,
)

DEPTH = 3  # how far the head is unrolled
DEPTH_WEIGHTS = (0.4, 0.3, 0.2)  # the trunk's own loss has weight 1
SHARES = {"file": 0.55, "definition": 0.35, "prose": 0.1}
DISTIL_SHARE = 0.25  # of the training time
JOINT_RATE, DISTIL_RATE = 2e-3, 1e-3
# The corpus is small (one token a parameter) and is read several times. With the usual
# 0.1 the trunk learns it by heart.
WEIGHT_DECAY = 1.0
PROMPT_LENGTHS = (8, 24, 64)  # tokens that the trunk continues in stage 2
EVALUATION_PROMPT = 16

TEXT_CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 12,  # deep and narrow: a draft costs little beside it
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
    },
    "eos_token_id": EOS_ID,
}


class MTPHead(nn.Module):
    """One multi-token-prediction module; embeddings and lm_head are the trunk's."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        full_attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, full_attention)])
        self.norm = Qwen3_5RMSNorm(size, eps=eps)

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: DepthCache,
    ) -> torch.Tensor:
        """Return the next depth's hidden states.

        Shapes:
            embedding, hidden, result: (B, n, hidden_size)
            rotary: cosines and sines, (1, n, rotary size) each
            mask: (n, n * depth), True where a query may look; None is causal
        """
        norms = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)
        x = self.fc(torch.cat(norms, dim=-1))
        x = self.layers[0](
            x, position_embeddings=rotary, attention_mask=mask, cache=cache
        )
        return self.norm(x)


class DepthCache:
    """Keys and values of all depths so far, one behind the other.

    Decoding drafts depth d with the entries of depth 1 in the head's cache, for all
    positions before, and behind them the entry of each depth up to d. Training sees
    the same with this cache and the mask of `depth_mask`.
    """

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (B, heads, n, head_dim) and return all there is."""
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def depth_mask(n: int, depth: int, device: torch.device) -> torch.Tensor | None:
    """Say what depth ``depth`` may look at, (n, n * depth).

    Chain j sees the entries of depth 1 up to j, and its own of every later depth.
    """
    if depth == 1:
        return None
    earlier = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    own = torch.eye(n, dtype=torch.bool, device=device)
    return torch.cat([earlier] + [own] * (depth - 1), dim=1)


@dataclass(frozen=True)
class TinyModel:
    """The trunk and its MTP head."""

    trunk: Qwen3_5ForCausalLM
    head: MTPHead

    @classmethod
    def create(cls, device: str) -> TinyModel:
        """Build both with random weights."""
        config = Qwen3_5TextConfig(**TEXT_CONFIG)
        config._attn_implementation = "sdpa"
        trunk = Qwen3_5ForCausalLM(config)
        head = MTPHead(config)
        head.apply(trunk._init_weights)
        return cls(trunk.to(device), head.to(device))

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, the tied ones once."""
        return [*self.trunk.parameters(), *self.head.parameters()]

    def sizes(self) -> dict[str, int]:
        """Count the parameters of each part."""
        return {
            "trunk": sum(p.numel() for p in self.trunk.parameters()),
            "head": sum(p.numel() for p in self.head.parameters()),
        }

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the tied lm_head: (B, n, hidden_size) to (B, n, vocab_size)."""
        return F.linear(hidden, self.trunk.model.embed_tokens.weight)

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the trunk: (B, T) tokens to (B, T, hidden_size), after the final norm."""
        return self.trunk.model(input_ids=inputs, use_cache=False).last_hidden_state

    def drafts(self, tokens: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Unroll the head over `DEPTH` depths, fed with the text's own tokens.

        Args:
            tokens: (B, >= T).
            hidden: (B, T, hidden_size), the trunk's over the first T tokens.

        Returns:
            For each depth d = 1, 2, … the logits (B, n, vocab_size); row j is about
            the token at j + d + 1, which the trunk predicts at position j + d.
        """
        n = entries(hidden.shape[1])
        cache, hidden, logits = DepthCache(), hidden[:, :n], []
        for depth in range(1, DEPTH + 1):
            embedding = self.trunk.model.embed_tokens(tokens[:, depth : depth + n])
            positions = torch.arange(depth - 1, depth - 1 + n, device=tokens.device)
            rotary = self.trunk.model.rotary_emb(hidden, positions[None])
            mask = depth_mask(n, depth, tokens.device)
            hidden = self.head(embedding, hidden, rotary, mask, cache)
            logits.append(self.logits(hidden))
        return logits


def entries(length: int) -> int:
    """Chains that fit into ``length`` positions; multiples of 8 have fast kernels."""
    return (length - DEPTH) // 8 * 8


def targets(values: torch.Tensor, n: int) -> list[torch.Tensor]:
    """Line up what the trunk says (B, T, …) with the drafts of each depth."""
    return [values[:, depth : depth + n] for depth in range(1, DEPTH + 1)]


def divergence(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(target || draft), mean over (B, n)."""
    draft, target = draft.float().flatten(0, 1), target.float().flatten(0, 1)
    log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of (B, T, V) with (B, T), in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def head_loss(
    model: TinyModel, tokens: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Weighted divergence of the drafts from the trunk, over all depths."""
    drafts = model.drafts(tokens, hidden)
    teacher = targets(logits.detach(), drafts[0].shape[1])
    losses = [divergence(d, t) for d, t in zip(drafts, teacher, strict=True)]
    return sum(w * x for w, x in zip(DEPTH_WEIGHTS, losses, strict=True))


def joint_loss(model: TinyModel, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the trunk's loss and the head's for (B, T + 1) tokens."""
    hidden = model.hidden(tokens[:, :-1])
    logits = model.logits(hidden)
    text = cross_entropy(logits, tokens[:, 1:])
    return text, head_loss(model, tokens, hidden, logits)


def distil_loss(model: TinyModel, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the head's loss alone; the trunk, frozen, only teaches."""
    hidden = model.hidden(tokens[:, :-1])
    logits = model.logits(hidden)
    return (head_loss(model, tokens, hidden, logits),)


def compile_losses() -> None:
    """Fuse the softmaxes over the vocabulary, much of a step's memory traffic."""
    global divergence, cross_entropy
    divergence = torch.compile(divergence)
    cross_entropy = torch.compile(cross_entropy)


def optimizer_for(parameters: Sequence[nn.Parameter], rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": WEIGHT_DECAY,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda
    )


def rate_factor(step: int, done: float, warmup: int = 100) -> float:
    """Linear warm-up by steps, then a cosine down to 2 % by time."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * cosine)


Losses = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def gradients(loss_of: Losses, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Add up the gradients of all losses; return the losses."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        losses = loss_of(tokens)
    sum(losses).backward()
    return losses


def fit(
    loss_of: Losses,
    sample: Callable[[], torch.Tensor],
    parameters: Sequence[nn.Parameter],
    *,
    rate: float,
    seconds: float,
    watch: Callable[[], str],
    label: str,
) -> int:
    """Train ``parameters`` for ``seconds`` and return the tokens seen.

    Now and then a line says the losses, and what ``watch`` sees on held-out text.
    """
    optimizer = optimizer_for(parameters, rate)
    gradients(loss_of, sample())  # compiles, so before the clock starts
    start, step, seen = time.monotonic(), 0, 0
    while (elapsed := time.monotonic() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_factor(step, elapsed / seconds)
        tokens = sample()
        optimizer.zero_grad(set_to_none=True)
        losses = gradients(loss_of, tokens)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step, seen = step + 1, seen + tokens.numel()
        if step % 200 == 0:
            shown = " ".join(f"{loss.item():.3f}" for loss in losses)
            print(f"{label} {step:6d} {elapsed:4.0f} s  {shown}  {watch()}", flush=True)
    return seen


@torch.no_grad()
def continue_greedily(
    trunk: Qwen3_5ForCausalLM, prompts: torch.Tensor, count: int
) -> torch.Tensor:
    """Append ``count`` tokens to (B, n) prompts, greedily.

    After EOS a new document begins, and its first token is sampled: greedily it
    would be the same document every time.
    """
    cache = DynamicCache(config=trunk.config)
    rows, step = [prompts], prompts
    for _ in range(count):
        with torch.autocast(prompts.device.type, dtype=torch.bfloat16):
            out = trunk(step, cache=cache, use_cache=True, logits_to_keep=1)
        logits = out.logits[:, -1].float()
        sampled = torch.multinomial(logits.softmax(-1), 1)
        ended = rows[-1][:, -1:] == EOS_ID
        step = torch.where(ended, sampled, logits.argmax(-1, keepdim=True))
        rows.append(step)
    return torch.cat(rows, dim=1)


def self_generated(
    model: TinyModel, mixture: Mixture, *, rows: int, length: int
) -> torch.Tensor:
    """Let the trunk write (~rows, length) tokens from beginnings of documents."""
    parts = []
    for prompt in (min(n, length // 2) for n in PROMPT_LENGTHS):
        prompts = mixture.prompts(rows // len(PROMPT_LENGTHS), prompt)
        parts.append(continue_greedily(model.trunk, prompts, length - prompt))
    return torch.cat(parts)


def train(
    model: TinyModel,
    mixture: Mixture,
    watched: TokenStream,
    options: argparse.Namespace,
) -> dict[str, int]:
    """Run both stages and return the tokens seen in each."""
    seconds, rows = options.minutes * 60, options.batch
    window = options.length + 1

    def watch() -> str:
        seen = held_out(model, watched, batches=1, rows=rows, length=options.length)
        return f"held-out {seen['loss']:.3f}, agreement {seen['agreement_1']:.3f}"

    joint = fit(
        lambda tokens: joint_loss(model, tokens),
        lambda: mixture.sample(rows, window),
        model.parameters(),
        rate=JOINT_RATE,
        seconds=seconds * (1 - DISTIL_SHARE),
        watch=watch,
        label="joint",
    )
    written = self_generated(
        model, mixture, rows=options.self_generated, length=options.length // 2 + 1
    )
    model.trunk.requires_grad_(False)
    print(f"self-generated: {tuple(written.shape)} tokens", flush=True)

    def half_and_half() -> torch.Tensor:
        pick = torch.randint(len(written), (rows,), device=written.device)
        corpus = mixture.sample(rows, written.shape[1])
        return torch.cat([written[pick], corpus])

    distil = fit(
        lambda tokens: distil_loss(model, tokens),
        half_and_half,
        list(model.head.parameters()),
        rate=DISTIL_RATE,
        seconds=seconds * DISTIL_SHARE,
        watch=watch,
        label="distil",
    )
    return {"joint": joint, "distil": distil}


@torch.no_grad()
def held_out(
    model: TinyModel, stream: TokenStream, *, batches: int, rows: int, length: int
) -> dict[str, float]:
    """Measure the trunk's loss and the head's agreement on unseen text.

    Agreement at depth d: the head's argmax is the trunk's, fed with the text's own
    tokens. Top-2: the trunk's argmax is among the head's two best.
    """
    rows = min(rows, (len(stream.tokens) - 1) // length)
    sums: dict[str, float] = {}
    starts = torch.arange(rows, device=stream.tokens.device) * length
    for batch in range(batches):
        tokens = stream.windows(starts + batch * rows * length, length + 1)
        for name, value in agreement(model, tokens).items():
            sums[name] = sums.get(name, 0.0) + value / batches
    return sums


def agreement(model: TinyModel, tokens: torch.Tensor) -> dict[str, float]:
    """Compare drafts and trunk on (B, T + 1) tokens."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        hidden = model.hidden(tokens[:, :-1])
        logits = model.logits(hidden)
        drafts = model.drafts(tokens, hidden)
    figures = {"loss": cross_entropy(logits, tokens[:, 1:]).item()}
    best = targets(logits.argmax(-1), drafts[0].shape[1])
    for depth, (draft, target) in enumerate(zip(drafts, best, strict=True), start=1):
        top = draft.topk(2, dim=-1).indices == target[..., None]  # (B, n, 2)
        figures[f"agreement_{depth}"] = top[..., 0].float().mean().item()
        figures[f"top2_{depth}"] = top.any(-1).float().mean().item()
    return figures


@torch.no_grad()
def acceptance(
    model: TinyModel, stream: TokenStream, *, rows: int, length: int
) -> dict[str, float]:
    """Play greedy rounds on what the trunk writes from unseen beginnings.

    Returns:
        ``k1`` … ``k3``: mean acceptance length, 1 + accepted / rounds, with that many
        drafts a round; ``ended``: share of texts that reach EOS by themselves.
    """
    pick = torch.linspace(0, len(stream.starts) - 1, rows).long()
    prompts = stream.windows(
        stream.starts[pick.to(stream.starts.device)], EVALUATION_PROMPT
    )
    tokens = continue_greedily(model.trunk, prompts, length)
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        drafts = model.drafts(tokens, model.hidden(tokens[:, :-1]))
    truth = targets(tokens[:, 1:], drafts[0].shape[1])
    right = torch.stack(
        [d.argmax(-1) == t for d, t in zip(drafts, truth, strict=True)], dim=-1
    )
    runs = right.long().cumprod(-1)[:, EVALUATION_PROMPT - 1 :]  # (B, n, DEPTH)
    figures = {
        f"k{k}": mean_acceptance_length(runs[..., :k].sum(-1).tolist())
        for k in range(1, DEPTH + 1)
    }
    written = tokens[:, EVALUATION_PROMPT:]
    return figures | {"ended": (written == EOS_ID).any(1).float().mean().item()}


def mean_acceptance_length(accepted: list[list[int]]) -> float:
    """Tokens a round, where a round at j accepts ``accepted[row][j]`` drafts."""
    rounds = emitted = 0
    for row in accepted:
        position = 0
        while position < len(row):
            rounds, emitted = rounds + 1, emitted + 1 + row[position]
            position += 1 + row[position]
    return emitted / rounds


def evaluate(
    model: TinyModel, held: dict[str, TokenStream], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Measure losses, agreement and acceptance for each kind of document."""
    figures = {}
    for kind, stream in held.items():
        figures[kind] = held_out(
            model, stream, batches=4, rows=options.batch, length=options.length
        ) | acceptance(model, stream, rows=options.batch, length=options.length // 2)
        shown = "  ".join(
            f"{name} {value:.3f}" for name, value in figures[kind].items()
        )
        print(f"{kind}: {shown}", flush=True)
    return figures


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=here / "models" / "qwen3_5-tiny-mtp")
    add("--minutes", type=float, default=5.5, help="training time (default: 5.5)")
    add("--seed", type=int, default=0)
    add(
        "--stdlib",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="corpus: a Python standard library (default: this Python's)",
    )
    add("--batch", type=int, default=64, help="rows a step (default: 64)")
    add("--length", type=int, default=512, help="tokens a row (default: 512)")
    add(
        "--self-generated",
        type=int,
        default=4608,
        metavar="ROWS",
        help="texts the trunk writes for stage 2 (default: 4608)",
    )
    add(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="leave torch.compile out; it is used on a GPU only",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the corpus, train, measure, save."""
    options = parse_options(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    if options.compile and device == "cuda":
        compile_losses()
    corpus = read_corpus(options.stdlib, options.seed)
    texts = [text for kind in KINDS for text in corpus.train[kind]]
    tokenizer = train_tokenizer(texts, TEXT_CONFIG["vocab_size"])
    streams = {
        kind: TokenStream.encode(corpus.train[kind], tokenizer, device)
        for kind in KINDS
    }
    held = {
        kind: TokenStream.encode(corpus.held_out[kind], tokenizer, device)
        for kind in KINDS
    }
    sizes = {kind: len(stream.tokens) for kind, stream in streams.items()}
    print(f"{device}; corpus tokens: {sizes}", flush=True)
    model = TinyModel.create(device)
    seen = train(model, Mixture(streams, SHARES), held["file"], options)
    save_tokenizer(options.out, tokenizer)
    save_checkpoint(options.out, model.trunk, model.head, TEXT_CONFIG)
    figures = evaluate(model, held, options)
    write_model_card(
        options.out,
        options=options,
        text_config=TEXT_CONFIG,
        parameters=model.sizes(),
        corpus=sizes,
        seen=seen,
        figures=figures,
        prompt=EVALUATION_PROMPT,
    )


if __name__ == "__main__":
    main()
