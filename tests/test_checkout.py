"""Python in a checkout finds all of Gossamer there, and says what to do if nobody has installed it."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import gossamer
from gossamer import checkout

ROOT = Path(__file__).parents[1]


def laid_out(root: Path, rooms_in: Path) -> Path:
    """The folder `gossamer` of a tree with empty packages."""
    (root / "gossamer").mkdir(parents=True)
    for room in checkout.ROOMS:
        (rooms_in / room).mkdir()
        (rooms_in / room / "__init__.py").touch()
    return root / "gossamer"


def installed_at(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    found = [SimpleNamespace(locate_file=lambda _, place=place: place) for place in places]
    monkeypatch.setattr(checkout, "distributions", lambda name: found)


def test_a_wheel_has_its_packages_in_its_folder(tmp_path: Path) -> None:
    assert checkout.beside(laid_out(tmp_path, tmp_path / "gossamer")) == []


def test_other_folders_beside_a_wheel_are_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "backend").mkdir()
    assert checkout.beside(laid_out(tmp_path / "site", tmp_path / "site" / "gossamer")) == []


def test_a_checkout_has_its_packages_beside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_at(monkeypatch, tmp_path, tmp_path / "site-packages")
    assert checkout.beside(laid_out(tmp_path / "here", tmp_path / "here")) == [str(tmp_path / "here")]


@pytest.mark.parametrize("built", [False, True])
def test_a_checkout_that_nobody_has_installed_says_how(built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_at(monkeypatch, *([tmp_path] if built else []))  # metadata that a build has left behind
    with pytest.raises(ImportError, match=r"is a checkout .* not installed for .*make smoke.* pip install --editable"):
        checkout.beside(laid_out(tmp_path, tmp_path))


def test_the_checkout_is_found_before_what_is_installed() -> None:
    """As with a wheel in the environment: without the finder of editable installations."""
    program = (
        "import sys\n"
        "sys.meta_path = [each for each in sys.meta_path if 'ditable' not in repr(each)]\n"
        "import gossamer, gossamer.passes.registry, pkgutil\n"
        "assert not {'tests', 'gossamer', 'examples'} & {each.name for each in pkgutil.iter_modules(gossamer.__path__)}\n"
        "print(gossamer.dialects.__file__, gossamer.passes.registry.__file__, sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.splitlines() == [str(ROOT / "dialects/__init__.py"), str(ROOT / "passes/registry.py")], done.stderr


@pytest.mark.parametrize("name", [*checkout.ROOMS, "nn", "torchsparse"])
def test_packages_are_attributes(name: str) -> None:
    assert isinstance(getattr(gossamer, name), ModuleType)
    assert importlib.metadata.version("gossamer") == gossamer.__version__
