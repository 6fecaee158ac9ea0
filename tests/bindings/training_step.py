"""The inputs and the output of training_step.c, for the tests of the Python bindings, which make the same step."""

import array
import struct
import subprocess

WEIGHTS = 5000
BIASES = 37
STEPS = 3


def value(i, seed):
    """One of 251 multiples of 1/64 between -2 and 2: exact in bf16."""
    return ((i * 37 + seed * 101) % 251 - 125) / 64


def values(count, seed):
    return array.array("f", (value(i, seed) for i in range(count)))


def bf16(floats):
    """The upper halves of the fp32 bits."""
    return array.array("H", (bits >> 16 for bits in array.array("I", floats.tobytes())))


def hash_bytes(data, start=0xCBF29CE484222325):
    """FNV-1a."""
    for byte in bytes(data):
        start = (start ^ byte) * 0x100000001B3 % 2**64
    return start


def summary(params, states, norm):
    """The output of the C program."""
    bits = struct.unpack("=Q", struct.pack("=d", norm))[0]
    return f"params {params:016x}\nstates {states:016x}\nnorm {bits:016x}\n"


def check(program, got):
    expected = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert got == expected, f"the C program says\n{expected}this binding\n{got}"
