"""The `hybridopt` command as Python runs it; tests/tools has what it does."""

import os
import subprocess
import sys


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "hybridopt", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_runs_the_program_with_its_arguments_and_exit_code():
    run = command("plan", "7B", "--json")
    assert run.returncode == 0 and '"elements": 7000000000' in run.stdout, run
    run = command("plan", "many")
    assert run.returncode == 2 and "expected how many parameters" in run.stderr, run


def test_without_the_program_it_says_where_to_get_it(tmp_path):
    run = command("info", HYBRIDOPT_TOOL=str(tmp_path / "absent"))
    assert run.returncode == 1
    assert f"there is no program {tmp_path / 'absent'}; install the package with pip" in run.stderr
