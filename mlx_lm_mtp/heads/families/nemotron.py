"""Nemotron-H: a row of small layers, the projection in the first, a norm in the last.

Which mixer a layer has is told by its tensors (the configuration says it, too, as
`mtp_hybrid_override_pattern`).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import HeadMismatch
from ..family import Family, Plan, Renames, Tensors, through_stock

_FIRST = "mtp.layers.0."
# The first of these tensors that a mixer has tells its kind; see stock's nemotron_h.
_KINDS = (
    ("in_proj.", "M"),
    ("q_proj.", "*"),
    ("gate.", "E"),
    ("up_proj.", "-"),
)


def _names(args: Any) -> Renames:
    return (
        (f"{_FIRST}enorm.", "pre_fc_norm_embedding."),
        (f"{_FIRST}hnorm.", "pre_fc_norm_hidden."),
        (f"{_FIRST}eh_proj.", "fc."),
        *((f"mtp.layers.{i}.final_layernorm.", "norm.") for i in range(_MOST)),
        ("mtp.", ""),
    )


_MOST = 16  # layers in a head


def _kind(plan: Plan, i: int) -> str:
    mixer = f"layers.{i}.mixer."
    names = [n.removeprefix(mixer) for n in plan.names if n.startswith(mixer)]
    kinds = (k for start, k in _KINDS if any(n.startswith(start) for n in names))
    return next(kinds, "?")


def _layers(plan: Plan) -> list[nn.Module]:
    count = len({n.split(".")[1] for n in plan.names if n.startswith("layers.")})
    # A head that nobody has read yet is an attention and experts, as released ones.
    kinds = "".join(_kind(plan, i) for i in range(count)) or "*E"
    if kinds.count("*") != 1 or set(kinds) - set("*E-"):
        raise HeadMismatch(
            f"its layers are of the kinds {kinds!r}; known are heads of one attention "
            "(*) with experts (E) and MLPs (-)"
        )
    return [plan.layer(plan.args, kind) for kind in kinds]


def _sanitize(trunk: Any, tensors: Tensors) -> dict[str, mx.array]:
    return through_stock(trunk, tensors, "backbone.")


NEMOTRON = Family(
    models=("nemotron_h",),
    names=_names,
    layers=_layers,
    sanitize=_sanitize,
    source="vLLM, models/nemotron_h_mtp.py",
)
