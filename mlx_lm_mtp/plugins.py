"""Finds drafters: loads plugins one by one, and knows who brought which name.

Two environment variables choose among the plugins that are installed, by the name of
their distribution or of their entry point, several of them separated by commas:
``MLX_LM_MTP_PLUGINS`` loads no others (but the built-in ones), and
``MLX_LM_MTP_DISABLE`` leaves some out (built-in ones, too).
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy

from . import declared, hookspecs
from .drafters.base import CONTRACT
from .errors import InvalidOption, PluginError, UnknownDrafter
from .options import DraftOptions

if TYPE_CHECKING:
    from .drafters.base import DrafterFactory

_OURS = "mlx-lm-mtp"
SELECT = "MLX_LM_MTP_PLUGINS"
DISABLE = "MLX_LM_MTP_DISABLE"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Registration:
    """One drafter: its name, how to build it, and the distribution it comes from."""

    name: str
    factory: DrafterFactory
    provider: str
    version: str
    options: type | None = None
    hooks: tuple[str, ...] = ()

    def own(self, options: DraftOptions) -> Any:
        """The drafter's own options, an instance of what it has declared, or None.

        Raises:
            InvalidOption: If one is unknown, or has a value it cannot have.
        """
        given = options.of_drafter(self.name)
        if self.options is None:
            declared.check_known(given, [], f"{self.name}.")
            return None
        return declared.of(self.options, given, f"{self.name}.")

    def described(self) -> list[str]:
        """Its options, in a few words each."""
        if self.options is None:
            return []
        return declared.describe(self.options, f"{self.name}.")


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
        for entry, provider, version in _chosen(_installed()):
            try:
                self.add(entry.load(), provider, version)
            except (Exception, SystemExit) as error:
                warnings.warn(
                    f"the mlx_lm_mtp plugin {entry.name!r} of {provider} "
                    f"{version} is left out: {_said(error)}",
                    stacklevel=2,
                )

    def add(self, plugin: Any, provider: str, version: str = "") -> None:
        """Register one plugin and the drafters that it brings.

        Raises:
            PluginError: If a hook of it is misspelt, a name is taken, or it needs a
                newer contract.
        """
        registered: dict[str, Registration] = {}
        known = self.manager.get_plugins()

        def register(
            name: str,
            factory: DrafterFactory,
            *,
            options: type | None = None,
            contract: int = 1,
            **unknown: Any,
        ) -> None:
            _check_contract(name, contract, unknown)
            _check_declared(name, factory, options)
            self._check_free(name, provider, registered)
            registered[name] = Registration(
                name, factory, provider, version, options, self._hooks_of(plugin)
            )

        try:
            self._check_names(plugin)
            if self.manager.register(plugin) is None:
                return  # blocked by name
            self.manager.check_pending()
            self._check_hooks(plugin)
            self._hook_of(plugin)(register=register)
        except Exception as error:
            if plugin not in known and self.manager.is_registered(plugin):
                self.manager.unregister(plugin)
            raise PluginError(_said(error)) from error
        self.registrations |= registered

    def check_options(self, options: DraftOptions) -> None:
        """See that all options of drafters are declared, and their values possible.

        Raises:
            InvalidOption: If one is not.
        """
        for option, _ in options.of_drafters:
            name = option.partition(".")[0]
            if name not in self.registrations:
                raise InvalidOption(
                    f"unknown draft option {option!r}; there is no drafter {name!r}, "
                    f"only: {', '.join(self)}."
                )
            self[name].own(options)

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

    def _check_free(
        self, name: str, provider: str, also: dict[str, Registration]
    ) -> None:
        taken = also.get(name) or self.registrations.get(name)
        if taken:
            raise PluginError(
                f"drafter {name!r} of {provider} is already registered by "
                f"{taken.provider}; one of the two must take another name."
            )

    def _check_names(self, plugin: Any) -> None:
        for name in dir(plugin):
            ours = name.startswith("mlx_lm_mtp_") and name not in self._known_hooks
            if ours and inspect.isroutine(getattr(plugin, name)):
                known = ", ".join(self._known_hooks)
                raise PluginError(f"{name} is no hook; the hooks are: {known}.")

    def _check_hooks(self, plugin: Any) -> None:
        """A function that is only named like a hook would be passed over in silence."""
        if not self._hooks_of(plugin):
            raise PluginError(
                f"it implements no hook; decorate {self._known_hooks[0]} with "
                "@mlx_lm_mtp.hookimpl."
            )

    @property
    def _known_hooks(self) -> list[str]:
        return sorted(n for n in vars(self.manager.hook) if not n.startswith("_"))

    def _hooks_of(self, plugin: Any) -> tuple[str, ...]:
        callers = self.manager.get_hookcallers(plugin) or []
        return tuple(caller.name for caller in callers)

    def _hook_of(self, plugin: Any) -> Any:
        others = set(self.manager.get_plugins()) - {plugin}
        return self.manager.subset_hook_caller("mlx_lm_mtp_register_drafters", others)


def _check_contract(name: str, contract: Any, unknown: dict[str, Any]) -> None:
    if not isinstance(contract, int) or contract < 1:
        raise PluginError(
            f"drafter {name!r} is registered for contract {contract!r}; give the "
            "number of the contract that it was written for."
        )
    if contract > CONTRACT or unknown:
        words = f"contract {contract}" if contract > CONTRACT else ", ".join(unknown)
        raise PluginError(
            f"drafter {name!r} needs {words}, and this mlx-lm-mtp has contract "
            f"{CONTRACT}; upgrade mlx-lm-mtp."
        )


def _check_declared(name: Any, factory: Any, options: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PluginError(
            f"a drafter is registered under the name {name!r}; letters, digits, - "
            "and _ can be typed."
        )
    if not callable(factory):
        raise PluginError(
            f"drafter {name!r} is registered with {type(factory).__name__}; a factory "
            "that can be called is needed."
        )
    if options is not None and not declared.declares(options):
        raise PluginError(
            f"the options of drafter {name!r} are {options!r}; a dataclass whose "
            "fields have a bool, int, float or str as default is needed."
        )


# --- the plugins that are installed -----------------------------------------------


class _Installed(NamedTuple):
    """An entry point, and the name and version of its distribution."""

    entry: importlib.metadata.EntryPoint
    provider: str
    version: str

    @property
    def names(self) -> frozenset[str]:
        """What it may be called in an environment variable."""
        return frozenset({_plain(self.provider), _plain(self.entry.name)})


def _installed() -> list[_Installed]:
    """All of our group; ours first, so that nobody takes a built-in drafter's name."""
    known: dict[int, tuple[str, str]] = {}  # to read a distribution's metadata once
    found = []
    for entry in importlib.metadata.entry_points(group=hookspecs.NAME):
        assert entry.dist is not None
        if id(entry.dist) not in known:
            metadata = entry.dist.metadata
            known[id(entry.dist)] = metadata["Name"], metadata["Version"]
        found.append(_Installed(entry, *known[id(entry.dist)]))
    return sorted(found, key=lambda plugin: plugin.provider != _OURS)


def _chosen(installed: list[_Installed]) -> Iterator[_Installed]:
    """Those that the environment variables leave; a name of no plugin is told."""
    selects = _named(SELECT, installed)
    disables = _named(DISABLE, installed) or frozenset()
    for plugin in installed:
        builtin = plugin.provider == _OURS
        selected = selects is None or builtin or plugin.names & selects
        if selected and not plugin.names & disables:
            yield plugin


def _named(variable: str, installed: list[_Installed]) -> frozenset[str] | None:
    """The names in an environment variable, None if it is not set."""
    if variable not in os.environ:
        return None
    given = [part.strip() for part in os.environ[variable].split(",")]
    names = {_plain(name): name for name in given if name}
    known = sorted({name for plugin in installed for name in plugin.names})
    for name in names:
        if name not in known:
            warnings.warn(
                f"{variable} names {names[name]!r}, which is no installed plugin; "
                f"there are: {', '.join(known)}",
                stacklevel=2,
            )
    return frozenset(names)


def _plain(name: str) -> str:
    """A name as it is compared, whichever of ``-``, ``_`` and ``.`` is written."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _said(error: BaseException) -> str:
    """What an error says, in one line, and of what kind it is if that says more."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    if isinstance(error, PluginError):
        return text
    return f"{kind}: {text}" if text else kind


@functools.cache
def drafters() -> DrafterPlugins:
    """The drafters of this environment, loaded at first use."""
    plugins = DrafterPlugins()
    plugins.load_entry_points()
    return plugins
