"""Finds drafters: loads plugins one by one, and knows who brought which name."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from . import hookspecs
from .errors import PluginError, UnknownDrafter

if TYPE_CHECKING:
    from .drafters.base import DrafterFactory

_OURS = "mlx-lm-mtp"


@dataclass(frozen=True)
class Registration:
    """One drafter: its name, how to build it, and the distribution it comes from."""

    name: str
    factory: DrafterFactory
    provider: str
    version: str


class DrafterPlugins:
    """All drafters of a plugin manager; the only caller of the hook.

    Args:
        manager: A manager that knows our hook; plugins are registered by the caller
            or by :meth:`load_entry_points`.
    """

    def __init__(self, manager: pluggy.PluginManager | None = None) -> None:
        self.manager = manager or pluggy.PluginManager(hookspecs.NAME)
        self.manager.add_hookspecs(hookspecs)
        self.registrations: dict[str, Registration] = {}

    def load_entry_points(self) -> None:
        """Load every plugin of our entry-point group; a broken one stops no other."""
        for distribution, entry in _entry_points():
            try:
                self.add(entry.load(), distribution.name, distribution.version)
            except (Exception, SystemExit) as error:
                warnings.warn(
                    f"the mlx_lm_mtp plugin {entry.name!r} of {distribution.name} "
                    f"{distribution.version} is left out: {error}",
                    stacklevel=2,
                )

    def add(self, plugin: Any, provider: str, version: str = "") -> None:
        """Register one plugin and the drafters that it brings.

        Raises:
            PluginError: If a hook of it is misspelt, or a name is taken.
        """
        registered: dict[str, Registration] = {}
        known = self.manager.get_plugins()

        def register(name: str, factory: DrafterFactory) -> None:
            self._claim(name, factory, provider, registered)
            registered[name] = Registration(name, factory, provider, version)

        try:
            if self.manager.register(plugin) is None:
                return  # blocked by name
            self.manager.check_pending()
            self._hook_of(plugin)(register=register)
        except Exception as error:
            reason = " ".join(str(error).split())
            if plugin not in known and self.manager.is_registered(plugin):
                self.manager.unregister(plugin)
            raise PluginError(reason) from error
        self.registrations |= registered

    def __getitem__(self, name: str) -> Registration:
        """The drafter of that name.

        Raises:
            UnknownDrafter: If there is none; the message lists those there are.
        """
        if name not in self.registrations:
            raise UnknownDrafter(
                f"unknown drafter {name!r}; the known ones are: {', '.join(self)}."
            )
        return self.registrations[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.registrations))

    def _claim(
        self, name: str, factory: Any, provider: str, also: dict[str, Registration]
    ) -> None:
        if not callable(factory):
            raise PluginError(
                f"drafter {name!r} of {provider} is registered with "
                f"{type(factory).__name__}; a factory that can be called is needed."
            )
        taken = also.get(name) or self.registrations.get(name)
        if taken:
            raise PluginError(
                f"drafter {name!r} of {provider} is already registered by "
                f"{taken.provider}; one of the two must take another name."
            )

    def _hook_of(self, plugin: Any) -> Any:
        others = set(self.manager.get_plugins()) - {plugin}
        return self.manager.subset_hook_caller("mlx_lm_mtp_register_drafters", others)


def _entry_points() -> Iterator[
    tuple[importlib.metadata.Distribution, importlib.metadata.EntryPoint]
]:
    seen = set()
    # Ours come first, so that nobody takes the name of a built-in drafter.
    distributions = sorted(importlib.metadata.distributions(), key=_is_foreign)
    for distribution in distributions:
        for entry in distribution.entry_points:
            # An editable install may be listed twice.
            if entry.group == hookspecs.NAME and entry not in seen:
                seen.add(entry)
                yield distribution, entry


def _is_foreign(distribution: importlib.metadata.Distribution) -> bool:
    return distribution.name != _OURS


@functools.cache
def drafters() -> DrafterPlugins:
    """The drafters of this environment, loaded at first use."""
    plugins = DrafterPlugins()
    plugins.load_entry_points()
    return plugins
