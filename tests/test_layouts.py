"""One head in every layout, encoding and quantisation loads to the same head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import mlx.core as mx
import pytest
from families import FAMILIES, SIDECARS, parameters, quantized, raw, save, trunk
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import same_bits

from mlx_lm_mtp import load_head
from mlx_lm_mtp.errors import HeadError, HeadMismatch, HeadNotFound, HeadUnreadable
from mlx_lm_mtp.heads import loaded_of
from mlx_lm_mtp.heads.find import ROOTS
from mlx_lm_mtp.heads.head import MTPHead

Tensors = dict[str, mx.array]

QWEN = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
MLX = {"format": "mlx"}
PT = {"format": "pt"}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def canonical(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of each family the head as it is loaded from its repository, by name."""
    heads: dict[str, Tensors] = {}

    def of(family: str) -> Tensors:
        if family not in heads:
            path = tmp_path_factory.mktemp(family)
            head = load_head(trunk(family), families.write_wild(path, family))
            heads[family] = parameters(head)
        return heads[family]

    return of


def differing(head: MTPHead, wanted: Tensors) -> list[str]:
    ours = parameters(head)
    return [
        name
        for name in sorted(ours.keys() | wanted.keys())
        if name not in ours
        or name not in wanted
        or not same_bits(ours[name], wanted[name])
    ]


def layout_of(family: str) -> tuple[str, str]:
    loaded = loaded_of(trunk(family))
    assert loaded is not None
    return loaded.weights.layout, loaded.weights.source


# --- layouts ----------------------------------------------------------------------


@pytest.mark.parametrize("root", ROOTS)
def test_original_names_below_any_root(
    tmp_path: Path, family: str, root: str, canonical: Any
) -> None:
    families.write_wild(tmp_path, family, root)
    head = load_head(trunk(family), tmp_path)
    assert differing(head, canonical(family)) == []
    assert layout_of(family) == ("in the shards", "model.safetensors")


@pytest.mark.parametrize("place", SIDECARS)
def test_sidecars(tmp_path: Path, family: str, place: str, canonical: Any) -> None:
    """Whatever the family, in the names that this package writes."""
    name, prefix = SIDECARS[place]
    tensors = {prefix + k: v for k, v in canonical(family).items()}
    save(tmp_path / name, tensors, MLX)
    head = load_head(trunk(family), tmp_path)
    assert differing(head, canonical(family)) == []
    assert layout_of(family) == ("sidecar", name)


def test_original_names_in_a_sidecar(
    tmp_path: Path, family: str, canonical: Any
) -> None:
    save(tmp_path / "mtp.safetensors", families.wild_head(family), PT)
    assert differing(load_head(trunk(family), tmp_path), canonical(family)) == []


def test_a_folder_of_its_own(tmp_path: Path, family: str, canonical: Any) -> None:
    save(tmp_path / "model.safetensors", canonical(family), MLX)
    config = {"model_type": f"{family}_mtp"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = load_head(trunk(family), tmp_path)
    assert differing(head, canonical(family)) == []
    assert layout_of(family) == ("folder", "model.safetensors")


@pytest.mark.parametrize("prefix", ["", "mtp."])
def test_one_file(tmp_path: Path, family: str, prefix: str, canonical: Any) -> None:
    file = tmp_path / "anything.safetensors"
    save(file, {prefix + k: v for k, v in canonical(family).items()}, MLX)
    assert differing(load_head(trunk(family), file), canonical(family)) == []
    assert layout_of(family) == ("file", "anything.safetensors")


def test_a_sidecar_counts_before_the_shards_and_says_so(
    tmp_path: Path, canonical: Any
) -> None:
    family = "qwen3_5"
    families.write_wild(tmp_path, family, seed=9)
    tensors = {f"mtp.{k}": v for k, v in canonical(family).items()}
    save(tmp_path / "mtp.safetensors", tensors, MLX)
    with pytest.warns(UserWarning, match="2 MTP heads") as caught:
        head = load_head(trunk(family), tmp_path)
    assert differing(head, canonical(family)) == []
    message = str(caught[0].message)
    assert "that in mtp.safetensors is used" in message
    assert "that in model.safetensors is not" in message


# --- encodings of norms -----------------------------------------------------------


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("word", ["raw", "shifted"])
@pytest.mark.parametrize("metadata", [MLX, PT], ids=["mlx", "pt"])
def test_a_declared_encoding_counts_before_all(
    tmp_path: Path, family: str, word: str, metadata: dict[str, str], canonical: Any
) -> None:
    tensors = canonical(family)
    tensors = raw(tensors) if word == "raw" else tensors
    named = {f"mtp.{k}": v for k, v in tensors.items()}
    save(tmp_path / "mtp.safetensors", named, metadata | {"mtp_norms": word})
    load_head(trunk(family), tmp_path)
    loaded = loaded_of(trunk(family))
    assert loaded is not None
    assert loaded.weights.norms == (word == "raw", f"declared in the file: {word}")
    assert f"declared in the file: {word}" in loaded.head.provenance


def test_other_families_have_plain_norms(tmp_path: Path, family: str) -> None:
    families.write_wild(tmp_path, family)
    load_head(trunk(family), tmp_path)
    loaded = loaded_of(trunk(family))
    assert loaded is not None
    assert loaded.weights.norms.raw is (family in QWEN)


# --- quantisation -----------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("skipped", [(), ("fc",)], ids=["all", "fc plain"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "deepseek_v3"])
def test_packed_heads_are_told_by_their_shapes(
    tmp_path: Path,
    family: str,
    bits: int,
    group: int,
    skipped: tuple[str, ...],
    canonical: Any,
) -> None:
    packed = quantized(canonical(family), bits, group, skipped)
    save(tmp_path / "mtp.safetensors", {f"mtp.{k}": v for k, v in packed.items()}, MLX)
    head = load_head(trunk(family), tmp_path)
    assert differing(head, packed) == []
    for path, module in head.named_modules():
        if f"{path}.scales" in packed:
            assert (module.bits, module.group_size) == (bits, group)


def test_groups_of_128(tmp_path: Path, canonical: Any) -> None:
    """Only the projection is wide enough for them in these heads."""
    packed = quantized(canonical("qwen3_5"), 4, 128)
    assert "fc.scales" in packed and "layers.0.mlp.up_proj.scales" not in packed
    save(tmp_path / "mtp.safetensors", packed, MLX)
    head = load_head(trunk("qwen3_5"), tmp_path)
    assert (head.fc.bits, head.fc.group_size) == (4, 128)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_other_modes(tmp_path: Path, mode: str, canonical: Any) -> None:
    tensors = dict(canonical("qwen3_5"))
    name = "layers.0.mlp.up_proj"
    packed = mx.quantize(tensors.pop(f"{name}.weight"), mode=mode)
    tensors |= {f"{name}.weight": packed[0], f"{name}.scales": packed[1]}
    save(tmp_path / "mtp.safetensors", tensors, MLX)
    head = load_head(trunk("qwen3_5"), tmp_path)
    assert head.layers[0].mlp.up_proj.mode == mode


def test_experts_that_were_packed_one_by_one(tmp_path: Path, canonical: Any) -> None:
    packed = quantized(canonical("qwen3_5_moe"), 4, 32)
    single: Tensors = {}
    for name, value in packed.items():
        before, switch, after = name.partition("switch_mlp.")
        if switch:
            single |= {
                f"{before}experts.{e}.{after}": value[e] for e in range(len(value))
            }
        else:
            single[name] = value
    save(tmp_path / "mtp.safetensors", {f"mtp.{k}": v for k, v in single.items()}, MLX)
    assert differing(load_head(trunk("qwen3_5_moe"), tmp_path), packed) == []


@pytest.mark.parametrize(
    ("said", "wrong"), [({"bits": 8}, "bits"), ({"group_size": 64}, "group_size")]
)
def test_what_is_declared_must_be_so(
    tmp_path: Path, said: dict[str, int], wrong: str, canonical: Any
) -> None:
    packed = quantized(canonical("qwen3_5"), 4, 32)
    right = {"bits": 4, "group_size": 32, "mode": "affine"}
    file = tmp_path / "mtp.safetensors"
    save(file, packed, MLX | {"mtp_quantization": json.dumps(right)})
    assert differing(load_head(trunk("qwen3_5"), tmp_path), packed) == []
    save(file, packed, MLX | {"mtp_quantization": json.dumps(right | said)})
    with pytest.raises(HeadMismatch, match=f"packed with {wrong}"):
        load_head(trunk("qwen3_5"), tmp_path)


@pytest.mark.parametrize("cut", ["weight", "scales"])
def test_what_does_not_multiply_out_is_an_error(
    tmp_path: Path, cut: str, canonical: Any
) -> None:
    packed = quantized(canonical("qwen3_5"), 4, 32)
    name = f"layers.0.mlp.up_proj.{cut}"
    packed[name] = packed[name][:, :-1]
    save(tmp_path / "mtp.safetensors", packed, MLX)
    with pytest.raises(HeadMismatch, match="cannot be unpacked|the model needs"):
        load_head(trunk("qwen3_5"), tmp_path)


def in_fp8(tensors: Tensors) -> Tensors:
    """Every projection in FP8 with a scale for each block of 128 x 128."""
    result: Tensors = {}
    for name, value in tensors.items():
        if value.ndim != 2 or "norm" in name or name.endswith(".gate.weight"):
            result[name] = value
            continue
        rows, columns = (-(-n // 128) for n in value.shape)
        scales = mx.random.uniform(0.5, 2.0, (rows, columns))
        wide = mx.repeat(mx.repeat(scales, 128, 0), 128, 1)
        exact = value / wide[: value.shape[0], : value.shape[1]]
        result[name] = mx.to_fp8(exact)
        result[f"{name}_scale_inv"] = scales
    return result


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "deepseek_v3"])
def test_fp8_heads_are_what_stock_would_make_of_them(
    tmp_path: Path, family: str
) -> None:
    from mlx_lm.models import deepseek_v3

    tensors = in_fp8(families.wild_head(family))
    save(tmp_path / "model.safetensors", tensors, PT)
    ours = parameters(load_head(trunk(family), tmp_path))
    # Stock's own code, which is that of DeepSeek-V3, leaves no other name alone.
    named = {f"model.layers.0.{k}": v for k, v in tensors.items()}
    stock = deepseek_v3.Model.sanitize(trunk("deepseek_v3"), named)
    plain = {k.removeprefix("model.layers.0."): v for k, v in stock.items()}
    save(tmp_path / "again" / "model.safetensors", plain, PT)
    again = parameters(load_head(trunk(family), tmp_path / "again"))
    assert [k for k in ours if not same_bits(ours[k], again[k])] == []
    assert ours["fc.weight"].dtype == mx.bfloat16


def test_fp8_of_other_blocks_is_refused(tmp_path: Path) -> None:
    tensors = in_fp8(families.wild_head("qwen3_5"))
    name = "mtp.fc.weight_scale_inv"
    tensors[name] = mx.ones((2, 4))
    save(tmp_path / "model.safetensors", tensors, PT)
    with pytest.raises(HeadMismatch, match=r"fc.weight is .* in FP8"):
        load_head(trunk("qwen3_5"), tmp_path)


# --- what is wrong ----------------------------------------------------------------


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    families.write_wild(tmp_path, "qwen3_5")
    index = {"weight_map": {"mtp.fc.weight": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HeadUnreadable, match=r"model-2.safetensors is missing"):
        load_head(trunk("qwen3_5"), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_damaged_json_is_named(tmp_path: Path, name: str) -> None:
    families.write_wild(tmp_path, "qwen3_5")
    (tmp_path / name).write_text("{")
    with pytest.raises(HeadUnreadable, match=f"{name} is damaged"):
        load_head(trunk("qwen3_5"), tmp_path)


def test_tensors_without_a_configuration_are_enough(
    tmp_path: Path, family: str, canonical: Any
) -> None:
    families.write_wild(tmp_path, family)
    (tmp_path / "config.json").unlink()
    assert differing(load_head(trunk(family), tmp_path), canonical(family)) == []


def test_a_configuration_without_tensors_is_told(tmp_path: Path, family: str) -> None:
    families.write_wild(tmp_path, family)
    save(tmp_path / "model.safetensors", {"model.norm.weight": mx.ones(64)}, MLX)
    with pytest.raises(HeadNotFound) as error:
        load_head(trunk(family), tmp_path)
    if family != "qwen3_next":  # its configurations say nothing
        assert "declares one all the same" in str(error.value)


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HeadNotFound, match="does not exist"):
        load_head(trunk("qwen3_5"), tmp_path / "nowhere")


def test_foreign_tensors_under_a_known_name(tmp_path: Path, canonical: Any) -> None:
    """Another kind of head, say, in a file of that name; ours is in the shards."""
    families.write_wild(tmp_path, "qwen3_5")
    foreign = {"mtp.layers.0.weight": mx.zeros(4), "decoder.fc.weight": mx.zeros(4)}
    save(tmp_path / "mtp.safetensors", foreign, MLX)
    head = load_head(trunk("qwen3_5"), tmp_path)
    assert differing(head, canonical("qwen3_5")) == []


# --- mangled files ----------------------------------------------------------------

WAYS = ("drop", "rename", "reshape", "dtype", "byte", "cut")


def _mangled(tensors: Tensors, name: str, way: str) -> Tensors:
    value = tensors.pop(name)
    if way == "rename":
        tensors[f"{name}x"] = value
    if way == "reshape":
        tensors[name] = value.reshape(-1)[: value.size // 2]
    if way == "dtype":
        tensors[name] = value.astype(mx.int32)
    return tensors


@settings(max_examples=4 * settings.default.max_examples)
@given(
    family=st.sampled_from(FAMILIES),
    way=st.sampled_from(WAYS),
    packed=st.booleans(),
    where=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
)
def test_a_mangled_head_is_an_error_or_itself(
    tmp_path_factory: pytest.TempPathFactory,
    canonical: Any,
    family: str,
    way: str,
    packed: bool,
    where: float,
    flip: int,
) -> None:
    """Never a head that silently is another one."""
    path = tmp_path_factory.mktemp("mangled")
    tensors = quantized(canonical(family), 4, 32) if packed else canonical(family)
    names = sorted(tensors)
    changed = dict(tensors)
    if way not in ("byte", "cut"):
        changed = _mangled(changed, names[int(where * len(names))], way)
    file = path / "mtp.safetensors"
    save(file, {f"mtp.{k}": v for k, v in changed.items()}, MLX)
    data = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    if way == "byte":  # in the header; what the numbers are nobody can tell
        data[int(where * header)] ^= flip
    if way == "cut":
        data = data[: int(where * len(data))]
    file.write_bytes(data)
    try:
        head = load_head(trunk(family), path)
    except HeadError as error:
        assert "\n" not in str(error)
    else:
        dropped = set(tensors) - set(changed)
        # Of these a head may use the trunk's.
        optional = {"embed_tokens.weight", "lm_head.weight"}
        assert way == "byte" or (way == "drop" and dropped <= optional)
        assert differing(head, {k: tensors[k] for k in changed}) == []
    finally:
        shutil.rmtree(path)
