"""The autoload finder, on a fake mlx-lm and a fake plugin in small subprocesses.

The subprocesses run without site-packages, so nothing that is installed takes part.
"""

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

BOOT = Path(__file__).resolve().parents[1] / "boot"

FAKES = {
    "mlx_lm/__init__.py": """
        from .utils import load
        from .convert import convert
        from .generate import generate
    """,
    "mlx_lm/utils.py": "def load(): return 'stock'\nexecuted = True",
    "mlx_lm/convert.py": "def convert(): return 'stock'\nexecuted = True",
    "mlx_lm/generate.py": "def generate(): return 'stock'\nexecuted = True",
    "mlx_lm/server.py": "executed = True",
    "mlx_lm_mtp/__init__.py": "from .install import install",
    "mlx_lm_mtp/install.py": """
        seen = []

        def patch(module):
            seen.append(module.__name__)
            module.patched = True

        def install():
            pass
    """,
}

PRELUDE = """
import importlib, importlib.machinery, importlib.util, sys
import _mlx_lm_mtp_boot as boot

# With mlx_lm; server, chat and benchmark are imported by who wants them.
imported = [*boot.TARGETS[:3]]

def finders():
    return [f for f in sys.meta_path if type(f).__module__ == "_mlx_lm_mtp_boot"]

def patched():
    from mlx_lm_mtp.install import seen
    return seen
"""

FAILING_PATCH = """
    install = None

    def patch(module):
        raise ValueError("no such luck")
"""


class World:
    """A folder with fake packages, and Python processes that see only that."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = [str(BOOT), str(root)]
        for name, text in FAKES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text))

    def remove(self, package: str) -> None:
        for file in (self.root / package).iterdir():
            file.unlink()
        (self.root / package).rmdir()

    def run(self, code: str, **environment: str) -> str:
        """Run `code`, which must succeed, and return what it wrote to stderr."""
        lines = [
            f"import sys; sys.dont_write_bytecode = True; sys.path[:0] = {self.path!r}",
            PRELUDE,
            textwrap.dedent(code),
        ]
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-W", "always", "-c", "\n".join(lines)],
            cwd=self.root,
            env=_clean_environment() | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr


def _clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("MLX_LM_MTP_")}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def assert_one_warning(stderr: str, module: str, reason: str) -> None:
    assert stderr.count("Warning") == 1, stderr
    assert f"because {module} could not be patched: {reason}" in stderr
    assert "stock mlx-lm keeps working" in stderr
    assert "Traceback" not in stderr


def test_patches_every_target_once_after_it_has_executed(world: World) -> None:
    world.write(
        "mlx_lm_mtp/install.py",
        """
        seen = []

        def install(): pass

        def patch(module):
            seen.append(module.__name__)
            assert module.executed
        """,
    )
    stderr = world.run("""
        boot.start()
        import mlx_lm, mlx_lm.server
        assert patched() == [*imported, "mlx_lm.server"]
        assert mlx_lm.generate() == "stock"
        """)
    assert stderr == ""


def test_is_idempotent(world: World) -> None:
    world.run("""
        boot.start(); boot.start(); boot.enable()
        assert len(finders()) == 1 and boot.enabled()
        import mlx_lm
        boot.enable()
        assert patched() == imported
        """)


def test_environment_variable_turns_start_off_but_not_enable(world: World) -> None:
    world.run(
        """
        boot.start()
        assert not boot.enabled() and finders() == []
        import mlx_lm
        assert patched() == []
        boot.enable()
        assert patched() == imported
        """,
        MLX_LM_MTP_AUTOLOAD="0",
    )


@pytest.mark.parametrize("value", ["1", ""])
def test_other_values_leave_it_on(world: World, value: str) -> None:
    world.run("boot.start(); assert boot.enabled()", MLX_LM_MTP_AUTOLOAD=value)


def test_disable_removes_the_finder(world: World) -> None:
    world.run("""
        before = list(sys.meta_path)
        boot.enable()
        assert boot.disable() and not boot.disable() and not boot.enabled()
        assert sys.meta_path == before
        import mlx_lm
        assert patched() == []
        """)


def test_disable_reaches_a_module_that_was_found_but_not_executed(world: World) -> None:
    world.run("""
        import mlx_lm
        boot.enable()
        patched().clear()
        del sys.modules["mlx_lm.utils"]
        spec = importlib.util.find_spec("mlx_lm.utils")
        module = importlib.util.module_from_spec(spec)
        boot.disable()
        spec.loader.exec_module(module)
        assert module.load() == "stock" and patched() == []
        """)


def test_modules_imported_before_are_patched_by_enable(world: World) -> None:
    world.run("""
        import mlx_lm.utils
        sys.modules["mlx_lm.generate"] = None  # an import that somebody blocked
        boot.enable()
        assert patched() == ["mlx_lm.utils", "mlx_lm.convert"]
        """)


def test_reload_patches_again(world: World) -> None:
    world.run("""
        boot.enable()
        import mlx_lm
        module = sys.modules["mlx_lm.generate"]
        del module.patched
        assert importlib.reload(module) is module and module.patched
        assert patched() == [*imported, "mlx_lm.generate"]
        """)


def test_module_shows_the_stock_loader(world: World) -> None:
    world.run("""
        boot.enable()
        import inspect, mlx_lm, pkgutil
        module = sys.modules["mlx_lm.generate"]
        loader = importlib.machinery.SourceFileLoader
        assert type(module.__loader__) is type(module.__spec__.loader) is loader
        assert "stock" in inspect.getsource(module.generate)
        assert b"stock" in pkgutil.get_data("mlx_lm.generate", "generate.py")
        """)


def test_found_spec_answers_for_the_stock_loader(world: World) -> None:
    world.run("""
        import mlx_lm
        boot.enable()
        del sys.modules["mlx_lm.generate"]
        loader = importlib.util.find_spec("mlx_lm.generate").loader
        assert "stock" in loader.get_source("mlx_lm.generate")
        assert loader.get_code("mlx_lm.generate").co_filename == loader.path
        """)


def test_lazy_loader_patches_on_first_use(world: World) -> None:
    world.run("""
        import mlx_lm
        boot.enable()
        patched().clear()
        del sys.modules["mlx_lm.utils"]
        spec = importlib.util.find_spec("mlx_lm.utils")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = sys.modules["mlx_lm.utils"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert patched() == []
        assert module.load() == "stock" and patched() == ["mlx_lm.utils"]
        """)


def test_loader_shared_by_many_modules(world: World) -> None:
    with zipfile.ZipFile(world.root / "stock.zip", "w") as archive:
        for file in (world.root / "mlx_lm").iterdir():
            archive.write(file, f"mlx_lm/{file.name}")
    world.remove("mlx_lm")
    world.path.append(str(world.root / "stock.zip"))
    stderr = world.run("""
        boot.enable()
        import mlx_lm, mlx_lm.server
        assert "stock.zip" in mlx_lm.server.__file__
        assert patched() == [*imported, "mlx_lm.server"]
        """)
    assert stderr == ""


@pytest.mark.parametrize("place", [0, 1])
def test_finder_that_asks_all_the_others(world: World, place: int) -> None:
    """Before ours or after it, such a finder leads to no endless loop."""
    stderr = world.run(f"""
        class Nosy:
            def find_spec(self, name, path=None, target=None):
                others = (finder for finder in sys.meta_path if finder is not self)
                specs = (finder.find_spec(name, path, target) for finder in others)
                return next((spec for spec in specs if spec is not None), None)

        boot.enable()
        sys.meta_path.insert({place}, Nosy())
        import mlx_lm
        assert patched() == imported
        """)
    assert stderr == ""


def test_finder_of_another_age(world: World) -> None:
    world.run("""
        import mlx_lm
        boot.enable()
        sys.meta_path.insert(0, object())
        assert boot._FINDER.find_spec("mlx_lm.utils", mlx_lm.__path__) is not None
        """)


def test_one_warning_when_patching_fails_and_stock_works(world: World) -> None:
    world.write("mlx_lm_mtp/install.py", FAILING_PATCH)
    stderr = world.run("""
        boot.start()
        import mlx_lm
        assert mlx_lm.load() == mlx_lm.generate() == "stock"
        assert not boot.enabled()
        """)
    assert_one_warning(stderr, "mlx_lm.utils", "ValueError: no such luck")


def test_one_warning_when_one_target_imports_the_other(world: World) -> None:
    world.write("mlx_lm/__init__.py", "")
    world.write("mlx_lm/generate.py", "from .utils import load as generate")
    world.write("mlx_lm_mtp/install.py", FAILING_PATCH)
    stderr = world.run("""
        boot.start()
        from mlx_lm.generate import generate
        assert generate() == "stock"
        """)
    assert_one_warning(stderr, "mlx_lm.utils", "ValueError")


def test_one_warning_when_two_threads_fail_at_once(world: World) -> None:
    world.write("mlx_lm/__init__.py", "")
    world.write(
        "mlx_lm_mtp/install.py",
        """
        import threading

        both = threading.Barrier(2, timeout=30)
        install = None

        def patch(module):
            both.wait()
            raise ValueError("no such luck")
        """,
    )
    stderr = world.run("""
        import concurrent.futures, mlx_lm, mlx_lm_mtp
        boot.start()
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            list(threads.map(importlib.import_module, boot.TARGETS[:2]))
        """)
    assert stderr.count("Warning") == 1, stderr


def test_one_warning_for_modules_imported_before(world: World) -> None:
    world.write("mlx_lm_mtp/install.py", FAILING_PATCH)
    stderr = world.run("import mlx_lm; boot.enable(); assert not boot.enabled()")
    assert_one_warning(stderr, "mlx_lm.utils", "ValueError")


def test_unsupported_version_is_one_warning(world: World) -> None:
    world.write("mlx_lm_mtp/errors.py", "class UnsupportedVersion(RuntimeError): pass")
    world.write(
        "mlx_lm_mtp/install.py",
        """
        from .errors import UnsupportedVersion

        install = None

        def patch(module):
            raise UnsupportedVersion("mlx-lm 0.31.0 is older than 0.32")
        """,
    )
    stderr = world.run("boot.start(); import mlx_lm; mlx_lm.generate()")
    reason = "UnsupportedVersion: mlx-lm 0.31.0 is older than 0.32"
    assert_one_warning(stderr, "mlx_lm.utils", reason)


def test_the_warning_points_at_the_import(world: World) -> None:
    world.write("mlx_lm_mtp/install.py", FAILING_PATCH)
    stderr = world.run("boot.start(); import mlx_lm")
    assert str(Path("mlx_lm", "__init__.py:2: RuntimeWarning")) in stderr


def test_warnings_as_errors_reach_the_importer_once(world: World) -> None:
    world.write("mlx_lm_mtp/install.py", FAILING_PATCH)
    world.run("""
        import warnings
        warnings.simplefilter("error")
        boot.start()
        try:
            import mlx_lm
        except RuntimeWarning:
            pass
        else:
            raise AssertionError("the warning was swallowed")
        import mlx_lm
        """)


def test_broken_plugin(world: World) -> None:
    world.write("mlx_lm_mtp/__init__.py", "import a_dependency_that_is_not_there")
    stderr = world.run("boot.start(); import mlx_lm; mlx_lm.generate()")
    reason = "ModuleNotFoundError: No module named 'a_dependency_that_is_not_there'"
    assert_one_warning(stderr, "mlx_lm.utils", reason)


def test_plugin_gone_while_the_boot_files_stayed(world: World) -> None:
    world.remove("mlx_lm_mtp")
    stderr = world.run("boot.start(); import mlx_lm; mlx_lm.generate()")
    reason = "ModuleNotFoundError: No module named 'mlx_lm_mtp'"
    assert_one_warning(stderr, "mlx_lm.utils", reason)


def test_mlx_lm_absent(world: World) -> None:
    world.remove("mlx_lm")
    stderr = world.run("""
        boot.start()
        for name in ("mlx_lm", "mlx_lm.generate"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert error.name == "mlx_lm"
            else:
                raise AssertionError(name)
        assert importlib.util.find_spec("mlx_lm") is None
        assert boot._FINDER.find_spec("mlx_lm.generate") is None
        """)
    assert stderr == ""


def test_an_error_of_stock_is_its_own(world: World) -> None:
    world.write("mlx_lm/utils.py", "raise OSError('stock is broken')")
    stderr = world.run("""
        boot.start()
        try:
            import mlx_lm
        except OSError as error:
            assert str(error) == "stock is broken"
        assert patched() == [] and boot.enabled()
        """)
    assert stderr == ""


def test_namespace_packages(world: World) -> None:
    """A folder called mlx_lm, and one in the place of a target."""
    world.remove("mlx_lm")
    world.write("mlx_lm/utils/data.txt", "")
    world.write("mlx_lm/generate.py", "")
    stderr = world.run("""
        boot.start()
        import mlx_lm
        assert boot.enabled()
        import mlx_lm.utils
        assert mlx_lm.utils.__path__ and not boot.enabled()
        """)
    assert_one_warning(stderr, "mlx_lm.utils", "its loader None has no exec_module")


def test_loader_without_exec_module(world: World) -> None:
    stderr = world.run("""
        class Legacy:
            def create_module(self, spec):
                return None

        class LegacyFinder:
            def find_spec(self, name, path=None, target=None):
                if name == "mlx_lm.utils":
                    return importlib.machinery.ModuleSpec(name, Legacy())

        sys.meta_path.insert(0, LegacyFinder())
        boot.start()
        spec = boot._FINDER.find_spec("mlx_lm.utils")
        assert type(spec.loader) is Legacy and not boot.enabled()
        """)
    assert_one_warning(stderr, "mlx_lm.utils", "its loader <")


def test_imports_nothing_but_sys(world: World) -> None:
    world.run("""
        import os
        del sys.modules["_mlx_lm_mtp_boot"]
        before = set(sys.modules)
        import _mlx_lm_mtp_boot
        _mlx_lm_mtp_boot.start()
        assert set(sys.modules) - before == {"_mlx_lm_mtp_boot"}
        """)
