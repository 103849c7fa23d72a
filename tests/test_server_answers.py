"""Stock's server with drafts: reasoning, tool calls and adapters are stock's."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from adapters import adapter
from servers import BUNDLED, Server, server

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{# tool_call.name #}</tool_call>"
    "{% endif %}{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% if enable_thinking %}<think>"
    "{% endif %}{% endif %}"
)
# Tokens that the tiny model likes, under the names of what is parsed.
MARKS = {"<think>": 770, "</think>": 384, "<tool_call>": 16, "</tool_call>": 201}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
QUESTIONS = ["Write a function that adds.", "What is a subprocess?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint as one that thinks and calls tools."""
    path = shutil.copytree(BUNDLED, tmp_path_factory.mktemp("thinking") / "model")
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ordinary = tokenizer["added_tokens"][0] | {"special": False}
    tokenizer["added_tokens"] += [
        ordinary | {"id": number, "content": mark} for mark, number in MARKS.items()
    ]
    file.write_text(json.dumps(tokenizer))
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("logs")
    with (
        server(folder / "ours", "--mtp", model=model) as ours,
        server(folder / "stock", plugin=False, model=model) as stock,
    ):
        yield ours, stock


def told(at: Server, **request: Any) -> tuple[Any, ...]:
    """What an answer says: of a stream all together, of tools what was called."""
    body = {"model": "default_model", "max_tokens": 60} | request
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
    model: Path, tmp_path: Path
) -> None:
    """The beginning of one with thinking: that of stock's segments is kept."""
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    with server(tmp_path / "log", "--mtp", model=model) as at:
        cold = told(at, **off)
    with server(tmp_path / "log", "--mtp", model=model) as at:
        told(at)
        assert told(at, **off) == cold
        with ThreadPoolExecutor(2) as threads:  # one of them in the batch
            assert list(threads.map(lambda _: told(at, **off), range(2))) == [cold] * 2


def test_the_marks_are_met(both: tuple[Server, Server]) -> None:
    """Else the test above would compare nothing."""
    content, reasoning, _, _ = told(both[0], max_tokens=120)
    assert reasoning and "</think>" not in reasoning
    assert both[1].client is not None and content != reasoning


def test_a_conversation_of_one_who_thinks_is_stock_s(
    both: tuple[Server, Server],
) -> None:
    """Its prompts end with a mark that the next turn's have not."""

    def talk(at: Server) -> list[Any]:
        messages: list[dict[str, str]] = []
        found = []
        for i in range(5):
            messages.append({"role": "user", "content": QUESTIONS[i % 2]})
            found.append(told(at, messages=messages, max_tokens=24))
            messages.append({"role": "assistant", "content": found[-1][0]})
        return found

    ours, stock = both
    assert talk(ours) == talk(stock)


def test_reasoning_goes_on_across_a_move(both: tuple[Server, Server]) -> None:
    ours, stock = both
    found: list[Any] = []
    request = {"stream": True, "max_tokens": 250}
    other = {"max_tokens": 40, "messages": [{"role": "user", "content": "x"}]}
    thread = threading.Thread(target=lambda: found.append(told(ours, **request)))
    thread.start()
    beside = told(ours, **other)
    thread.join()
    assert found == [told(stock, **request)]
    assert beside == told(stock, **other)


def test_an_adapter_of_the_server_or_of_a_request(model: Path, tmp_path: Path) -> None:
    path = adapter(model, tmp_path / "adapter", "lora")
    of_server = server(tmp_path / "a", "--mtp", "--adapter-path", path, model=model)
    bare = server(tmp_path / "b", "--mtp", model=model)
    with (
        of_server as ours,
        bare as both,
        server(tmp_path / "c", plugin=False, model=model) as stock,
    ):
        by_request = {"model": str(model), "extra_body": {"adapters": str(path)}}
        asked = ({}, by_request, {})
        mine = [told(both, **request) for request in asked]
        assert mine == [told(stock, **request) for request in asked]
        assert told(ours) == mine[1] != mine[0]
