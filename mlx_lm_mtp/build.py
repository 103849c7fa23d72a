"""From a drafter's name to the drafter: its options, its context, its factory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from . import plugins, random_state
from .anatomy import is_sharded
from .drafters.base import DraftContext, Drafter
from .errors import DraftError, InvalidOption, PluginError
from .options import DraftOptions
from .origin import path_of
from .plugins import Registration
from .propose import check_gives

_DRAFT_MODEL = "draft-model"
_METHODS = ("begin", "prefill", "draft", "observe")


def resolve(
    draft: str | Drafter,
    model: nn.Module,
    tokenizer: Any,
    options: DraftOptions,
    draft_model: nn.Module | None = None,
) -> Drafter | None:
    """The drafter of that name, or the object itself; None when nothing is drafted.

    Args:
        draft: Which.
        model, tokenizer: The target's.
        options: Of this generation.
        draft_model: The draft model that the caller has given, if any.

    Raises:
        DraftError: If there is none, or it cannot do what the options ask for.
    """
    if isinstance(draft, str):
        plugins.drafters()[draft]
        plugins.drafters().check_options(options)
    if not options.num_draft_tokens:
        return None
    _check_whole(model)
    if not isinstance(draft, str):
        return _ready(_checked(draft, "draft"), options, [], draft_model)
    workshop = _Workshop(model, tokenizer, options, draft_model, [])
    with random_state.untouched():
        drafter = workshop.build(draft)
    return _ready(drafter, options, workshop.built, draft_model)


def _check_whole(model: nn.Module) -> None:
    if is_sharded(model):
        raise InvalidOption(
            "a model whose layers are divided among ranks cannot be drafted for: a "
            "head needs the whole of them; leave out draft, or use a pipeline."
        )


@dataclass(frozen=True)
class _Workshop:
    """Builds drafters for one generation.

    Args:
        model, tokenizer, options, draft_model: As in :func:`resolve`.
        built: The names of those that were built.
    """

    model: nn.Module
    tokenizer: Any
    options: DraftOptions
    draft_model: nn.Module | None
    built: list[str]

    def build(self, name: str) -> Drafter:
        """The drafter of that name, which may ask for others."""
        registration = plugins.drafters()[name]
        if name in self.built:
            raise InvalidOption(
                f"drafter {name!r} is to draft twice; name each drafter once, and "
                "never one as a part of itself."
            )
        self.built.append(name)
        context = self.context(registration.own(self.options))
        what = f"what the factory of drafter {name!r} ({registration.provider}) made"
        return _checked(_made(registration, context), what)

    def context(self, own: Any) -> DraftContext:
        """What a drafter with these options of its own is built from."""
        return DraftContext(
            self.model,
            self.tokenizer,
            self.options,
            path_of(self.model),
            own,
            self.draft_model,
            self.build,
        )


def in_context(
    model: nn.Module, tokenizer: Any, options: DraftOptions, own: Any
) -> DraftContext:
    """What a factory that has no name is called with."""
    return _Workshop(model, tokenizer, options, None, []).context(own)


def _made(registration: Registration, context: DraftContext) -> Drafter:
    """What the factory gives; an error that is none of ours names its distribution."""
    try:
        return registration.factory(context)
    except DraftError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(
            f"drafter {registration.name!r} of {registration.provider} "
            f"{registration.version} could not be built: {said}"
        ) from error


def _ready(
    drafter: Drafter,
    options: DraftOptions,
    built: list[str],
    draft_model: nn.Module | None,
) -> Drafter:
    """The drafter, if it and those built for it obey all that was asked for."""
    for option, value in options.of_drafters:
        name = option.partition(".")[0]
        if name not in built:
            raise InvalidOption(
                f"draft option {option}={value} is of no use without drafter "
                f"{name!r}; leave it out, or choose that drafter."
            )
    if draft_model is not None and _DRAFT_MODEL not in built:
        raise InvalidOption(
            f"draft_model is given, and drafter {drafter.name!r} does not use it; "
            "choose one way of drafting."
        )
    check_gives(drafter, options)
    return drafter


def _checked(drafter: Any, what: str) -> Drafter:
    if isinstance(drafter, type):
        raise InvalidOption(
            f"{what} is the class {drafter.__name__}; give an instance."
        )
    missing = [m for m in _METHODS if not callable(getattr(drafter, m, None))]
    missing += [a for a in ("name", "needs_hidden") if not hasattr(drafter, a)]
    if missing:
        raise InvalidOption(
            f"{what} is {type(drafter).__name__}, which is neither the name of a "
            f"drafter nor a drafter: it lacks {', '.join(missing)}."
        )
    return drafter
