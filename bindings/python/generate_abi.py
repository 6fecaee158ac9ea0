#!/usr/bin/env python3
"""Writes src/hybridopt/abi/generated.py from include/offload.h; with --check only compares.

The middle of the header is plain C99 in one style, so that a few patterns read all of it; what they
do not understand is an error, never left out.
"""

import argparse
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
HEADER = HERE.parents[1] / "include" / "offload.h"
OUTPUT = HERE / "src" / "hybridopt" / "abi" / "generated.py"

PREAMBLE = '''"""The structs, constants and functions of offload.h, by the same names.

Written by generate_abi.py; do not edit. The manual is the header.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER
from typing import Any


class Struct(ctypes.Structure):
    """A struct of the ABI: zero but for struct_size and the fields that are named."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name, *_ in self._fields_[1:])
        return f"{type(self).__name__}({fields})"


'''

# C type: (ctypes type, Python type of a field)
SCALARS = {
    "int32_t": ("ctypes.c_int32", "int"),
    "uint32_t": ("ctypes.c_uint32", "int"),
    "int64_t": ("ctypes.c_int64", "int"),
    "uint64_t": ("ctypes.c_uint64", "int"),
    "double": ("ctypes.c_double", "float"),
    "char*": ("ctypes.c_char_p", "bytes | None"),
    "void*": ("ctypes.c_void_p", "int | None"),
}


class Header:
    def __init__(self, text):
        match = re.search(r"/\* begin-plain-c99 \*/(.*)/\* end-plain-c99 \*/", text, re.S)
        if match is None:
            raise ValueError("begin- and end-plain-c99 not found")
        self.types = dict(SCALARS)
        self.names = []
        self.lines = []
        self.functions = []
        code = re.sub(r"/\*.*?\*/", " ", match.group(1), flags=re.S)
        for declaration in self.split(code):
            self.declare(" ".join(declaration.split()))

    @staticmethod
    def split(code):
        """Declarations end at a semicolon outside of braces."""
        depth, start = 0, 0
        for position, character in enumerate(code):
            depth += (character == "{") - (character == "}")
            if character == ";" and depth == 0:
                yield code[start:position]
                start = position + 1
        if code[start:].strip():
            raise ValueError(f"not understood: {code[start:]!r}")

    def declare(self, text):
        if match := re.fullmatch(r"enum \w+ \{(.*)\}", text):
            self.enum(match[1])
        elif match := re.fullmatch(r"typedef struct \w+ \{(.*)\} (\w+)", text):
            self.struct(match[2], match[1])
        elif match := re.fullmatch(r"typedef (\w+) \(\*(\w+)\)\((.*)\)", text):
            self.alias(match[2], self.callback(match[1], match[3]), "Any")
        elif match := re.fullmatch(r"typedef struct \w+\* ?(\w+)", text):
            self.alias(match[1], *SCALARS["void*"])
        elif match := re.fullmatch(r"typedef (\w+\*?) (\w+)", text):
            self.alias(match[2], *self.types[match[1]])
        elif match := re.fullmatch(r"OFFLOAD_API ((?:const )?\w+\*?) (\w+)\((.*)\)", text):
            result = self.type_of(match[1])[0]
            arguments = ", ".join(self.arguments(match[3]))
            self.functions.append(f'    "{match[2]}": ({result}, [{arguments}]),')
        else:
            raise ValueError(f"not understood: {text!r}")

    def alias(self, name, ctype, python):
        self.types[name] = (name, python)
        self.names.append(name)
        self.lines.append(f"{name} = {ctype}")

    def enum(self, body):
        for item in body.split(","):
            if item.strip():
                name, value = (part.strip() for part in item.split("="))
                self.names.append(name)
                self.lines.append(f"{name} = {int(value, 0)}")

    def struct(self, name, body):
        fields, hints = [], []
        for text in filter(None, (part.strip() for part in body.split(";"))):
            for field, ctype, python in self.fields(text):
                fields.append(f'        ("{field}", {ctype}),')
                hints.append(f"    {field}: {python}")
        self.types[name] = (name, name)
        self.names.append(name)
        self.lines += ["", "", f"class {name}(Struct):", *hints, "    _fields_ = ["]
        self.lines += [*fields, "    ]", "", ""]

    def fields(self, text):
        if match := re.fullmatch(r"(\w+) \(\*(\w+)\)\((.*)\)", text):
            yield match[2], self.callback(match[1], match[3]), "Any"
        elif match := re.fullmatch(r"char (\w+)\[(\d+)\]", text):
            yield match[1], f"ctypes.c_char * {match[2]}", "bytes"
        elif match := re.fullmatch(r"(\w+) (\w+)\[(\d+)\]", text):
            ctype, python = self.type_of(match[1])
            yield match[2], f"{ctype} * {match[3]}", f"ctypes.Array[{ctype}]"
        elif match := re.fullmatch(r"((?:const )?\w+\**) (\w+)", text):
            yield match[2], *self.type_of(match[1])
        else:
            raise ValueError(f"field not understood: {text!r}")

    def callback(self, result, arguments):
        result = "None" if result == "void" else self.type_of(result)[0]
        return f"CFUNCTYPE({', '.join([result, *self.arguments(arguments)])})"

    def arguments(self, text):
        if text.strip() == "void":
            return
        for argument in text.split(","):
            match = re.fullmatch(r"\s*((?:const )?\w+\**) \w+\s*", argument)
            if match is None:
                raise ValueError(f"argument not understood: {argument!r}")
            yield self.type_of(match[1])[0]

    def type_of(self, text):
        text = text.removeprefix("const ")
        if text in self.types:
            return self.types[text]
        if text.endswith("*") and text[:-1] in self.types:
            return f"POINTER({self.types[text[:-1]][0]})", "Any"
        raise ValueError(f"type not understood: {text!r}")

    def python(self):
        text = PREAMBLE + "\n".join(self.lines)
        text = re.sub(r"\n{4,}", "\n\n\n", text).rstrip("\n")
        functions = "\n".join(self.functions)
        text += "\n\n# Result and arguments of every function.\nFUNCTIONS: dict[str, tuple[Any, list[Any]]] = {\n"
        return text + functions + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the file is not up to date")
    arguments = parser.parse_args()
    text = Header(HEADER.read_text()).python()
    if arguments.check:
        if not OUTPUT.exists() or OUTPUT.read_text() != text:
            sys.exit(f"FAILED: {OUTPUT} does not match {HEADER}; run {__file__}")
        print(f"{OUTPUT.name} matches {HEADER.name}")
    else:
        OUTPUT.write_text(text)


if __name__ == "__main__":
    main()
