"""`mlx_lm.stream_generate(draft=...)` and `mlx_lm.generate(draft=...)`."""

from __future__ import annotations

import copy
from typing import Any

import checkpoints
import mlx.core as mx
import mlx_lm
import oracle
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from scripted import Scripted

from mlx_lm_mtp import DraftError, DraftOptions, Tally
from mlx_lm_mtp.errors import InvalidOption

pytestmark = pytest.mark.usefixtures("plugin")
PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return checkpoints.write(tmp_path_factory.mktemp("api") / "model").path


@pytest.fixture
def loaded(path: Any) -> Any:
    return mlx_lm.load(str(path))


def responses(loaded: Any, prompt: Any = PROMPT, **kwargs: Any) -> list[Any]:
    return list(mlx_lm.stream_generate(*loaded, prompt, **kwargs))


def told(response: Any) -> tuple[Any, ...]:
    """What a response says, without what depends on the clock."""
    return (
        response.text,
        response.token,
        response.prompt_tokens,
        response.generation_tokens,
        response.finish_reason,
        response.logprobs.tolist(),
    )


@pytest.mark.parametrize("k", [0, 1, 2, 3, 6])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_tokens": 1},
        {"prefill_step_size": 2},
        {"max_kv_size": 12},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 12},
        {"sampler": make_sampler(0.8, top_p=0.9)},
        {"logits_processors": make_logits_processors({3: 2.0}, 1.2, 8)},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_responses_are_stock_s(loaded: Any, k: int, more: dict[str, Any]) -> None:
    more = {"max_tokens": 24} | more
    mx.random.seed(7)
    stock = responses(loaded, **more)
    mx.random.seed(7)
    ours = responses(loaded, draft="mtp", num_draft_tokens=k, **more)
    assert [told(r) for r in ours] == [told(r) for r in stock]


def test_prompts_in_every_form(loaded: Any) -> None:
    ids = loaded[1].encode(PROMPT)
    for prompt in (PROMPT, ids, mx.array(ids)):
        stock = responses(loaded, prompt, max_tokens=9)
        ours = responses(loaded, prompt, max_tokens=9, draft="mtp")
        assert [told(r) for r in ours] == [told(r) for r in stock]


def test_arguments_by_position_mean_what_they_mean_in_stock(loaded: Any) -> None:
    stock = list(mlx_lm.stream_generate(*loaded, PROMPT, 7))
    stream = mx.new_thread_local_stream(mx.default_device())
    ours = list(mlx_lm.stream_generate(*loaded, PROMPT, 7, None, stream, draft="mtp"))
    assert [told(r) for r in ours] == [told(r) for r in stock]


def test_from_draft_is_true_for_accepted_drafts_only(loaded: Any) -> None:
    truth = [r.token for r in responses(loaded, max_tokens=30)]
    drafter = Scripted(truth, lambda i: i % 4 != 3)
    ours = responses(loaded, max_tokens=30, draft=drafter, num_draft_tokens=2)
    stats = ours[-1].draft_stats
    assert sum(r.from_draft for r in ours) == stats.accepted.total() > 0
    assert not ours[0].from_draft


def test_the_statistics_object(loaded: Any) -> None:
    stats = Tally()
    ours = responses(
        loaded, max_tokens=30, draft="mtp", num_draft_tokens=2, draft_stats=stats
    )
    assert ours[-1].draft_stats == stats.stats
    assert (stats.drafter, stats.num_draft_tokens) == ("mtp", 2)
    assert stats.rounds + stats.accepted.total() == 30
    assert stats.mean_acceptance_length == 30 / stats.rounds


def test_k_zero_is_plain_decoding_and_loads_nothing(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_lm_mtp.heads.head_of", None)
    ours = responses(loaded, max_tokens=5, draft="mtp", num_draft_tokens=0)
    assert len(ours) == 5 and not any(r.from_draft for r in ours)
    assert "nothing drafted" in ours[-1].draft_stats.summary()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 30])
def test_the_cache_is_right_when_the_last_response_comes(
    loaded: Any, max_tokens: int
) -> None:
    """At the last response itself, before the generator is run out or closed."""
    model, tokenizer = loaded
    theirs, ours = make_prompt_cache(model), make_prompt_cache(model)
    responses(loaded, max_tokens=max_tokens, prompt_cache=theirs)
    for response in mlx_lm.stream_generate(
        *loaded, PROMPT, max_tokens=max_tokens, prompt_cache=ours, draft="mtp"
    ):
        if response.finish_reason is not None:
            assert oracle.differences(ours[: len(theirs)], theirs) == []


def test_an_eos_inside_an_accepted_draft(loaded: Any) -> None:
    """The caches hold the EOS and nothing behind it."""
    model, tokenizer = loaded
    truth = [r.token for r in responses(loaded, max_tokens=12)]
    for at in range(1, 8):
        if truth[at] in truth[:at]:
            continue
        tokenizer = copy.copy(tokenizer)
        tokenizer.eos_token_ids = {truth[at]}
        results = []
        for draft in ({}, {"draft": Scripted(truth), "num_draft_tokens": 5}):
            caches = make_prompt_cache(model)
            got = responses((model, tokenizer), prompt_cache=caches, **draft)
            assert got[-1].finish_reason == "stop"
            results.append(([r.token for r in got], caches))
        assert results[0][0] == results[1][0]
        stock, ours = results[0][1], results[1][1]
        assert oracle.differences(ours[: len(stock)], stock) == []


def test_a_consumer_that_breaks_off_leaves_stock_s_cache(loaded: Any) -> None:
    model, _ = loaded
    for stop in range(1, 7):
        caches = make_prompt_cache(model)
        theirs = make_prompt_cache(model)
        responses(loaded, max_tokens=stop, prompt_cache=theirs)
        for n, _ in enumerate(
            mlx_lm.stream_generate(*loaded, PROMPT, prompt_cache=caches, draft="mtp"),
            start=1,
        ):
            if n == stop:
                break
        assert oracle.differences(caches[: len(theirs)], theirs) == []


def test_two_turns_on_one_prompt_cache(loaded: Any) -> None:
    results = []
    for draft in ({}, {"draft": "mtp"}):
        caches = make_prompt_cache(loaded[0])
        first = responses(loaded, max_tokens=9, prompt_cache=caches, **draft)
        second = responses(loaded, "+1", max_tokens=9, prompt_cache=caches, **draft)
        results.append([told(r) for r in first + second])
    assert results[0] == results[1]


def test_generations_may_be_interleaved(loaded: Any) -> None:
    stock = [r.token for r in responses(loaded, max_tokens=12)]
    other = [r.token for r in responses(loaded, "import", max_tokens=12)]
    both = zip(
        mlx_lm.stream_generate(*loaded, PROMPT, max_tokens=12, draft="mtp"),
        mlx_lm.stream_generate(*loaded, "import", max_tokens=12, draft="mtp"),
        strict=True,
    )
    tokens = [(a.token, b.token) for a, b in both]
    assert [list(column) for column in zip(*tokens, strict=True)] == [stock, other]


def test_generate_gives_the_text_and_says_what_drafting_did(
    loaded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = mlx_lm.generate(*loaded, PROMPT, max_tokens=15)
    assert mlx_lm.generate(*loaded, PROMPT, max_tokens=15, draft="mtp") == stock
    assert capsys.readouterr().out == ""
    mlx_lm.generate(*loaded, PROMPT, verbose=True, max_tokens=15, draft="mtp")
    *_, peak, last = capsys.readouterr().out.splitlines()
    assert peak.startswith("Peak memory") and last.startswith("Draft: mtp, k=3, ")


class TestBadInput:
    """One sentence each, naming the argument, its value and what to do."""

    def refused(self, loaded: Any, **kwargs: Any) -> str:
        with pytest.raises(DraftError) as caught:
            responses(loaded, max_tokens=3, **kwargs)
        assert isinstance(caught.value, ValueError)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_unknown_drafter(self, loaded: Any) -> None:
        said = self.refused(loaded, draft="medusa")
        assert "'medusa'" in said and "mtp" in said

    @pytest.mark.parametrize("k", [-1, 1.5, "3", True])
    def test_number_of_drafts(self, loaded: Any, k: Any) -> None:
        said = self.refused(loaded, draft="mtp", num_draft_tokens=k)
        assert "num_draft_tokens" in said and repr(k) in said

    def test_draft_and_draft_model(self, loaded: Any) -> None:
        said = self.refused(loaded, draft="mtp", draft_model=loaded[0])
        assert "draft_model" in said

    def test_input_embeddings(self, loaded: Any) -> None:
        said = self.refused(loaded, draft="mtp", input_embeddings=mx.zeros((3, 64)))
        assert "input_embeddings" in said

    def test_no_drafter_at_all(self, loaded: Any) -> None:
        assert "lacks begin" in self.refused(loaded, draft=3)

    def test_a_class_instead_of_a_drafter(self, loaded: Any) -> None:
        assert "class Scripted; give" in self.refused(loaded, draft=Scripted)

    def test_options_that_are_none(self, loaded: Any) -> None:
        said = self.refused(loaded, draft="mtp", draft_options="verify=step")
        assert "draft_options is 'verify=step'" in said

    @pytest.mark.parametrize("stats", [{}, {"a": 1}])
    def test_statistics_that_are_none(self, loaded: Any, stats: Any) -> None:
        said = self.refused(loaded, draft="mtp", draft_stats=stats)
        assert "draft_stats" in said

    def test_unknown_option(self, loaded: Any) -> None:
        said = self.refused(loaded, draft="mtp", draft_options={"deep": 3})
        assert "'deep'" in said and "verify" in said

    def test_option_value(self, loaded: Any) -> None:
        said = self.refused(loaded, draft="mtp", draft_options={"verify": "tree"})
        assert "'tree'" in said and "batch" in said

    def test_options_without_draft(self, loaded: Any) -> None:
        said = self.refused(loaded, draft_options=DraftOptions())
        assert "draft_options" in said

    def test_max_tokens_zero_is_stock_s_error(self, loaded: Any) -> None:
        with pytest.raises(ValueError, match="non-zero"):
            responses(loaded, max_tokens=0, draft="mtp")


def test_both_verify_modes_and_both_hiddens_give_the_same(loaded: Any) -> None:
    stock = [r.token for r in responses(loaded, max_tokens=15)]
    for verify in ("batch", "step"):
        for hidden in ("post_norm", "pre_norm"):
            options = {"verify": verify, "hidden": hidden}
            ours = responses(loaded, max_tokens=15, draft="mtp", draft_options=options)
            assert [r.token for r in ours] == stock


def test_without_draft_stock_runs_untouched(loaded: Any) -> None:
    import sys

    stock = sys.modules["mlx_lm.generate"].stream_generate.__wrapped__
    assert [told(r) for r in stock(*loaded, PROMPT, max_tokens=5)] == [
        told(r) for r in responses(loaded, max_tokens=5)
    ]


def test_stock_s_own_draft_model_still_works(loaded: Any, path: Any) -> None:
    import tiny

    target, draft = tiny.Spec("qwen3").build(), tiny.Spec("qwen3", seed=2).build()
    stock = [r.token for r in responses((target, loaded[1]), max_tokens=12)]
    ours = responses((target, loaded[1]), max_tokens=12, draft_model=draft)
    assert [r.token for r in ours] == stock


@pytest.mark.parametrize("name", ["draft", "draft_options", "draft_stats"])
def test_batches_are_not_drafted_for_and_say_so(loaded: Any, name: str) -> None:
    value = {"draft": "mtp", "draft_options": {}, "draft_stats": Tally()}[name]
    (model, tokenizer), prompts = loaded, [[1, 2], [3]]
    said = f"^{name} cannot be given to batch_generate, which decodes all"
    with pytest.raises(InvalidOption, match=said):
        mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=3, **{name: value})
    plain = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=3, draft=None)
    assert len(plain.texts) == 2
