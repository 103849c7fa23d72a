"""The one hook of this package, for plugins that bring drafters.

A plugin is a module or object with an implementation of the hook, named by an entry
point in the group ``mlx_lm_mtp``::

    from mlx_lm_mtp import hookimpl

    @hookimpl
    def mlx_lm_mtp_register_drafters(register):
        register("mine", lambda context: MyDrafter(context.model))

Hooks only register. Drafting itself calls plain methods
(:class:`mlx_lm_mtp.drafters.base.Drafter`), and no array ever goes through a hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .drafters.base import DrafterFactory

NAME = "mlx_lm_mtp"

hookspec = pluggy.HookspecMarker(NAME)
hookimpl = pluggy.HookimplMarker(NAME)


@hookspec
def mlx_lm_mtp_register_drafters(
    register: Callable[[str, DrafterFactory], None],
) -> None:
    """Call ``register(name, factory)`` for every drafter that the plugin brings.

    Args:
        register: Takes a name, as users type it, and a factory that builds the drafter
            from a :class:`~mlx_lm_mtp.drafters.base.DraftContext`.
    """
