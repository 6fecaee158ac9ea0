"""Runs the command-line tool that HYBRIDOPT_TOOL names, and checks how it ends."""

import fcntl
import glob
import json
import os
import pty
import struct
import subprocess
import termios
import time

TOOL = os.environ["HYBRIDOPT_TOOL"]

DONE, BAD, USAGE, FAILED = 0, 1, 2, 3


def tool(*arguments, **options):
    return subprocess.run(
        [TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options
    )


def succeed(*arguments):
    result = tool(*arguments)
    assert (result.returncode, result.stderr) == (DONE, ""), result
    return result.stdout


def refuse(code, text, *arguments, **options):
    """The tool fails with this code and text, as text and as JSON."""
    result = tool(*arguments, **options)
    assert result.returncode == code, result
    assert text in result.stderr and result.stderr.startswith("hybridopt: "), result.stderr
    answer = tool(*arguments, "--json", **options)
    assert answer.returncode == code and answer.stderr == ""
    assert text in json.loads(answer.stdout)["error"]
    return json.loads(answer.stdout)["status"]


def ended_by(number, begun, *arguments):
    """The exit status of a tool that hangs in a write, and gets this signal when `begun` finds a path."""
    env = {**os.environ, "LD_PRELOAD": os.environ["HYBRIDOPT_FAULTY_FILES"], "HYBRIDOPT_TEST_FAULT": "hang"}
    process = subprocess.Popen([TOOL, *map(str, arguments)], env=env, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not glob.glob(str(begun)):
        assert process.poll() is None and time.monotonic() < end, f"nothing is at {begun}"
        time.sleep(0.01)
    process.send_signal(number)
    return process.wait(timeout=120)


def misuse(text, command, *arguments):
    """The command line is wrong: this text names what, and nothing is done."""
    result = tool(command, *arguments)
    assert (result.returncode, result.stdout) == (USAGE, ""), result
    name = f"hybridopt {command}"
    assert result.stderr == f"{name}: {text}\nRun '{name} --help' for more information.\n"


def may_be_shown(text):
    return all(letter == "\n" or letter.isprintable() for letter in text)


def read_terminal(ours):
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the last writer has closed the terminal
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return shown.decode()


def on_a_terminal(*arguments, columns=0):
    """The text that the tool writes to a terminal, and its standard output, which is no terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
    process = subprocess.Popen(
        [TOOL, *map(str, arguments)], stdout=subprocess.PIPE, stderr=theirs, text=True
    )
    os.close(theirs)
    shown = read_terminal(ours)
    out = process.stdout.read()
    process.stdout.close()
    assert process.wait() == DONE
    return shown, out


def shown_by_a_terminal(*arguments, **options):
    """The text that the tool writes to standard output if that is a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [TOOL, *map(str, arguments)], stdout=theirs, stderr=subprocess.DEVNULL, **options
    )
    os.close(theirs)
    shown = read_terminal(ours)
    assert process.wait() == DONE
    return shown.replace("\r\n", "\n")
