"""The one hook of this package, for plugins that bring drafters.

A plugin is a module or object with an implementation of the hook, named by an entry
point in the group ``mlx_lm_mtp``::

    from mlx_lm_mtp import hookimpl

    @hookimpl
    def mlx_lm_mtp_register_drafters(register):
        register("mine", lambda context: MyDrafter(context.model), contract=1)

Hooks only register. Drafting itself calls plain methods
(:class:`mlx_lm_mtp.drafters.base.Drafter`), and no array ever goes through a hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from .drafters.base import DrafterFactory

NAME = "mlx_lm_mtp"

hookspec = pluggy.HookspecMarker(NAME)
hookimpl = pluggy.HookimplMarker(NAME)


class Register(Protocol):
    """What the hook is given."""

    def __call__(
        self,
        name: str,
        factory: DrafterFactory,
        *,
        options: type | None = None,
        contract: int = 1,
    ) -> None:
        """Register one drafter.

        Args:
            name: As users type it; letters, digits, ``-`` and ``_``.
            factory: Builds the drafter from a
                :class:`~mlx_lm_mtp.drafters.base.DraftContext`.
            options: A frozen dataclass with a default for each field, made with
                :func:`mlx_lm_mtp.option`. Users set a field as ``name.field=value``,
                and the factory finds an instance in ``context.own``.
            contract: The version of the drafter contract that it was written for.

        Raises:
            PluginError: If the name is taken, or the registration cannot work.
        """


@hookspec
def mlx_lm_mtp_register_drafters(register: Register) -> None:
    """Call ``register(name, factory)`` for every drafter that the plugin brings.

    Args:
        register: See :class:`Register`.
    """
