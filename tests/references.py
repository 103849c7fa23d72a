"""What every family's head computes, in NumPy and in float64.

Written from the formulas, and from the configurations and tensors of the original
repositories (see :mod:`wild`): nothing of MLX, of mlx-lm or of the package is used, so
that an agreement with them says something. All heads of this kind are

    x = projection([norm(embedding of the next token), norm(hidden state)])
    y = decoder layer(s) of x
    logits = lm_head(final norm(y))

and :data:`FACTS` has what they differ in. vLLM replaces the embedding at position 0 by
zeros in the heads of GLM, DeepSeek, MiMo and ERNIE (no token is drafted from there);
here, as in the engines that do not, every position is computed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from wild import ZERO_CENTRED, text_config

Config = Mapping[str, Any]
Array = np.ndarray


@dataclass(frozen=True)
class Facts:
    """What is known of a family's head, and whence.

    Args:
        order: Which halves the projection takes, in order.
        hidden: The target's hidden state that vLLM feeds: ``post_norm`` is the output
            of the trunk's final norm, ``pre_norm`` its input.
        recycles: What stands in for it at the next depth, likewise: the output of the
            head's own final norm, or its input.
        embedding: ``own`` or ``trunk``.
        lm_head: ``own`` or ``trunk``.
        embedding_norm, hidden_norm, projection, layers, final_norm: Names in the
            original repositories; ``{n}`` is the number of the trunk's layers and
            ``{last}`` that of the head's last layer. No final norm is "".
        source: Files that say so; without another name, of vLLM's models.
        note: What else to know.
    """

    order: tuple[str, str]
    hidden: str
    recycles: str
    embedding: str
    lm_head: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    layers: str
    final_norm: str
    source: str
    note: str = ""


_EMBEDDING_FIRST = ("embedding", "hidden")


def _mtp(source: str, note: str) -> Facts:
    """The names of Qwen's heads."""
    return Facts(
        order=_EMBEDDING_FIRST,
        hidden="post_norm",
        recycles="post_norm",
        embedding="trunk",
        lm_head="trunk",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        layers="mtp.layers.0",
        final_norm="mtp.norm",
        source=source,
        note=note,
    )


def _last_layer(source: str, note: str) -> Facts:
    """The names of DeepSeek's heads: the layer behind the trunk's last one."""
    return Facts(
        order=_EMBEDDING_FIRST,
        hidden="post_norm",
        recycles="post_norm",
        embedding="own",
        lm_head="own",
        embedding_norm="model.layers.{n}.enorm",
        hidden_norm="model.layers.{n}.hnorm",
        projection="model.layers.{n}.eh_proj",
        layers="model.layers.{n}",
        final_norm="model.layers.{n}.shared_head.norm",
        source=source,
        note=note,
    )


_RECYCLES = (
    "SGLang recycles what shared_head.norm gives, and vLLM's deepseek_mtp.py has come "
    "to do so, which raised acceptance (ROCm/ATOM: 61.4 to 64.6 % on DeepSeek-R1); its "
    "older files, and those of GLM, recycle what goes into that norm."
)
_QWEN_NOTE = (
    "Every norm is stored less 1. The layer has full attention, gated, whatever its "
    "place would say, and experts where the trunk has."
)
FACTS: dict[str, Facts] = {
    "qwen3_5": _mtp("qwen3_5_mtp.py, qwen3_5.py", _QWEN_NOTE),
    "qwen3_5_moe": _mtp("qwen3_5_mtp.py, qwen3_5.py", _QWEN_NOTE),
    "qwen3_next": _mtp("qwen3_next_mtp.py, qwen3_next.py", _QWEN_NOTE),
    "glm4_moe": _last_layer("glm4_moe_mtp.py, glm4_moe.py", _RECYCLES),
    "glm4_moe_lite": _last_layer(
        "glm4_moe_lite_mtp.py, glm4_moe_lite.py",
        "Latent attention, as DeepSeek's; its inner norms use the common epsilon. "
        + _RECYCLES,
    ),
    "deepseek_v3": _last_layer("deepseek_mtp.py, deepseek_v2.py", _RECYCLES),
    "mimo": Facts(
        order=("hidden", "embedding"),
        hidden="pre_norm",
        recycles="post_norm",
        embedding="trunk",
        lm_head="trunk",
        embedding_norm="model.mtp_layers.0.token_layernorm",
        hidden_norm="model.mtp_layers.0.hidden_layernorm",
        projection="model.mtp_layers.0.input_proj",
        layers="model.mtp_layers.0",
        final_norm="model.mtp_layers.0.final_layernorm",
        source="mimo_mtp.py, mimo.py",
        note="The trunk's final norm comes with the lm_head, behind what is fed.",
    ),
    "ernie4_5_moe": Facts(
        order=_EMBEDDING_FIRST,
        hidden="pre_norm",
        recycles="pre_norm",
        embedding="trunk",
        lm_head="trunk",
        embedding_norm="model.mtp_emb_norm.0",
        hidden_norm="model.mtp_hidden_norm.0",
        projection="model.mtp_linear_proj.0",
        layers="model.mtp_block.0",
        final_norm="model.norm",
        source="PaddleFormers, ernie4_5_moe/modeling.py; FastDeploy, ernie4_5_mtp.py",
        note=(
            "A dense layer, and the trunk's own final norm before the lm_head, as its "
            "authors have it; vLLM's ernie_mtp.py has none there, and feeds the hidden "
            "state behind it. Rotary embeddings are interleaved, as in the trunk; "
            "ernie_mtp.py takes a Llama layer, whose halves are split."
        ),
    ),
    "exaone_moe": _mtp(
        "exaone_moe_mtp.py, exaone_moe.py",
        "Norms are plain. A dense layer; attention to everything has no positions as "
        "long as other layers have a window.",
    ),
    "nemotron_h": Facts(
        order=_EMBEDDING_FIRST,
        hidden="post_norm",
        recycles="post_norm",
        embedding="trunk",
        lm_head="trunk",
        embedding_norm="mtp.layers.0.enorm",
        hidden_norm="mtp.layers.0.hnorm",
        projection="mtp.layers.0.eh_proj",
        layers="mtp.layers",
        final_norm="mtp.layers.{last}.final_layernorm",
        source="nemotron_h_mtp.py, nemotron_h.py",
        note="Small layers of a norm, a mixer and a residual; attention has no rope.",
    ),
}


def head_forward(
    family: str,
    config: Config,
    tensors: Mapping[str, Array],
    embedding: Array,
    lm_head: Array,
    tokens: Array,
    hidden: Array,
) -> tuple[Array, Array]:
    """A head over one sequence from its start: positions are 0 to T - 1.

    Args:
        family: A key of :data:`FACTS`.
        config: The configuration, as in :data:`wild.CONFIGS`.
        tensors: The head's, as :func:`wild.head_tensors` names them, and the trunk's
            ``model.norm.weight`` where a head goes through it.
        embedding: The trunk's, `(V, H)`; not used if the head has its own.
        lm_head: The trunk's, `(V, H)`; likewise.
        tokens: The next token of every position, `(T,)`.
        hidden: The target's hidden states, `(T, H)`; see :attr:`Facts.hidden`.

    Returns:
        What stands in for the hidden state at the next depth, `(T, H)`, and the logits,
        `(T, V)`.
    """
    c, facts = text_config(config), FACTS[family]
    w = Weights.of(family, c, tensors)
    names = {
        "n": c["num_hidden_layers"],
        "last": len(c.get("mtp_hybrid_override_pattern", "*")) - 1,
    }
    layers = w.at(facts.layers.format(**names))
    if facts.embedding == "own":
        embedding = layers["embed_tokens.weight"]
    if facts.lm_head == "own":
        lm_head = layers["shared_head.head.weight"]
    halves = {
        "embedding": w.norm(
            facts.embedding_norm.format(**names), np.float64(embedding)[tokens]
        ),
        "hidden": w.norm(facts.hidden_norm.format(**names), np.float64(hidden)),
    }
    x = np.concatenate([halves[half] for half in facts.order], axis=-1)
    x = _LAYERS[family](c, layers, w.linear(facts.projection.format(**names), x))
    final = facts.final_norm.format(**names)
    normed = w.norm(final, x) if final else x
    recycled = normed if facts.recycles == "post_norm" else x
    return recycled, normed @ np.float64(lm_head).T


@dataclass(frozen=True)
class Weights:
    """Tensors under a common prefix, and the layers that have nothing but a weight.

    Args:
        tensors: All tensors, float64.
        prefix: What their names here begin with.
        epsilon: Of the norms.
        centre: What is added to a norm's weight: 1 where it is stored less 1.
    """

    tensors: Mapping[str, Array]
    prefix: str
    epsilon: float
    centre: float

    @classmethod
    def of(cls, family: str, c: Config, tensors: Mapping[str, Array]) -> Weights:
        epsilon = c.get("rms_norm_eps", c.get("layer_norm_epsilon"))
        centre = 1.0 if family in ZERO_CENTRED else 0.0
        exact = {name: np.float64(value) for name, value in tensors.items()}
        return cls(exact, "", epsilon, centre)

    def at(self, name: str) -> Weights:
        return Weights(self.tensors, f"{self.prefix}{name}.", self.epsilon, self.centre)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def __getitem__(self, name: str) -> Array:
        return self.tensors[self.prefix + name]

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self[f"{name}.weight"].T
        return y + self[f"{name}.bias"] if f"{name}.bias" in self else y

    def norm(self, name: str, x: Array) -> Array:
        return rms_norm(x, self.centre + self[f"{name}.weight"], self.epsilon)


# --- formulas ---------------------------------------------------------------------


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """`x / sqrt(mean(x²) + ε) · weight` over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rope(x: Array, dims: int, base: float, *, interleaved: bool) -> Array:
    """Rotates the first `dims` features of `(T, heads, D)` by the position.

    Pair `i` turns by `position · base^(-2i / dims)`. Interleaved pairs are neighbours
    (2i, 2i + 1); the others lie half of `dims` apart (i, i + dims / 2).
    """
    half = dims // 2
    speeds = base ** (-np.arange(half) * 2 / dims)
    angles = np.arange(len(x))[:, None, None] * speeds  # (T, 1, half)
    first = slice(0, dims, 2) if interleaved else slice(0, half)
    second = slice(1, dims, 2) if interleaved else slice(half, dims)
    a, b, y = x[..., first], x[..., second], x.copy()
    y[..., first] = a * np.cos(angles) - b * np.sin(angles)
    y[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return y


def causal_attention(
    q: Array, k: Array, v: Array, scale: float, window: int = 0
) -> Array:
    """Softmax attention of `(T, heads, D)`; several heads of `q` may share one of `k`.

    A token sees itself and what is before it, or with a window the last `window` of
    these. Returns `(T, heads · D)`.
    """
    shared = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    back = np.arange(len(q))[:, None] - np.arange(len(k))
    seen = (back >= 0) & ((back < window) if window else True)
    weights = softmax(np.where(seen, scores, -np.inf))
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def swiglu(w: Weights, x: Array) -> Array:
    gated = silu(w.linear("gate_proj", x)) * w.linear("up_proj", x)
    return w.linear("down_proj", gated)


def relu2(w: Weights, x: Array) -> Array:
    """An MLP without a gate: `down(max(up(x), 0)²)`."""
    return w.linear("down_proj", np.maximum(w.linear("up_proj", x), 0) ** 2)


# --- attention --------------------------------------------------------------------


def attention(
    c: Config, w: Weights, x: Array, rotate: Callable[[Array], Array], window: int = 0
) -> Array:
    """Attention with grouped heads; queries and keys are normed where `w` has norms."""
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    q, k, v = (
        w.linear(name, x).reshape(len(x), -1, dim)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    q, k = _normed(w, q, k)
    return w.linear(
        "o_proj", causal_attention(rotate(q), rotate(k), v, dim**-0.5, window)
    )


def gated_attention(
    c: Config, w: Weights, x: Array, rotate: Callable[[Array], Array]
) -> Array:
    """Qwen3-Next's: `q_proj` gives every head its query, and then a gate.

    The sigmoid of the gate multiplies what the head has read.
    """
    dim = c["head_dim"]
    q, gate = np.split(w.linear("q_proj", x).reshape(len(x), -1, 2 * dim), 2, axis=-1)
    k, v = (w.linear(n, x).reshape(len(x), -1, dim) for n in ("k_proj", "v_proj"))
    q, k = _normed(w, q, k)
    read = causal_attention(rotate(q), rotate(k), v, dim**-0.5)
    return w.linear("o_proj", read * sigmoid(gate.reshape(len(x), -1)))


def _normed(w: Weights, q: Array, k: Array) -> tuple[Array, Array]:
    if "q_norm.weight" not in w:
        return q, k
    return w.norm("q_norm", q), w.norm("k_norm", k)


def latent_attention(c: Config, w: Weights, x: Array) -> Array:
    """DeepSeek's (arXiv:2405.04434, section 2.1), every key and value written out.

    Keys and values of all heads come from one small vector a token; the rotated part
    of the key is the same for all heads, and only it knows positions.
    """
    heads, nope, rotated = (
        c["num_attention_heads"],
        c["qk_nope_head_dim"],
        c["qk_rope_head_dim"],
    )
    q = w.linear("q_b_proj", w.norm("q_a_layernorm", w.linear("q_a_proj", x)))
    q = q.reshape(len(x), heads, nope + rotated)
    latent, k_rope = np.split(
        w.linear("kv_a_proj_with_mqa", x), [c["kv_lora_rank"]], axis=-1
    )
    kv = w.linear("kv_b_proj", w.norm("kv_a_layernorm", latent))
    k, v = np.split(kv.reshape(len(x), heads, -1), [nope], axis=-1)

    def turned(y: Array) -> Array:
        return rope(y, rotated, c["rope_theta"], interleaved=True)

    q = np.concatenate([q[..., :nope], turned(q[..., nope:])], axis=-1)
    k_rope = np.repeat(turned(k_rope[:, None]), heads, axis=1)
    k = np.concatenate([k, k_rope], axis=-1)
    return w.linear("o_proj", causal_attention(q, k, v, (nope + rotated) ** -0.5))


# --- experts ----------------------------------------------------------------------


def highest(scores: Array, count: int) -> Array:
    """Where the `count` highest of the last axis are, as booleans."""
    chosen = np.zeros(scores.shape, bool)
    best = np.argsort(-scores, axis=-1)[..., :count]
    np.put_along_axis(chosen, best, True, axis=-1)
    return chosen


def softmax_router(c: Config, w: Weights, x: Array) -> Array:
    """Weights of all experts, `(T, E)`: 0 for those that are not chosen."""
    scores = softmax(w.linear("gate", x))
    scores *= highest(scores, c["num_experts_per_tok"])
    if c["norm_topk_prob"]:
        scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def sigmoid_router(c: Config, w: Weights, x: Array) -> Array:
    """DeepSeek-V3's (arXiv:2412.19437, section 2.1.2), `(T, E)`.

    The bias counts for the choice alone. Experts come in groups; a group counts as
    much as its two best, and experts of all but the best groups are left out.
    """
    scores = sigmoid(w.linear("gate", x))
    corrected = scores + w["gate.e_score_correction_bias"]
    if c["n_group"] > 1:
        groups = corrected.reshape(len(x), c["n_group"], -1)
        worth = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
        kept = highest(worth, c["topk_group"])[..., None]
        corrected = np.where(kept, groups, -np.inf).reshape(scores.shape)
    scores *= highest(corrected, c["num_experts_per_tok"])
    if c["norm_topk_prob"]:
        scores /= scores.sum(axis=-1, keepdims=True)
    return scores * c["routed_scaling_factor"]


def experts(
    w: Weights, x: Array, weights: Array, expert: Callable[[Weights, Array], Array]
) -> Array:
    """The sum of all experts' outputs, weighted."""
    return sum(
        weights[:, [e]] * expert(w.at(f"experts.{e}"), x)
        for e in range(weights.shape[-1])
    )


def gated_shared_experts(c: Config, w: Weights, x: Array) -> Array:
    """Qwen3-Next's: the shared expert has a gate of its own."""
    routed = experts(w, x, softmax_router(c, w, x), swiglu)
    shared = swiglu(w.at("shared_expert"), x)
    return routed + sigmoid(w.linear("shared_expert_gate", x)) * shared


def shared_experts(c: Config, w: Weights, x: Array) -> Array:
    """DeepSeek-V3's and GLM's."""
    routed = experts(w, x, sigmoid_router(c, w, x), swiglu)
    return routed + swiglu(w.at("shared_experts"), x)


def latent_experts(c: Config, w: Weights, x: Array) -> Array:
    """Nemotron-H's: routed on `x`, but computed in a smaller space if there is one."""
    latent = "fc1_latent_proj.weight" in w
    inner = w.linear("fc1_latent_proj", x) if latent else x
    routed = experts(w, inner, sigmoid_router(c, w, x), relu2)
    routed = w.linear("fc2_latent_proj", routed) if latent else routed
    return routed + relu2(w.at("shared_experts"), x)


# --- layers -----------------------------------------------------------------------


def _layer(
    w: Weights,
    x: Array,
    attend: Callable[[Weights, Array], Array],
    mlp: Callable[[Weights, Array], Array],
) -> Array:
    """Norms before both parts, residuals around them."""
    x = x + attend(w.at("self_attn"), w.norm("input_layernorm", x))
    return x + mlp(w.at("mlp"), w.norm("post_attention_layernorm", x))


def _qwen(c: Config, w: Weights, x: Array) -> Array:
    ropes = c.get("rope_parameters", c)
    dims = int(c["head_dim"] * ropes["partial_rotary_factor"])

    def rotate(y: Array) -> Array:
        return rope(y, dims, ropes["rope_theta"], interleaved=False)

    def mlp(w: Weights, y: Array) -> Array:
        return gated_shared_experts(c, w, y) if "gate.weight" in w else swiglu(w, y)

    return _layer(w, x, lambda w, y: gated_attention(c, w, y, rotate), mlp)


def _glm(c: Config, w: Weights, x: Array) -> Array:
    dims = int(c["head_dim"] * c["partial_rotary_factor"])

    def rotate(y: Array) -> Array:
        return rope(y, dims, c["rope_theta"], interleaved=False)

    return _layer(
        w,
        x,
        lambda w, y: attention(c, w, y, rotate),
        lambda w, y: shared_experts(c, w, y),
    )


def _latent(c: Config, w: Weights, x: Array) -> Array:
    return _layer(
        w,
        x,
        lambda w, y: latent_attention(c, w, y),
        lambda w, y: shared_experts(c, w, y),
    )


def _mimo(c: Config, w: Weights, x: Array) -> Array:
    def rotate(y: Array) -> Array:
        return rope(y, y.shape[-1], c["rope_theta"], interleaved=False)

    return _layer(w, x, lambda w, y: attention(c, w, y, rotate), swiglu)


def _ernie(c: Config, w: Weights, x: Array) -> Array:
    def rotate(y: Array) -> Array:
        return rope(y, y.shape[-1], c["rope_theta"], interleaved=True)

    return _layer(w, x, lambda w, y: attention(c, w, y, rotate), swiglu)


def _exaone(c: Config, w: Weights, x: Array) -> Array:
    sliding = "sliding_attention"
    window = c["mtp_sliding_windows"][0] if c["mtp_layer_types"][0] == sliding else 0
    positions = window or sliding not in c["layer_types"]

    def rotate(y: Array) -> Array:
        base = c["rope_parameters"]["rope_theta"]
        return rope(y, y.shape[-1], base, interleaved=False) if positions else y

    return _layer(w, x, lambda w, y: attention(c, w, y, rotate, window), swiglu)


def _nemotron(c: Config, w: Weights, x: Array) -> Array:
    for i, kind in enumerate(c["mtp_hybrid_override_pattern"]):
        layer = w.at(str(i))
        mixer, y = layer.at("mixer"), layer.norm("norm", x)
        if kind == "*":
            x = x + attention(c, mixer, y, lambda y: y)
        else:
            x = x + latent_experts(c, mixer, y)
    return x


_LAYERS: dict[str, Callable[[Config, Weights, Array], Array]] = {
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_next": _qwen,
    "glm4_moe": _glm,
    "glm4_moe_lite": _latent,
    "deepseek_v3": _latent,
    "mimo": _mimo,
    "ernie4_5_moe": _ernie,
    "exaone_moe": _exaone,
    "nemotron_h": _nemotron,
}
