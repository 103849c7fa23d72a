"""Stock's server with `--mtp` and its companions, by wrapping parts of it.

A request that is alone is drafted for, in a thread of its own that takes turns with
stock's; several are decoded by stock, in its batch. When another one comes in, the one
that was alone moves there, and when it is the last one left, it moves back. What stock
serves one by one (requests with a seed, or a quantised cache) is drafted for as well.

The parts: the parser and the check of a request's body are told of drafts; the
arguments of a generation carry what was asked for; an :class:`Answer` stands where
stock's queue of a request stood, so that it can move; stock's `_serve_single` runs in a
thread, and reads its tokens from our `stream_generate`; what came of it goes into the
usage of the answer, the log, and ``/v1/draft/stats``.
"""

from __future__ import annotations

import argparse
import contextlib
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

from .errors import DraftError, TakeBack
from .options import DraftOptions
from .wrapping import wrap

if TYPE_CHECKING:
    from .carry import Around
    from .serving.answer import Answer
    from .serving.asked import Asked
    from .serving.serving import Serving

_STATS = "/v1/draft/stats"
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
    answer: Answer | None = None  # which is told its tokens here
    prompt: Prompt | None = None  # and has this one


_here = _Here()
_servings: weakref.WeakKeyDictionary[Any, Serving] = weakref.WeakKeyDictionary()


def serving_of(generator: Any) -> Serving:
    """What belongs to one of stock's response generators."""
    from .serving.serving import Serving

    if generator not in _servings:
        args = generator.cli_args
        most = args.decode_concurrency
        room = max(most, args.prompt_concurrency)
        _servings[generator] = Serving(generator.requests, most, room)
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
            _check_ranks(self, found)
            return found

    class Argparse:
        ArgumentParser = Parser

        def __getattr__(self, name: str) -> Any:
            return getattr(stock, name)

    return Argparse()


def _check_ranks(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stock shares requests among ranks, but not when each of them comes and goes."""
    if args.draft is not None and (ranks := _ranks()) > 1:
        parser.error(
            f"--mtp and --draft cannot go with {ranks} ranks: only the first one knows "
            "which requests are active, and so which of them are drafted for; leave "
            "them out, or start the server without mlx.launch."
        )


def _ranks() -> int:
    """Processes that the server consists of; stock has asked the same already."""
    import mlx.core as mx

    return mx.distributed.init().size()


def _default(args: argparse.Namespace) -> Asked:
    """What the command line asks for."""
    from .serving.asked import Asked
    from .stock_cli import options_of

    draft = getattr(args, "draft", None)
    options = options_of(args) if draft else {}
    return Asked(draft, DraftOptions.of(options, args.num_draft_tokens))


def _nothing() -> Asked:
    """What somebody asks for who does not know of drafts."""
    from .serving.asked import Asked

    return Asked(None, DraftOptions())


# --- requests, in the threads of the HTTP server ------------------------------------


def _validate(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def validate_model_parameters(self: Any) -> None:
        from .serving.asked import read

        stock(self)
        args = self.response_generator.cli_args
        self.asked = read(
            self.body,
            _default(args),
            self.num_draft_tokens,
            draft_model=args.draft_model,
            ranks=_ranks(),
        )

    return validate_model_parameters


def _begin(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of a generation carry what was asked for."""

    @functools.wraps(stock)
    def generate(
        self: Any, request: Any, generation_args: Any, *args: Any, **kwargs: Any
    ) -> Any:
        asked = getattr(_here.handler, "asked", None)
        generation_args.asked = asked or _nothing()
        return stock(self, request, generation_args, *args, **kwargs)

    return generate


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
        return f"Draft: none, {asked.why or 'nothing was drafted'}"
    stats = asked.stats
    host = ", ".join(f"{stage} {s:.2f}" for stage, s in stats.host_seconds.items() if s)
    batched = f", and {asked.batched} in a batch" if asked.batched else ""
    return (
        f"{stats.summary()}, {stats.tokens} tokens in {stats.rounds} rounds{batched}, "
        f"seconds of the host: {host}"
    )


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
            return _answered(stock(self, timeout))
        with turns.aside():
            return _answered(stock(self, timeout))

    return next_request


def _answered(found: Any) -> Any:
    """A request with an :class:`Answer` in the place of its queue."""
    from .serving.answer import Answer

    if found is None or isinstance(found[0], Answer):
        return found
    queue, request, args = found
    args.answer = Answer(queue, request, args)
    return args.answer, request, args


def _next_step(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Of the batch: `TimeBudget.__next__`, which stock asks before each of them."""

    @functools.wraps(stock)
    def next_step(self: Any) -> None:
        stock(self)
        if _here.generator is None:
            return
        serving = serving_of(_here.generator)
        if any(answer.moving for answer in serving.batched.values()):
            raise StopIteration  # stock lets go of it before the next step
        serving.turns.pass_on()

    return next_step


def _is_batchable(stock: Callable[..., bool]) -> Callable[..., bool]:
    # Stock asks for images beside this; it serves these requests one by one.
    images = stock.__globals__["_image_parts"]

    @functools.wraps(stock)
    def is_batchable(self: Any, args: Any) -> bool:
        from .serving.asked import BATCHED

        answer, asked, serving = args.answer, args.asked, serving_of(self)
        answer.batchable = stock(self, args)
        answer.batchable &= not any(images(answer.request.messages))
        if not answer.batchable or not answer.drafted:
            return answer.batchable
        asked.reason = "" if serving.alone else BATCHED
        if not asked.explicit:
            asked.reason = serving.undraftable.get(_subject(args), asked.reason)
        return bool(asked.reason)

    return is_batchable


def _subject(args: Any) -> tuple[Any, ...]:
    """What a drafter is built for."""
    model, asked = args.model, args.asked
    return model.model, model.adapter, asked.draft, asked.options


def _serve_single(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def serve_single(self: Any, request: Any, stream: Any) -> None:
        from mlx_lm.generate import generation_stream

        serving, (answer, _, args) = serving_of(self), request
        if not serving.working and args.asked.draft is None:
            return stock(self, request, stream)

        def work() -> None:
            _here.serving, _here.answer = serving, answer
            try:
                _prepare(args, self.model_provider, serving)
                # Streams belong to threads; this one has its own for every thread.
                stock(self, request, generation_stream)
            except DraftError as error:
                answer.put(error)  # before a word of an answer: it is an error
            finally:
                _here.serving = _here.answer = _here.prompt = None

        serving.start(work)

    return serve_single


def _prepare(args: Any, provider: Any, serving: Serving) -> None:
    """Build the drafter, or find out why nothing can be drafted.

    Raises:
        DraftError: If it cannot be built, and the request itself asks for it.
    """
    from .build import resolve

    asked = args.asked
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
        serving.undraftable[_subject(args)] = asked.reason
        logging.warning(f"Nothing is drafted: {error}")


def _tokenize(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def tokenize(self: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        answer = args.answer
        if answer.left is not None:
            tokens = answer.resume(tokenizer)
            found = tokens, [tokens], ["assistant"], "normal", None
        else:
            found = stock(self, tokenizer, request, args)
            answer.prompt = found[0]
            # Also where they are behind what is in the cache: a drafter is shown
            # tokens, and its caches would be kept behind tokens alone.
            if found[4] is not None:
                answer.asked.reason = _EMBEDDED
        if _here.serving is not None:
            _here.prompt = Prompt(*found[:3], self)
        else:
            serving_of(self).joining = answer
        return found

    return tokenize


def _machine(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Of a request that has moved, the stop sequences have seen what it was told."""

    @functools.wraps(stock)
    def make_state_machine(self: Any, *args: Any) -> Any:
        from .serving.answer import Resumed

        stop_sequences, text = stock(self, *args)
        answer = _current()
        if answer is not None and answer.left is not None:
            stop_sequences = Resumed(stop_sequences, answer.said[:])
        return stop_sequences, text

    return make_state_machine


def _current() -> Answer | None:
    """The answer that this thread is at, or is about to put into the batch."""
    if _here.answer is not None or _here.generator is None:
        return _here.answer
    return getattr(serving_of(_here.generator), "joining", None)


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


def _load(stock: Callable[..., None]) -> Callable[..., None]:
    """An adapter's weights are lazy, and what is lazy belongs to this thread."""

    @functools.wraps(stock)
    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        import mlx.core as mx

        stock(self, *args, **kwargs)
        mx.eval(self.model.parameters())

    return load


def _fetch(stock: Callable[..., Any]) -> Callable[..., Any]:
    """For the batch without what drafters have put behind the model's caches."""

    @functools.wraps(stock)
    def fetch_nearest_cache(self: Any, model: Any, tokens: Any) -> Any:
        answer = _current()
        if answer is not None and answer.left is not None:
            return answer.take(), tokens[-1:]
        cache, rest = stock(self, model, tokens)
        if not rest:  # a generator needs a token to begin with: stock's would die
            return None, tokens
        if cache is not None and _here.generator is not None:
            _without_drafters(cache, _here.generator.model_provider)
        return cache, rest

    return fetch_nearest_cache


def _insert(stock: Callable[..., None]) -> Callable[..., None]:
    """What is still to be computed belongs to this thread; others will read it.

    Of a request that moves, the batch gets the caches. One that has moved here has
    been told its first token from elsewhere, so that stock has noted it twice.
    """

    @functools.wraps(stock)
    def insert_cache(
        self: Any, model: Any, tokens: Any, prompt_cache: Any, **kwargs: Any
    ) -> None:
        if _here.generator is not None or _here.serving is not None:
            import mlx.core as mx

            mx.eval([cache.state for cache in prompt_cache])
        answer = _here.answer
        if answer is not None and answer.moving:
            return _join(answer, prompt_cache)
        if answer is not None and answer.left is not None:
            tokens = [*answer.prompt, *answer.said]
        stock(self, model, tokens, prompt_cache, **kwargs)

    return insert_cache


# --- tokens ---------------------------------------------------------------------------


def _stream_generate(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def stream_generate(*args: Any, **kwargs: Any) -> Any:
        serving, answer = _here.serving, _here.answer
        if serving is None or answer is None:
            return stock(*args, **kwargs)
        responses = _responses(stock, answer, kwargs, serving)
        return _in_turns(serving, answer, responses)

    return stream_generate


def _responses(
    stock: Callable[..., Any], answer: Answer, kwargs: dict[str, Any], serving: Serving
) -> Iterator[Any]:
    """Stock's responses, with drafts if they can be."""
    progress, asked = kwargs["prompt_progress_callback"], answer.asked

    def in_turns(done: int, total: int) -> None:
        progress(done, total)
        serving.turns.pass_on()

    kwargs["prompt_progress_callback"] = in_turns
    if asked.drafter is None or asked.reason:
        return stock(**kwargs)
    around = _around(answer, len(kwargs["prompt"]))
    return stock(**_drafting(kwargs, asked), around=around)


def _drafting(kwargs: dict[str, Any], asked: Asked) -> dict[str, Any]:
    more = {"draft_model": None, "input_embeddings": None}
    return (
        {k: v for k, v in kwargs.items() if k not in more}
        | {"draft": asked.drafter, "draft_options": asked.options}
        | {"num_draft_tokens": asked.options.num_draft_tokens}
        | {"draft_stats": asked.tally}
    )


def _around(answer: Answer, rest: int) -> Around:
    """What a generation is told of what came before the last `rest` tokens."""
    from .carry import Around

    prompt = _here.prompt
    assert prompt is not None
    cached = len(prompt.tokens) - rest
    kinds = prompt.checkpoints(cached)

    def keep(length: int, caches: list[Any]) -> None:
        prompt.keep(cached + length, caches, kinds[length])

    return Around(
        # Stock's batch shows logits processors all tokens; whom it would not have
        # decoded is shown, as by stock, what is fed.
        before=prompt.tokens[:cached] if answer.batchable else (),
        begun=answer.left.logprobs if answer.left is not None else None,
        checkpoints=dict.fromkeys(kinds, keep),
    )


def _without_drafters(cache: list[Any], provider: Any) -> None:
    """Cut off what a drafter has put behind the model's caches."""
    from mlx_lm.models.cache import make_prompt_cache

    if provider.draft_model is None:  # which has its own there
        del cache[len(make_prompt_cache(provider.model)) :]


def _in_turns(serving: Serving, answer: Answer, responses: Any) -> Iterator[Any]:
    """One response a turn, as long as the server runs and nobody else comes in."""
    try:
        for response in responses:
            yield response
            if serving.stopped:
                return
            serving.turns.pass_on()
            if answer.batchable and response.from_draft and serving.joinable:
                answer.moving = True
                with contextlib.suppress(StopIteration):
                    responses.throw(TakeBack())
                return
    finally:
        responses.close()


def _join(answer: Answer, caches: list[Any]) -> None:
    """Leave a request to the batch: its caches are behind all but its last token."""
    from .serving.answer import Left

    serving, prompt = _here.serving, _here.prompt
    assert serving is not None and prompt is not None
    _without_drafters(caches, prompt.generator.model_provider)
    serving.move(answer, Left(caches))


def _batch_generator(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock, updated=())
    def made(*args: Any, **kwargs: Any) -> Any:
        from .serving.batch import Batch

        generator = _here.generator
        if generator is None:
            return stock(*args, **kwargs)
        draft = functools.partial(generator._serve_single, stream=None)
        return Batch(serving_of(generator), draft, *args, **kwargs)

    return made


_NAMES: dict[str, Callable[[Any], Any]] = {
    "argparse": _argparse,
    "main": _main,
    "stream_generate": _stream_generate,
    "BatchGenerator": _batch_generator,
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
        "generate": _begin,
        "_generate": _generate,
        "_next_request": _next_request,
        "_is_batchable": _is_batchable,
        "_serve_single": _serve_single,
        "_tokenize": _tokenize,
        "_make_state_machine": _machine,
        "stop_and_join": _stop,
    },
    "TimeBudget": {"__next__": _next_step},
    "ModelProvider": {"reset": _reset, "_load": _load},
    "LRUPromptCache": {"fetch_nearest_cache": _fetch, "insert_cache": _insert},
}
