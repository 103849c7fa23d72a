"""Tiny checkpoints on disk, in the layouts that are found in the wild.

:func:`write` puts a model of :mod:`tiny` and a head for it into a directory. The same
spec gives the same model in every layout, bit for bit: norm weights lie on a grid
where taking 1 off and adding it back loses nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from tiny import VOCAB, Spec, head_tensors, text_args

from mlx_lm_mtp.testing.tokenizer import EOS, characters

Tensors = dict[str, mx.array]

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# What stock adds 1 to, in the trunk, when a checkpoint is raw.
_TRUNK_NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is written.

    Args:
        form: ``raw`` is the original repositories' (zero-centred norms, the
            convolution kernels as `(C, 1, K)`, format pt), ``mlx`` a conversion's.
        experts: The head's: ``single`` (one by one), ``fused`` (`experts.gate_up_proj`)
            or ``switch``; by default as the trunk's, which are what stock can load.
        prefix: Before the head's names; by default what the form has.
        head: Whether the head's tensors are there.
        head_bits: Bits of the head's projections in groups of 32; None for plain ones.
        own: Which of ``embed_tokens`` and ``lm_head`` the head brings itself.
        file: A file for the head alone, which the index does not list.
    """

    form: str = "raw"
    experts: str = ""
    prefix: str = ""
    head: bool = True
    head_bits: int | None = None
    own: tuple[str, ...] = ()
    file: str = ""

    def trunk_experts(self, family: str) -> str:
        if self.form == "mlx":
            return "switch"
        return "fused" if family == "qwen3_5" else "single"

    @property
    def format(self) -> str:
        return "pt" if self.form == "raw" else "mlx"

    @property
    def head_prefix(self) -> str:
        return self.prefix or ("mtp." if self.form == "raw" else "language_model.mtp.")


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk, and what must come out of it.

    Args:
        path: The directory.
        model: The trunk, as stock must load it.
        head: The head's tensors, as `MTPHead` must have them.
        layout: How they are written.
    """

    path: Path
    model: nn.Module
    head: Tensors
    layout: Layout


def write(path: Path, spec: Spec | None = None, **layout: Any) -> Written:
    """Write a tiny checkpoint; keyword arguments are those of :class:`Layout`."""
    spec, how = spec or Spec(), Layout(**layout)
    model = trunk(spec)
    head = head_for(spec, own=how.own, bits=how.head_bits)
    form = how.trunk_experts(spec.family)
    tensors = _head_file(head, how, form)
    path.mkdir(parents=True, exist_ok=True)
    if how.file:
        save(path / how.file, tensors, how.format)
        tensors = {}
    write_shards(path, _shards(_trunk_file(model, how, form), tensors), how.format)
    write_config(path, model, spec)
    write_tokenizer(path)
    return Written(path, model, head, how)


def trunk(spec: Spec) -> nn.Module:
    """The tiny model of this spec with norms on the grid."""
    model = dataclasses.replace(spec, weights="fp32").build()
    model.update(tree_map_with_path(_on_grid, model.parameters()))
    if spec.weights == "bf16":
        model.set_dtype(mx.bfloat16, predicate=lambda d: d == mx.float32)
    if spec.weights == "4bit":
        nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


def head_for(spec: Spec, own: tuple[str, ...] = (), bits: int | None = None) -> Tensors:
    """A head for the tiny model of this spec, named as `MTPHead` has it."""
    tensors = head_tensors(dataclasses.replace(spec, weights="fp32").build())
    tensors = {k: _on_grid(k, _spread(k, v)) for k, v in tensors.items()}
    for name in own:
        shape = (VOCAB, tensors["norm.weight"].shape[0])
        tensors[f"{name}.weight"] = mx.random.normal(shape)
    if spec.weights != "fp32":
        tensors = {k: v.astype(mx.bfloat16) for k, v in tensors.items()}
    return tensors if bits is None else quantized(tensors, bits)


def quantized(tensors: Mapping[str, mx.array], bits: int) -> Tensors:
    """The same head with every projection quantised, in groups of 32."""
    result: Tensors = {}
    for name, value in tensors.items():
        if value.ndim < 2:
            result[name] = value
            continue
        parts = mx.quantize(value, group_size=32, bits=bits)
        base = name.removesuffix(".weight")
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            result[f"{base}.{part}"] = array
    return result


def is_norm(name: str) -> bool:
    """Whether a name of the head is a norm's: nothing else is called so."""
    return "norm" in name


def unshifted(head: Mapping[str, mx.array]) -> Tensors:
    """The head as the original repositories have it: norms around zero."""
    return {k: v - 1.0 if is_norm(k) else v for k, v in head.items()}


# --- names and layouts ------------------------------------------------------------


def _trunk_file(model: nn.Module, how: Layout, experts: str) -> Tensors:
    """The trunk's tensors, as the file has them."""
    tensors = with_experts(dict(tree_flatten(model.parameters())), experts)
    if how.form == "mlx":
        return tensors
    return {_raw_name(k): _raw_value(k, v) for k, v in tensors.items()}


def _head_file(head: Tensors, how: Layout, experts: str) -> Tensors:
    """The head's tensors, as the file has them."""
    if not how.head:
        return {}
    tensors = with_experts(head, how.experts or experts)
    if how.form == "raw":
        tensors = unshifted(tensors)
    return {f"{how.head_prefix}{k}": v for k, v in tensors.items()}


def _raw_name(name: str) -> str:
    """`language_model.model.x` is `model.language_model.x` in original Qwen3.5s."""
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return name.removeprefix("language_model.")


def _raw_value(name: str, value: mx.array) -> mx.array:
    if name.endswith("conv1d.weight"):
        return mx.contiguous(value.moveaxis(1, 2))
    return value - 1.0 if name.endswith(_TRUNK_NORMS) else value


def with_experts(tensors: Mapping[str, mx.array], form: str) -> Tensors:
    """`switch_mlp` tensors in another form; everything else as it is."""
    layers = {k.partition("switch_mlp.")[0] for k in tensors if "switch_mlp." in k}
    result = dict(tensors)
    if form == "switch":
        return result
    for layer in layers:
        stacked = {
            name: result.pop(f"{layer}switch_mlp.{name}.weight")
            for name in _PROJECTIONS
        }
        parts = _fused(stacked) if form == "fused" else _single(stacked)
        result |= {f"{layer}experts.{k}": v for k, v in parts.items()}
    return result


def _fused(stacked: Tensors) -> Tensors:
    gate_up = mx.concatenate([stacked["gate_proj"], stacked["up_proj"]], axis=-2)
    return {"gate_up_proj": gate_up, "down_proj": stacked["down_proj"]}


def _single(stacked: Tensors) -> Tensors:
    return {
        f"{e}.{name}.weight": weight[e]
        for name, weight in stacked.items()
        for e in range(weight.shape[0])
    }


def _on_grid(path: str, value: mx.array) -> mx.array:
    """Norm weights as multiples of 1/64: exact in bf16, with and without the 1."""
    if "norm" not in path:
        return value
    return mx.round(value * 64) / 64


def _spread(name: str, value: mx.array) -> mx.array:
    """q/k norms as large as those of released heads: about 1.75."""
    return value + 0.75 if name.endswith(("q_norm.weight", "k_norm.weight")) else value


# --- files ------------------------------------------------------------------------


def _shards(trunk_tensors: Tensors, head: Tensors) -> list[Tensors]:
    """Two shards, the head in the second one, together with the trunk's rest."""
    names = sorted(trunk_tensors)
    half = len(names) // 2
    first = {k: trunk_tensors[k] for k in names[:half]}
    return [first, {k: trunk_tensors[k] for k in names[half:]} | head]


def write_shards(path: Path, shards: list[Tensors], form: str = "pt") -> None:
    """Write shards of a safetensors format, and an index of them."""
    places = {}
    for i, tensors in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save(path / name, tensors, form)
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def save(file: Path, tensors: Tensors, form: str = "pt") -> None:
    """Write one file of a safetensors format."""
    mx.save_safetensors(str(file), tensors, metadata={"format": form})


def write_config(path: Path, model: nn.Module, spec: Spec) -> None:
    """A config that declares a head, as converted checkpoints do even without one."""
    text = dataclasses.asdict(text_args(model)) | {"mtp_num_hidden_layers": 1}
    text.pop("rope_scaling", None)
    if spec.family == "qwen3_5":
        name = "qwen3_5_moe" if spec.experts else "qwen3_5"
        text["model_type"] = f"{name}_text"
        config = {"model_type": name, "text_config": text}
    else:
        config = text | {"model_type": spec.family}
    if spec.weights == "4bit":
        config["quantization"] = {"group_size": 32, "bits": 4}
    config["eos_token_id"] = VOCAB - 1
    (path / "config.json").write_text(json.dumps(config))


def write_tokenizer(path: Path) -> None:
    """The kit's tokenizer, as a checkpoint has it."""
    characters().save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
