"""A generation that one side begins and another goes on with: loop, answer, server."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import checks
import mlx.core as mx
import oracle
import pytest
import tiny
from mlx_lm.generate import make_stop_sequences
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load
from servers import BUNDLED, Server, Servers

from mlx_lm_mtp import draft_generate_step
from mlx_lm_mtp.carry import Around
from mlx_lm_mtp.errors import TakeBack
from mlx_lm_mtp.options import DraftOptions
from mlx_lm_mtp.serving.answer import Answer, Left, Resumed
from mlx_lm_mtp.serving.asked import Asked
from mlx_lm_mtp.stats import Tally

SPECS = [tiny.Spec(), tiny.Spec("qwen3_next", experts=True), tiny.Spec("qwen3")]
PROMPT = checks.PROMPT

# --- the loop ---------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS[:2], ids=lambda spec: spec.family)
@pytest.mark.parametrize("pattern", ["1", "0110", "10", "0"])
@pytest.mark.parametrize("n", range(1, 10))
def test_a_token_is_taken_back(spec: tiny.Spec, pattern: str, n: int) -> None:
    found = checks.broken_off_differences(spec, PROMPT, pattern, n, take_back=True)
    assert found == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"verify": "step"},
        {"capture": "replay"},
        {"profile": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_token_is_taken_back_however_it_is_verified(
    n: int, options: dict[str, Any]
) -> None:
    found = checks.broken_off_differences(
        SPECS[0], PROMPT, "1", n, take_back=True, options=DraftOptions.of(options)
    )
    assert found == []


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_goes_on_where_another_has_ended(spec: tiny.Spec, n: int) -> None:
    """Stock begins and has chosen one more token; the loop yields that first."""
    model = checks.model_of(spec)
    whole = oracle.stock(model, PROMPT, n + 9)
    begun = oracle.stock(model, PROMPT, n)
    tally = Tally()
    steps = draft_generate_step(
        mx.array(whole.tokens[n : n + 1]),
        model,
        checks.scripted("110")(whole.tokens[n + 1 :]),
        max_tokens=9,
        prompt_cache=begun.caches,
        around=Around(begun=whole.logprobs[n]),
        stats=tally,
    )
    made = list(steps)
    ours = oracle.Result(
        begun.tokens + [token for token, *_ in made],
        begun.logprobs + [logprobs for _, logprobs, _ in made],
        begun.caches[: len(make_prompt_cache(model))],
        whole.random_state,
    )
    assert checks.result_differences(ours, whole) == []
    assert tally.tokens == 9


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_token_that_was_chosen_before_counts(limit: int) -> None:
    model = checks.model_of(SPECS[0])
    whole = oracle.stock(model, PROMPT, 4)
    steps = draft_generate_step(
        mx.array(whole.tokens[:1]),
        model,
        checks.scripted("1")(whole.tokens[1:]),
        max_tokens=limit,
        prompt_cache=oracle.stock(model, PROMPT, 0).caches,
        around=Around(begun=whole.logprobs[0]),
    )
    assert [token for token, *_ in steps] == whole.tokens[:limit]


@pytest.mark.parametrize("way", ["eos", "on_tokens"])
def test_a_generation_may_end_with_the_token_chosen_before(way: str) -> None:
    model = checks.model_of(SPECS[0])
    whole = oracle.stock(model, PROMPT, 4)
    told: list[list[int]] = []
    ends: dict[str, Any] = {"eos_token_ids": whole.tokens[:1]}
    if way == "on_tokens":
        ends = {"on_tokens": lambda tokens: told.append(tokens) or True}
    steps = draft_generate_step(
        mx.array(whole.tokens[:1]),
        model,
        checks.scripted("1")(whole.tokens[1:]),
        prompt_cache=oracle.stock(model, PROMPT, 0).caches,
        around=Around(begun=whole.logprobs[0]),
        **ends,
    )
    assert [token for token, *_ in steps] == whole.tokens[:1]
    assert told == ([whole.tokens[:1]] if way == "on_tokens" else [])


def test_processors_are_shown_what_the_cache_holds_if_it_is_told() -> None:
    model, before, seen = checks.model_of(SPECS[0]), [7, 8, 9], []

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    caches = oracle.stock(model, before, 0).caches
    steps = draft_generate_step(
        mx.array(PROMPT),
        model,
        checks.scripted("1")([0]),
        max_tokens=1,
        prompt_cache=caches,
        logits_processors=[look],
        around=Around(before=before),
    )
    list(steps)
    assert seen[0] == [*before, *PROMPT]


def test_a_generation_that_is_not_at_a_token_takes_nothing_back() -> None:
    model = checks.model_of(SPECS[0])
    steps = draft_generate_step(mx.array(PROMPT), model, checks.scripted("1")([0]))
    with pytest.raises(TakeBack):
        steps.throw(TakeBack())


# --- the answer -------------------------------------------------------------------


class Context:
    """As stock's: who listens may stop it."""

    def __init__(self) -> None:
        self._should_stop = False

    def stop(self) -> None:
        self._should_stop = True


def answer(**args: Any) -> tuple[Answer, Queue[Any]]:
    queue: Queue[Any] = Queue()
    asked = Asked(None, DraftOptions())
    known = {"max_tokens": 10, "asked": asked} | args
    return Answer(queue, "request", SimpleNamespace(**known)), queue


def response(token: int, finish_reason: str | None = None) -> Any:
    return SimpleNamespace(token=token, text="?", finish_reason=finish_reason)


def drained(queue: Queue[Any]) -> list[Any]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def test_an_answer_passes_on_what_is_news() -> None:
    told, queue = answer()
    context, error = Context(), ValueError()
    for item in (context, (1, 2), response(5), (2, 2), error, None):
        told.put(item)
    found = drained(queue)
    assert found[0] is context and found[1] == (1, 2) and found[2].token == 5
    assert found[3:] == [error, None]


def test_the_end_of_a_part_is_not_the_end() -> None:
    told, queue = answer()
    told.put(Context())
    told.put(response(5))
    told.leave()
    told.put(None)
    second = Context()
    told.put(second)
    assert [type(item) for item in drained(queue)] == [Context, SimpleNamespace]
    assert not second._should_stop


def test_an_end_that_comes_before_the_move_is_the_end() -> None:
    told, queue = answer()
    told.put(Context())
    told.leave()
    told.put(response(5, "length"))
    told.put(None)
    assert drained(queue)[-1] is None


def test_who_listens_stops_whoever_computes() -> None:
    told, _ = answer()
    first, second, third = Context(), Context(), Context()
    told.put(first)
    told.put(second)
    first.stop()  # all that the listener knows
    assert second._should_stop and told.cancelled
    told.put(third)
    assert third._should_stop


TEXTS = ["naïve café – 漢字 🙂🙂", "def f(x):\n    return x  # tab\tend", " leading"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("last", ["stop", "length", None])
def test_the_text_goes_on_where_it_was(text: str, last: str | None) -> None:
    """Wherever it is cut, within a character as well."""
    _, tokenizer = load(str(BUNDLED), lazy=True)[:2]
    tokens = tokenizer.encode(text)
    whole = _texts(tokenizer, tokens, last)
    for cut in range(1, len(tokens)):
        told, queue = answer()
        for token in tokens[:cut]:
            told.put(response(token))
        told.rest(Left([]))
        assert told.resume(tokenizer) == tokens[:cut]
        for i, token in enumerate(tokens[cut:], cut + 1):
            told.put(response(token, last if i == len(tokens) else None))
        texts = [r.text for r in drained(queue)]
        assert texts[cut:] == whole[cut:]


def _texts(tokenizer: Any, tokens: list[int], last: str | None) -> list[str]:
    detokenizer, texts = tokenizer.detokenizer, []
    for i, token in enumerate(tokens, 1):
        if i < len(tokens) or last != "stop":
            detokenizer.add_token(token)
        if i == len(tokens) and last:
            detokenizer.finalize()
        texts.append(detokenizer.last_segment)
    return texts


def test_the_rest_is_what_is_still_to_be_told() -> None:
    told, _ = answer(max_tokens=10)
    told.prompt = [1, 2]
    told.put(response(3))
    told.put(response(4))
    who, request, args = told.rest(Left([], token=5, logprobs=mx.zeros(9)))
    assert (who, request, args.max_tokens) == (told, "request", 8)
    assert told.args.max_tokens == 10
    _, tokenizer = load(str(BUNDLED), lazy=True)[:2]
    assert told.resume(tokenizer) == [1, 2, 3, 4, 5]


def test_a_stop_word_is_found_across_the_move() -> None:
    _, tokenizer = load(str(BUNDLED), lazy=True)[:2]
    word = tokenizer.encode("a stop word")
    stop_sequences = make_stop_sequences(tokenizer, ["a stop word"])
    matcher = Resumed(stop_sequences, word[:-1]).matcher()
    assert matcher.advance(word[-1])
    assert not stop_sequences.matcher().advance(word[-1])


# --- the server -------------------------------------------------------------------

BODY = {"model": "default_model", "prompt": "def main(argv=None):\n"}


def streamed(at: Server, events: dict[int, Any], **request: Any) -> dict[str, Any]:
    """A text as it came, and its usage.

    Args:
        events: Chunks that were read -> what is then called.
    """
    stream = at.client.completions.create(
        **BODY | request, stream=True, stream_options={"include_usage": True}
    )
    text, usage, finish, chunks = "", None, None, 0
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].text
            finish = chunk.choices[0].finish_reason or finish
            chunks += 1
            events.get(chunks, lambda: None)()
        usage = chunk.usage or usage
    return {
        "text": text,
        "finish": finish,
        "tokens": usage.completion_tokens,
        "speculation": getattr(usage, "speculation", None),
    }


def same_text(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    names = ("text", "finish", "tokens")
    assert [ours[name] for name in names] == [theirs[name] for name in names]


def begun(at: Server, **request: Any) -> Any:
    """What calls it starts another request; `join` waits for its answer."""
    found: list[Any] = []

    def ask() -> None:
        answer = at.client.completions.create(**BODY | request)
        found.append(answer)

    thread = threading.Thread(target=ask)

    def start() -> None:
        thread.start()

    start.join = lambda: thread.join() or found[0]  # type: ignore[attr-defined]
    return start


@pytest.mark.parametrize("extra", [{}, {"extra_body": {"repetition_penalty": 1.1}}])
def test_who_was_alone_joins_the_batch_and_comes_back(
    ours: Server, stock: Server, extra: dict[str, Any]
) -> None:
    """Another request comes in, and is answered; the first is drafted for again."""
    request = {"prompt": "import os\n", "max_tokens": 220, **extra}
    other = begun(ours, prompt="class A:\n", max_tokens=40)
    mine = streamed(ours, {12: other}, **request)
    beside = other.join()
    same_text(mine, stock.once(streamed, {}, **request))
    speculation = mine["speculation"]
    assert speculation["drafter"] == "mtp"
    assert 0 < speculation["batched"] < 150
    drafted_tokens = 220 - speculation["batched"]
    assert speculation["rounds"] < drafted_tokens
    alone = stock.once(streamed, {}, prompt="class A:\n", max_tokens=40)
    assert beside.choices[0].text == alone["text"]
    # What it left in the prompt cache is found, behind the same tokens.
    text = request["prompt"] + mine["text"] + " x"
    again = [at.client.completions.create(**BODY | {"prompt": text, "max_tokens": 9})
             for at in (ours, stock)]  # fmt: skip
    assert again[0].choices[0].text == again[1].choices[0].text
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in again]
    assert cached[0] == cached[1]
    assert extra or cached[0] > 220  # with all that was said


def test_who_began_in_the_batch_is_drafted_for_once_alone(
    ours: Server, stock: Server
) -> None:
    first = begun(ours, prompt="import os\n", max_tokens=30)
    second: dict[str, Any] = {}

    def ask() -> None:
        second.update(streamed(ours, {}, prompt="class A:\n", max_tokens=150))

    thread = threading.Thread(target=ask)
    first()
    thread.start()
    first.join()
    thread.join()
    same_text(second, stock.once(streamed, {}, prompt="class A:\n", max_tokens=150))
    assert second["speculation"]["drafter"] == "mtp"


def test_a_stop_word_ends_an_answer_wherever_it_is_computed(
    ours: Server, stock: Server
) -> None:
    request = {"max_tokens": 300, "stop": [" must not call"]}
    wanted = streamed(stock, {}, **request)
    assert wanted["finish"] == "stop"
    for chunk in (2, 30, 57, 60, 63):
        other = begun(ours, prompt="import os\n", max_tokens=25)
        mine = streamed(ours, {chunk: other}, **request)
        other.join()
        same_text(mine, wanted)


def test_moving_to_and_fro_changes_no_answer(ours: Server, stock: Server) -> None:
    """Short requests come and go beside long ones; some clients hang up."""
    wanted = stock.once(streamed, {}, max_tokens=420)

    def hang_up() -> None:
        stream = ours.client.completions.create(
            **BODY | {"max_tokens": 200, "prompt": "for i in"}, stream=True
        )
        for _ in zip(range(4), stream, strict=False):
            pass
        stream.close()

    others = [begun(ours, prompt=f"x = {i}\n", max_tokens=5 + i) for i in range(8)]
    events: dict[int, Any] = {10 + 45 * i: other for i, other in enumerate(others)}
    with ThreadPoolExecutor(4) as threads:
        events |= {n: lambda: threads.submit(hang_up) for n in (32, 212)}
        mine = streamed(ours, events, max_tokens=420)
    for i, other in enumerate(others):
        alone = {"prompt": f"x = {i}\n", "max_tokens": 5 + i}
        theirs = stock.once(streamed, {}, **alone)
        assert other.join().choices[0].text == theirs["text"]
    same_text(mine, wanted)
    assert mine["speculation"]["batched"] > 0
    assert ours.get("/health") == {"status": "ok"}


def test_who_hangs_up_within_a_move_frees_its_place(ours: Server) -> None:
    for chunks in range(8, 20):
        stream = ours.client.completions.create(
            **BODY | {"max_tokens": 500}, stream=True
        )
        other = begun(ours, prompt="import os\n", max_tokens=8)
        for i, _ in enumerate(stream):
            if i == 7:
                other()
            if i == chunks:
                break
        stream.close()
        other.join()
    time.sleep(1)  # until the last one has been found out
    mine = streamed(ours, {}, max_tokens=20)
    assert mine["speculation"]["batched"] == 0  # nobody is left in there


def test_a_full_batch_is_not_joined(served: Servers) -> None:
    """It would have to wait until there is room."""
    options = ("--mtp", "--decode-concurrency", 1, "--prompt-concurrency", 1)
    at = served(*options)
    other = begun(at, prompt="import os\n", max_tokens=50)
    mine = streamed(at, {12: other}, max_tokens=150)
    other.join()
    assert mine["speculation"]["batched"] == 0
