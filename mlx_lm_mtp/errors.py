"""What can go wrong, each told in one sentence: the argument, its value, what to do.

DraftError (ValueError)
 ├── UnsupportedVersion   this mlx-lm is not one we know how to extend
 ├── InvalidOption        an argument or option out of range, or two that clash
 ├── UnknownDrafter       no drafter of that name is registered
 ├── PluginError          a plugin, or a drafter's factory, cannot do what it is to
 ├── HeadError
 │    ├── HeadNotFound    the checkpoint has no MTP head where one can live
 │    ├── HeadMismatch    a head is there, but does not fit the model
 │    └── HeadUnreadable  a weight file is cut short or damaged
 ├── DrafterError         a drafter broke its contract
 ├── NothingToChoose      logits processors left no token to choose
 └── CommitError          caches could not be brought to the accepted tokens
"""


class DraftError(ValueError):
    """Base of every error that this package raises on purpose."""


class UnsupportedVersion(DraftError):
    """The installed mlx-lm is older or newer than the supported range."""


class InvalidOption(DraftError):
    """An argument has a value that cannot work, or clashes with another."""


class UnknownDrafter(DraftError):
    """No registered drafter has the requested name."""


class PluginError(DraftError):
    """A plugin cannot be registered as it asks to be, or its factory fails."""


class HeadError(DraftError):
    """Base of what can be wrong with a checkpoint's MTP head."""


class HeadNotFound(HeadError):
    """No head was found; the message says what was looked for, and where."""


class HeadMismatch(HeadError):
    """The head's tensors do not fit the model's dimensions."""


class HeadUnreadable(HeadError):
    """A file that should hold the head cannot be read."""


class DrafterError(DraftError):
    """A drafter returned something that its contract does not allow."""


class NothingToChoose(DraftError):
    """Logits processors made a row of NaN, or allow no token at all."""


class CommitError(DraftError):
    """Caches could neither be trimmed, nor committed, nor replayed."""


class TakeBack(Exception):
    """Thrown into a generation at a token that was drafted: it ends before this one.

    Caches are then as behind the token before it, so that somebody else can go on from
    there by feeding this one. (Behind the last token of a generation there is nothing
    that could be fed: the next one is chosen, but nobody has seen it.)
    """
