"""The public cache functions on every kind of cache, beside stock one by one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from checks import (
    INPUTS,
    PROMPT,
    after_prompt,
    cache_differences,
    commit_differences,
    feed,
    model_of,
    restore_differences,
    stock_after,
    tree_differences,
)
from mlx_lm.models import gated_delta, ssm
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from oracle import contents, differences, same_bits
from tiny import HYBRIDS, VOCAB, WITH_EXPERTS, Spec

import mlx_lm_mtp
from mlx_lm_mtp import wrapping
from mlx_lm_mtp.state import capture, commit
from mlx_lm_mtp.state.forms import BATCHED
from mlx_lm_mtp.state.recurrence import Recurrence
from mlx_lm_mtp.target import Target

STATE_SPACE = ("mamba2", "falcon_h1")
WIDTH = len(INPUTS)
PREFIXES = range(WIDTH + 1)
PATHS = (INPUTS, (1, 2, 3, 4, 5, 6), (95, 95, 0, 17, 17, 8))


def _name(spec: Spec) -> str:
    return f"{spec.family}{'-moe' if spec.experts else ''}-{spec.weights}"


def _specs(families: Sequence[str]) -> list[Any]:
    """Every kind of weights; experts in bf16 do not run on the CPU."""
    dense = [Spec(f, weights=w) for f in families for w in ("fp32", "bf16", "4bit")]
    experts = [
        Spec(f, experts=True, weights=w)
        for f in families
        if f in WITH_EXPERTS
        for w in ("fp32", "4bit")
    ]
    return [pytest.param(spec, id=_name(spec)) for spec in dense + experts]


every_hybrid = pytest.mark.parametrize("spec", _specs(HYBRIDS))
every_family = pytest.mark.parametrize(
    "spec", _specs((*HYBRIDS, *STATE_SPACE, "qwen3"))
)
a_hybrid_each = pytest.mark.parametrize(
    "spec", [pytest.param(Spec(family), id=family) for family in HYBRIDS]
)
a_recurrent_each = pytest.mark.parametrize(
    "spec", [pytest.param(Spec(f), id=f) for f in (*HYBRIDS, *STATE_SPACE)]
)
HYBRID = Spec("qwen3_5")


def _recorded(spec: Spec, tokens: Sequence[int] = INPUTS) -> list[Any]:
    """Caches after the prompt and one recorded forward."""
    caches = after_prompt(spec)
    mlx_lm_mtp.begin_speculative_checkpoints(caches)
    feed(model_of(spec), tokens, caches)
    return caches


def _committed(spec: Spec, n: int) -> list[Any]:
    caches = _recorded(spec)
    assert mlx_lm_mtp.commit_verified_prefix(caches, WIDTH, n)
    return caches


def _same_logits(spec: Spec, ours: list[Any], theirs: list[Any]) -> bool:
    """Whether both caches lead to the same next logits; both are written to."""
    model = model_of(spec)
    return same_bits(feed(model, [7], ours), feed(model, [7], theirs))


# --- commit of a prefix -------------------------------------------------------------


@every_family
@pytest.mark.parametrize("n", PREFIXES)
def test_a_committed_prefix_is_what_stock_holds_after_it(spec: Spec, n: int) -> None:
    assert commit_differences(spec, n) == []


@every_family
def test_decoding_goes_on_from_a_committed_prefix_as_in_stock(spec: Spec) -> None:
    ours = _committed(spec, 2)
    theirs = copy.deepcopy(stock_after(spec, PROMPT + INPUTS[:2]))
    assert _same_logits(spec, ours, theirs)
    assert differences(ours, theirs) == []


@a_recurrent_each
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_verifies_narrower_than_the_convolution_window(spec: Spec, width: int) -> None:
    for n in range(width + 1):
        ours = _recorded(spec, INPUTS[:width])
        assert mlx_lm_mtp.commit_verified_prefix(ours, width, n)
        assert differences(ours, stock_after(spec, PROMPT + INPUTS[:n])) == []


@a_recurrent_each
def test_round_after_round(spec: Spec) -> None:
    ours, kept = after_prompt(spec), PROMPT
    for n in (3, 1, 6, 0, 2):
        mlx_lm_mtp.begin_speculative_checkpoints(ours)
        feed(model_of(spec), INPUTS, ours)
        assert mlx_lm_mtp.commit_verified_prefix(ours, WIDTH, n)
        kept += INPUTS[:n]
        assert differences(ours, stock_after(spec, kept)) == []


@every_family
def test_a_recorded_forward_gives_the_logits_of_decoding(spec: Spec) -> None:
    recorded, decoding = after_prompt(spec), after_prompt(spec)
    mlx_lm_mtp.begin_speculative_checkpoints(recorded)
    ours = feed(model_of(spec), INPUTS, recorded)
    theirs = [model_of(spec)(mx.array([[t]]), cache=decoding) for t in INPUTS]
    assert same_bits(ours, mx.concatenate(theirs, axis=1))
    assert differences(recorded, decoding) == []


@every_hybrid
def test_recording_changes_neither_logits_nor_states(spec: Spec) -> None:
    recorded, plain = after_prompt(spec), after_prompt(spec)
    mlx_lm_mtp.begin_speculative_checkpoints(recorded)
    ours = feed(model_of(spec), INPUTS, recorded)
    mlx_lm_mtp.commit_verified_prefix(recorded, WIDTH, WIDTH)
    assert same_bits(ours, feed(model_of(spec), INPUTS, plain))
    assert differences(recorded, plain) == []


@a_recurrent_each
@pytest.mark.parametrize("n", PREFIXES)
def test_verify_in_empty_caches(spec: Spec, n: int) -> None:
    """Nothing accepted leaves zeros, which a layer reads as it reads an empty cache."""
    ours = make_prompt_cache(model_of(spec))
    mlx_lm_mtp.begin_speculative_checkpoints(ours)
    feed(model_of(spec), INPUTS, ours)
    assert mlx_lm_mtp.commit_verified_prefix(ours, WIDTH, n)
    theirs = copy.deepcopy(stock_after(spec, INPUTS[:n]))
    assert n == 0 or differences(ours, theirs) == []
    assert _same_logits(spec, ours, theirs)
    assert differences(ours, theirs) == []


@pytest.mark.parametrize("accepted", [-1, WIDTH + 1])
def test_accepted_len_out_of_range_is_refused_and_can_be_corrected(
    accepted: int,
) -> None:
    ours = _recorded(HYBRID)
    with pytest.raises(
        ValueError, match=rf"accepted_len is {accepted}, outside 0\.\.6"
    ):
        mlx_lm_mtp.commit_verified_prefix(ours, WIDTH, accepted)
    assert differences(ours, stock_after(HYBRID, PROMPT + INPUTS)) == []
    assert mlx_lm_mtp.commit_verified_prefix(ours, WIDTH, 4)
    assert differences(ours, stock_after(HYBRID, PROMPT + INPUTS[:4])) == []


# --- how the states were had --------------------------------------------------------


def _kept_states(caches: list[Any]) -> set[bool]:
    """Whether the records of the layers hold their states."""
    recordings = [commit._recordings.get(cache) for cache in caches]
    recording = next(r for r in recordings if r is not None)
    return {layer.after.__name__ != "replay" for layer in recording.layers.values()}


@every_hybrid
@pytest.mark.parametrize("n", PREFIXES)
def test_states_replayed_from_the_recurrence_are_the_same(spec: Spec, n: int) -> None:
    with Recurrence("replay")():
        ours = _recorded(spec)
    assert _kept_states(ours) == {False}
    assert mlx_lm_mtp.commit_verified_prefix(ours, WIDTH, n)
    assert differences(ours, stock_after(spec, PROMPT + INPUTS[:n])) == []


def _linear(spec: Spec) -> nn.Module:
    """The first gated-delta layer."""
    model = model_of(spec)
    layer = getattr(model, "language_model", model).model.layers[0]
    return layer.linear_attn if "linear_attn" in layer else layer.self_attn


def _rows(count: int) -> mx.array:
    return mx.random.normal((2, count, 64), key=mx.random.key(3))


def _feed_masked(layer: nn.Module, rows: mx.array, mask: mx.array, cache: Any) -> None:
    layer(rows, mask, cache)
    mx.eval(cache.cache)


def _slots(spec: Spec) -> int:
    return len(make_prompt_cache(model_of(spec))[0].cache)


@a_hybrid_each
@pytest.mark.parametrize("n", PREFIXES)
@pytest.mark.parametrize("capture", ["states", "replay"])
def test_a_masked_recurrence(spec: Spec, n: int, capture: str) -> None:
    """Two rows, the second with padding in front and a hole among its inputs."""
    layer, rows = _linear(spec), _rows(2 + WIDTH)
    ours, theirs = ArraysCache(_slots(spec)), ArraysCache(_slots(spec))
    mask = mx.array([[1] * 8, [0, 0, 0, 0, 1, 0, 1, 1]]) == 1
    for cache in (ours, theirs):
        _feed_masked(layer, rows[:, :2], mask[:, :2], cache)
    with Recurrence(capture)():
        mlx_lm_mtp.begin_speculative_checkpoints([ours])
        _feed_masked(layer, rows[:, 2:], mask[:, 2:], ours)
    assert _kept_states([ours]) == {capture == "states"}
    assert mlx_lm_mtp.commit_verified_prefix([ours], WIDTH, n)
    for i in range(2, 2 + n):
        _feed_masked(layer, rows[:, i : i + 1], mask[:, i : i + 1], theirs)
    assert differences([ours], [theirs]) == []


# --- attention caches, written to without a model -----------------------------------

_KV_ROWS = mx.random.normal((2, VOCAB, 2, 64), key=mx.random.key(5))


def _write(cache: Any, tokens: Sequence[int]) -> None:
    """Store rows that depend on the token, as one forward would."""
    if isinstance(cache, CacheList):
        for nested in cache.caches:
            _write(nested, tokens)
    elif isinstance(cache, ArraysCache):
        for token in tokens:
            before = 0 if cache[0] is None else cache[0]
            cache[0] = before + _KV_ROWS[0, token]
    else:
        rows = _KV_ROWS[:, mx.array(tokens)].swapaxes(1, 2)
        cache.update_and_fetch(rows[:1], rows[1:])
        mx.eval(cache.state)


def _written(make: Callable[[], Any], one_by_one: Sequence[int] = ()) -> Any:
    cache = make()
    _write(cache, PROMPT)
    for token in one_by_one:
        _write(cache, [token])
    return cache


TRIMMABLE: dict[str, Callable[[], Any]] = {
    "kv": KVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=4),
    "rotating": lambda: RotatingKVCache(max_size=32, keep=4),
    "rotating-all-but-full": lambda: RotatingKVCache(len(PROMPT) + WIDTH + 1, keep=4),
    "chunked": lambda: ChunkedKVCache(chunk_size=32),
    "list": lambda: CacheList(KVCache(), KVCache()),
    "list-of-kinds": lambda: CacheList(RotatingKVCache(32), QuantizedKVCache(32, 8)),
}
# At the end of a verify it can be trimmed no more, or never could.
STUCK: dict[str, Callable[[], Any]] = {
    "rotating-just-full": lambda: RotatingKVCache(len(PROMPT) + WIDTH, keep=4),
    "rotating-wrapped": lambda: RotatingKVCache(len(PROMPT) + 2, keep=4),
    "arrays": lambda: ArraysCache(1),
    "list-with-arrays": lambda: CacheList(KVCache(), ArraysCache(1)),
}
every_trimmable = pytest.mark.parametrize("kind", TRIMMABLE)
every_stuck = pytest.mark.parametrize("kind", STUCK)
every_cache = pytest.mark.parametrize("kind", {**TRIMMABLE, **STUCK})


@every_trimmable
@pytest.mark.parametrize("n", PREFIXES)
def test_a_trimmable_cache_keeps_the_prefix(kind: str, n: int) -> None:
    ours = _written(TRIMMABLE[kind])
    mlx_lm_mtp.begin_speculative_checkpoints([ours])
    _write(ours, INPUTS)
    assert mlx_lm_mtp.commit_verified_prefix([ours], WIDTH, n)
    theirs = _written(TRIMMABLE[kind], INPUTS[:n])
    assert differences([ours], [theirs]) == []
    for cache in (ours, theirs):
        _write(cache, [7])
    assert differences([ours], [theirs]) == []


@pytest.mark.parametrize("kind", ["quantized", "rotating", "chunked"])
@pytest.mark.parametrize("n", PREFIXES)
def test_other_attention_caches_in_a_model(kind: str, n: int) -> None:
    assert commit_differences(Spec("qwen3"), n, CACHES_OF[kind]) == []


CACHES_OF = {
    kind: lambda model, kind=kind: [TRIMMABLE[kind]() for _ in model.layers]
    for kind in ("quantized", "rotating", "chunked")
}


@every_stuck
@pytest.mark.parametrize("n", range(WIDTH))
def test_one_cache_that_can_do_neither_leaves_all_untouched(kind: str, n: int) -> None:
    caches = [_written(KVCache), _written(STUCK[kind]), _written(KVCache)]
    mlx_lm_mtp.begin_speculative_checkpoints(caches)
    for cache in caches:
        _write(cache, INPUTS)
    before = copy.deepcopy(caches)
    assert not mlx_lm_mtp.commit_verified_prefix(caches, WIDTH, n)
    assert differences(caches, before) == []


@every_stuck
def test_full_acceptance_needs_no_way_back(kind: str) -> None:
    cache = _written(STUCK[kind])
    mlx_lm_mtp.begin_speculative_checkpoints([cache])
    _write(cache, INPUTS)
    before = copy.deepcopy([cache])
    assert mlx_lm_mtp.commit_verified_prefix([cache], WIDTH, WIDTH)
    assert differences([cache], before) == []


# --- when a record does not fit -----------------------------------------------------


def _refused(caches: list[Any], verified: int = WIDTH, accepted: int = 2) -> bool:
    """Whether the commit is refused and nothing is touched."""
    before = copy.deepcopy(caches)
    committed = mlx_lm_mtp.commit_verified_prefix(caches, verified, accepted)
    return not committed and differences(caches, before) == []


def test_without_begin_nothing_can_be_committed() -> None:
    caches = after_prompt(HYBRID)
    feed(model_of(HYBRID), INPUTS, caches)
    assert _refused(caches)


def test_recording_ends_with_the_commit() -> None:
    caches = _committed(HYBRID, 3)
    feed(model_of(HYBRID), INPUTS, caches)
    assert _refused(caches)
    assert capture._thread.recording is None


def test_recording_ends_with_a_commit_that_is_refused() -> None:
    caches = [*_recorded(HYBRID), _written(STUCK["rotating-wrapped"], INPUTS)]
    assert _refused(caches)
    assert capture._thread.recording is None


def test_the_number_of_verified_inputs_must_be_that_of_the_forward() -> None:
    assert _refused(_recorded(HYBRID), verified=WIDTH - 1)


def test_another_forward_of_the_same_layers_is_not_mixed_up() -> None:
    """Two conversations in turn: each cache finds the layers that filled it."""
    ours, other = after_prompt(HYBRID), after_prompt(HYBRID)
    mlx_lm_mtp.begin_speculative_checkpoints([*ours, *other])
    feed(model_of(HYBRID), INPUTS, ours)
    feed(model_of(HYBRID), PATHS[1], other)
    assert mlx_lm_mtp.commit_verified_prefix([*ours, *other], WIDTH, 4)
    assert differences(ours, stock_after(HYBRID, PROMPT + INPUTS[:4])) == []
    assert differences(other, stock_after(HYBRID, PROMPT + PATHS[1][:4])) == []


def test_only_the_last_forward_is_committed() -> None:
    caches = _recorded(HYBRID)
    feed(model_of(HYBRID), PATHS[1], caches)
    assert mlx_lm_mtp.commit_verified_prefix(caches, WIDTH, 1)
    assert differences(caches, stock_after(HYBRID, PROMPT + INPUTS + (1,))) == []


def test_begin_drops_the_record_of_an_earlier_forward() -> None:
    caches = _recorded(HYBRID)
    mlx_lm_mtp.begin_speculative_checkpoints(caches)
    assert _refused(caches)


def test_a_cache_that_was_restored_in_between_is_not_committed() -> None:
    """Its arrays are not those of the forward any more."""
    caches = _recorded(HYBRID)
    mlx_lm_mtp.restore(caches, mlx_lm_mtp.snapshot(caches))
    assert _refused(caches)


def test_caches_with_row_lengths_are_not_committed() -> None:
    """Stock stores other windows for them than the last rows."""
    layer, rows = _linear(HYBRID), _rows(WIDTH)
    cache = ArraysCache(2)
    cache.prepare(lengths=[6, 3])
    mlx_lm_mtp.begin_speculative_checkpoints([cache])
    _feed_masked(layer, rows, cache.make_mask(WIDTH), cache)
    assert _refused([cache])


def _in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def run() -> None:
        with mx.stream(mx.cpu):
            results.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def _fed(caches: list[Any]) -> list[Any]:
    feed(model_of(HYBRID), INPUTS, caches)
    mx.eval([cache.state for cache in caches])
    return caches


def test_a_forward_in_another_thread_is_not_recorded() -> None:
    caches = after_prompt(HYBRID)
    mlx_lm_mtp.begin_speculative_checkpoints(caches)
    _in_thread(lambda: _fed(caches))
    assert _refused(caches)


def test_a_forward_in_another_thread_does_not_disturb_a_recording() -> None:
    caches, other = after_prompt(HYBRID), after_prompt(HYBRID)
    mlx_lm_mtp.begin_speculative_checkpoints(caches)
    _in_thread(lambda: _fed(other))
    feed(model_of(HYBRID), INPUTS, caches)
    assert mlx_lm_mtp.commit_verified_prefix(caches, WIDTH, 4)
    assert differences(caches, stock_after(HYBRID, PROMPT + INPUTS[:4])) == []
    assert differences(other, stock_after(HYBRID, PROMPT + INPUTS)) == []


# --- snapshots ----------------------------------------------------------------------


@every_family
def test_a_snapshot_can_be_restored_again_and_again(spec: Spec) -> None:
    assert restore_differences(spec, times=3) == []


@every_cache
def test_a_snapshot_of_any_cache(kind: str) -> None:
    make = {**TRIMMABLE, **STUCK}[kind]
    ours = _written(make)
    saved = mlx_lm_mtp.snapshot([ours])
    for _ in range(3):
        for token in INPUTS:  # one by one, as in-place writes need
            _write(ours, [token])
        assert cache_differences([ours], [_written(make)]) != []
        mlx_lm_mtp.restore([ours], saved)
        assert differences([ours], [_written(make)]) == []


@every_cache
def test_an_empty_cache_is_restored_as_empty(kind: str) -> None:
    make = {**TRIMMABLE, **STUCK}[kind]
    ours = make()
    saved = mlx_lm_mtp.snapshot([ours])
    _write(ours, INPUTS)
    mlx_lm_mtp.restore([ours], saved)
    assert ours.empty()
    assert contents(ours) == {}
    _write(ours, PROMPT)
    assert differences([ours], [_written(make)]) == []


def test_a_snapshot_is_not_touched_by_writes_through_the_cache() -> None:
    """Writes in place go through handles of the cache's own."""
    cache = _written(KVCache)
    saved = mlx_lm_mtp.snapshot([cache])
    keys = mx.array(cache.keys)
    mx.eval(keys)
    for value in (1.0, 2.0):
        cache.keys[...] = value
        mlx_lm_mtp.restore([cache], saved)
        assert same_bits(cache.keys, keys)


def test_restore_wants_as_many_snapshots_as_caches() -> None:
    caches = after_prompt(HYBRID)
    with pytest.raises(ValueError, match="shorter"):
        mlx_lm_mtp.restore(caches, mlx_lm_mtp.snapshot(caches)[:-1])


def _stepwise(spec: Spec) -> tuple[list[Any], list[Any]]:
    """Inputs fed one by one, and the snapshots after each but the last."""
    caches, snapshots = after_prompt(spec), []
    for token in INPUTS:
        feed(model_of(spec), [token], caches)
        snapshots.append(mlx_lm_mtp.snapshot(caches))
    return caches, snapshots[:-1]


@every_family
@pytest.mark.parametrize("n", range(1, WIDTH + 1))
def test_a_stepwise_verify_goes_back_to_a_snapshot(spec: Spec, n: int) -> None:
    caches, snapshots = _stepwise(spec)
    assert mlx_lm_mtp.commit_verified_snapshot(caches, snapshots, n, WIDTH)
    assert differences(caches, stock_after(spec, PROMPT + INPUTS[:n])) == []


@pytest.mark.parametrize(
    ("accepted", "kept"),
    [(0, None), (-1, None), (WIDTH + 1, None), (3, 2), (1, 0)],
    ids=["none", "negative", "beyond", "snapshot-missing", "no-snapshots"],
)
def test_a_snapshot_that_is_not_there_leaves_all_untouched(
    accepted: int, kept: int | None
) -> None:
    caches, snapshots = _stepwise(HYBRID)
    snapshots = snapshots[:kept]
    assert not mlx_lm_mtp.commit_verified_snapshot(caches, snapshots, accepted, WIDTH)
    assert differences(caches, stock_after(HYBRID, PROMPT + INPUTS)) == []


def test_accepting_every_step_needs_no_snapshot() -> None:
    caches, _ = _stepwise(HYBRID)
    assert mlx_lm_mtp.commit_verified_snapshot(caches, [], WIDTH, WIDTH)
    assert differences(caches, stock_after(HYBRID, PROMPT + INPUTS)) == []


# --- several paths ------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("row", range(len(PATHS)))
def test_a_row_of_the_tree_is_what_its_path_alone_leaves(spec: Spec, row: int) -> None:
    for n in PREFIXES:
        assert tree_differences(spec, PATHS, n, row) == []


@every_trimmable
@pytest.mark.parametrize("row", range(len(PATHS)))
def test_a_row_of_other_attention_caches(kind: str, row: int) -> None:
    """Rows are told apart by what each path writes."""
    ours, alone = _written(TRIMMABLE[kind]), _written(TRIMMABLE[kind])
    mlx_lm_mtp.tile_caches([ours], len(PATHS))
    _write_paths(ours, PATHS)
    assert mlx_lm_mtp.commit_tree_row([ours], WIDTH, 4, row)
    _write(alone, PATHS[row])
    mlx_lm_mtp.commit_verified_prefix([alone], WIDTH, 4)
    assert differences([ours], [alone]) == []


def _write_paths(cache: Any, paths: Sequence[Sequence[int]]) -> None:
    if isinstance(cache, CacheList):
        for nested in cache.caches:
            _write_paths(nested, paths)
    else:
        rows = _KV_ROWS[:, mx.array(paths)].swapaxes(2, 3)
        cache.update_and_fetch(rows[0], rows[1])


@a_recurrent_each
def test_paths_give_the_logits_of_each_alone(spec: Spec) -> None:
    tiled = after_prompt(spec)
    mlx_lm_mtp.tile_caches(tiled, len(PATHS))
    mlx_lm_mtp.begin_speculative_checkpoints(tiled)
    logits = Target(model_of(spec))(mx.array(PATHS), tiled, form=BATCHED).logits
    for row, path in enumerate(PATHS):
        alone = after_prompt(spec)
        mlx_lm_mtp.begin_speculative_checkpoints(alone)
        assert same_bits(logits[row : row + 1], feed(model_of(spec), path, alone))


def test_a_tree_that_was_not_recorded_is_left_as_it_is() -> None:
    caches = after_prompt(HYBRID)
    mlx_lm_mtp.tile_caches(caches, len(PATHS))
    Target(model_of(HYBRID))(mx.array(PATHS), caches, form=BATCHED)
    before = copy.deepcopy(caches)
    assert not mlx_lm_mtp.commit_tree_row(caches, WIDTH, 3, 1)
    assert differences(caches, before) == []


def test_a_tree_prefix_out_of_range_is_refused() -> None:
    caches = _recorded(HYBRID)
    with pytest.raises(ValueError, match="outside"):
        mlx_lm_mtp.commit_tree_row(caches, WIDTH, WIDTH + 1, 0)


def test_caches_are_tiled_from_batch_one() -> None:
    caches = after_prompt(HYBRID)
    mlx_lm_mtp.tile_caches(caches, 2)
    with pytest.raises(ValueError, match="batch 1, got batch 2"):
        mlx_lm_mtp.tile_caches(caches, 2)


def test_tiling_empty_caches_changes_nothing() -> None:
    caches = make_prompt_cache(model_of(HYBRID))
    mlx_lm_mtp.tile_caches(caches, 3)
    assert all(cache.empty() for cache in caches)


# --- what stock does with its caches afterwards -------------------------------------


@every_family
def test_a_committed_cache_can_be_copied(spec: Spec) -> None:
    """The copy is independent: writing to one leaves the other."""
    caches = _committed(spec, 3)
    copied = copy.deepcopy(caches)
    feed(model_of(spec), INPUTS, copied)
    mx.eval([cache.state for cache in copied])
    assert differences(caches, stock_after(spec, PROMPT + INPUTS[:3])) == []


@every_family
def test_a_committed_cache_can_be_saved_and_loaded(spec: Spec, tmp_path: Path) -> None:
    caches, file = _committed(spec, 3), str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, caches)
    loaded = load_prompt_cache(file)
    assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
    assert differences(loaded, stock_after(spec, PROMPT + INPUTS[:3])) == []
    assert _same_logits(spec, loaded, caches)


# --- the wrappers -------------------------------------------------------------------

_WRAPPED = (
    (gated_delta, "gated_delta_ops"),
    (gated_delta, "gated_delta_kernel"),
    (ssm, "ssm_attn"),
    (ssm, "ssm_update_kernel"),
    (nn.Conv1d, "__call__"),
)


def _bound() -> list[Any]:
    return [vars(owner)[name] for owner, name in _WRAPPED]


def test_uninstalling_puts_the_very_objects_of_stock_back() -> None:
    mlx_lm_mtp.uninstall()
    stock = _bound()
    _committed(HYBRID, 3)
    assert not any(a is b for a, b in zip(_bound(), stock, strict=True))
    mlx_lm_mtp.uninstall()
    assert all(a is b for a, b in zip(_bound(), stock, strict=True))


def test_recording_works_again_after_uninstalling() -> None:
    mlx_lm_mtp.uninstall()
    assert commit_differences(HYBRID, 2) == []


def test_who_finds_a_name_wrapped_finds_the_wrapper() -> None:
    """Not stock, while another thread is about to put the wrapper in its place."""

    class Owner:
        name = "stock"

    begun, go_on, seen = threading.Event(), threading.Event(), list[str]()

    def slowly(stock: str) -> str:
        begun.set()
        go_on.wait(10)
        return "wrapped"

    def second() -> None:
        wrapping.wrap(Owner, "name", slowly)
        seen.append(Owner.name)

    threads = [
        threading.Thread(target=wrapping.wrap, args=(Owner, "name", slowly)),
        threading.Thread(target=second),
    ]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.2)  # it waits, and must not have gone on
    go_on.set()
    for thread in threads:
        thread.join()
    wrapping._stock.pop((Owner, "name"))
    assert seen == ["wrapped"]


def test_a_name_that_stock_does_not_have_is_left_alone() -> None:
    class Owner:
        pass

    wrapping.wrap(Owner, "name", lambda stock: 1 / 0)
    assert not hasattr(Owner, "name")


def test_wrapping_twice_wraps_once() -> None:
    capture.see_through()
    once = _bound()
    capture.see_through()
    assert all(a is b for a, b in zip(_bound(), once, strict=True))


# --- what is easily got wrong --------------------------------------------------------


@pytest.mark.parametrize("row", [-1, len(PATHS)])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    caches = after_prompt(HYBRID)
    mlx_lm_mtp.tile_caches(caches, len(PATHS))
    mlx_lm_mtp.begin_speculative_checkpoints(caches)
    Target(model_of(HYBRID))(mx.array(PATHS), caches, form=BATCHED)
    with pytest.raises(ValueError, match="row"):
        mlx_lm_mtp.commit_tree_row(caches, WIDTH, 3, row)


def test_tiling_is_all_or_nothing() -> None:
    one, two = _written(KVCache), _written(KVCache)
    mlx_lm_mtp.tile_caches([two], 2)
    with pytest.raises(ValueError, match="batch 1"):
        mlx_lm_mtp.tile_caches([one, two], 3)
    assert differences([one], [_written(KVCache)]) == []


def test_forwards_that_are_never_committed_do_not_pile_up() -> None:
    caches = _recorded(HYBRID)
    recording = capture._thread.recording
    once = len(recording.layers)
    for token in INPUTS:
        feed(model_of(HYBRID), [token], caches)
    mlx_lm_mtp.commit_verified_prefix(caches, 1, 1)
    assert len(recording.layers) == once


def test_a_commit_in_another_thread_ends_the_recording() -> None:
    caches = _fed(_recorded(HYBRID, INPUTS[:1]))
    recording = capture._thread.recording
    _in_thread(lambda: mlx_lm_mtp.commit_verified_prefix(caches, WIDTH, WIDTH))
    recorded = len(recording.layers)
    feed(model_of(HYBRID), INPUTS, caches)
    capture._thread.recording = None
    assert len(recording.layers) == recorded


def test_a_concatenating_cache_keeps_the_prefix() -> None:
    """Or is refused: what it must not do is to keep more and say that it did not."""
    cache = _written(ConcatenateKVCache)
    _write(cache, INPUTS)
    if mlx_lm_mtp.commit_verified_prefix([cache], WIDTH, 2):
        _write(cache, [7])
        alone = _written(ConcatenateKVCache, (*INPUTS[:2], 7))
        assert differences([cache], [alone]) == []


def test_left_padding_advances_by_the_accepted_inputs() -> None:
    layer, rows = _linear(HYBRID), _rows(WIDTH)
    ours, theirs = (ArraysCache(2, left_padding=[0, 5]) for _ in range(2))
    mlx_lm_mtp.begin_speculative_checkpoints([ours])
    _feed_masked(layer, rows, ours.make_mask(WIDTH), ours)
    assert mlx_lm_mtp.commit_verified_prefix([ours], WIDTH, 2)
    _feed_masked(layer, rows[:, :2], theirs.make_mask(2), theirs)
    assert differences([ours], [theirs]) == []
    assert ours.left_padding.tolist() == theirs.left_padding.tolist()


def test_a_chunked_cache_that_becomes_full() -> None:
    """As Llama 4 has them: the front is cut before a forward writes."""
    ours, theirs = (ChunkedKVCache(chunk_size=8) for _ in range(2))
    for cache in (ours, theirs):
        _write(cache, PROMPT)
    ours.maybe_trim_front()
    _write(ours, INPUTS)
    assert mlx_lm_mtp.commit_verified_prefix([ours], WIDTH, 4)
    for token in INPUTS[:4]:
        theirs.maybe_trim_front()
        _write(theirs, [token])
    assert differences([ours], [theirs]) == []
