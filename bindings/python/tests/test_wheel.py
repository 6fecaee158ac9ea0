"""The wheel that `pip install ./bindings/python` makes: around the library of this build, and with a
library that is built for it, as pip does. That one has no CUDA, and most of its objects come from this
build, because compiling them again takes minutes. `scripts/test --wheel` tests the one that scripts/wheel
makes for users."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest
from scripts import ten_lines

PACKAGE = pathlib.Path(__file__).parents[1]

TRAINING = """
import torch, hybridopt, hybridopt.abi as abi
weight = torch.nn.Parameter(torch.ones(3))
optimizer = hybridopt.SGD([weight], lr=0.5)
weight.sum().backward()
optimizer.step()
assert weight.tolist() == [0.5, 0.5, 0.5]
print(abi.library_path())
print(hybridopt.__file__)
"""


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["HYBRIDOPT_PREBUILT"] = str(pathlib.Path(os.environ["HYBRIDOPT_LIBRARY"]).parent)
    subprocess.run(command, check=True, env=environment)


# The wheel that pip makes, or the wheel that HYBRIDOPT_TEST_WHEEL names, which scripts/wheel has made.
SHIPPED = os.environ.get("HYBRIDOPT_TEST_WHEEL")
SETTINGS = {
    "around": [f"{name}={os.environ[name]}" for name in ("HYBRIDOPT_LIBRARY", "HYBRIDOPT_TOOL")],
    "built": [
        "HYBRIDOPT_CUDA=OFF",
        "CMAKE_CXX_FLAGS_RELEASE=-O0",
        f"CMAKE_CXX_COMPILER_LAUNCHER={PACKAGE / 'tests' / 'prebuilt_object.sh'}",
    ],
}


@pytest.fixture(scope="module", params=["shipped"] if SHIPPED else SETTINGS)
def wheel(request, tmp_path_factory):
    if SHIPPED:
        return pathlib.Path(SHIPPED)
    folder = tmp_path_factory.mktemp("wheel")
    settings = ["--config-settings=cmake.define." + setting for setting in SETTINGS[request.param]]
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, *settings, PACKAGE)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A virtual environment with only the wheel. It finds torch, which takes minutes to install, where the tests
    have it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    pip("--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    pathlib.Path(packages, "torch.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def ran(folder, *command):
    """The output of a command in that environment, without the environment variables of the tests."""
    run = subprocess.run(
        [f"bin/{command[0]}", *command[1:]],
        env={"PATH": f"{folder}/bin", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return run.stdout


def test_holds_the_package_one_library_and_the_command(wheel):
    system = "manylinux_2_" if SHIPPED else "linux_"
    assert wheel.name.startswith("hybridopt-") and f"-py3-none-{system}" in wheel.name
    files = zipfile.ZipFile(wheel).namelist()
    modules = {
        str(path.relative_to(PACKAGE / "src"))
        for path in (PACKAGE / "src").rglob("*")
        if path.suffix in (".py", ".typed")
    }
    ours = {name for name in files if ".dist-info/" not in name and not name.endswith("/")}
    assert ours == modules | {"hybridopt/libhybridopt.so.0.1", "hybridopt/bin/hybridopt"}


def test_holds_the_library_once(wheel):
    program = zipfile.ZipFile(wheel).read("hybridopt/bin/hybridopt")
    assert b"\0libhybridopt.so.0.1\0" in program  # one of the libraries that the loader opens for the program


def test_holds_its_description_and_all_licenses(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text and "# hybridopt for Python" in text
    licenses = metadata.replace("METADATA", "licenses/")
    root = PACKAGE.parents[1]
    for name in ("LICENSE", "THIRD_PARTY.md"):
        assert archive.read(licenses + name) == (root / name).read_bytes()


def test_is_of_the_librarys_version(wheel):
    from hybridopt import abi

    version = wheel.name.split("-")[1]
    assert abi.build_info().startswith(f"hybridopt {version},")


def test_trains_where_nothing_else_is(environment):
    library, package = map(pathlib.Path, ran(environment, "python", "-c", TRAINING).split())
    assert package.parent == library.parent and library.name == "libhybridopt.so.0.1"
    assert package.is_relative_to(environment)


def test_the_readmes_lines_run(environment):
    (environment / "ten_lines.py").write_text(ten_lines())
    for _ in range(2 if SHIPPED else 1):
        printed = ran(environment, "python", "ten_lines.py").splitlines()
        assert [line.split()[0] for line in printed[:5]] == ["25", "50", "75", "100", "AdamW"], printed


def test_brings_the_hybridopt_command(environment):
    for command in ("info", "plan", "inspect", "verify", "reshard", "export"):
        assert f"hybridopt {command} [OPTIONS]" in ran(environment, "hybridopt", command, "--help")


def test_without_the_librarys_sources_the_build_says_where_to_run(tmp_path):
    copied = tmp_path / "python"
    subprocess.run(["cp", "-r", PACKAGE, copied], check=True)
    run = subprocess.run(
        ["cmake", "-S", copied, "-B", tmp_path / "build"], capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "pip in a checkout of the repository" in " ".join(run.stderr.split())
