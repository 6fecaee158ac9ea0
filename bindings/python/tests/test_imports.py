"""The modules of the package import each other in one direction: there is no cycle, and the sub-packages have an
order. Imports for type checkers and imports inside of functions count too, because they are dependencies as well."""

import ast
import graphlib
import pathlib
import re
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "src/hybridopt"
# The sub-packages from the top down: each imports only from those below it. docs/ARCHITECTURE.md lists them in this
# order. The modules beside the sub-packages, __init__ and __main__, are above all of them.
ORDER = [
    "integrations", "stash", "optimizers", "hiding", "engine", "sync", "state", "steps", "settings", "ranks", "changes",
    "params", "traps", "base", "abi",
]  # fmt: skip


def imports_of(root):
    """The modules of a package, and which of these modules each of them imports."""
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
            for alias in node.names:  # a module of the package, or a name inside of one
                whole = f"{base}.{alias.name}"
                imported.add(whole if whole in modules else base)
    return imported.intersection(modules) - {name}


def upward_imports(root, order):
    """The imports that go up in the order of sub-packages, or from a sub-package to a module beside it, as "importer
    imports imported". Raises ValueError if the order does not name exactly the existing sub-packages."""
    floors = {f"{root.name}.{name}": -floor for floor, name in enumerate(order)}
    imports = imports_of(root)
    floor_of = {name: floors.get(".".join(name.split(".")[:2]), 1) for name in imports}
    folders = {path.parent.name for path in root.glob("*/*.py")}
    if folders != set(order):
        raise ValueError(f"the sub-packages are {sorted(folders)}, the order names {sorted(order)}")
    return [
        f"{name} imports {other}"
        for name, others in sorted(imports.items())
        for other in sorted(others)
        if floor_of[other] > floor_of[name]
    ]


def circle_of(root):
    """A cycle of imports, or None."""
    try:
        graphlib.TopologicalSorter(imports_of(root)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_there_is_no_circle():
    assert circle_of(PACKAGE) is None


def test_sub_packages_import_from_those_below_alone():
    assert upward_imports(PACKAGE, ORDER) == []


def test_the_docs_list_the_sub_packages_in_their_order():
    text = (PACKAGE.parents[3] / "docs/ARCHITECTURE.md").read_text()
    assert re.findall(r"^\| `hybridopt/(\w+)/` \|", text, re.MULTILINE) == ORDER


def test_all_modules_are_looked_at():
    imports = imports_of(PACKAGE)
    assert imports["hybridopt.optimizers.algorithms"] >= {"hybridopt.abi", "hybridopt.optimizers.optimizer"}
    assert "hybridopt.optimizers.algorithms" in imports["hybridopt"]
    assert "hybridopt.abi.generated" in imports["hybridopt.abi.errors"]
    assert "hybridopt.params.sharding" in imports["hybridopt.params.tensors"]  # an import inside of a function
    assert "hybridopt.ranks.process_group" in imports["hybridopt.optimizers.optimizer"]  # an import for type checkers


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


@pytest.mark.parametrize(
    "module, text, upward",
    [
        ("low/a.py", "from . import b", []),
        ("high/a.py", "from ..low.b import name", []),
        ("__main__.py", "from .high import a", []),
        ("low/a.py", "from ..high import b", ["package.low.a imports package.high.b"]),
        ("low/a.py", "def later():\n    import package.high.b", ["package.low.a imports package.high.b"]),
        ("low/a.py", "from .. import other", ["package.low.a imports package.other"]),
        ("low/__init__.py", "from ..high.b import name", ["package.low imports package.high.b"]),
    ],
)
def test_imports_that_go_up_are_found(module, text, upward, tmp_path):
    root = tmp_path / "package"
    for name in ("high/__init__.py", "high/a.py", "high/b.py", "low/__init__.py", "low/a.py", "low/b.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    (root / "__init__.py").write_text("")
    (root / "other.py").write_text("")
    (root / module).write_text(text)
    assert upward_imports(root, ["high", "low"]) == upward


def test_a_sub_package_without_a_place_in_the_order_is_found(tmp_path):
    root = tmp_path / "package"
    (root / "low").mkdir(parents=True)
    (root / "low" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match=r"the sub-packages are \['low'\], the order names \['high', 'low'\]"):
        upward_imports(root, ["high", "low"])


def test_without_megatron_install_says_how_to_get_it(monkeypatch):
    from hybridopt.integrations import megatron

    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ModuleNotFoundError, match="install.. replaces classes of megatron-core.*pip install --no-deps megatron-core"):
        megatron.install()
