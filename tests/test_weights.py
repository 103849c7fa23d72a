"""Finding a head in a checkpoint, and telling how its norms are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoints
import mlx.core as mx
import mlx_lm.utils
import pytest
from checkpoints import Written, is_norm, save, unshifted, with_experts
from mlx.utils import tree_flatten
from oracle import same_bits
from tiny import WITH_HEAD, Spec

from mlx_lm_mtp import load_head
from mlx_lm_mtp.errors import HeadNotFound, HeadUnreadable
from mlx_lm_mtp.heads import find
from mlx_lm_mtp.heads.families.qwen import QWEN
from mlx_lm_mtp.heads.find import ROOTS, HeadWeights

Tensors = dict[str, mx.array]

DENSE = Spec()
EXPERTS = Spec(experts=True)
FORMS = ("raw", "mlx")
PREFIXES = tuple(f"{root}mtp." for root in ROOTS)
RAW_CONV = {"model.layers.0.linear_attn.conv1d.weight": mx.zeros((8, 1, 4))}
MLX_CONV = {"model.layers.0.linear_attn.conv1d.weight": mx.zeros((8, 4, 1))}


def find_head(path: Path) -> HeadWeights:
    """What is found for a Qwen model."""
    return find.find_head(path, QWEN, None)


def differing(ours: Tensors, theirs: Tensors) -> list[str]:
    """Names that only one side has, or whose bits differ."""
    names = sorted(ours.keys() | theirs.keys())
    return [
        n
        for n in names
        if n not in ours or n not in theirs or not same_bits(ours[n], theirs[n])
    ]


def one_sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    """The message, which must be a single line with an end."""
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def head_only(path: Path, *, raw: bool, also: Tensors | None = None) -> HeadWeights:
    """What is found beside a head of format pt, with no trunk but `also`."""
    head = checkpoints.head_for(DENSE)
    return found(path, unshifted(head) if raw else head, also or {})


def found(path: Path, head: Tensors, also: Tensors, form: str = "pt") -> HeadWeights:
    named = {f"mtp.{k}": v for k, v in head.items()}
    save(path / "model.safetensors", named | also, form)
    return find_head(path)


# --- where heads are --------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("form", FORMS)
def test_every_prefix_is_found(tmp_path: Path, form: str, prefix: str) -> None:
    written = checkpoints.write(tmp_path, form=form, prefix=prefix)
    assert not differing(find_head(tmp_path).shifted(), written.head)


@pytest.mark.parametrize("experts", ["single", "fused", "switch"])
@pytest.mark.parametrize("family", WITH_HEAD)
@pytest.mark.parametrize("form", FORMS)
def test_every_layout_of_experts_is_found(
    tmp_path: Path, form: str, family: str, experts: str
) -> None:
    spec = Spec(family, experts=True)
    written = checkpoints.write(tmp_path, spec, form=form, experts=experts)
    tensors = find_head(tmp_path).shifted()
    assert not differing(tensors, with_experts(written.head, experts))
    assert not differing(QWEN.sanitize(None, tensors), written.head)


def test_the_source_names_the_file_that_holds_the_head(tmp_path: Path) -> None:
    checkpoints.write(tmp_path)
    assert find_head(tmp_path).source == "model-00002-of-00002.safetensors"


def test_a_head_across_shards_is_put_together(tmp_path: Path) -> None:
    head = checkpoints.head_for(DENSE)
    names = sorted(head)
    for i, part in enumerate((names[:7], names[7:])):
        tensors = {f"mtp.{k}": head[k] for k in part}
        save(tmp_path / f"model-{i}.safetensors", tensors, "mlx")
    weights = find_head(tmp_path)
    assert not differing(weights.tensors, head)
    assert weights.source == "model-0.safetensors, model-1.safetensors"


@pytest.mark.parametrize("form", FORMS)
def test_a_shard_that_the_index_does_not_list_is_found(
    tmp_path: Path, form: str
) -> None:
    written = checkpoints.write(tmp_path, form=form, file="model-mtp.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    assert "mtp" not in index.read_text()
    assert not differing(find_head(tmp_path).shifted(), written.head)


def test_quantised_tensors_are_found_as_they_are(tmp_path: Path) -> None:
    written = checkpoints.write(tmp_path, form="mlx", head_bits=4)
    assert not differing(find_head(tmp_path).shifted(), written.head)


# --- what is not a head -----------------------------------------------------------


def test_a_declared_head_without_tensors_is_not_found(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, form="mlx", head=False)
    assert "mtp_num_hidden_layers" in (tmp_path / "config.json").read_text()
    with pytest.raises(HeadNotFound) as error:
        find_head(tmp_path)
    message = str(error.value)
    for part in (str(tmp_path), *PREFIXES, "model*.safetensors", "2 files"):
        assert part in message
    assert "use the original checkpoint" in message


@pytest.mark.parametrize("there", [True, False], ids=["empty", "missing"])
def test_a_directory_without_weights(tmp_path: Path, there: bool) -> None:
    path = tmp_path if there else tmp_path / "nowhere"
    with pytest.raises(HeadNotFound, match="0 files|does not exist"):
        find_head(path)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.foo",
        "mtp.fc",
        "mtp_fc.weight",
        "fc.weight",
        "xmtp.fc.weight",
        "model.layers.3.mtp_gate.weight",
        "model.layers.3.mtp.fc.weight",
    ],
)
def test_similar_names_are_no_head(tmp_path: Path, name: str) -> None:
    save(tmp_path / "model.safetensors", {name: mx.zeros((4, 4))} | RAW_CONV)
    with pytest.raises(HeadNotFound):
        find_head(tmp_path)


def test_similar_names_beside_a_head_are_not_taken(tmp_path: Path) -> None:
    also = {"model.layers.3.mtp_gate.weight": mx.zeros((4,)), **RAW_CONV}
    weights = head_only(tmp_path, raw=True, also=also)
    assert weights.tensors.keys() == checkpoints.head_for(DENSE).keys()


@pytest.mark.parametrize("name", ["adapters.safetensors", "vision.safetensors"])
def test_other_files_are_not_read(tmp_path: Path, name: str) -> None:
    written = checkpoints.write(tmp_path)
    (tmp_path / name).write_bytes(b"not safetensors")
    assert not differing(find_head(tmp_path).shifted(), written.head)


# --- raw or shifted norms ---------------------------------------------------------


@pytest.mark.parametrize("conv", [RAW_CONV, MLX_CONV], ids=["raw", "mlx"])
def test_format_mlx_goes_before_all_else(tmp_path: Path, conv: Tensors) -> None:
    weights = found(tmp_path, checkpoints.head_for(DENSE), conv, "mlx")
    assert tuple(weights.norms) == (False, "safetensors format: mlx")


@pytest.mark.parametrize(
    ("raw", "conv", "evidence"),
    [
        (True, RAW_CONV, "the trunk's conv1d is in raw layout (8, 1, 4)"),
        (False, MLX_CONV, "the trunk's conv1d is in MLX layout (8, 4, 1)"),
    ],
    ids=["raw", "mlx"],
)
def test_the_conv_layout_tells(
    tmp_path: Path, raw: bool, conv: Tensors, evidence: str
) -> None:
    weights = head_only(tmp_path, raw=raw, also=conv)
    assert tuple(weights.norms) == (raw, evidence)


def test_the_conv_layout_goes_before_the_norms(tmp_path: Path) -> None:
    """A head trained anew may have norms of any size."""
    head = checkpoints.head_for(DENSE)
    head = {k: v - 0.9 if is_norm(k) else v for k, v in head.items()}
    assert not found(tmp_path, head, MLX_CONV).norms.raw


@pytest.mark.parametrize(("raw", "mean"), [(True, 0.75), (False, 1.75)])
def test_without_a_conv_the_qk_norms_tell(
    tmp_path: Path, raw: bool, mean: float
) -> None:
    weights = head_only(tmp_path, raw=raw)
    assert weights.norms.raw is raw
    name, _, value = weights.norms.evidence.rpartition(" ")
    assert name == "mean of the q/k norms"
    assert float(value) == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "shifted"])
def test_norms_around_the_projection_tell_nothing(tmp_path: Path, raw: bool) -> None:
    """On released heads they are below 0.5 in both encodings."""
    head = checkpoints.head_for(DENSE)
    head = unshifted(head) if raw else head
    head |= {k: mx.full(v.shape, 0.4) for k, v in head.items() if "pre_fc" in k}
    assert found(tmp_path, head, {}).norms.raw is raw


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "shifted"])
def test_negative_weights_tell_last(tmp_path: Path, raw: bool) -> None:
    head = checkpoints.head_for(DENSE)
    head = {k: v for k, v in head.items() if ".self_attn." not in k}
    weights = found(tmp_path, unshifted(head) if raw else head, {})
    assert weights.norms.raw is raw
    assert weights.norms.evidence.startswith("share of negative norm weights 0.")


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "shifted"])
def test_a_head_of_other_origin_than_the_trunk(tmp_path: Path, raw: bool) -> None:
    """A raw head beside a converted trunk is told by itself, not by that trunk.

    Wrong norms give no error: nothing is ever accepted, that is all.
    """
    written = checkpoints.write(tmp_path, form="mlx", head=False)
    head = unshifted(written.head) if raw else written.head
    named = {f"mtp.{k}": v for k, v in head.items()}
    save(tmp_path / "model-mtp.safetensors", named, "pt")
    assert find_head(tmp_path).norms.raw is raw


# --- adding the 1 -----------------------------------------------------------------


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("family", WITH_HEAD)
def test_raw_norms_get_their_1_once(tmp_path: Path, family: str, weights: str) -> None:
    checkpoints.write(tmp_path, Spec(family, weights=weights))
    head = find_head(tmp_path)
    assert not differing(head.shifted(), head.shifted())
    for name, value in head.shifted().items():
        stored = head.tensors[name]
        one = mx.array(1.0 if is_norm(name) else 0.0, stored.dtype)
        assert same_bits(value, stored + one), name


def test_only_the_norms_of_a_moe_head_get_a_1(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, EXPERTS)
    head = find_head(tmp_path)
    changed = set(differing(head.shifted(), head.tensors))
    assert changed == {k for k in head.tensors if is_norm(k)}
    assert len(changed) == 7


def test_shifted_norms_stay(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, form="mlx")
    head = find_head(tmp_path)
    assert head.shifted() is head.tensors


def parameters(written: Written) -> Tensors:
    return dict(tree_flatten(written.model.parameters()))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("spec", "form"),
    [
        (Spec(), "raw"),
        (Spec(), "mlx"),
        (Spec(weights="bf16"), "raw"),
        (Spec(weights="4bit"), "mlx"),
        (Spec(experts=True), "raw"),
        (Spec(experts=True), "mlx"),
        (Spec("qwen3_next", experts=True), "raw"),
    ],
    ids=lambda v: v if isinstance(v, str) else f"{v.family}-{v.experts}-{v.weights}",
)
def test_the_trunk_stays_as_stock_loads_it(
    tmp_path: Path, spec: Spec, form: str
) -> None:
    """Whether a head's tensors lie beside it or not, built or not."""
    written = checkpoints.write(tmp_path, spec, form=form)
    model, _ = mlx_lm.utils.load_model(tmp_path)
    load_head(model, tmp_path)
    loaded = dict(tree_flatten(model.parameters()))
    assert not differing(loaded, parameters(written))


# --- damaged files ----------------------------------------------------------------


def _cut_header(data: bytes) -> bytes:
    return data[:40]


def _cut_length(data: bytes) -> bytes:
    return data[:3]


def _cut_data(data: bytes) -> bytes:
    return data[:-4]


def _broken_header(data: bytes) -> bytes:
    return data[:8] + b"?" * 16 + data[24:]


def _nothing(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("shard", ["model-00001-of-00002", "model-00002-of-00002"])
@pytest.mark.parametrize(
    "damage", [_cut_header, _cut_length, _cut_data, _broken_header, _nothing]
)
def test_a_damaged_file_is_named(
    tmp_path: Path, shard: str, damage: Callable[[bytes], bytes]
) -> None:
    written = checkpoints.write(tmp_path)
    file = tmp_path / f"{shard}.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(HeadUnreadable) as error:
        load_head(written.model, tmp_path)
    message = one_sentence(error)
    assert str(file) in message
    assert "download it again" in message.lower()
