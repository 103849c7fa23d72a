"""Stock's server with drafts: reasoning, tool calls and adapters are stock's."""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from adapters import adapter
from servers import BUNDLED, Server, Servers, server

from mlx_lm_mtp import stock_server
from mlx_lm_mtp.options import DraftOptions
from mlx_lm_mtp.serving.answer import Answer
from mlx_lm_mtp.serving.asked import Asked

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{# tool_call.name #}</tool_call>"
    "{% endif %}{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% if enable_thinking %}<think>"
    "{% endif %}{% endif %}"
)
# Tokens that the tiny model says, under the names of what is parsed.
MARKS = {"<think>": 770, "</think>": 318, "<tool_call>": 424, "</tool_call>": 575}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
QUESTIONS = ["Write a function that adds.", "What is a subprocess?"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint as one that thinks and calls tools."""
    path = shutil.copytree(BUNDLED, tmp_path_factory.mktemp("thinking") / "model")
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    _rename(tokenizer)
    file.write_text(json.dumps(tokenizer))
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return path


def _rename(tokenizer: dict[str, Any]) -> None:
    """Give tokens the names of marks; a number alone would not be theirs.

    A mark that is not in the vocabulary gets a number behind its end, of which the
    model has no embedding.
    """
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    names = {number: name for name, number in vocabulary.items()}
    gone = {names[number] for number in MARKS.values()}
    tokenizer["model"]["merges"] = [
        pair for pair in merges if not gone & {*pair, "".join(pair)}
    ]
    ordinary = tokenizer["added_tokens"][0] | {"special": False}
    for mark, number in MARKS.items():
        del vocabulary[names[number]]
        vocabulary[mark] = number
        tokenizer["added_tokens"].append(ordinary | {"id": number, "content": mark})


@pytest.fixture(scope="module")
def both(model: Path, served: Servers) -> tuple[Server, Server]:
    return served("--mtp", model=model), served(plugin=False, model=model)


def told(at: Server, **request: Any) -> tuple[Any, ...]:
    """What an answer says: of a stream all together, of tools what was called."""
    body = {"model": "default_model", "max_tokens": 40} | request
    body.setdefault("messages", [{"role": "user", "content": QUESTIONS[0]}])
    content = reasoning = ""
    calls, finish = [], None
    answer = at.client.chat.completions.create(**body)
    for part in answer if body.get("stream") else [answer]:
        for choice in part.choices:
            said = choice.delta if body.get("stream") else choice.message
            content += said.content or ""
            reasoning += getattr(said, "reasoning", None) or ""
            calls += [call.function.name for call in said.tool_calls or ()]
            finish = choice.finish_reason or finish
    return content, reasoning, calls, finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("thinking", [True, False])
def test_what_is_parsed_is_what_stock_parses(
    both: tuple[Server, Server],
    stream: bool,
    tools: Any,
    question: str,
    thinking: bool,
) -> None:
    ours, stock = both
    # Stock dies of a prompt that is all in its cache, as the same question without
    # thinking would be.
    question = f"{question} {thinking}"
    request = {
        "messages": [{"role": "user", "content": question}],
        "stream": stream,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}},
    } | ({"tools": tools} if tools else {})
    mine = told(ours, **request)
    assert mine == told(stock, **request)
    assert mine[0] or mine[1] or mine[2]


def test_a_prompt_that_is_all_in_the_cache_is_answered(
    both: tuple[Server, Server],
) -> None:
    """The beginning of one with thinking: that of stock's segments is kept."""
    on = {"messages": [{"role": "user", "content": "What is in the cache?"}]}
    off = on | {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    ours, stock = both
    cold = told(stock, **off)
    told(ours, **on)
    assert told(ours, **off) == cold
    with ThreadPoolExecutor(2) as threads:  # one of them in the batch
        assert list(threads.map(lambda _: told(ours, **off), range(2))) == [cold] * 2


def test_the_marks_are_met(both: tuple[Server, Server]) -> None:
    """Else the test above would compare nothing."""
    messages = [{"role": "user", "content": f"{QUESTIONS[0]} True"}]
    content, reasoning, _, _ = told(both[0], messages=messages)
    assert reasoning and "</think>" not in reasoning
    assert content and "<tool_call>" not in content
    assert "Failed to parse tool call" in both[0].log.read_text()


def test_a_conversation_of_one_who_thinks_is_stock_s(
    both: tuple[Server, Server],
) -> None:
    """Its prompts end with a mark that the next turn's have not."""

    def talk(at: Server) -> list[Any]:
        messages: list[dict[str, str]] = []
        found = []
        for i in range(5):
            messages.append({"role": "user", "content": QUESTIONS[i % 2]})
            found.append(told(at, messages=messages, max_tokens=16))
            messages.append({"role": "assistant", "content": found[-1][0]})
        return found

    ours, stock = both
    assert talk(ours) == talk(stock)


def test_reasoning_goes_on_across_a_move(both: tuple[Server, Server]) -> None:
    ours, stock = both
    found: list[Any] = []
    request = {"stream": True, "max_tokens": 120}
    other = {"max_tokens": 20, "messages": [{"role": "user", "content": "x"}]}
    thread = threading.Thread(target=lambda: found.append(told(ours, **request)))
    thread.start()
    beside = told(ours, **other)
    thread.join()
    assert found == [told(stock, **request)]
    assert beside == told(stock, **other)


def test_an_adapter_of_the_server_or_of_a_request(
    model: Path, both: tuple[Server, Server], tmp_path: Path
) -> None:
    path = adapter(model, tmp_path / "adapter", "lora")
    by_request = {"model": str(model), "extra_body": {"adapters": str(path)}}
    asked = ({}, by_request, {})
    bare, stock = both
    mine = [told(bare, **request) for request in asked]
    assert mine == [told(stock, **request) for request in asked]
    options = ("--mtp", "--adapter-path", path)
    with server(tmp_path / "log", *options, model=model) as ours:
        assert told(ours) == mine[1] != mine[0]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("more", [{}, {"draft": "mtp"}, {"draft": "none"}, {"seed": 3}])
def test_images_are_refused_as_by_stock(
    both: tuple[Server, Server], more: dict[str, Any]
) -> None:
    """By a model that cannot see, and also beside a request that is drafted for."""
    ours, stock = both
    content = [{"type": "text", "text": "What is it?"}, IMAGE]
    body = {"messages": [{"role": "user", "content": content}]} | more

    def asked(at: Server) -> tuple[int, str]:
        return at.post("/v1/chat/completions", json.dumps(body).encode())

    wanted = asked(stock)
    assert 400 <= wanted[0] < 500 and "content type" in wanted[1]
    assert asked(ours) == wanted
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(told, ours)
        assert [asked(ours) for _ in range(3)] == [wanted] * 3
        assert beside.result() == stock.once(told)


@pytest.mark.parametrize("seen", [None, object()], ids=["no image", "images"])
def test_a_prompt_with_images_is_not_drafted_for(seen: Any) -> None:
    """Also where stock finds all of them in its cache, and feeds tokens alone."""
    found = ([1, 2], [[1, 2]], ["assistant"], "normal", seen)
    asked = Asked("mtp", DraftOptions(), explicit=True)
    args = SimpleNamespace(asked=asked)
    args.answer = Answer(Queue(), None, args)
    cli_args = SimpleNamespace(decode_concurrency=1, prompt_concurrency=1)
    generator = Generator(requests=Queue(), cli_args=cli_args)
    tokenize = stock_server._METHODS["ResponseGenerator"]["_tokenize"]
    assert tokenize(lambda *_: found)(generator, None, None, args) == found
    assert bool(asked.reason) == (seen is not None)
    # and it stays out of the batch
    image = [{"role": "user", "content": [IMAGE]}]
    args.answer.request = SimpleNamespace(messages=image if seen else [])
    stock = importlib.import_module("mlx_lm.server").ResponseGenerator._is_batchable
    batchable = stock_server._is_batchable(inspect.unwrap(stock))
    generator.model_provider = SimpleNamespace(is_batchable=True)
    generator.cli_args.kv_bits = args.seed = None
    batchable(generator, args)
    assert args.answer.batchable == (seen is None)


class Generator(SimpleNamespace):
    """In the place of stock's; what belongs to one is found by its identity."""

    __hash__ = object.__hash__
