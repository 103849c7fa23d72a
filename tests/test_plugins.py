"""The plugin host: who brings which drafter, and what goes wrong with drafters."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import checkpoints
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import oracle
import pluggy
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from scripted import Scripted, proposer
from tiny import Spec

from mlx_lm_mtp import cli, draft_generate_step, hookimpl, hookspecs, plugins
from mlx_lm_mtp._version import __version__
from mlx_lm_mtp.drafters.base import CONTRACT, DraftContext, Drafter, Proposal
from mlx_lm_mtp.errors import (
    DrafterError,
    HeadNotFound,
    InvalidOption,
    PluginError,
    UnknownDrafter,
)
from mlx_lm_mtp.options import DraftOptions
from mlx_lm_mtp.plugins import DrafterPlugins

PROMPT = [3, 1, 4, 1, 5]


class Plugin:
    """Brings drafters of these names; each is built by `factory`."""

    def __init__(self, *names: str, factory: Any = None) -> None:
        self.names = names
        self.factory = factory or (lambda context: Scripted([]))

    @hookimpl
    def mlx_lm_mtp_register_drafters(self, register: Callable[..., None]) -> None:
        for name in self.names:
            register(name, self.factory)


class Raising:
    """Registers one drafter, then fails."""

    @hookimpl
    def mlx_lm_mtp_register_drafters(self, register: Callable[..., None]) -> None:
        register("half", lambda context: Scripted([]))
        raise OSError("no such device")


class Misspelt:
    """Its hook does not exist."""

    @hookimpl
    def mlx_lm_mtp_register_drafter(self, register: Callable[..., None]) -> None:
        raise AssertionError("called")


class WrongArgument:
    """Its hook asks for what the hook does not give."""

    @hookimpl
    def mlx_lm_mtp_register_drafters(self, registry: Callable[..., None]) -> None:
        raise AssertionError("called")


# --- adding plugins ---------------------------------------------------------------


def test_a_plugin_brings_its_drafters() -> None:
    host = DrafterPlugins()
    host.add(Plugin("b", "a"), "some-dist", "1.2")
    assert list(host) == ["a", "b"]
    registration = host["a"]
    assert (registration.name, registration.provider) == ("a", "some-dist")
    assert registration.version == "1.2"
    assert isinstance(registration.factory(context()), Scripted)


def test_plugins_are_asked_once() -> None:
    """A later plugin does not make the earlier ones register again."""
    host = DrafterPlugins()
    for name in ("one", "two", "three"):
        host.add(Plugin(name), f"{name}-dist")
    assert {n: host[n].provider for n in host} == {
        n: f"{n}-dist" for n in ("one", "two", "three")
    }


def test_a_module_is_a_plugin() -> None:
    module = ModuleType("my_plugin")

    @hookimpl
    def mlx_lm_mtp_register_drafters(register: Callable[..., None]) -> None:
        register("mine", lambda context: Scripted([]))

    module.mlx_lm_mtp_register_drafters = mlx_lm_mtp_register_drafters
    host = DrafterPlugins()
    host.add(module, "my-dist")
    assert list(host) == ["mine"]


def test_a_manager_of_ones_own() -> None:
    manager = pluggy.PluginManager(hookspecs.NAME)
    host = DrafterPlugins(manager)
    host.add(Plugin("mine"), "my-dist")
    assert host.manager is manager
    assert len(manager.get_plugins()) == 1


def test_a_name_taken_by_another_names_both() -> None:
    host = DrafterPlugins()
    host.add(Plugin("mine"), "first-dist")
    with pytest.raises(PluginError) as error:
        host.add(Plugin("other", "mine"), "second-dist")
    for part in ("'mine'", "first-dist", "second-dist"):
        assert part in str(error.value)
    assert list(host) == ["mine"]
    assert host["mine"].provider == "first-dist"


def test_a_name_taken_twice_by_one_plugin() -> None:
    host = DrafterPlugins()
    with pytest.raises(PluginError, match="'mine' of my-dist is already registered"):
        host.add(Plugin("mine", "mine"), "my-dist")
    assert list(host) == []


@pytest.mark.parametrize("plugin", [Raising, Misspelt, WrongArgument])
def test_a_broken_plugin_leaves_nothing_behind(plugin: type) -> None:
    host = DrafterPlugins()
    with pytest.raises((PluginError, pluggy.PluginValidationError)):
        host.add(plugin(), "broken-dist")
    assert list(host) == []
    assert host.manager.get_plugins() == set()
    host.add(Plugin("mine"), "my-dist")
    assert list(host) == ["mine"]


@pytest.mark.parametrize(
    ("plugin", "part"),
    [
        (Raising, "no such device"),
        (Misspelt, "mlx_lm_mtp_register_drafter"),
        (WrongArgument, "registry"),
    ],
)
def test_a_broken_plugin_is_a_plugin_error(plugin: type, part: str) -> None:
    with pytest.raises(PluginError, match=part):
        DrafterPlugins().add(plugin(), "broken-dist")


def test_the_same_plugin_twice_is_a_plugin_error() -> None:
    host, plugin = DrafterPlugins(), Plugin("mine")
    host.add(plugin, "my-dist")
    with pytest.raises(PluginError):
        host.add(plugin, "my-dist")


def test_an_unknown_drafter_lists_the_known() -> None:
    host = DrafterPlugins()
    host.add(Plugin("b", "a"), "my-dist")
    with pytest.raises(UnknownDrafter) as error:
        host["c"]
    assert str(error.value) == "unknown drafter 'c'; the known ones are: a, b."


# --- entry points -----------------------------------------------------------------

GOOD = """
from mlx_lm_mtp import hookimpl

@hookimpl
def mlx_lm_mtp_register_drafters(register):
    register({name!r}, lambda context: None)
"""


class Site:
    """A directory of installed distributions."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(root))

    def install(self, name: str, code: str, version: str = "1.0") -> str:
        """Install a distribution of one module, which is its plugin."""
        module = f"plugin_of_{name.replace('-', '_')}"
        self.monkeypatch.delitem(sys.modules, module, raising=False)
        (self.root / f"{module}.py").write_text(code)
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        entry = f"[mlx_lm_mtp]\n{name}-entry = {module}\n"
        (info / "entry_points.txt").write_text(entry)
        return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = set(sys.modules)
    yield Site(tmp_path, monkeypatch)
    for module in set(sys.modules) - before:
        if module.startswith("plugin_of_"):
            del sys.modules[module]


OURS = ["chain", "draft-model", "mtp", "ngram"]


def loaded() -> DrafterPlugins:
    host = DrafterPlugins()
    host.load_entry_points()
    return host


def test_an_installed_plugin_is_found(site: Site) -> None:
    site.install("third-party", GOOD.format(name="mine"), "2.5")
    host = loaded()
    assert set(host) == {"mine", *OURS}
    assert (host["mine"].provider, host["mine"].version) == ("third-party", "2.5")


def test_our_own_drafters_come_through_the_group_like_any_other() -> None:
    entries = importlib.metadata.entry_points(group=hookspecs.NAME)
    modules = {name: f"mlx_lm_mtp.drafters.{name.replace('-', '_')}" for name in OURS}
    assert {e.name: e.value for e in entries} == modules
    for name in OURS:
        registration = loaded()[name]
        provider = registration.provider, registration.version
        assert provider == ("mlx-lm-mtp", __version__)


def test_a_built_in_drafter_keeps_its_name(site: Site) -> None:
    site.install("aaa-dist", GOOD.format(name="mtp"))
    with pytest.warns(UserWarning, match="aaa-dist"):
        host = loaded()
    assert host["mtp"].provider == "mlx-lm-mtp"


def test_without_its_entry_point_our_own_drafter_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert list(loaded()) == []


BROKEN = {
    "import": "import no_such_module_at_all",
    "syntax": "def (",
    "raising": "raise OSError('no such device')",
    "exiting": "raise SystemExit('no such device')",
    "misspelt": GOOD.format(name="x").replace("_drafters", "_drafter"),
    "argument": GOOD.format(name="x").replace("register", "registry", 2),
    "taken": GOOD.format(name="mtp"),
    "undecorated": GOOD.format(name="x").replace("@hookimpl", ""),
    "hookless": "x = 1",
    "newer": GOOD.format(name="x").replace("None)", "None, contract=99)"),
    "unheard-of": GOOD.format(name="x").replace("None)", "None, colour=1)"),
    "unnamed": GOOD.format(name="two words"),
    "dotted": GOOD.format(name="a.b"),
    "no factory": GOOD.format(name="x").replace("lambda context: None", "None"),
    "options": GOOD.format(name="x").replace("None)", "None, options=dict)"),
}
SAID = {
    "undecorated": "@mlx_lm_mtp.hookimpl",
    "hookless": "implements no hook",
    "newer": "drafter 'x' needs contract 99, and this mlx-lm-mtp has contract 1",
    "unheard-of": "drafter 'x' needs colour",
    "unnamed": "'two words'",
    "dotted": "'a.b'",
    "no factory": "a factory that can be called",
    "options": "the options of drafter 'x'",
    "import": "ModuleNotFoundError: No module named 'no_such_module_at_all'",
    "raising": "OSError: no such device",
    "misspelt": "mlx_lm_mtp_register_drafter is no hook",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_plugin_stops_no_other(site: Site, broken: str) -> None:
    """One warning names its distribution, whatever the order they come in."""
    site.install("aaa-dist", GOOD.format(name="first"))
    site.install("broken-dist", BROKEN[broken], "0.3")
    site.install("zzz-dist", GOOD.format(name="last"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        host = loaded()
    assert {"first", "last"} < set(host)
    messages = [str(w.message) for w in caught if "mlx_lm_mtp" in str(w.message)]
    assert len(messages) == 1
    if broken != "taken":  # the one that is found later is left out
        assert "'broken-dist-entry' of broken-dist 0.3 is left out" in messages[0]
        assert "mtp" in host
    assert SAID.get(broken, "") in messages[0]
    assert "\n" not in messages[0]


def test_two_plugins_of_one_name_warn_with_both(site: Site) -> None:
    site.install("aaa-dist", GOOD.format(name="mine"))
    site.install("bbb-dist", GOOD.format(name="mine"))
    with pytest.warns(UserWarning, match="already registered") as caught:
        host = loaded()
    message = str(caught[0].message)
    assert "aaa-dist" in message
    assert "bbb-dist" in message
    assert host["mine"].provider in ("aaa-dist", "bbb-dist")


def test_a_distribution_that_is_listed_twice_is_loaded_once(
    site: Site, tmp_path: Path
) -> None:
    site.install("third-party", GOOD.format(name="mine"))
    site.monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert set(loaded()) == {"mine", *OURS}


def test_plugins_are_loaded_at_first_use_and_once(site: Site) -> None:
    site.install("third-party", GOOD.format(name="x") + "import sys\nsys.loaded = 1")
    plugins.drafters.cache_clear()
    assert not hasattr(sys, "loaded")
    try:
        assert plugins.drafters() is plugins.drafters()
        assert sys.loaded == 1
    finally:
        del sys.loaded
        plugins.drafters.cache_clear()


# --- selecting plugins ------------------------------------------------------------


@pytest.fixture
def two(site: Site) -> Site:
    site.install("First_Dist", GOOD.format(name="one"))
    site.install("second-dist", GOOD.format(name="two"))
    return site


@pytest.mark.parametrize(
    ("variable", "value", "names"),
    [
        ("PLUGINS", "first-dist", {"one", *OURS}),
        ("PLUGINS", "second_dist-entry, First.Dist,", {"one", "two", *OURS}),
        ("PLUGINS", "", {*OURS}),
        ("PLUGINS", "mtp", {*OURS}),
        ("DISABLE", "first_dist", {"two", *OURS}),
        ("DISABLE", "ngram,second-dist", {"one", "chain", "draft-model", "mtp"}),
        ("DISABLE", "mlx-lm-mtp", {"one", "two"}),
        ("DISABLE", "", {"one", "two", *OURS}),
    ],
)
def test_plugins_are_chosen_by_name(
    two: Site, variable: str, value: str, names: set[str]
) -> None:
    two.monkeypatch.setenv(f"MLX_LM_MTP_{variable}", value)
    assert set(loaded()) == names


def test_a_plugin_that_is_left_out_is_not_imported(site: Site) -> None:
    site.install("broken-dist", "raise AssertionError('imported')")
    site.monkeypatch.setenv("MLX_LM_MTP_DISABLE", "broken-dist")
    assert set(loaded()) == {*OURS}


@pytest.mark.parametrize("variable", ["MLX_LM_MTP_PLUGINS", "MLX_LM_MTP_DISABLE"])
def test_a_name_of_no_plugin_is_told(two: Site, variable: str) -> None:
    two.monkeypatch.setenv(variable, "frist-dist")
    with pytest.warns(UserWarning, match=f"{variable} names 'frist-dist'") as caught:
        loaded()
    assert "first-dist" in str(caught[0].message)


# --- the list of plugins ----------------------------------------------------------


@pytest.fixture
def listing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    def run(*plugin: tuple[Any, str, str]) -> str:
        host = loaded()
        for arguments in plugin:
            host.add(*arguments)
        monkeypatch.setattr(plugins, "drafters", lambda: host)
        monkeypatch.setattr(sys, "argv", ["mlx_lm_mtp", "plugins"])
        cli.main()
        return capsys.readouterr().out

    return run


HOOK = "mlx_lm_mtp_register_drafters"


def test_plugins_are_listed_in_a_table(listing: Callable[..., str]) -> None:
    table, options = listing((Plugin("a-long-name"), "some-dist", "12.0")).split("\n\n")
    rows = table.splitlines()
    assert [row.split() for row in rows] == [
        ["drafter", "provider", "version", "hooks"],
        ["a-long-name", "some-dist", "12.0", HOOK],
        *[[name, "mlx-lm-mtp", __version__, HOOK] for name in OURS],
    ]
    assert len({row.index(row.split()[1]) for row in rows}) == 1
    assert all(row == row.rstrip() for row in rows)
    assert "  ngram.longest=N (tokens that are compared, default: 16)\n" in options


def test_a_plugin_without_a_version_is_listed(listing: Callable[..., str]) -> None:
    rows = listing((Plugin("mine"), "my-dist", "")).splitlines()
    assert ["mine", "my-dist", HOOK] in [row.split() for row in rows]


@pytest.mark.parametrize("arguments", [[], ["nonsense"]], ids=["none", "unknown"])
def test_the_command_must_be_known(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["mlx_lm_mtp", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "usage: mlx_lm_mtp" in capsys.readouterr().err


# --- what is promised to plugin authors -------------------------------------------


def hooks() -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(hookspecs).items()
        if hasattr(value, f"{hookspecs.NAME}_spec")
    }


def test_the_hooks_are_these() -> None:
    """A new argument is fine; a hook or an argument that goes breaks plugins."""
    found = {name: str(inspect.signature(hook)) for name, hook in hooks().items()}
    assert found == {
        "mlx_lm_mtp_register_drafters": ("(register: 'Register') -> 'None'")
    }
    assert str(inspect.signature(hookspecs.Register.__call__)) == (
        "(self, name: 'str', factory: 'DrafterFactory', *, "
        "options: 'type | None' = None, contract: 'int' = 1) -> 'None'"
    )
    assert CONTRACT == 1


def test_every_hook_is_documented() -> None:
    for name, hook in hooks().items():
        assert name.startswith(f"{hookspecs.NAME}_")
        doc = inspect.getdoc(hook)
        assert doc is not None
        for argument in inspect.signature(hook).parameters:
            assert f"{argument}:" in doc
        assert name in (hookspecs.__doc__ or "")


def test_the_drafter_protocol_is_this() -> None:
    """Third parties write to it."""
    methods = {
        name: str(inspect.signature(method))
        for name, method in vars(Drafter).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    array, none = "'mx.array'", "'None'"
    seen = f"(self, tokens: {array}, hidden: 'mx.array | None') -> {none}"
    assert methods == {
        "begin": f"(self) -> {none}",
        "prefill": seen,
        "draft": f"(self, token: {array}, k: 'int') -> 'Proposal'",
        "observe": seen,
    }
    assert Drafter.__annotations__ == {"name": "str", "needs_hidden": "bool"}


def test_every_method_of_the_protocol_is_documented() -> None:
    for name in ("begin", "prefill", "draft", "observe"):
        assert inspect.getdoc(getattr(Drafter, name))


def test_the_context_is_this() -> None:
    assert list(DraftContext.__dataclass_fields__) == [
        "model",
        "tokenizer",
        "options",
        "model_path",
        "own",
        "draft_model",
        "others",
    ]


def test_what_plugins_import_is_exported() -> None:
    import mlx_lm_mtp

    exported = {"Drafter", "DraftContext", "Proposal", "Branch", "Wanted"}
    exported |= {"hookimpl", "hookspec"}
    assert exported < set(mlx_lm_mtp.__all__)
    assert all(hasattr(mlx_lm_mtp, name) for name in exported)


# --- drafters in use --------------------------------------------------------------


@functools.cache
def model() -> nn.Module:
    return Spec("qwen3").build()


@functools.cache
def truth() -> list[int]:
    return oracle.stock(model(), PROMPT, 24).tokens


@functools.cache
def tokenizer() -> TokenizerWrapper:
    with tempfile.TemporaryDirectory() as path:
        checkpoints.write_tokenizer(Path(path))
        return load_tokenizer(Path(path))


def context() -> DraftContext:
    return DraftContext(nn.Identity(), None, DraftOptions())


def generate(draft: Any, **kwargs: Any) -> list[Any]:
    """The responses of stock's `stream_generate` with a drafter."""
    responses = mlx_lm.stream_generate(
        model(), tokenizer(), PROMPT, max_tokens=12, draft=draft, **kwargs
    )
    return list(responses)


@pytest.fixture
def host(plugin: None, monkeypatch: pytest.MonkeyPatch) -> DrafterPlugins:
    """The drafters that generation knows: `mtp`, and what the test adds."""
    host = loaded()
    monkeypatch.setattr(plugins, "drafters", lambda: host)
    return host


@pytest.mark.usefixtures("plugin")
def test_a_drafter_object_is_used_as_it_is() -> None:
    drafter = Scripted(truth())
    responses = generate(drafter, num_draft_tokens=3)
    assert [r.token for r in responses] == truth()[:12]
    assert sum(r.from_draft for r in responses) == 9
    assert responses[-1].draft_stats.drafter == "scripted"
    assert drafter.prompt == PROMPT


def test_a_registered_drafter_is_used_by_name(host: DrafterPlugins) -> None:
    contexts: list[DraftContext] = []

    def factory(context: DraftContext) -> Drafter:
        contexts.append(context)
        return Scripted(truth())

    host.add(Plugin("mine", factory=factory), "my-dist")
    responses = generate("mine", num_draft_tokens=2)
    assert [r.token for r in responses] == truth()[:12]
    assert responses[-1].draft_stats.drafter == "mine"
    (context,) = contexts
    assert context.model is model()
    assert isinstance(context.tokenizer, TokenizerWrapper)
    assert context.options.num_draft_tokens == 2
    assert context.model_path is None


def test_an_unknown_name_lists_the_known(host: DrafterPlugins) -> None:
    host.add(Plugin("mine"), "my-dist")
    known = "chain, draft-model, mine, mtp, ngram"
    with pytest.raises(UnknownDrafter, match=f"'mimo'; the known ones are: {known}"):
        generate("mimo")


@pytest.mark.parametrize("raised", [OSError("no such\ndevice"), ZeroDivisionError()])
def test_what_a_factory_raises_names_its_distribution(
    host: DrafterPlugins, raised: Exception
) -> None:
    def factory(context: DraftContext) -> Drafter:
        raise raised

    host.add(Plugin("mine", factory=factory), "my-dist", "3.1")
    with pytest.raises(PluginError) as error:
        generate("mine")
    said = f"{type(raised).__name__}: {' '.join(str(raised).split())}".strip()
    assert str(error.value) == (
        f"drafter 'mine' of my-dist 3.1 could not be built: {said}"
    )
    assert error.value.__cause__ is raised


def test_an_error_of_ours_comes_through_a_factory(host: DrafterPlugins) -> None:
    def factory(context: DraftContext) -> Drafter:
        raise HeadNotFound("there is none")

    host.add(Plugin("mine", factory=factory), "my-dist")
    with pytest.raises(HeadNotFound, match=r"^there is none$"):
        generate("mine")


def test_a_factory_is_not_called_when_nothing_is_drafted(host: DrafterPlugins) -> None:
    host.add(Plugin("mine", factory=lambda context: 1 / 0), "my-dist")
    responses = generate("mine", num_draft_tokens=0)
    assert [r.token for r in responses] == truth()[:12]


@pytest.mark.parametrize("made", [None, "mtp", 7], ids=repr)
def test_a_factory_that_makes_no_drafter(host: DrafterPlugins, made: Any) -> None:
    host.add(Plugin("mine", factory=lambda context: made), "my-dist")
    with pytest.raises(InvalidOption) as error:
        generate("mine")
    assert type(made).__name__ in str(error.value)


def without(*names: str) -> Any:
    """A drafter object that lacks some of what a drafter has."""
    members = {"name", "needs_hidden", "begin", "prefill", "draft", "observe"}
    drafter = Scripted([])
    return SimpleNamespace(**{m: getattr(drafter, m) for m in members - set(names)})


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    "lacking",
    [
        ("observe",),
        ("begin", "draft"),
        ("name",),
        ("needs_hidden",),
        ("begin", "prefill", "draft", "observe", "name", "needs_hidden"),
    ],
    ids=" ".join,
)
def test_an_object_that_is_no_drafter(lacking: tuple[str, ...]) -> None:
    with pytest.raises(InvalidOption) as error:
        generate(without(*lacking))
    message = str(error.value)
    assert message.startswith("draft is SimpleNamespace, which is neither")
    assert message.endswith(f"it lacks {', '.join(lacking)}.")


@pytest.mark.usefixtures("plugin")
def test_a_method_that_cannot_be_called() -> None:
    drafter = Scripted([])
    drafter.observe = None  # type: ignore[assignment]
    with pytest.raises(InvalidOption, match="lacks observe"):
        generate(drafter)


# --- proposals --------------------------------------------------------------------


class Proposing(Scripted):
    """Proposes whatever it was given."""

    def __init__(self, proposal: Any) -> None:
        super().__init__([])
        self.proposal = proposal

    def draft(self, token: mx.array, k: int) -> Any:
        return self.proposal


X = mx.array([[1]])
WRONG = {
    "list": ([1, 2], "returned list"),
    "none": (None, "returned NoneType"),
    "array": (mx.array([[1, 2]]), "returned array"),
    "of a list": (Proposal([[1, 2]]), "must return a Proposal whose tokens are"),
    "float": (Proposal(mx.array([[1.0, 2.0]])), r"float32 tokens of shape \(1, 2\)"),
    "bool": (Proposal(mx.array([[True]])), r"bool tokens of shape \(1, 1\)"),
    "scalar": (Proposal(mx.array(1)), r"int32 tokens of shape \(\)"),
    "flat": (Proposal(mx.array([1, 2])), r"int32 tokens of shape \(2,\)"),
    "deep": (Proposal(mx.array([[[1]]])), r"int32 tokens of shape \(1, 1, 1\)"),
    "two rows": (Proposal(mx.array([[1], [2]])), r"int32 tokens of shape \(2, 1\)"),
    "no rows": (Proposal(mx.zeros((0, 2), mx.int32)), r"of shape \(0, 2\)"),
}


@pytest.mark.parametrize(("proposal", "part"), WRONG.values(), ids=WRONG)
def test_a_wrong_proposal_is_the_drafters_fault(proposal: Any, part: str) -> None:
    steps = draft_generate_step(mx.array(PROMPT), model(), Proposing(proposal))
    with pytest.raises(DrafterError, match=part) as error:
        list(steps)
    assert str(error.value).startswith("drafter 'scripted' ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [mx.uint32, mx.int32, mx.int64, mx.uint8], ids=str)
def test_integers_of_any_size_are_tokens(dtype: mx.Dtype) -> None:
    proposal = Proposal(mx.array([[1, 2]], dtype))
    tokens = proposer(Proposing(proposal))(X, 2, 96).tokens
    assert tokens.dtype == mx.uint32
    assert tokens.tolist() == [[1, 2]]


@pytest.mark.parametrize("given", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_tokens_beyond_k_are_cut(k: int, given: int) -> None:
    proposing = Proposing(Proposal.of(range(given)))
    tokens = proposer(proposing)(X, k, 96).tokens
    assert tokens.tolist() == [list(range(given))[:k]]
    assert tokens.dtype == mx.uint32


@pytest.mark.parametrize("excess", [1, 4])
def test_excess_tokens_change_nothing(excess: int) -> None:
    drafter = Scripted(truth(), excess=excess)
    steps = draft_generate_step(mx.array(PROMPT), model(), drafter, max_tokens=12)
    assert [token for token, _, _ in steps] == truth()[:12]
    assert drafter.seen == truth()[:12]


BEYOND = """
import mlx.core as mx
from scripted import Scripted
from tiny import VOCAB, Spec
from mlx_lm_mtp import draft_generate_step
from mlx_lm_mtp.errors import DrafterError

mx.set_default_device(mx.cpu)
drafter = Scripted([])
drafter._say = lambda i: 4_000_000_000
try:
    print(list(draft_generate_step(mx.array([1]), Spec().build(), drafter)))
except DrafterError as error:
    print(error)
"""


def test_tokens_beyond_the_vocabulary_do_not_end_the_process() -> None:
    """A drafter may have been made for a larger vocabulary."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), str(here.parent / "boot")])
    result = subprocess.run(
        [sys.executable, "-c", BEYOND],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr.decode()


def test_an_empty_proposal_is_plain_decoding() -> None:
    drafter = Proposing(Proposal.of([]))
    steps = draft_generate_step(mx.array(PROMPT), model(), drafter, max_tokens=12)
    assert [(token, drafted) for token, _, drafted in steps] == [
        (token, False) for token in truth()[:12]
    ]


def test_a_proposal_of_plain_integers() -> None:
    tokens = Proposal.of([5, 7]).tokens
    assert (tokens.shape, tokens.dtype) == ((1, 2), mx.uint32)
    assert Proposal.of([]).tokens.shape == (1, 0)
