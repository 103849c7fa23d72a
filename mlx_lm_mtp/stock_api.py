"""The entry points of mlx-lm with `draft=` added, as wrappers around stock's own.

Stock's `stream_generate` keeps its body: the tokenizer, the text, the statistics, the
stop. It is handed a :class:`DraftRequest` in the place of a draft model, and so reads
its tokens from `speculative_generate_step`, which sees the request and runs our loop.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InvalidOption, TakeBack
from .options import DraftOptions
from .regime import Marks
from .rounds import Round
from .stats import Tally

if TYPE_CHECKING:
    import mlx.nn as nn

    from .drafters.base import Drafter
    from .trace import Trace

_STREAM_DOC = """
    Added by mlx-lm-mtp (keyword arguments):
        draft (str or Drafter, optional): What drafts tokens, e.g. ``"mtp"``. The
          tokens stay those of plain decoding. Default: ``None``.
        num_draft_tokens (int): Drafts a round; 0 is plain decoding. Default: ``3``.
        draft_options (DraftOptions or dict, optional): How to draft and verify.
        draft_trace (str or Path, optional): A file to which every verify is appended
          as a line of JSON, to be replayed without the model.
        draft_stats (Tally, optional): Filled while generating; every response
          carries what it has come to, a ``DraftStats``, as ``draft_stats``.
    """
# Arguments of `generate_step` that stock drops on its way to a draft model.
_DROPPED = ("max_kv_size", "prompt_progress_callback")


@dataclass
class DraftRequest:
    """One generation with drafts, in the place of stock's draft model.

    Args:
        drafter: What proposes tokens; None is plain decoding.
        options: How to draft and verify.
        stats: Filled while generating.
        thinking: The tokens that begin and end thinking, if the model thinks.
        trace: Is told every verify.
        kept: Arguments that stock would drop.
    """

    drafter: Drafter | None
    options: DraftOptions
    stats: Tally
    thinking: Marks | None = None
    trace: Trace | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    _steps: Generator[Any, None, None] | None = None

    def steps(self, prompt: Any, model: Any, *stream: Any, **kwargs: Any) -> Any:
        """The token generator that stock's `stream_generate` reads."""
        kwargs |= self.kept
        if self.drafter is None:
            self._steps = _plain(self, prompt, model, *stream, **kwargs)
        else:
            from .generate import draft_generate_step

            self._steps = draft_generate_step(
                prompt,
                model,
                self.drafter,
                *stream,
                options=self.options,
                stats=self.stats,
                thinking=self.thinking,
                trace=self.trace,
                **kwargs,
            )
        return self._steps

    def close(self) -> None:
        """Stop now: caches and random state are then those of plain decoding."""
        if self._steps is not None:
            self._steps.close()

    def take_back(self) -> None:
        """Stop before the last token, which was drafted."""
        assert self._steps is not None
        with contextlib.suppress(TakeBack):
            self._steps.throw(TakeBack())


def _plain(
    request: DraftRequest, prompt: Any, model: Any, *stream: Any, **kwargs: Any
) -> Any:
    """Stock's own steps, each counted as a round that drafts nothing."""
    from mlx_lm.generate import generate_step

    started = time.perf_counter()
    stats = request.stats
    steps = generate_step(prompt, model, *stream, **kwargs)
    try:
        for token, logprobs in _computed(steps, request):
            done = Round(token=token, paths=((),))
            stats.count(done)
            if request.trace is not None:
                request.trace.add(done)
            yield token, logprobs, False
    finally:
        steps.close()
        stats.note(seconds=time.perf_counter() - started)
        if request.trace is not None:
            request.trace.end(stats.stats)


def _computed(steps: Generator[Any, None, None], request: DraftRequest) -> Any:
    """Stock's steps, with the arithmetic that a generation with drafts has."""
    from .state.capture import see_through
    from .state.recurrence import Recurrence

    options = request.options
    computing = Recurrence(options.capture, options.recurrence, request.stats.note)
    see_through()
    while True:
        with computing():  # not while the caller has the step
            step = next(steps, None)
        if step is None:
            return
        yield step


# --- the wrappers -----------------------------------------------------------------


def speculative_generate_step(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap stock's function of that name: a request runs our loop.

    So does a draft model whose rounds stock could not take back.
    """

    @functools.wraps(stock)
    def wrapper(
        prompt: Any, model: Any, draft_model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(draft_model, DraftRequest):
            return draft_model.steps(prompt, model, *args, **kwargs)
        if _trims(model, draft_model, kwargs.get("prompt_cache")):
            return stock(prompt, model, draft_model, *args, **kwargs)
        request = _of_draft_model(draft_model, kwargs.pop("num_draft_tokens", 2))
        return request.steps(prompt, model, *args, **kwargs)

    return wrapper


def _trims(model: Any, draft_model: Any, prompt_cache: list[Any] | None) -> bool:
    """Whether stock's own loop can take back what it drafts, now and later.

    It refuses caches of recurrent layers, does not look at the draft model's, and a
    rotating cache that is full ignores it.
    """
    from mlx_lm.models.cache import make_prompt_cache

    from .state.limits import rings

    caches = prompt_cache or [
        cache for m in (model, draft_model) for cache in make_prompt_cache(m)
    ]
    return all(cache.is_trimmable() for cache in caches) and not rings(caches)


def _of_draft_model(draft_model: Any, k: int) -> DraftRequest:
    from .drafters.draft_model import DraftModelDrafter

    options = DraftOptions(num_draft_tokens=k)
    drafter = DraftModelDrafter(draft_model) if k else None
    return DraftRequest(drafter, options, Tally(drafter="draft-model"))


def stream_generate(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap stock's function of that name: it takes `draft` and what goes with it."""

    @functools.wraps(stock)
    def wrapper(
        model: nn.Module,
        tokenizer: Any,
        prompt: Any,
        *args: Any,
        draft: str | Drafter | None = None,
        draft_options: DraftOptions | Mapping[str, Any] | None = None,
        draft_stats: Tally | None = None,
        draft_trace: str | Path | None = None,
        **kwargs: Any,
    ) -> Any:
        if draft is None:
            _check_unused(
                draft_options=draft_options,
                draft_stats=draft_stats,
                draft_trace=draft_trace,
            )
            return stock(model, tokenizer, prompt, *args, **kwargs)
        arguments = _by_name(stock, model, tokenizer, prompt, *args, **kwargs)
        options = DraftOptions.of(
            draft_options, arguments.pop("num_draft_tokens", None)
        )
        _check_no_embeddings(arguments)
        trace = _traced(draft_trace, draft, options, model)
        from .build import resolve

        drafter = resolve(
            draft, model, tokenizer, options, arguments.pop("draft_model", None)
        )
        stats = _named(draft_stats, draft, options)
        request = DraftRequest(drafter, options, stats, _thinking(tokenizer), trace)
        request.kept = {k: arguments.pop(k) for k in _DROPPED if k in arguments}
        return _responses(stock(**arguments | {"draft_model": request}), request)

    wrapper.__doc__ = f"{stock.__doc__}{_STREAM_DOC}"
    return wrapper


def generate(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap stock's function of that name: it says what drafting did when verbose."""

    @functools.wraps(stock)
    def wrapper(
        model: nn.Module,
        tokenizer: Any,
        prompt: Any,
        verbose: bool = False,
        **kwargs: Any,
    ) -> str:
        from .stock_cli import report, requested

        kwargs = requested() | kwargs
        if kwargs.get("draft") is None:
            return stock(model, tokenizer, prompt, verbose, **kwargs)
        if kwargs.get("draft_stats") is None:
            kwargs["draft_stats"] = Tally()
        text = stock(model, tokenizer, prompt, verbose, **kwargs)
        stats = kwargs["draft_stats"].stats
        if verbose:
            print("\n".join([stats.summary(), *stats.tables()]))
        report(stats)
        return text

    return wrapper


def batch_generate(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap stock's function of that name: it says that it does not draft."""

    @functools.wraps(stock)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for name in ("draft", "draft_options", "draft_stats", "draft_trace"):
            if kwargs.pop(name, None) is not None:
                raise InvalidOption(
                    f"{name} cannot be given to batch_generate, which decodes all "
                    "prompts in one batch without drafts; leave it out, or call "
                    "generate or stream_generate for each prompt."
                )
        return stock(*args, **kwargs)

    return wrapper


def _responses(stock_responses: Any, request: DraftRequest) -> Any:
    """Stock's responses; the last is not given away before the caches are right."""
    try:
        for response in stock_responses:
            if response.finish_reason is not None:
                request.close()
            response.draft_stats = request.stats.stats
            yield response
    except TakeBack:
        request.take_back()
    finally:
        stock_responses.close()
        request.close()


# --- arguments --------------------------------------------------------------------


def _by_name(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """All arguments of a call of stock's, by name."""
    arguments = dict(inspect.signature(stock).bind(*args, **kwargs).arguments)
    more = arguments.pop("kwargs", {})
    return arguments | more


def _check_unused(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InvalidOption(f"{name} is of no use without draft; give draft, too.")


def _check_no_embeddings(arguments: dict[str, Any]) -> None:
    if arguments.pop("input_embeddings", None) is not None:
        raise InvalidOption(
            "input_embeddings cannot be drafted for; leave out draft, or give the "
            "prompt as tokens."
        )


def _thinking(tokenizer: Any) -> Marks | None:
    """The tokens around thinking, if a tokenizer has them as stock's wrapper does."""
    marks = [
        getattr(tokenizer, f"think_{mark}_tokens", None) for mark in ("start", "end")
    ]
    return Marks(*marks) if all(marks) else None


def _named(stats: Tally | None, draft: Any, options: DraftOptions) -> Tally:
    """The tally to be filled, with what is known beforehand."""
    if stats is None:
        stats = Tally()
    if not isinstance(stats, Tally):
        raise InvalidOption(f"draft_stats is {stats!r}; give a Tally.")
    stats.note(
        drafter=draft if isinstance(draft, str) else str(draft.name),
        num_draft_tokens=options.num_draft_tokens,
        verify=options.verify,
        exactness=options.exactness,
        strategy=options.unusual,
    )
    return stats


def _traced(
    file: str | Path | None, draft: Any, options: DraftOptions, model: nn.Module
) -> Trace | None:
    """The trace that a generation is to write, if it is."""
    if file is None:
        return None
    from .origin import path_of
    from .trace import Trace

    path = path_of(model)
    header = {
        "model": None if path is None else str(path),
        "drafter": str(getattr(draft, "name", draft)),
        "num_draft_tokens": options.num_draft_tokens,
        "options": options.to_dict(),
    }
    return Trace(Path(file), header)
