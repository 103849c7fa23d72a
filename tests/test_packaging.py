"""The package as pip installs it: a wheel and an editable install, in scratch places.

Each environment sees the stock packages of the running one through a folder of links,
so nothing is downloaded and the running installation of mlx-lm-mtp takes no part.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="comes with the extra `test`")
pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[1]
BOOT_FILES = {"_mlx_lm_mtp_boot.py", "mlx_lm_mtp.pth", "mlx_lm_mtp.start"}
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation"]


class Environment:
    """A virtual environment with stock packages only, to begin with."""

    def __init__(self, root: Path, stock: Path) -> None:
        venv.create(root, symlinks=True)
        self.scripts = root / "bin"
        (self.packages,) = root.glob("lib/python*/site-packages")
        (self.packages / "stock.pth").write_text(f"{stock}\n")
        self.before = self.files()

    def python(self, *arguments: str, **environment: str) -> str:
        return self.run("python", *arguments, **environment)

    def done(
        self, script: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.scripts / script, *arguments],
            cwd=self.scripts,  # anywhere but the checkout
            env=_clean_environment() | environment,
            capture_output=True,
            text=True,
        )

    def run(self, script: str, *arguments: str, **environment: str) -> str:
        """Run `script`, which must succeed without a word about us on stderr."""
        done = self.done(script, *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "mlx_lm_mtp" not in done.stderr.replace("-", "_"), done.stderr
        return done.stdout

    def install(self, *what: str) -> None:
        self.python(*PIP, "install", *OFFLINE, *what)

    def uninstall(self, what: str = "mlx-lm-mtp") -> None:
        self.python(*PIP, "uninstall", "--yes", what)

    def files(self) -> set[str]:
        """Return the files of site-packages and the scripts, without bytecode."""
        found = [*self.packages.rglob("*"), *self.scripts.iterdir()]
        return {str(f) for f in found if f.is_file() and f.suffix != ".pyc"}

    def modules(self, *flags: str, **environment: str) -> set[str]:
        """Return the names of the modules that a bare start of Python loads."""
        code = "import json, sys; print(json.dumps(list(sys.modules)))"
        loaded = self.python(*flags, "-c", code, **environment)
        return set(json.loads(loaded))


def _clean_environment() -> dict[str, str]:
    """Return the environment without what would change how Python starts."""
    ours = ("PYTHON", "MLX_LM_MTP_", "PIP_", "COVERAGE_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)}


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to all installed packages but ours."""
    links = tmp_path_factory.mktemp("stock")
    for entry in _installed():
        link = links / entry.name
        if not link.exists():  # the first one on sys.path wins
            link.symlink_to(entry, target_is_directory=entry.is_dir())
    return links


def _installed() -> Iterator[Path]:
    for folder in map(Path, sys.path):
        if folder.name in ("site-packages", "dist-packages") and folder.is_dir():
            yield from (f for f in folder.iterdir() if "mlx_lm_mtp" not in f.name)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as for a release."""
    out = tmp_path_factory.mktemp("dist")
    build = "from hatchling.build import *; import sys; print(build_{}(sys.argv[1]))"
    source = out / _python(build.format("sdist"), out, cwd=ROOT)
    with tarfile.open(source) as archive:
        archive.extractall(out, filter="data")
    unpacked = out / source.name.removesuffix(".tar.gz")
    return out / _python(build.format("wheel"), out, cwd=unpacked)


def _python(code: str, *arguments: Path, cwd: Path) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    output = subprocess.check_output(command, cwd=cwd, text=True)
    return output.splitlines()[-1]


@pytest.fixture(scope="session")
def new_environment(
    tmp_path_factory: pytest.TempPathFactory, stock: Path
) -> Callable[[], Environment]:
    return lambda: Environment(tmp_path_factory.mktemp("venv"), stock)


@pytest.fixture(scope="session")
def from_wheel(new_environment: Callable[[], Environment], wheel: Path) -> Environment:
    environment = new_environment()
    environment.install(str(wheel))
    return environment


@pytest.fixture(scope="session")
def from_editable(new_environment: Callable[[], Environment]) -> Environment:
    environment = new_environment()
    environment.install("--editable", str(ROOT))
    return environment


@pytest.fixture(scope="session", params=["from_wheel", "from_editable"])
def installed(request: pytest.FixtureRequest) -> Environment:
    return request.getfixturevalue(request.param)


# `--mtp` among stock's options shows that stock is patched.
PATCHED = """
import {first}, importlib
parser = importlib.import_module("mlx_lm.generate").setup_arg_parser()
print("--mtp" in parser.format_help())
"""
STOCK_FIRST = PATCHED.format(first="mlx_lm")
OURS_FIRST = PATCHED.format(first="mlx_lm_mtp")


def test_import_of_stock_is_patched(installed: Environment) -> None:
    assert installed.python("-c", STOCK_FIRST) == "True\n"


def test_our_package_may_be_imported_first(from_wheel: Environment) -> None:
    assert from_wheel.python("-c", OURS_FIRST) == "True\n"


def test_autoload_can_be_turned_off(from_wheel: Environment) -> None:
    patched = from_wheel.python("-c", STOCK_FIRST, MLX_LM_MTP_AUTOLOAD="0")
    assert patched == "False\n"


def test_our_script_needs_no_autoload(from_wheel: Environment) -> None:
    script = "mlx_lm_mtp.generate"
    assert "--mtp" in from_wheel.run(script, "--help", MLX_LM_MTP_AUTOLOAD="0")


@pytest.fixture(scope="session")
def bare_modules(new_environment: Callable[[], Environment]) -> set[str]:
    return new_environment().modules()


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_start_up_imports_nothing_but_sys(
    installed: Environment, bare_modules: set[str], autoload: str
) -> None:
    loaded = installed.modules(MLX_LM_MTP_AUTOLOAD=autoload)
    assert loaded - bare_modules == {"_mlx_lm_mtp_boot"}


def test_no_site_no_autoload(from_wheel: Environment) -> None:
    assert "_mlx_lm_mtp_boot" not in from_wheel.modules("-S")


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_start_file(from_wheel: Environment, autoload: str) -> None:
    """Python 3.15 calls what it names, in place of the .pth file's import line."""
    code = f"""
import pkgutil, sys
sys.path.append({str(from_wheel.packages)!r})
with open(sys.path[-1] + "/mlx_lm_mtp.start") as lines:
    pkgutil.resolve_name(lines.readline().strip())()
print(sys.modules["_mlx_lm_mtp_boot"].enabled())
"""
    enabled = from_wheel.python("-S", "-c", code, MLX_LM_MTP_AUTOLOAD=autoload)
    assert enabled == f"{autoload == '1'}\n"


def test_scripts(installed: Environment) -> None:
    scripts = {name for name in os.listdir(installed.scripts) if "mlx_lm" in name}
    assert scripts == {"mlx_lm_mtp", "mlx_lm_mtp.generate"}  # never mlx_lm.generate


def test_entry_points(from_wheel: Environment) -> None:
    entry_points = _distribution(from_wheel).entry_points
    found = {(e.group, e.name, e.value) for e in entry_points}
    assert found == {
        ("console_scripts", "mlx_lm_mtp", "mlx_lm_mtp.cli:main"),
        ("console_scripts", "mlx_lm_mtp.generate", "mlx_lm_mtp.cli:generate"),
        ("mlx_lm_mtp", "chain", "mlx_lm_mtp.drafters.chain"),
        ("mlx_lm_mtp", "draft-model", "mlx_lm_mtp.drafters.draft_model"),
        ("mlx_lm_mtp", "mtp", "mlx_lm_mtp.drafters.mtp"),
        ("mlx_lm_mtp", "ngram", "mlx_lm_mtp.drafters.ngram"),
        ("pytest11", "mlx_lm_mtp", "mlx_lm_mtp.testing.pytest_plugin"),
    }


def test_pytest_finds_the_fixture_and_has_nothing_to_warn_of(
    from_wheel: Environment, tmp_path: Path
) -> None:
    """It looks through all modules of what brings a plugin, the boot module too."""
    file = tmp_path / "test_one.py"
    file.write_text(
        "def test_one(check_drafter):\n    assert callable(check_drafter)\n"
    )
    pytest_ = ["-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert "1 passed" in from_wheel.python(*pytest_, str(file))
    file.write_text("def test_one():\n    pass\n")
    assert "1 passed" in from_wheel.python(*pytest_, "-p", "no:mlx_lm_mtp", str(file))
    load = "[e.load() for e in metadata.distribution('mlx-lm-mtp').entry_points]"
    from_wheel.python("-c", f"from importlib import metadata; {load}")


def test_the_example_of_a_plugin(
    new_environment: Callable[[], Environment], wheel: Path, tmp_path: Path
) -> None:
    """Installed as its page says, found by name, listed, checked by its own test."""
    folder = shutil.copytree(ROOT / "examples" / "drafter_plugin", tmp_path / "plugin")
    environment = new_environment()
    environment.install(str(wheel), str(folder))
    listed = environment.run("mlx_lm_mtp", "plugins")
    row = "followers    mlx-lm-mtp-followers  0.1.0    mlx_lm_mtp_register_drafters\n"
    assert row in listed
    assert "followers.least=N (times that a token must have followed" in listed
    model = str(ROOT / "examples" / "models" / "qwen3_5-tiny-mtp")
    generate = ["mlx_lm_mtp.generate", "--model", model, "--prompt", "import os\n"]
    generate += ["--max-tokens", "40"]
    said = environment.run(*generate)
    by_name = ["--draft", "followers", "--draft-option", "followers.least=1"]
    drafted = environment.run(*generate, *by_name)
    assert said.split("==========")[1] == drafted.split("==========")[1]
    assert "Draft: followers, k=3, followers.least=1, " in drafted
    assert "followers.least=N" in environment.run("mlx_lm_mtp.generate", "--help")
    environment.python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder))
    environment.uninstall("mlx-lm-mtp-followers")
    gone = environment.done(*generate, *by_name)
    assert gone.returncode == 2 and "unknown drafter 'followers'" in gone.stderr


def _distribution(environment: Environment) -> Distribution:
    (found,) = distributions(name="mlx-lm-mtp", path=[str(environment.packages)])
    return found


def test_metadata(installed: Environment) -> None:
    distribution = _distribution(installed)
    version: dict[str, str] = {}
    exec((ROOT / "mlx_lm_mtp" / "_version.py").read_text(), version)
    assert distribution.version == version["__version__"]
    assert distribution.metadata["Requires-Python"] == ">=3.11"
    assert distribution.metadata["License-Expression"] == "MIT"
    required = {r for r in distribution.requires or () if "extra" not in r}
    assert required == {"mlx-lm<0.33,>=0.32", "pluggy<2,>=1.5"}


def test_contents_of_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {n for n in names if n.startswith("mlx_lm_mtp/")}
    tracked = {
        f.relative_to(ROOT).as_posix()
        for f in (ROOT / "mlx_lm_mtp").rglob("*")
        if f.is_file() and "__pycache__" not in f.parts
    }
    assert packaged == tracked and "mlx_lm_mtp/py.typed" in packaged
    others = {n for n in names if n not in packaged and ".dist-info/" not in n}
    assert others == BOOT_FILES


@pytest.mark.parametrize("editable", [False, True])
def test_uninstalling_leaves_nothing_behind(
    new_environment: Callable[[], Environment], wheel: Path, editable: bool
) -> None:
    environment = new_environment()
    what = ["--editable", str(ROOT)] if editable else [str(wheel)]
    environment.install(*what)
    added = {Path(f).name for f in environment.files() - environment.before}
    assert added > BOOT_FILES
    environment.uninstall()
    assert environment.files() == environment.before
    assert not any(environment.packages.rglob("*mlx_lm_mtp*"))  # nor bytecode
    code = "import sys; print([f for f in sys.meta_path if 'mtp' in repr(f)])"
    assert environment.python("-c", code) == "[]\n"
