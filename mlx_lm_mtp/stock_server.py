"""Stock's server with `--mtp` and its companions, by wrapping parts of it.

A request that is alone is drafted for, in a thread of its own that takes turns with
stock's; requests that come in meanwhile are decoded by stock, in its batch. What stock
serves one by one (requests with a seed, or a quantised cache) is drafted for as well.

The parts: the parser and the check of a request's body are told of drafts; the
arguments of a generation carry what was asked for; stock's `_serve_single` runs in a
thread, and reads its tokens from our `stream_generate`; what came of it goes into the
usage of the answer, the log, and ``/v1/draft/stats``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import DraftError
from .options import DraftOptions
from .wrapping import wrap

if TYPE_CHECKING:
    from .serving.asked import Asked
    from .serving.serving import Serving

_STATS = "/v1/draft/stats"
_BATCHED = "several requests were active, which are decoded in one batch"
_EMBEDDED = "prompts with images are not drafted for"
_MODEL = "a draft model drafts"


class Prompt(NamedTuple):
    """A prompt as stock takes it apart, so as to keep the caches behind its parts.

    Args:
        tokens: All of it.
        segments: System prompt, conversation, and what begins the answer, as far as
            they can be told apart; together they are the prompt.
        types: What stock calls each of them.
        generator: Keeps the caches.
    """

    tokens: list[int]
    segments: list[list[int]]
    types: list[str]
    generator: Any

    def checkpoints(self, cached: int) -> dict[int, str]:
        """Lengths behind which stock's batch would keep the caches, and their types.

        They count from the `cached` tokens that need not be fed.
        """
        ends = list(itertools.accumulate(len(segment) for segment in self.segments))
        ends[-1] -= 1  # the last token is fed alone
        pairs = zip(ends, self.types, strict=True)
        return {end - cached: kind for end, kind in pairs if end > cached}

    def keep(self, length: int, caches: list[Any], kind: str) -> None:
        """Put the caches behind so many tokens where later requests find them."""
        key = self.generator.model_provider.model_key
        tokens = self.tokens[:length]
        self.generator.prompt_cache.insert_cache(key, tokens, caches, cache_type=kind)


class _Here(threading.local):
    """What this thread is at."""

    handler: Any = None  # reads a request, and writes its answer
    generator: Any = None  # computes, for all requests of stock's generator
    serving: Serving | None = None  # decodes one request, in turns with the others
    asked: Asked | None = None  # which asks for this
    prompt: Prompt | None = None  # and has this one


_here = _Here()
_servings: weakref.WeakKeyDictionary[Any, Serving] = weakref.WeakKeyDictionary()


def serving_of(generator: Any) -> Serving:
    """What belongs to one of stock's response generators."""
    from .serving.serving import Serving

    if generator not in _servings:
        _servings[generator] = Serving(generator.cli_args.decode_concurrency)
    return _servings[generator]


def see_through(module: ModuleType) -> None:
    """Wrap the parts of ``mlx_lm.server``, which has just been executed."""
    for name, wrapper in _NAMES.items():
        wrap(module, name, wrapper)
    for owner, wrappers in _METHODS.items():
        for name, wrapper in wrappers.items():
            wrap(getattr(module, owner), name, wrapper)


# --- the command line ---------------------------------------------------------------


def _main(stock: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(stock)
    def main() -> None:
        try:
            stock()
        except DraftError as error:
            sys.exit(f"mlx_lm.server: error: {error}")

    return main


def _argparse(stock: ModuleType) -> Any:
    """Stands in for argparse in the server's module: its parser knows our arguments."""

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *args: Any, **kwargs: Any) -> Any:
            from .stock_cli import add_arguments, check

            # Should stock come to have the option itself, we stand back.
            if "--mtp" in self.format_usage():
                return super().parse_args(*args, **kwargs)
            add_arguments(self, statistics=False)
            found = super().parse_args(*args, **kwargs)
            check(self, found)
            return found

    class Argparse:
        ArgumentParser = Parser

        def __getattr__(self, name: str) -> Any:
            return getattr(stock, name)

    return Argparse()


def _default(args: argparse.Namespace) -> Asked:
    """What the command line asks for."""
    from .serving.asked import Asked
    from .stock_cli import options_of

    draft = getattr(args, "draft", None)
    options = options_of(args) if draft else {}
    return Asked(draft, DraftOptions.of(options, args.num_draft_tokens))


# --- requests, in the threads of the HTTP server ------------------------------------


def _validate(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def validate_model_parameters(self: Any) -> None:
        from .serving.asked import read

        stock(self)
        default = _default(self.response_generator.cli_args)
        self.asked = read(self.body, default, self.num_draft_tokens)

    return validate_model_parameters


def _arguments(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def arguments(*args: Any, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs)
        made.asked = getattr(_here.handler, "asked", None)
        return made

    return arguments


def _completion(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def handle_completion(self: Any, *args: Any, **kwargs: Any) -> None:
        serving = serving_of(self.response_generator)
        serving.enter()
        _here.handler = self
        try:
            stock(self, *args, **kwargs)
        finally:
            _here.handler = None
            serving.leave()
            serving.totals.add(self.asked)
            if _shown(self.asked):
                logging.info(_line(self.asked))

    return handle_completion


def _usage(stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Both of stock's functions that say what an answer took."""

    @functools.wraps(stock)
    def answer(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        made = stock(self, *args, **kwargs)
        if "usage" in made and _shown(self.asked):
            made["usage"]["speculation"] = self.asked.to_dict()
        return made

    return answer


def _get(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def do_GET(self: Any) -> None:
        if self.path != _STATS:
            return stock(self)
        totals = serving_of(self.response_generator).totals.to_dict()
        body = json.dumps(totals).encode()
        self._set_completion_headers(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    return do_GET


def _shown(asked: Asked) -> bool:
    """Whether drafts were asked for, or were told to stay away."""
    return asked.draft is not None or asked.explicit


def _line(asked: Asked) -> str:
    if not asked.stats.drafted:
        return f"Draft: none, {asked.reason or 'nothing was drafted'}"
    return f"{asked.stats.summary()}, {asked.stats.tokens} tokens"


# --- the thread that computes, and those that draft ---------------------------------


def _generate(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def generate(self: Any) -> None:
        _here.generator = self
        with serving_of(self).turns.turn():
            stock(self)

    return generate


def _next_request(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def next_request(self: Any, timeout: float | None = None) -> Any:
        turns = serving_of(self).turns
        if timeout is None:
            turns.pass_on()
            return stock(self, timeout)
        with turns.aside():
            return stock(self, timeout)

    return next_request


def _next_step(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Of the batch: `TimeBudget.__next__`, which stock asks before each of them."""

    @functools.wraps(stock)
    def next_step(self: Any) -> None:
        stock(self)
        if _here.generator is not None:
            serving_of(_here.generator).turns.pass_on()

    return next_step


def _is_batchable(stock: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(stock)
    def is_batchable(self: Any, args: Any) -> bool:
        asked = args.asked
        if not stock(self, args):
            return False
        if asked is None or asked.draft is None or not asked.options.num_draft_tokens:
            return True
        if serving_of(self).alone:
            asked.reason = ""
            return False
        asked.reason = _BATCHED
        return True

    return is_batchable


def _serve_single(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def serve_single(self: Any, request: Any, stream: Any) -> None:
        from mlx_lm.generate import generation_stream

        serving, asked = serving_of(self), request[-1].asked
        if not serving.working and (asked is None or asked.draft is None):
            return stock(self, request, stream)

        def work() -> None:
            _here.serving, _here.asked = serving, asked
            try:
                _prepare(asked, self.model_provider)
                # Streams belong to threads; this one has its own for every thread.
                stock(self, request, generation_stream)
            except DraftError as error:
                request[0].put(error)  # before a word of an answer: it is an error
            finally:
                _here.serving = _here.asked = _here.prompt = None

        serving.start(work)

    return serve_single


def _prepare(asked: Asked, provider: Any) -> None:
    """Build the drafter, or find out why nothing can be drafted.

    Raises:
        DraftError: If it cannot be built, and the request itself asks for it.
    """
    from .stock_api import resolve

    if asked.draft is None or asked.reason:
        return
    if provider.draft_model is not None:
        asked.reason = _MODEL
        return
    model, tokenizer = provider.model, provider.tokenizer
    try:
        asked.drafter = resolve(asked.draft, model, tokenizer, asked.options)
    except DraftError as error:
        if asked.explicit:
            raise
        asked.reason = str(error)
        logging.warning(f"Nothing is drafted: {error}")


def _tokenize(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def tokenize(self: Any, *args: Any) -> Any:
        prompt, segments, types, *rest = stock(self, *args)
        if _here.serving is not None:
            _here.prompt = Prompt(prompt, segments, types, self)
        return prompt, segments, types, *rest

    return tokenize


def _stop(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def stop_and_join(self: Any) -> None:
        serving_of(self).stopped = True
        stock(self)

    return stop_and_join


def _reset(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Stock forgets its model here, for another one or for good."""

    @functools.wraps(stock)
    def reset(self: Any) -> None:
        if _here.generator is not None:
            serving_of(_here.generator).finish()
        stock(self)

    return reset


def _fetch(stock: Callable[..., Any]) -> Callable[..., Any]:
    """For the batch without what drafters have put behind the model's caches."""

    @functools.wraps(stock)
    def fetch_nearest_cache(self: Any, model: Any, tokens: Any) -> Any:
        cache, rest = stock(self, model, tokens)
        if cache is not None and _here.generator is not None:
            _without_drafters(cache, _here.generator.model_provider)
        return cache, rest

    return fetch_nearest_cache


def _insert(stock: Callable[..., None]) -> Callable[..., None]:
    """What is still to be computed belongs to this thread; others will read it."""

    @functools.wraps(stock)
    def insert_cache(
        self: Any, model: Any, tokens: Any, prompt_cache: Any, **kwargs: Any
    ) -> None:
        if _here.generator is not None or _here.serving is not None:
            import mlx.core as mx

            mx.eval([cache.state for cache in prompt_cache])
        stock(self, model, tokens, prompt_cache, **kwargs)

    return insert_cache


# --- tokens ---------------------------------------------------------------------------


def _stream_generate(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def stream_generate(*args: Any, **kwargs: Any) -> Any:
        serving, asked = _here.serving, _here.asked
        if serving is None or asked is None:
            return stock(*args, **kwargs)
        return _in_turns(serving, _responses(stock, asked, kwargs, serving))

    return stream_generate


def _responses(
    stock: Callable[..., Any], asked: Asked, kwargs: dict[str, Any], serving: Serving
) -> Iterator[Any]:
    """Stock's responses, with drafts if they can be."""
    progress = kwargs["prompt_progress_callback"]

    def in_turns(done: int, total: int) -> None:
        progress(done, total)
        serving.turns.pass_on()

    kwargs["prompt_progress_callback"] = in_turns
    if kwargs.get("input_embeddings") is not None:
        asked.reason = _EMBEDDED
    if asked.drafter is not None and not asked.reason:
        return stock(**_drafting(kwargs, asked), **_keeping(kwargs["prompt"]))
    return stock(**kwargs)


def _drafting(kwargs: dict[str, Any], asked: Asked) -> dict[str, Any]:
    more = {"draft_model": None, "input_embeddings": None}
    return (
        {k: v for k, v in kwargs.items() if k not in more}
        | {"draft": asked.drafter, "draft_options": asked.options}
        | {"num_draft_tokens": asked.options.num_draft_tokens}
        | {"draft_stats": asked.tally}
    )


def _keeping(rest: list[int]) -> dict[str, Any]:
    """Keep what stock's batch would keep of the caches behind a prompt.

    Args:
        rest: The tokens that are fed.
    """
    prompt = _here.prompt
    assert prompt is not None
    cached = len(prompt.tokens) - len(rest)
    kinds = prompt.checkpoints(cached)

    def keep(length: int, caches: list[Any]) -> None:
        prompt.keep(cached + length, caches, kinds[length])

    return {"checkpoints": tuple(kinds), "on_checkpoint": keep}


def _without_drafters(cache: list[Any], provider: Any) -> None:
    """Cut off what a drafter has put behind the model's caches."""
    from mlx_lm.models.cache import make_prompt_cache

    if provider.draft_model is None:  # which has its own there
        del cache[len(make_prompt_cache(provider.model)) :]


def _in_turns(serving: Serving, responses: Any) -> Iterator[Any]:
    """One response a turn, as long as the server runs."""
    try:
        for response in responses:
            yield response
            if serving.stopped:
                return
            serving.turns.pass_on()
    finally:
        responses.close()


_NAMES: dict[str, Callable[[Any], Any]] = {
    "argparse": _argparse,
    "main": _main,
    "GenerationArguments": _arguments,
    "stream_generate": _stream_generate,
}
_METHODS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "APIHandler": {
        "validate_model_parameters": _validate,
        "handle_completion": _completion,
        "generate_response": _usage,
        "completion_usage_response": _usage,
        "do_GET": _get,
    },
    "ResponseGenerator": {
        "_generate": _generate,
        "_next_request": _next_request,
        "_is_batchable": _is_batchable,
        "_serve_single": _serve_single,
        "_tokenize": _tokenize,
        "stop_and_join": _stop,
    },
    "TimeBudget": {"__next__": _next_step},
    "ModelProvider": {"reset": _reset},
    "LRUPromptCache": {"fetch_nearest_cache": _fetch, "insert_cache": _insert},
}
