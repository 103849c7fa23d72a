"""Stock's server with drafts, over HTTP: every answer is that of stock's own server."""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import openai
import pytest
from servers import BUNDLED, Server, Servers, server

import mlx_lm_mtp
from mlx_lm_mtp.serving.turns import Turns

PROMPT = "def main(argv=None):\n"
CODE = ("class Queue:\n", "import os\n", "def read(path):\n", "for i in range(")
TURNS = (
    "Write a function that adds two numbers.",
    "Now one that multiplies.",
    "And a class with both.",
    "Sort a list.",
)


def completed(at: Server, **request: Any) -> dict[str, Any]:
    """What an answer says, without what differs from call to call."""
    body = {"model": "default_model", "prompt": PROMPT, "max_tokens": 24} | request
    answer = at.client.completions.create(**body).model_dump()
    usage = answer["usage"]
    choice = answer["choices"][0]
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return {"choice": choice, "counts": counts, "more": usage.get("speculation")}


def same(ours: Server, stock: Server, **request: Any) -> dict[str, Any]:
    """The answer of both; returns what drafting says of it."""
    mine = completed(ours, **request)
    theirs = stock.once(completed, **request)
    speculation = mine.pop("more")
    assert theirs.pop("more") is None
    assert mine == theirs
    return speculation


# --- one request at a time --------------------------------------------------------

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_tokens": 1},
    "seed": {"seed": 5, "temperature": 0.9},
    "filters": {
        "seed": 6,
        "temperature": 1.0,
        "top_p": 0.8,
        "extra_body": {"top_k": 9},
    },
    "penalty": {"extra_body": {"repetition_penalty": 1.3}},
    "presence": {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {"65": 4.0}},
    "log-probabilities": {"logprobs": True},
    "likeliest": {"logprobs": True, "extra_body": {"top_logprobs": 3}},
    "stop": {"stop": ["subprocess"], "max_tokens": 60},
    "stop across tokens": {"stop": ["ess with", "a\n"], "max_tokens": 60},
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_an_answer_is_stock_s(
    ours: Server, stock: Server, request_: dict[str, Any]
) -> None:
    speculation = same(ours, stock, **request_)
    if request_.get("max_tokens") != 1:
        assert speculation["drafter"] == "mtp" and speculation["drafted"] > 0


def streamed(at: Server, **request: Any) -> tuple[str, list[Any], Any]:
    """The text, the reasons to finish, and the usage of a stream."""
    chunks = at.client.completions.create(
        model="default_model",
        stream=True,
        stream_options={"include_usage": True},
        **{"prompt": PROMPT, "max_tokens": 24} | request,
    )
    text, reasons, usage = "", [], None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            reasons.append(choice.finish_reason)
    return text, reasons, usage


def test_a_stream_is_stock_s_with_drafts_in_its_usage(
    ours: Server, stock: Server
) -> None:
    text, reasons, usage = streamed(ours)
    assert (text, reasons) == streamed(stock)[:2]
    assert usage.speculation["num_draft_tokens"] == 3
    assert usage.speculation["accepted"] > 0


def test_a_request_says_how_it_is_drafted(ours: Server, stock: Server) -> None:
    plain = same(ours, stock, extra_body={"draft": "none"})
    assert plain == {"drafter": None, "reason": "plain decoding was asked for"}
    none = same(ours, stock, extra_body={"num_draft_tokens": 0})
    assert none["reason"] == "num_draft_tokens is 0"
    options = {"depth": "confidence", "tau": 0.3}
    deep = same(
        ours, stock, extra_body={"num_draft_tokens": 6, "draft_options": options}
    )
    assert deep["num_draft_tokens"] == 6 and len(deep["acceptance_per_position"]) <= 6


def test_a_server_without_drafts_drafts_for_whom_asks(served: Servers) -> None:
    at = served()
    assert completed(at)["more"] is None
    asked = completed(at, extra_body={"draft": "mtp"})
    assert asked["more"]["drafter"] == "mtp"
    assert completed(at)["more"] is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"draft": "medusa"}, "unknown drafter 'medusa'"),
        ({"draft": 3}, "draft is 3; give the name of a drafter, or none."),
        ({"draft_options": {"deep": 1}}, "unknown draft option 'deep'"),
        ({"draft_options": [1]}, "draft_options is [1]"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0"),
        ({"max_tokens": "x"}, "max_tokens must be of type int"),
    ],
    ids=str,
)
def test_bad_bodies_are_400_and_one_sentence(
    ours: Server, body: dict[str, Any], said: str
) -> None:
    status, answer = ours.post(
        "/v1/completions", json.dumps({"prompt": "x"} | body).encode()
    )
    assert status == 400 and said in json.loads(answer)["error"]


@pytest.mark.parametrize("body", [b"{", b"[1]", b"", b"\xff", b'{"max_tokens": 3}'])
def test_malformed_bodies_are_answered_as_by_stock(
    ours: Server, stock: Server, body: bytes
) -> None:
    def answered(at: Server) -> Any:
        with contextlib.suppress(OSError):
            return at.post("/v1/completions", body)

    assert answered(ours) == answered(stock)
    assert ours.get("/health") == {"status": "ok"}


def test_totals_are_counted_for_each_drafter_and_k(tmp_path: Path) -> None:
    with server(tmp_path / "log", "--mtp") as at:
        assert at.get("/v1/draft/stats")["drafted"] == []
        for k in (2, 4, 4):
            completed(at, extra_body={"num_draft_tokens": k})
        completed(at, extra_body={"draft": "none"})
        found = at.get("/v1/draft/stats")
        log = at.log.read_text()
    assert [(r["num_draft_tokens"], r["requests"]) for r in found["drafted"]] == [
        (2, 1),
        (4, 2),
    ]
    assert all(row["tokens"] == 24 * row["requests"] for row in found["drafted"])
    reasons = {"plain decoding was asked for": 1}
    assert found["plain"] == {"requests": 1, "tokens": 24, "reasons": reasons}
    assert log.count("Draft: mtp, k=4, ") == 2
    assert "Draft: none, plain decoding was asked for" in log


def test_as_many_are_drafted_as_pay_and_that_is_told(
    served: Servers, stock: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is drafted depends on seconds; the answers do not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is known yet
    at = served("--mtp", "--draft-option", "depth=throughput")
    for seed in (1, 2, 3):
        same(at, stock, seed=seed, max_tokens=60)
    fixed = completed(at, extra_body={"draft_options": {"depth": "fixed"}})["more"]
    assert set(fixed["rounds_by_k"][:3]) <= {0, 1}  # where the budget ends
    (row,) = at.get("/v1/draft/stats")["drafted"]
    assert sum(row["rounds_by_k"]) == row["rounds"]
    assert row["rounds_by_k"][0] > 0
    log = at.log.read_text()
    assert "rounds parked: plain decoding is measured" in log
    assert "k in rounds: 0 " in log


def told(at: Server) -> tuple[int, int]:
    """Requests and tokens of the totals, wherever the tokens came from."""
    found = at.get("/v1/draft/stats")
    rows = found["drafted"]
    tokens = sum(row["tokens"] + row["batched"] for row in rows)
    requests = sum(row["requests"] for row in rows)
    plain = found["plain"]
    return requests + plain["requests"], tokens + plain["tokens"]


def test_totals_are_all_tokens(ours: Server) -> None:
    """Those of drafts, of the batch, and of requests that came and went between."""
    plain, k = {"draft": "none"}, {"num_draft_tokens": 2}
    requests: list[dict[str, Any]] = [
        *REQUESTS.values(),
        *({"extra_body": extra, "max_tokens": 12} for extra in (plain, k)),
    ]
    together = [{"prompt": CODE[i], "max_tokens": 12 + 24 * i} for i in range(4)]
    before, batched = told(ours), ours.get("/v1/draft/stats")["plain"]["tokens"]
    answers = [completed(ours, **request) for request in requests]
    with ThreadPoolExecutor(4) as threads:
        answers += threads.map(lambda request: completed(ours, **request), together)
    said = sum(answer["counts"][1] for answer in answers)
    for _ in range(50):  # one is counted once its client has the answer
        now = told(ours)
        if now[0] - before[0] == len(answers):
            break
        time.sleep(0.1)
    assert (now[0] - before[0], now[1] - before[1]) == (len(answers), said)
    assert ours.get("/v1/draft/stats")["plain"]["tokens"] > batched


def test_an_image_without_a_chat_template_is_text(ours: Server, stock: Server) -> None:
    """As in stock, which takes it for one when it looks for who can be batched."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 8}

    def asked(at: Server) -> dict[str, Any]:
        status, answer = at.post("/v1/chat/completions", json.dumps(body).encode())
        assert status == 200
        return json.loads(answer)

    mine, theirs = asked(ours), asked(stock)
    assert mine["choices"] == theirs["choices"]
    assert mine["usage"]["speculation"]["drafter"] == "mtp"


def test_a_draft_model_and_a_drafter_are_one_too_many(served: Servers) -> None:
    """Also for one request: it is told before anything is loaded."""

    def asked(at: Server, **more: Any) -> tuple[int, str]:
        body = {"prompt": "x = ", "max_tokens": 4, "draft": "mtp"} | more
        status, answer = at.post("/v1/completions", json.dumps(body).encode())
        return status, json.loads(answer).get("error", "")

    at = served("--draft-model", BUNDLED)
    for more in ({}, {"draft_model": "default_model"}, {"draft_model": "x"}):
        status, error = asked(at, **more)
        assert status == 400 and error.startswith("draft is 'mtp', but the draft model")
    assert asked(at, draft_model=None) == (200, "")  # of the same model, without it
    assert asked(at, draft="none") == (200, "")  # stock alone refuses it for a hybrid
    at = served("--mtp")
    status, error = asked(at, draft_model=str(BUNDLED))
    assert status == 400 and f"the draft model {BUNDLED} drafts" in error
    assert asked(at) == (200, "")


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere", "/", "/health"])
def test_other_pages_are_stock_s(ours: Server, stock: Server, path: str) -> None:
    def shown(at: Server) -> Any:
        try:
            return at.get(path)
        except Exception as error:
            return str(error)

    assert shown(ours) == shown(stock)


# --- conversations ----------------------------------------------------------------


def conversation(at: Server, turns: int, **request: Any) -> list[tuple[str, int, Any]]:
    """Of each turn the answer, the cached tokens, and what drafting says."""
    messages: list[dict[str, str]] = []
    found = []
    for i in range(turns):
        messages.append({"role": "user", "content": TURNS[i % len(TURNS)]})
        answer = at.client.chat.completions.create(
            model="default_model", messages=messages, max_tokens=12, **request
        )
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        cached = answer.usage.prompt_tokens_details.cached_tokens
        found.append((text, cached, getattr(answer.usage, "speculation", None)))
    return found


@pytest.mark.parametrize("turns", [2, 10])
def test_turns_of_a_conversation_are_stock_s(
    ours: Server, stock: Server, turns: int
) -> None:
    mine, theirs = conversation(ours, turns), stock.once(conversation, turns)
    assert [text for text, *_ in mine] == [text for text, *_ in theirs]
    assert [cached for _, cached, _ in mine] == [cached for _, cached, _ in theirs]
    for _, _, speculation in mine:
        assert speculation["drafter"] == "mtp"


def test_seeded_turns_are_stock_s(ours: Server, stock: Server) -> None:
    sampled = {"temperature": 0.8, "seed": 3}
    mine = conversation(ours, 3, **sampled)
    theirs = conversation(stock, 3, **sampled)
    assert [text for text, *_ in mine] == [text for text, *_ in theirs]


# --- several at once --------------------------------------------------------------


def mixed(i: int) -> dict[str, Any]:
    """The i-th of many different requests; each is decoded alone, for it is seeded."""
    return {
        "prompt": CODE[i % len(CODE)],
        "max_tokens": 5 + i % 5 * 4,
        "seed": i,
        "temperature": (0.0, 0.8)[i % 2],
        "extra_body": {"num_draft_tokens": i % 4},
    }


def test_many_at_once_are_each_as_alone(ours: Server, stock: Server) -> None:
    """32 requests, and among them clients that go away and bodies that are none."""
    wanted = [stock.once(completed, **mixed(i))["choice"] for i in range(32)]

    def asked(i: int) -> dict[str, Any]:
        if i % 8 == 0:
            gone(ours, i)
        if i % 8 == 4:
            assert answered(ours, b"{")[0] == 400
        return completed(ours, **mixed(i))["choice"]

    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(asked, range(32))) == wanted
    assert ours.get("/health") == {"status": "ok"}


def answered(at: Server, body: bytes) -> tuple[int, str]:
    """As the client of others does: again, if too many have come at the same time."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            return at.post("/v1/completions", body)
        time.sleep(0.2)
    raise AssertionError("it does not answer")


def gone(at: Server, seed: int) -> None:
    """A client that reads the beginning of a long answer, and hangs up."""
    stream = at.client.completions.create(
        model="default_model",
        prompt=PROMPT,
        max_tokens=400,
        stream=True,
        seed=seed,
        temperature=0.5,
    )
    for _ in zip(range(3), stream, strict=False):
        pass
    stream.close()


def test_a_late_one_does_not_wait_for_the_end_of_the_first(ours: Server) -> None:
    """The first is drafted for; the second is decoded meanwhile."""
    done: list[str] = []
    started = threading.Event()

    def first() -> None:
        stream = ours.client.completions.create(
            model="default_model", prompt=PROMPT, max_tokens=300, stream=True
        )
        for _ in stream:
            started.set()
        done.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(60)
    second = completed(ours, prompt=CODE[0], max_tokens=6)
    done.append("second")
    thread.join()
    assert done == ["second", "first"]
    assert "several requests were active" in second["more"]["reason"]


def test_a_client_that_goes_away_frees_its_place(ours: Server, stock: Server) -> None:
    gone(ours, 1)
    gone(stock, 1)
    start = time.monotonic()
    same(ours, stock, prompt=PROMPT, seed=2, temperature=0.7)
    assert time.monotonic() - start < 60
    # What it left in the prompt cache can be used.
    speculation = same(ours, stock)
    assert speculation["drafter"] == "mtp"


def resident(at: Server) -> int:
    """Kilobytes."""
    status = Path(f"/proc/{at.process.pid}/status").read_text()
    (line,) = (row for row in status.splitlines() if row.startswith("VmRSS"))
    return int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_requests(tmp_path: Path) -> None:
    with server(tmp_path / "log", "--mtp", "--prompt-cache-size", 4) as at:

        def ask(i: int) -> None:
            completed(at, prompt=f"{CODE[i % 4]}# {i}\n", max_tokens=4)

        def afterwards(requests: range) -> float:
            """Kilobytes, the median over these requests: buffers come and go."""
            found = []
            for some in range(requests.start, requests.stop, 20):
                list(threads.map(ask, range(some, some + 20)))
                found.append(resident(at))
            return statistics.median(found)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(ask, range(60)))  # both ways of decoding have buffers
            early = afterwards(range(60, 160))
            list(threads.map(ask, range(160, 400)))
            late = afterwards(range(400, 500))
    # The caches of a request, if they were kept by mistake, are 1.6 megabytes.
    assert late - early < 8_000, (early, late)


def test_a_termination_during_a_stream_ends_the_process(tmp_path: Path) -> None:
    with server(tmp_path / "log", "--mtp") as at:
        stream = at.client.completions.create(
            model="default_model", prompt=PROMPT, max_tokens=2000, stream=True
        )
        next(iter(stream))
        at.process.send_signal(signal.SIGTERM)
        assert at.process.wait(20) == -signal.SIGTERM
        with contextlib.suppress(openai.APIError, Exception):
            list(stream)
        assert "Traceback" not in at.log.read_text()


# --- how it is started --------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--kv-bits", 8, "--quantized-kv-start", 0),
        ("--prompt-cache-size", 1, "--prefill-step-size", 3),
        ("--num-draft-tokens", 5, "--temp", 0.7, "--top-k", 20),
    ],
    ids=lambda o: " ".join(str(word) for word in o if str(word).startswith("--")),
)
def test_stock_s_options_keep_their_meaning(
    tmp_path: Path, options: tuple[Any, ...]
) -> None:
    with (
        server(tmp_path / "ours", "--mtp", *options) as mine,
        server(tmp_path / "stock", *options, plugin=False) as other,
    ):
        for seed in (1, 2):
            speculation = same(mine, other, seed=seed)
            assert speculation["drafter"] == "mtp"


@pytest.mark.parametrize(
    "options",
    [
        ("--mtp", "--decode-concurrency", 1, "--prompt-concurrency", 1),
        ("--mtp", "--mtp-head", BUNDLED, "--draft-option", "verify=step"),
    ],
    ids=lambda o: " ".join(str(word) for word in o if str(word).startswith("--")),
)
def test_options_that_change_no_answer(
    served: Servers, stock: Server, options: tuple[Any, ...]
) -> None:
    for seed in (1, 2):
        assert same(served(*options), stock, seed=seed)["drafter"] == "mtp"


def test_a_model_without_a_head_is_served_plainly(tmp_path: Path) -> None:
    bare = checkpoints.write(tmp_path / "bare", head=False).path
    with server(tmp_path / "log", "--mtp", model=bare) as at:
        found = completed(at, prompt="def", max_tokens=4)
        assert found["more"]["drafter"] is None
        assert found["more"]["reason"].startswith("no MTP head in ")
        body = {"prompt": "def", "max_tokens": 4, "draft": "mtp"}
        status, answer = at.post("/v1/completions", json.dumps(body).encode())
        assert status == 404 and "no MTP head in " in json.loads(answer)["error"]
        assert "Nothing is drafted: no MTP head in " in at.log.read_text()
        assert at.get("/health") == {"status": "ok"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mtp-head", "x"), "--mtp-head x is of no use without --mtp; add it."),
        (("--draft", "medusa"), "unknown drafter 'medusa'"),
        (("--mtp", "--draft-model", "x"), "--draft-model x cannot go with --mtp"),
        (
            ("--draft", "draft-model", "--draft-model", "x"),
            "name it with --draft-option draft-model.model=x.",
        ),
        (("--mtp", "--draft-option", "deep=1"), "unknown draft option 'deep'"),
        (("--mtp", "--draft-option", "ngram.deep=1"), "draft option 'ngram.deep'"),
    ],
)
def test_refused_before_it_listens(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plugin: None,
    options: tuple[str, ...],
    said: str,
) -> None:
    module = importlib.import_module("mlx_lm.server")
    monkeypatch.setattr(sys, "argv", ["mlx_lm.server", *options])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_help_names_our_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plugin: None
) -> None:
    module = importlib.import_module("mlx_lm.server")
    monkeypatch.setattr(sys, "argv", ["mlx_lm.server", "--help"])
    with pytest.raises(SystemExit):
        module.main()
    out = capsys.readouterr().out
    for name in ("--mtp", "--draft NAME", "--mtp-head", "--draft-option"):
        assert name in out
    assert "--draft-stats" not in out


def test_stock_s_server_is_put_back() -> None:
    code = """
import mlx_lm.server as s
before = {n: getattr(s, n) for n in ("argparse", "main", "GenerationArguments")}
methods = {n: vars(s.APIHandler)[n] for n in ("do_GET", "handle_completion")}
import mlx_lm_mtp
mlx_lm_mtp.install()
assert s.argparse is not before["argparse"]
assert vars(s.APIHandler)["do_GET"] is not methods["do_GET"]
mlx_lm_mtp.uninstall()
assert all(getattr(s, n) is v for n, v in before.items())
assert all(vars(s.APIHandler)[n] is v for n, v in methods.items())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "MLX_LM_MTP_AUTOLOAD": "0",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert mlx_lm_mtp.__version__


# --- turns ------------------------------------------------------------------------


def test_turns_are_taken_in_order_and_by_one_at_a_time() -> None:
    turns, order, inside = Turns(), [], 0
    problems: list[int] = []

    def work(name: int) -> None:
        nonlocal inside
        with turns.turn():
            for _ in range(50):
                inside += 1
                problems.extend([inside] if inside > 1 else [])
                order.append(name)
                inside -= 1
                turns.pass_on()

    with turns.turn():
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for _ in range(50):
            turns.pass_on()
    for thread in threads:
        thread.join(10)
    assert problems == []
    assert order == [0, 1, 2] * 50


def test_nobody_waits_for_one_who_waits_for_something_else() -> None:
    turns = Turns()
    with turns.turn():
        worked = threading.Event()

        def work() -> None:
            with turns.turn():
                worked.set()

        threading.Thread(target=work).start()
        with turns.aside():
            assert worked.wait(10)
