"""Turn mlx-lm-mtp on when mlx-lm is imported.

Every Python of the environment runs :func:`start` (from ``mlx_lm_mtp.pth``, or from
``mlx_lm_mtp.start`` as of Python 3.15), so this module imports nothing but ``sys`` and
only puts one finder on ``sys.meta_path``. The finder waits for the stock modules in
``TARGETS`` and hands each one, right after it has executed, to
``mlx_lm_mtp.install.patch``. If that fails, one warning says so, the finder goes, and
stock mlx-lm keeps working.

PYTEST_DONT_REWRITE: pytest looks for assertions in what brings a plugin for it, and
warns of modules that were imported before.
"""

import sys

TYPE_CHECKING = False  # known to type checkers, and spares importing typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
else:
    Loader = object

TARGETS: "tuple[str, ...]" = (
    "mlx_lm.utils",
    "mlx_lm.convert",
    "mlx_lm.generate",
    "mlx_lm.server",
    "mlx_lm.chat",
    "mlx_lm.benchmark",
    "mlx_lm.cache_prompt",
)
"""The stock modules that get patched, in the order in which mlx-lm executes them."""


def start() -> None:
    """Turn the plugin on at start-up, unless ``MLX_LM_MTP_AUTOLOAD=0`` forbids it."""
    import os  # costs nothing: site has imported it before it comes to us

    if os.environ.get("MLX_LM_MTP_AUTOLOAD") != "0":
        enable()


def enable() -> None:
    """Patch the targets from now on: those imported already, and the rest as they come.

    Does nothing when it is on already.
    """
    if enabled():
        return
    sys.meta_path.insert(0, _FINDER)
    for name in TARGETS:
        module = sys.modules.get(name)
        if module is not None:  # None there blocks an import
            _patch(name, module)


def disable() -> bool:
    """Take the finder away again and return whether it was there.

    Modules that were patched stay patched.
    """
    try:
        sys.meta_path.remove(_FINDER)
    except ValueError:
        return False
    return True


def enabled() -> bool:
    """Return whether the finder is in place."""
    return _FINDER in sys.meta_path


def _patch(name: str, module: "ModuleType") -> None:
    if not enabled():  # turned off, or given up, since the module was found
        return
    try:
        from mlx_lm_mtp.install import patch

        patch(module)
    except Exception as error:
        _give_up(name, f"{type(error).__name__}: {error}")


def _give_up(name: str, reason: str) -> None:
    # One failure ends it for every target: half a patch helps nobody. Going first also
    # keeps a second target, or a second thread, from warning again.
    if not disable():
        return
    import warnings

    warnings.warn(
        "mlx-lm-mtp is off and stock mlx-lm keeps working, because "
        f"{name} could not be patched: {reason}",
        RuntimeWarning,
        stacklevel=4,  # the import statement, or the caller of enable()
    )


class _PatchingFinder:
    """Finds the targets as the other finders do, and wraps their loaders."""

    def __init__(self) -> None:
        self._searches: set[tuple[str, int]] = set()  # name and thread

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        if name not in TARGETS:
            return None
        spec = self._search(name, path, target)
        if spec is not None:
            _wrap(spec)
        return spec

    def _search(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        from _thread import get_ident

        # The search comes back here, perhaps through a finder that asks the others,
        # too: answer no, for the others to answer.
        search = (name, get_ident())
        if search in self._searches:
            return None
        self._searches.add(search)
        try:
            return _ask_all(name, path, target)
        finally:
            self._searches.discard(search)


def _ask_all(
    name: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> "ModuleSpec | None":
    for finder in tuple(sys.meta_path):  # a copy: disable() may come in between
        if hasattr(finder, "find_spec"):  # Python 3.11 still has finders without
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
    return None


def _wrap(spec: "ModuleSpec") -> None:
    stock = spec.loader
    if stock is not None and hasattr(stock, "exec_module"):
        spec.loader = _PatchingLoader(spec, stock)
    else:  # a namespace, or a legacy loader that works out of our sight
        _give_up(spec.name, f"its loader {stock!r} has no exec_module")


class _PatchingLoader(Loader):
    """Executes a module with its stock loader, then has it patched.

    It stands in front of the stock loader instead of changing it, because one loader
    may serve many modules (zipimport).
    """

    def __init__(self, spec: "ModuleSpec", stock: "Loader") -> None:
        self._spec = spec
        self._stock = stock

    def __getattr__(self, attribute: str) -> object:
        # create_module, get_code, get_data, path: all of these are the stock loader's.
        return getattr(self._stock, attribute)

    def exec_module(self, module: "ModuleType") -> None:
        # From here on the module looks stock: nobody (inspect, runpy,
        # importlib.resources) needs to know that we were there.
        module.__loader__ = self._spec.loader = self._stock
        self._stock.exec_module(module)
        _patch(self._spec.name, module)


_FINDER = _PatchingFinder()
