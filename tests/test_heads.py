"""The head itself: what it computes, when it is built, and what does not fit."""

from __future__ import annotations

import dataclasses
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import pytest
from checkpoints import Written, save
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from oracle import random_state, same_bits
from tiny import HYBRIDS, VOCAB, WITH_HEAD, Spec, text_args

from mlx_lm_mtp import load_head
from mlx_lm_mtp.anatomy import text_model
from mlx_lm_mtp.errors import HeadMismatch, HeadNotFound
from mlx_lm_mtp.heads import head_of
from mlx_lm_mtp.heads.families import MODELS
from mlx_lm_mtp.heads.head import MTPHead

Tensors = dict[str, mx.array]

LENGTH = 7
SPECS = [
    Spec(),
    Spec(tied=False),
    Spec(weights="bf16"),
    Spec(experts=True),
    Spec("qwen3_next"),
    Spec("qwen3_next", experts=True, tied=False),
]
MOE = [Spec(experts=True), Spec("qwen3_next", experts=True)]


def name_of(spec: Any) -> str:
    """A readable id for a spec."""
    if not isinstance(spec, Spec):
        return str(spec)
    words = [spec.family, "moe" if spec.experts else "dense"]
    return "-".join([*words, "tied" if spec.tied else "untied", spec.weights])


def pairs(written: Written, length: int = LENGTH) -> tuple[mx.array, mx.array]:
    """`(1, T)` tokens and `(1, T, H)` hidden states, of the trunk's dtype."""
    mx.random.seed(5)
    tokens = mx.random.randint(0, VOCAB, (1, length))
    size = text_args(written.model).hidden_size
    hidden = mx.random.normal((1, length, size))
    dtype = text_model(written.model).norm.weight.dtype
    return tokens, hidden.astype(dtype)


def outputs(written: Written, head: MTPHead | None = None) -> tuple[mx.array, mx.array]:
    """Hidden states and logits of a head over the same pairs."""
    head = head or load_head(written.model, written.path)
    hidden = head(*pairs(written), KVCache())
    return hidden, head.logits(hidden)


# --- the formula ------------------------------------------------------------------


class Reference:
    """The formula of the head, put together by hand from its tensors.

    x_j = fc([norm_e(embed(token_{j+1})), norm_h(hidden_j)]), then a decoder layer,
    then the last norm. Only the insides of the layer are stock's.
    """

    def __init__(self, written: Written) -> None:
        self.tensors = written.head
        self.args = text_args(written.model)
        self.trunk = text_model(written.model)
        self.attention = self._part("self_attn", self.args)
        self.mlp = self._part("mlp", self.args)

    def _part(self, name: str, args: Any) -> nn.Module:
        """The same part of the trunk's last layer, an attention, with our weights."""
        module = type(getattr(self.trunk.layers[-1], name))
        sizes = (args.hidden_size, args.intermediate_size)
        part = module(*sizes if module.__name__ == "Qwen3NextMLP" else (args,))
        prefix = f"layers.0.{name}."
        own = {k: v for k, v in self.tensors.items() if k.startswith(prefix)}
        part.load_weights([(k.removeprefix(prefix), v) for k, v in own.items()])
        return part

    def norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(
            x, self.tensors[f"{name}.weight"], self.args.rms_norm_eps
        )

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        embedding = self.norm("pre_fc_norm_embedding", self.trunk.embed_tokens(tokens))
        both = [embedding, self.norm("pre_fc_norm_hidden", hidden)]
        x = mx.concatenate(both, axis=-1) @ self.tensors["fc.weight"].T
        mask = "causal" if tokens.shape[1] > 1 else None
        x = x + self.attention(self.norm("layers.0.input_layernorm", x), mask, cache)
        x = x + self.mlp(self.norm("layers.0.post_attention_layernorm", x))
        return self.norm("norm", x)


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_the_head_computes_the_formula(tmp_path: Path, spec: Spec) -> None:
    written = checkpoints.write(tmp_path, spec)
    expected = Reference(written)(*pairs(written), KVCache())
    assert same_bits(outputs(written)[0], expected)


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_positions_are_those_of_its_own_cache(tmp_path: Path, spec: Spec) -> None:
    """Fed pair by pair, it knows how far it is."""
    written = checkpoints.write(tmp_path, spec)
    tokens, hidden = pairs(written)
    head, cache = load_head(written.model, tmp_path), KVCache()
    steps = [
        head(tokens[:, i : i + 1], hidden[:, i : i + 1], cache) for i in range(LENGTH)
    ]
    expected = Reference(written)(tokens, hidden, KVCache())
    assert same_bits(mx.concatenate(steps, axis=1), expected)
    assert cache.offset == LENGTH


def test_a_raw_rope_position_starts_at_zero(tmp_path: Path) -> None:
    """What came before in the trunk is no matter: only contiguity is."""
    written = checkpoints.write(tmp_path)
    tokens, hidden = pairs(written)
    head, cache = load_head(written.model, tmp_path), KVCache()
    head(tokens[:, :3], hidden[:, :3], cache)
    late = head(tokens[:, 3:], hidden[:, 3:], cache)
    assert not same_bits(late, head(tokens[:, 3:], hidden[:, 3:], KVCache()))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", WITH_HEAD)
def test_logits_come_from_the_trunks_lm_head(
    tmp_path: Path, family: str, tied: bool
) -> None:
    written = checkpoints.write(tmp_path, Spec(family, tied=tied))
    hidden, logits = outputs(written)
    trunk = getattr(written.model, "language_model", written.model)
    weight = trunk.model.embed_tokens.weight if tied else trunk.lm_head.weight
    assert same_bits(logits, hidden @ weight.T)


@pytest.mark.parametrize(
    "own", [("lm_head",), ("embed_tokens",), ("lm_head", "embed_tokens")], ids="-".join
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_head_may_bring_its_own_ends(
    tmp_path: Path, own: tuple[str, ...], tied: bool
) -> None:
    written = checkpoints.write(tmp_path, Spec(tied=tied), own=own)
    plain, plain_logits = outputs(checkpoints.write(tmp_path / "b", Spec(tied=tied)))
    hidden, logits = outputs(written)
    assert same_bits(hidden, plain) is ("embed_tokens" not in own)
    assert not same_bits(logits, plain_logits)
    if "lm_head" in own:
        assert same_bits(logits, hidden @ written.head["lm_head.weight"].T)


def test_its_own_embedding_is_not_its_lm_head(tmp_path: Path) -> None:
    """Tied is the trunk's matter: logits stay with the trunk's embedding."""
    written = checkpoints.write(tmp_path, own=("embed_tokens",))
    hidden, logits = outputs(written)
    trunk = text_model(written.model).embed_tokens.weight
    assert same_bits(logits, hidden @ trunk.T)


# --- layouts ----------------------------------------------------------------------

LAYOUTS = [
    {"form": "raw"},
    {"form": "mlx"},
    {"form": "mlx", "prefix": "mtp."},
    {"form": "raw", "prefix": "model.language_model.mtp."},
    {"form": "raw", "file": "model-mtp.safetensors"},
]
EXPERT_LAYOUTS = [
    {"form": form, "experts": experts}
    for form in ("raw", "mlx")
    for experts in ("single", "fused", "switch")
]


def all_equal(path: Path, spec: Spec, layouts: list[dict[str, Any]]) -> bool:
    """Whether a head gives the same bits in all layouts."""
    results = [
        outputs(checkpoints.write(path / str(i), spec, **layout))
        for i, layout in enumerate(layouts)
    ]
    hidden, logits = results[0]
    return all(same_bits(h, hidden) and same_bits(o, logits) for h, o in results)


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_all_layouts_give_the_same_head(tmp_path: Path, spec: Spec) -> None:
    assert all_equal(tmp_path, spec, LAYOUTS)


@pytest.mark.parametrize("spec", MOE, ids=name_of)
def test_all_layouts_of_experts_give_the_same_head(tmp_path: Path, spec: Spec) -> None:
    assert all_equal(tmp_path, spec, EXPERT_LAYOUTS)


def test_fused_experts_may_be_called_weights(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path, MOE[0], experts="fused")
    expected = outputs(written)[0]
    rewrite(written, lambda k, v: (f"{k}.weight" if ".experts." in k else k, v))
    assert same_bits(outputs(written)[0], expected)


def rewrite(
    written: Written, change: Callable[[str, mx.array], tuple[str, mx.array] | None]
) -> None:
    """Change the head's names and values in the file; None drops a tensor."""
    file = written.path / "model-00002-of-00002.safetensors"
    tensors = {}
    for name, value in mx.load(str(file)).items():
        new = change(name, value) if "mtp." in name else (name, value)
        if new is not None:
            tensors[new[0]] = mx.array(new[1])
    mx.eval(tensors)
    save(file, tensors, written.layout.format)


# --- quantised --------------------------------------------------------------------


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
@pytest.mark.parametrize(
    "spec",
    [Spec(), Spec(tied=False, weights="4bit"), Spec("qwen3_next")],
    ids=name_of,
)
def test_a_quantised_head_computes_with_its_own_bits(
    tmp_path: Path, spec: Spec, bits: int
) -> None:
    """As much as a plain head made of the values that its bits stand for."""
    plain = dataclasses.replace(spec, weights="fp32")
    written = checkpoints.write(tmp_path, plain, form="mlx", head_bits=bits)
    head = load_head(written.model, tmp_path)
    assert head.fc.bits == head.layers[0].self_attn.q_proj.bits == bits
    expected = Reference(dataclasses.replace(written, head=dequantised(written, bits)))
    result = outputs(written, head)[0]
    assert mx.allclose(result, expected(*pairs(written), KVCache()), 1e-3, 1e-3)


def dequantised(written: Written, bits: int) -> Tensors:
    result = {}
    for name, value in written.head.items():
        base = name.removesuffix(".weight")
        parts = [written.head.get(f"{base}.{p}") for p in ("scales", "biases")]
        if name.endswith(".weight"):
            plain = parts[0] is None
            result[name] = value if plain else mx.dequantize(value, *parts, 32, bits)
    return result


@pytest.mark.parametrize("spec", MOE, ids=name_of)
def test_a_quantised_moe_head(tmp_path: Path, spec: Spec) -> None:
    written = checkpoints.write(tmp_path, spec, form="mlx", head_bits=4)
    head = load_head(written.model, tmp_path)
    switch = head.layers[0].mlp.switch_mlp
    assert (switch.up_proj.bits, switch.up_proj.group_size) == (4, 32)
    assert mx.isfinite(outputs(written, head)[1]).all()


@pytest.mark.parametrize("name", ["fc", "layers.0.self_attn.o_proj"])
def test_projections_may_be_left_plain(tmp_path: Path, name: str) -> None:
    """Many quantised heads keep `fc` in bf16."""
    written = checkpoints.write(tmp_path, form="mlx", head_bits=4)
    plain = checkpoints.head_for(Spec())[f"{name}.weight"]
    rewrite(written, lambda k, v: plain_again(k, v, name, plain))
    head = load_head(written.model, tmp_path)
    quantised = [k for k, m in head.named_modules() if hasattr(m, "bits")]
    assert name not in quantised
    assert len(quantised) == 7


def plain_again(
    key: str, value: mx.array, name: str, plain: mx.array
) -> tuple[str, mx.array] | None:
    if f"{name}." not in key:
        return key, value
    return (key, plain) if key.endswith(".weight") else None


def test_a_plain_head_on_a_quantised_trunk(tmp_path: Path) -> None:
    """Its embedding and lm_head are then the trunk's quantised ones."""
    spec = Spec(weights="4bit", tied=False)
    written = checkpoints.write(tmp_path, spec, form="mlx")
    expected = Reference(written)(*pairs(written), KVCache())
    hidden, logits = outputs(written)
    assert same_bits(hidden, expected)
    trunk = written.model.language_model
    assert same_bits(logits, trunk.lm_head(expected))
    assert isinstance(trunk.lm_head, nn.QuantizedLinear)


def test_own_quantised_ends(tmp_path: Path) -> None:
    own = ("embed_tokens", "lm_head")
    written = checkpoints.write(tmp_path, form="mlx", head_bits=4, own=own)
    head = load_head(written.model, tmp_path)
    assert isinstance(head.embed_tokens, nn.QuantizedEmbedding)
    assert isinstance(head.lm_head, nn.QuantizedLinear)
    assert outputs(written, head)[1].shape == (1, LENGTH, VOCAB)


# --- what does not fit ------------------------------------------------------------


def mismatch(written: Written) -> str:
    """The message about a head that does not fit, in one line."""
    with pytest.raises(HeadMismatch) as error:
        load_head(written.model, written.path)
    message = str(error.value)
    assert "\n" not in message
    assert "model-00002-of-00002.safetensors" in message
    return message


@pytest.mark.parametrize(
    "name", ["norm.weight", "layers.0.mlp.up_proj.weight", "pre_fc_norm_hidden.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    written = checkpoints.write(tmp_path)
    rewrite(written, lambda k, v: None if k == f"mtp.{name}" else (k, v))
    shape = written.head[name].shape
    assert f"{name} is missing, the model needs {shape}" in mismatch(written)


@pytest.mark.parametrize("name", ["extra.weight", "layers.1.mlp.up_proj.weight"])
def test_an_extra_tensor_is_named(tmp_path: Path, name: str) -> None:
    written = checkpoints.write(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    save(file, mx.load(str(file)) | {f"mtp.{name}": mx.zeros((3, 5))})
    assert f"{name} is (3, 5), the model needs no such tensor" in mismatch(written)


def test_a_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    name = "layers.0.mlp.down_proj.weight"
    rewrite(written, lambda k, v: (k, v[:, :-32] if k.endswith(name) else v))
    assert f"{name} is (64, 64), the model needs (64, 96)" in mismatch(written)


@pytest.mark.parametrize(
    ("model", "head"), [(0, 1), (1, 0)], ids=["moe head", "dense head"]
)
def test_a_head_with_other_experts_does_not_fit(
    tmp_path: Path, model: int, head: int
) -> None:
    specs = Spec(), Spec(experts=True)
    written = checkpoints.write(tmp_path, specs[head])
    trunk = checkpoints.trunk(specs[model])
    assert "layers.0.mlp." in mismatch(dataclasses.replace(written, model=trunk))


def test_fused_experts_without_their_other_half(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path, MOE[0], experts="fused")
    name = "experts.down_proj"
    rewrite(written, lambda k, v: None if k.endswith(name) else (k, v))
    assert "down_proj" in mismatch(written)


@pytest.mark.parametrize("expert", [0, 2, 3], ids=["first", "middle", "last"])
def test_an_expert_that_is_missing(tmp_path: Path, expert: int) -> None:
    written = checkpoints.write(tmp_path, MOE[1], experts="single")
    name = f"experts.{expert}.up_proj.weight"
    rewrite(written, lambda k, v: None if k.endswith(name) else (k, v))
    assert "up_proj" in mismatch(written)


def test_experts_of_unequal_shapes(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path, MOE[1], experts="single")
    name = "experts.2.up_proj.weight"
    rewrite(written, lambda k, v: (k, v[:-1] if k.endswith(name) else v))
    assert "up_proj" in mismatch(written)


@pytest.mark.parametrize(
    "width",
    [
        32,
        48,
        128,
    ],
)
def test_a_quantised_head_of_a_model_of_another_size(
    tmp_path: Path, width: int
) -> None:
    """The commonest mistake of all: the head of the 4B model on the 9B one."""
    written = checkpoints.write(tmp_path, form="mlx", head_bits=4)
    wider = checkpoints.trunk(Spec())
    args = dataclasses.replace(text_args(wider), hidden_size=width)
    wider.language_model = type(wider.language_model)(args)
    mismatch(dataclasses.replace(written, model=wider))


@pytest.mark.parametrize("family", sorted({*HYBRIDS, "qwen3", "mamba2"} - {*WITH_HEAD}))
def test_models_of_other_families_have_no_head(tmp_path: Path, family: str) -> None:
    checkpoints.write(tmp_path)
    with pytest.raises(HeadNotFound) as error:
        load_head(Spec(family).build(), tmp_path)
    message = str(error.value)
    assert repr(family) in message
    assert ", ".join(MODELS) in message


# --- when it is built -------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every file that is read through `mx.load`, in order."""
    files: list[str] = []
    load = mx.load

    def counting(file: str, *args: Any, **kwargs: Any) -> Any:
        files.append(Path(file).name)
        return load(file, *args, **kwargs)

    monkeypatch.setattr(mx, "load", counting)
    return files


@pytest.mark.usefixtures("plugin")
def test_a_head_is_built_at_first_use_and_once(
    tmp_path: Path, loads: list[str]
) -> None:
    checkpoints.write(tmp_path)
    model, _ = mlx_lm.load(str(tmp_path))
    stock = len(loads)
    assert stock == 2
    head = head_of(model)
    assert len(loads) == 2 * stock
    assert head_of(model) is head
    assert len(loads) == 2 * stock


@pytest.mark.usefixtures("plugin")
def test_two_models_have_two_heads(tmp_path: Path) -> None:
    checkpoints.write(tmp_path)
    models = [mlx_lm.load(str(tmp_path))[0] for _ in range(2)]
    assert head_of(models[0]) is not head_of(models[1])


def test_load_head_replaces_the_head(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    first = load_head(written.model, tmp_path)
    second = load_head(written.model, str(tmp_path))
    assert head_of(written.model) is second is not first


def test_a_head_that_does_not_fit_replaces_nothing(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path / "good")
    head = load_head(written.model, written.path)
    other = checkpoints.write(tmp_path / "bad", Spec(experts=True))
    with pytest.raises(HeadMismatch):
        load_head(written.model, other.path)
    assert head_of(written.model) is head


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    """Nothing of the head is to be seen in the model, nor the other way round."""
    written = checkpoints.write(tmp_path, Spec(tied=False))
    before = [k for k, _ in tree_flatten(written.model.parameters())]
    attributes = set(vars(written.model))
    head = load_head(written.model, tmp_path)
    assert [k for k, _ in tree_flatten(written.model.parameters())] == before
    assert set(vars(written.model)) == attributes
    assert dict(tree_flatten(head.parameters())).keys() == written.head.keys()


def test_building_a_head_draws_no_random_numbers(tmp_path: Path) -> None:
    """The tokens that are sampled next are those of plain decoding."""
    written = checkpoints.write(tmp_path, Spec(experts=True))
    mx.random.seed(3)
    before = random_state()
    load_head(written.model, tmp_path)
    assert random_state() == before


def test_a_training_model_stays_in_training(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path, Spec(tied=False))
    written.model.train()
    load_head(written.model, tmp_path)
    assert all(m.training for m in written.model.modules())


@pytest.mark.usefixtures("plugin")
def test_a_discarded_model_is_freed_though_its_head_was_built(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, Spec(tied=False))
    model, _ = mlx_lm.load(str(tmp_path))
    refs = [weakref.ref(m) for m in (model, head_of(model), model.layers[0])]
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


def test_a_head_outlives_its_model(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    expected = outputs(written)[0]
    head = load_head(written.model, tmp_path)
    inputs = pairs(written)
    ref = weakref.ref(written.model)
    del written
    gc.collect()
    assert ref() is None
    assert same_bits(head(*inputs, KVCache()), expected)


# --- where the model came from ----------------------------------------------------


def test_a_model_from_before_install_is_told_what_to_do(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path)
    with pytest.raises(HeadNotFound) as error:
        head_of(written.model)
    assert "mlx_lm_mtp.load_head(model, path)" in str(error.value)
    assert "after mlx_lm_mtp.install()" in str(error.value)
    load_head(written.model, tmp_path)
    assert isinstance(head_of(written.model), MTPHead)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("loader", ["load", "load_model", "lazy"])
def test_every_loader_is_remembered(tmp_path: Path, loader: str) -> None:
    checkpoints.write(tmp_path)
    loaders = {
        "load": lambda: mlx_lm.load(str(tmp_path)),
        "load_model": lambda: mlx_lm.utils.load_model(tmp_path),
        "lazy": lambda: mlx_lm.load(str(tmp_path), lazy=True),
    }
    assert isinstance(head_of(loaders[loader]()[0]), MTPHead)


@pytest.mark.usefixtures("plugin")
def test_a_model_with_adapters_has_the_head_of_its_checkpoint(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path / "model")
    adapters = write_adapters(tmp_path / "adapters", written)
    model, _ = mlx_lm.load(str(written.path), adapter_path=str(adapters))
    assert any("lora_a" in k for k, _ in tree_flatten(model.parameters()))
    expected = outputs(written)[0]
    assert same_bits(outputs(written, head_of(model))[0], expected)


def write_adapters(path: Path, written: Written) -> Path:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    settings = {"rank": 2, "scale": 1.0, "dropout": 0.0}
    model = checkpoints.trunk(Spec())
    model.freeze()
    linear_to_lora_layers(model, 2, settings)
    path.mkdir()
    weights = dict(tree_flatten(model.trainable_parameters()))
    save(path / "adapters.safetensors", weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    (path / "adapter_config.json").write_text(checkpoints.json.dumps(config))
    return path


@pytest.mark.usefixtures("plugin")
def test_a_relative_path_is_remembered_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.write(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    model, _ = mlx_lm.load("model")
    monkeypatch.chdir(os.sep)
    assert isinstance(head_of(model), MTPHead)


def test_heads_of_several_places_are_kept_apart(tmp_path: Path) -> None:
    """One that is asked for by its place does not become the model's own."""
    written = checkpoints.write(tmp_path / "own")
    other = checkpoints.write(tmp_path / "other", own=("lm_head",)).path
    own = load_head(written.model, written.path)
    elsewhere = head_of(written.model, other)
    assert elsewhere is not own and "lm_head" in elsewhere
    assert head_of(written.model) is own
    assert head_of(written.model, str(other)) is elsewhere
