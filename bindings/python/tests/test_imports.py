"""The modules of the package import each other downward only: there is no circle. Imports for type
checkers and those inside of functions count too, for they say who knows whom."""

import ast
import graphlib
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "src/hybridopt"


def imports_of(root):
    """The modules of a package, and those of it that each of them imports."""
    files = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: imports_of_file(name, path, files) for name, path in files.items()}


def imports_of_file(name, path, modules):
    imported = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:  # a module of the package, or something that is in one
                whole = f"{base}.{alias.name}"
                imported.add(whole if whole in modules else base)
    return imported.intersection(modules) - {name}


def circle_of(root):
    """A circle of imports, or None."""
    try:
        graphlib.TopologicalSorter(imports_of(root)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_there_is_no_circle():
    assert circle_of(PACKAGE) is None


def test_all_modules_are_looked_at():
    imports = imports_of(PACKAGE)
    assert imports["hybridopt.algorithms"] >= {"hybridopt.abi", "hybridopt.optimizer"}
    assert "hybridopt.algorithms" in imports["hybridopt"]
    assert "hybridopt.abi.generated" in imports["hybridopt.abi.errors"]
    assert "hybridopt.sharding" in imports["hybridopt.tensors"]  # inside of functions
    assert "hybridopt.process_group" in imports["hybridopt.optimizer"]  # for type checkers


@pytest.mark.parametrize(
    "back",
    [
        "from . import one",
        "from .one import name",
        "import package.one",
        "def later():\n    from package import one",
        "if TYPE_CHECKING:\n    from .one import Name",
    ],
)
def test_circles_are_found(back, tmp_path):
    root = tmp_path / "package"
    (root / "inner").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "one.py").write_text("from .inner import two")
    (root / "inner" / "__init__.py").write_text("")
    (root / "inner" / "two.py").write_text("from .. import three")
    (root / "three.py").write_text("from . import other")
    (root / "other.py").write_text("")
    assert circle_of(root) is None
    (root / "three.py").write_text(back)
    assert set(circle_of(root)) == {"package.one", "package.inner.two", "package.three"}
