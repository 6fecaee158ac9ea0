#!/usr/bin/env python3
"""Writes what the bindings declare of include/offload.h and of src/kernels/algorithms.h; with --check
it only compares.

Python gets structs, constants and functions for ctypes, the rows of the algorithms, and the reports as
dataclasses. Rust gets the declarations of the crate hybridopt-sys, the names that its layout test
compares with C, the enum of the algorithms, groups and the reports. The library gets the function that
adds the result of a step to the totals.

The middle of the header is plain C99 in one style, and so are the rows of the algorithms in theirs,
so that a few patterns read all of it. The generator refuses what they do not match; it never leaves a
declaration or a field out.
"""

import argparse
import dataclasses
import pathlib
import re
import sys
import textwrap

HERE = pathlib.Path(__file__).resolve().parent
HEADER = HERE.parent / "include" / "offload.h"
ALGORITHMS = HERE.parent / "src" / "kernels" / "algorithms.h"
TOTALS = HERE.parent / "src" / "optimizer" / "step_totals.h"

SCALARS = ("char", "double", "float", "int32_t", "int64_t", "uint32_t", "uint64_t", "uint8_t", "void")


# ------------------------------------------------------------------------ what the header declares


@dataclasses.dataclass
class Type:
    name: str  # the name of a scalar, or of a type that the header declares
    pointers: tuple[bool, ...] = ()  # one entry for each `*`; True where it points to something const
    lengths: tuple[int, ...] = ()  # of an array: one entry for each dimension


@dataclasses.dataclass
class Value:
    """A field or a parameter."""

    name: str
    type: "Type | FunctionType"
    comment: str = ""  # of a field


@dataclasses.dataclass
class FunctionType:
    """A pointer to a function."""

    result: Type
    parameters: list[Value]


@dataclasses.dataclass
class Enum:
    is_flags: bool  # true if its values are or-ed into a uint32_t field
    constants: list[tuple[str, int]]


@dataclasses.dataclass
class Handle:
    """A pointer to an opaque struct."""

    name: str
    target: str


@dataclasses.dataclass
class Alias:
    name: str
    type: Type | FunctionType


@dataclasses.dataclass
class Struct:
    name: str
    fields: list[Value]
    comment: str

    @property
    def said(self):
        """The fields that have a meaning for a user."""
        return [f for f in self.fields if f.name != "struct_size" and not f.name.startswith("reserved")]


@dataclasses.dataclass
class Function:
    name: str
    type: FunctionType


class Header:
    """The declarations of the header, in its order."""

    def __init__(self, text):
        match = re.search(r"/\* begin-plain-c99 \*/(.*)/\* end-plain-c99 \*/", text, re.S)
        if match is None:
            raise ValueError("begin- and end-plain-c99 not found")
        self.plain = match[1]
        self.comments = dict(re.findall(r"^ +(OFFLOAD_\w+) = \w+,? +/\* (.*) \*/$", match[1], re.M))
        # Fields name their enum in a comment; flags are "enum NAME, or-ed".
        self.flags = set(re.findall(r"enum (\w+), or-ed", match[1]))
        self.names = set(SCALARS)
        self.declarations = []
        code = re.sub(r"/\*.*?\*/", " ", match[1], flags=re.S)
        for declaration in split_declarations(code):
            self.declarations.append(self.declaration(" ".join(declaration.split())))

    def struct(self, name):
        return next(struct for struct in self.of(Struct) if struct.name == name)

    def of(self, kind):
        return [declared for declared in self.declarations if isinstance(declared, kind)]

    def declaration(self, text):
        if match := re.fullmatch(r"enum (\w+) \{(.*)\}", text):
            return self.enum(match[1], match[2])
        if match := re.fullmatch(r"typedef struct \w+ \{(.*)\} (\w+)", text):
            fields = [self.value(field) for field in match[1].split(";") if field.strip()]
            return self.named(self.commented(Struct(match[2], fields, "")))
        if match := re.fullmatch(r"typedef (\w+) \(\*(\w+)\)\((.*)\)", text):
            return self.named(Alias(match[2], self.function(match[1], match[3])))
        if match := re.fullmatch(r"typedef struct (\w+)\* ?(\w+)", text):
            return self.named(Handle(match[2], match[1]))
        if match := re.fullmatch(r"typedef (\w+\*?) (\w+)", text):
            return self.named(Alias(match[2], self.type(match[1])))
        if match := re.fullmatch(r"OFFLOAD_API ((?:const )?\w+\*?) (\w+)\((.*)\)", text):
            return Function(match[2], self.function(match[1], match[3]))
        raise ValueError(f"not understood: {text!r}")

    def commented(self, struct):
        """The struct with the comment before it and the comments after its fields."""
        name = struct.name.removesuffix("_t")
        text = re.search(rf"typedef struct {name} \{{(.*?)\}} {struct.name};", self.plain, re.S)
        before = re.search(r"/\*((?:(?!\*/).)*)\*/\n\Z", self.plain[: text.start()], re.S)
        struct.comment = plain_words(before[1]) if before else ""
        for field in struct.fields:
            behind = re.search(rf"\b{field.name}(?:\[\d+\])*; */\*(.*?)\*/", text[1], re.S)
            field.comment = plain_words(behind[1]) if behind else ""
        return struct

    def named(self, declared):
        self.names.add(declared.name)
        return declared

    def enum(self, name, body):
        items = [item.split("=") for item in body.split(",") if item.strip()]
        return Enum(name in self.flags, [(key.strip(), int(value, 0)) for key, value in items])

    def value(self, text):
        text = text.strip()
        if match := re.fullmatch(r"(\w+) \(\*(\w+)\)\((.*)\)", text):
            return Value(match[2], self.function(match[1], match[3]))
        if match := re.fullmatch(r"(\w+) (\w+)((?:\[\d+\])+)", text):
            lengths = tuple(int(length) for length in re.findall(r"\d+", match[3]))
            return Value(match[2], Type(self.type(match[1]).name, lengths=lengths))
        if match := re.fullmatch(r"((?:const )?\w+\**) (\w+)", text):
            return Value(match[2], self.type(match[1]))
        raise ValueError(f"field or parameter not understood: {text!r}")

    def function(self, result, parameters):
        values = [] if parameters == "void" else parameters.split(",")
        return FunctionType(self.type(result), [self.value(value) for value in values])

    def type(self, text):
        name = text.removeprefix("const ").rstrip("*")
        if name not in self.names:
            raise ValueError(f"type not understood: {text!r}")
        pointers = text.count("*")
        is_const = text.startswith("const ")
        return Type(name, tuple(is_const and level == 0 for level in range(pointers)))


def plain_words(comment):
    """A comment without the stars at the beginnings of its lines, as one line."""
    return " ".join(re.sub(r"\n \* ?", " ", comment).split())


def split_declarations(code):
    """Splits code into declarations, which end at a semicolon outside of braces."""
    depth, start = 0, 0
    for position, character in enumerate(code):
        depth += (character == "{") - (character == "}")
        if character == ";" and depth == 0:
            yield code[start:position]
            start = position + 1
    if code[start:].strip():
        raise ValueError(f"not understood: {code[start:]!r}")


# ------------------------------------------------------------------------------------- algorithms


@dataclasses.dataclass
class Algorithm:
    """The parts of a row of algorithms.h that the bindings need."""

    constant: str
    name: str
    moments: list[str]  # constants of enum offload_state_kind
    needs_momentum: bool  # true if its moments exist only with momentum
    counts_steps: bool


@dataclasses.dataclass
class GroupField:
    """A row of kGroupFields."""

    name: str
    is_flag: bool
    is_count: bool
    is_list: bool  # rows of numbers
    readers: list[str] | None  # constants of enum offload_algorithm; None: all


class Algorithms:
    def __init__(self, text, header):
        self.lists = [field.name for field in header.struct("offload_group_t").fields if field.type.lengths]
        kinds = table(text, "StoredKind kStoredKinds")
        self.kind_names = dict(re.findall(r'\{(\w+), "(\w+)"', kinds))
        if len(self.kind_names) != kinds.count("{"):
            raise ValueError("a row of kStoredKinds is not understood")
        self.fields = [self.field(row) for row in rows_of(table(text, "GroupField kGroupFields"))]
        rows = re.split(r"\{(?=\.value)", table(text, "Algorithm kAlgorithms"))
        self.rows = [self.row(row) for row in rows[1:]]
        if not self.rows or rows[0].strip():
            raise ValueError(f"not understood before the rows of kAlgorithms: {rows[0]!r}")

    def row(self, text):
        fields = dict(re.findall(r"\.(\w+) = (.*?)(?:,\s*(?=\.)|\},?\s*$)", text, re.S))
        row = Algorithm(
            constant=fields.pop("value"),
            name=fields.pop("name").strip('"'),
            moments=re.findall(r"OFFLOAD_STATE_\w+", fields.pop("moments")),
            needs_momentum="rule_without_momentum" in fields,
            counts_steps=fields.pop("counts_steps", "false") == "true",
        )
        internal = {"set_coefficients", "initial_moment0", "nan_reaches_param"}
        internal |= {name for name in fields if name.startswith("rule")}
        if not fields.keys() <= internal or not {*row.moments} <= self.kind_names.keys():
            raise ValueError(f"a row of kAlgorithms is not understood: {text!r}")
        return row

    def field(self, row):
        match = re.fullmatch(r'\{"(\w+)", ?&offload_group_t::(\w+), ?(\{?)(.*?),?\}', row)
        if match is None or match[1] != match[2]:
            raise ValueError(f"a row of kGroupFields is not understood: {row!r}")
        readers = None if "kAllAlgorithms" in match[4] else re.findall(r"OFFLOAD_\w+", match[4])
        is_count = re.search(r", k\w+Most$", match[4]) is not None  # behind the readers of a flag
        is_list = match[1] in self.lists
        return GroupField(match[1], match[3] == "" and not is_count and not is_list, is_count, is_list, readers)

    def read_by(self, row):
        """The names of the fields of a group that an algorithm reads."""
        return [f.name for f in self.fields if f.readers is None or row.constant in f.readers]


def rows_of(text):
    """The rows of a table, each as one line."""
    return [" ".join(row.split()).removesuffix(",") for row in re.split(r"^    (?=\{)", text, flags=re.M)[1:]]


def table(text, name):
    """The text between the braces of an array."""
    match = re.search(rf"inline constexpr {name}\[\] = \{{\n(.*?)\n\}};", text, re.S)
    if match is None:
        raise ValueError(f"{name} not found")
    return match[1]


# ---------------------------------------------------------------------------------------- Python

PYTHON_PREAMBLE = '''"""The structs, constants and functions of offload.h, by the same names, and the algorithms.

Written by generate_abi.py; do not edit. The manual is the header.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER
from typing import Any, NamedTuple


class Struct(ctypes.Structure):
    """A struct of the ABI: zero except struct_size and the fields that are named."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name, *_ in self._fields_[1:])
        return f"{type(self).__name__}({fields})"


'''

PYTHON_ALGORITHMS = '''

class Algorithm(NamedTuple):
    """A row of src/kernels/algorithms.h."""

    name: str
    moments: dict[str, int]  # enum offload_state_kind, by the names that torch gives them
    needs_momentum: bool  # it keeps its moments for groups with momentum only
    reads: tuple[str, ...]  # the fields of offload_group_t that it reads
    counts_steps: bool  # torch keeps a step count beside the moments


# The fields of offload_group_t that are 0 or 1.
GROUP_FLAGS = ({})

# By enum offload_algorithm.
ALGORITHMS: dict[int, Algorithm] = {{
'''

PYTHON_SCALARS = {
    "char": "ctypes.c_char",
    "double": "ctypes.c_double",
    "float": "ctypes.c_float",
    "int32_t": "ctypes.c_int32",
    "int64_t": "ctypes.c_int64",
    "uint32_t": "ctypes.c_uint32",
    "uint8_t": "ctypes.c_uint8",
    "uint64_t": "ctypes.c_uint64",
    "char*": "ctypes.c_char_p",
    "void*": "ctypes.c_void_p",
}

# The Python type of a field of that ctypes type. For other ctypes types it is the type itself, or Any.
PYTHON_HINTS = {
    "ctypes.c_char_p": "bytes | None",
    "ctypes.c_double": "float",
    "ctypes.c_int32": "int",
    "ctypes.c_int64": "int",
    "ctypes.c_uint32": "int",
    "ctypes.c_uint64": "int",
    "ctypes.c_void_p": "int | None",
}


class Python:
    def __init__(self, header, algorithms):
        self.hints = dict(PYTHON_HINTS)
        lines = []
        for declared in header.declarations:
            if isinstance(declared, Enum):
                lines += [f"{name} = {value}" for name, value in declared.constants]
            elif isinstance(declared, (Handle, Alias)):
                lines.append(self.alias(declared))
            elif isinstance(declared, Struct):
                lines += ["", "", *self.struct(declared), "", ""]
        text = PYTHON_PREAMBLE + re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).rstrip("\n")
        text += "\n\n# Result and arguments of every function.\n"
        text += "FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {\n"
        text += "".join(self.function(function) for function in header.of(Function))
        flags = ", ".join(f'"{field.name}"' for field in algorithms.fields if field.is_flag)
        text += "}\n" + PYTHON_ALGORITHMS.format(flags)
        self.text = text + "".join(self.algorithm(row, algorithms) for row in algorithms.rows) + "}\n"

    @staticmethod
    def algorithm(row, algorithms):
        moments = ", ".join(f'"{algorithms.kind_names[kind]}": {kind}' for kind in row.moments)
        reads = ", ".join(f'"{name}"' for name in algorithms.read_by(row))
        values = f'"{row.name}"', f"{{{moments}}}", row.needs_momentum, f"({reads})", row.counts_steps
        return f"    {row.constant}: Algorithm(\n" + "".join(f"        {v},\n" for v in values) + "    ),\n"

    def alias(self, declared):
        pointer = isinstance(declared, Handle)
        ctype = "ctypes.c_void_p" if pointer else self.ctype(declared.type)
        self.hints[declared.name] = self.hints.get(ctype, "Any")
        return f"{declared.name} = {ctype}"

    def struct(self, declared):
        self.hints[declared.name] = declared.name
        fields = [(field.name, self.ctype(field.type), field.type) for field in declared.fields]
        hints = [f"    {name}: {self.hint(ctype, c)}" for name, ctype, c in fields]
        pairs = [f'        ("{name}", {ctype}),' for name, ctype, _ in fields]
        return [f"class {declared.name}(Struct):", *hints, "    _fields_ = [", *pairs, "    ]"]

    def function(self, declared):
        result, *parameters = self.signature(declared.type)
        return f'    "{declared.name}": ({result}, [{", ".join(parameters)}]),\n'

    def signature(self, function):
        result = function.result
        yield "None" if result == Type("void") else self.ctype(result)
        for parameter in function.parameters:
            yield self.ctype(parameter.type)

    def ctype(self, c):
        if isinstance(c, FunctionType):
            return f"CFUNCTYPE({', '.join(self.signature(c))})"
        if c.lengths:
            return " * ".join([self.ctype(Type(c.name)), *map(str, reversed(c.lengths))])
        if not c.pointers:
            return PYTHON_SCALARS.get(c.name, c.name)
        if len(c.pointers) == 1 and f"{c.name}*" in PYTHON_SCALARS:
            return PYTHON_SCALARS[f"{c.name}*"]
        return f"POINTER({self.ctype(Type(c.name, c.pointers[:-1]))})"

    def hint(self, ctype, c):
        if isinstance(c, Type) and c.lengths:
            if c.name == "char":
                return "bytes"
            depth = len(c.lengths)
            return "ctypes.Array[" * depth + self.ctype(Type(c.name)) + "]" * depth
        return self.hints.get(ctype, "Any")


# ------------------------------------------------------------------------------------------ Rust

RUST_PREAMBLE = """\
//! The constants, structs and functions of offload.h, by the same names. The statuses and the
//! enumerators of `int32_t` fields are `i32`, flags are `u32`.
//!
//! Written by generate_abi.py; do not edit. The manual is the header.

use std::os::raw::{c_char, c_void};
"""

RUST_NAMES_PREAMBLE = """\
//! The names that the layout test compares with C. Written by generate_abi.py; do not edit.

use super::*;

"""

RUST_SCALARS = {
    "char": "c_char",
    "double": "f64",
    "float": "f32",
    "int32_t": "i32",
    "int64_t": "i64",
    "uint32_t": "u32",
    "uint8_t": "u8",
    "uint64_t": "u64",
    "void": "c_void",
}


class Rust:
    def __init__(self, header):
        self.text = RUST_PREAMBLE
        for declared in header.declarations:
            if isinstance(declared, Enum):
                rust = "i32" if not declared.is_flags else "u32"
                constants = declared.constants
                lines = [f"pub const {name}: {rust} = {value};" for name, value in constants]
                self.text += "\n" + "\n".join(lines) + "\n"
            elif isinstance(declared, Handle):
                self.text += f"\n#[repr(C)]\npub struct {declared.target} {{\n"
                self.text += f"    _private: [u8; 0],\n}}\n"
                self.text += f"pub type {declared.name} = *mut {declared.target};\n"
            elif isinstance(declared, Alias):
                self.text += f"\npub type {declared.name} = {self.type(declared.type)};\n"
            elif isinstance(declared, Struct):
                self.text += "\n#[repr(C)]\n#[derive(Clone, Copy)]\n"
                self.text += self.listed(f"pub struct {declared.name}", declared, "    pub {}: {},")
                self.text += f"default_is_zero!({declared.name});\n"
        functions = "".join(self.function(function) for function in header.of(Function))
        self.text += f'\nextern "C" {{\n{functions}}}\n'

    def listed(self, head, declared, line):
        fields = [line.format(field.name, self.type(field.type)) for field in declared.fields]
        return "\n".join([f"{head} {{", *fields, "}\n"])

    def function(self, declared):
        parameters = self.parameters(declared.type)
        head, result = f"    pub fn {declared.name}(", f"){self.arrow(declared.type)};\n"
        line = head + ", ".join(parameters) + result
        if len(line) <= 100:
            return line
        return f"{head}\n" + "".join(f"        {each},\n" for each in parameters) + f"    {result}"

    def parameters(self, function):
        return [f"{value.name}: {self.type(value.type)}" for value in function.parameters]

    def arrow(self, function):
        return "" if function.result == Type("void") else f" -> {self.type(function.result)}"

    def type(self, c):
        if isinstance(c, FunctionType):
            parameters = ", ".join(self.parameters(c))
            return f'Option<unsafe extern "C" fn({parameters}){self.arrow(c)}>'
        name = RUST_SCALARS.get(c.name, c.name)
        for is_const in c.pointers:
            name = f"*{'const' if is_const else 'mut'} {name}"
        for length in reversed(c.lengths):
            name = f"[{name}; {length}]"
        return name


def rust_names(header):
    """The names that the crate's layout test checks: every field and every constant."""
    text = RUST_NAMES_PREAMBLE + "pub fn table() -> Table {\n    let mut table = Table::new();\n"
    for struct in header.of(Struct):
        fields = "".join(f"        {field.name},\n" for field in struct.fields)
        text += f"    fields!(table, {struct.name} {{\n{fields}    }});\n"
    for enum in header.of(Enum):
        names = "".join(f"        {name},\n" for name, _ in enum.constants)
        text += f"    values!(table,\n{names}    );\n"
    return text + "    table\n}\n"


RUST_ALGORITHM_PREAMBLE = """\
//! The algorithms. Written by generate_abi.py; do not edit.

use hybridopt_sys as sys;

/// The update rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
"""


def rust_algorithms(header, algorithms):
    """The Rust enum of the algorithms in the safe crate."""
    names, text = [], RUST_ALGORITHM_PREAMBLE
    for row in algorithms.rows:
        names.append(row.name.capitalize() if row.name.isupper() else row.name)
        comment = header.comments[row.constant]
        text += f"    /// {comment[0].upper()}{comment[1:]}.\n    {names[-1]},\n"
    text += "}\n\nimpl Algorithm {\n    pub(crate) fn raw(self) -> i32 {\n        match self {\n"
    for name, row in zip(names, algorithms.rows):
        text += f"            Algorithm::{name} => sys::{row.constant},\n"
    return text + "        }\n    }\n}\n"


def sentence(comment, words):
    """A comment of the header as a sentence, in which words of C are replaced by those of another language."""
    text = re.sub(r"^enum", "of enum", comment)
    for c, word in words.items():
        text = re.sub(rf"(?<![\w.]){c}", word, text)
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


RUST_WORDS = {"1: ": "`true`: ", "0: ": "`false`: ", "UINT64_MAX": "`u64::MAX`"}


def rust_doc(comment, indent):
    lines = textwrap.wrap(sentence(comment, RUST_WORDS), 96 - len(indent))
    return "".join(f"{indent}/// {line}\n" for line in lines)


RUST_GROUP_PREAMBLE = """\
//! Groups of params. Written by generate_abi.py; do not edit.

use crate::algorithm::Algorithm;
use hybridopt_sys as sys;

/// Hyperparameters, as PyTorch names and means them. There are no silent defaults: `Default` is all
/// zero, and a field that the algorithm does not use must stay zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Group {
"""


RUST_GROUP_ALGORITHM = "None: that of the optimizer. set_group cannot change it."


def rust_type_of(field, lengths):
    if field.is_list:
        rows, columns = lengths
        return f"[[f64; {columns}]; {rows}]"
    return "bool" if field.is_flag else "i32" if field.is_count else "f64"


def rust_group(header, algorithms):
    """The struct of the hyperparameters in the safe crate: numbers, and flags as bool."""
    struct = header.struct("offload_group_t")
    comments = {field.name: field.comment for field in struct.said}
    lengths = {field.name: field.type.lengths for field in struct.said}
    own = comments.pop("algorithm")  # not a hyperparameter: it chooses which there are
    if comments.keys() != {field.name for field in algorithms.fields}:
        raise ValueError("offload_group_t and kGroupFields have other fields")
    text, values = RUST_GROUP_PREAMBLE, ""
    text += rust_doc(RUST_GROUP_ALGORITHM if own else "", "    ") + "    pub algorithm: Option<Algorithm>,\n"
    values += "            algorithm: self.algorithm.map_or(0, Algorithm::raw),\n"
    for field in algorithms.fields:
        name = field.name
        text += rust_doc(comments[name], "    ")
        text += f"    pub {name}: {rust_type_of(field, lengths[name])},\n"
        value = f"i32::from(self.{name})" if field.is_flag else f"self.{name}"
        values += f"            {name}: {value},\n"
    text += "}\n\nimpl Group {\n    pub(crate) fn raw(&self) -> sys::offload_group_t {\n"
    text += f"        sys::offload_group_t {{\n{values}            ..Default::default()\n        }}\n"
    return text + "    }\n}\n"


# ---------------------------------------------------------------------------------------- reports


@dataclasses.dataclass
class Report:
    """A struct that the library fills in, and how the bindings show it."""

    struct: str
    rust: str
    python: str = ""  # "": Python shows the ctypes struct itself
    is_sum: bool = False  # its fields are totals, which begin at zero


RESULT, STATS = "offload_step_result_t", "offload_stats_t"
REPORTS = [
    Report("offload_context_info_t", rust="ContextInfo"),
    Report("offload_plan_t", rust="Plan", python="PlannedMemory"),
    Report(RESULT, rust="StepResult", python="StepResult"),
    Report(STATS, rust="Stats", python="Totals", is_sum=True),
    Report("offload_checkpoint_info_t", rust="CheckpointInfo"),
]


def is_bool(field):
    """True if the field is an int32_t that is 1 or 0; its comment then says what 1 means."""
    return field.type == Type("int32_t") and field.comment.startswith("1: ")


def summed_fields(header):
    """The fields of the totals that add up the field of the same name of a step's result."""
    totals = {field.name: field for field in header.struct(STATS).said}
    summed = [field for field in header.struct(RESULT).said if field.name in totals]
    for field in summed:
        if field.type != totals[field.name].type or field.type not in (Type("double"), Type("uint64_t")):
            raise ValueError(f"{field.name} of a step's result cannot be added to the totals")
    return summed


def is_by_tier(field):
    return bool(field.type.lengths) and "by enum offload_tier" in field.comment


def tiers(header):
    """The names of the tiers, in the order of their numbers, and the header's comments on them."""
    prefix = "OFFLOAD_TIER_"
    names = {value: name for enum in header.of(Enum) for name, value in enum.constants if name.startswith(prefix)}
    if sorted(names) != list(range(len(names))):
        raise ValueError("the tiers are not numbered from 0 on")
    return [(names[value].removeprefix(prefix).lower(), header.comments[names[value]]) for value in range(len(names))]


def comment_of(header, report, field):
    """The header's comment on a field of a report."""
    text = field.comment
    if not text and report.is_sum:
        of_step = {each.name: each.comment for each in summed_fields(header)}
        text = f"of all steps: {of_step[field.name]}" if field.name in of_step else ""
    if not text:
        raise ValueError(f"{field.name} of {report.struct} has no comment")
    return text


RUST_REPORTS_PREAMBLE = """\
//! Reports of the library. Each has a field for every field of the C struct.
//!
//! Written by generate_abi.py; do not edit.

use std::ffi::CStr;
use std::os::raw::c_char;

use hybridopt_sys as sys;

fn text(characters: &[c_char]) -> String {
    assert!(characters.contains(&0), "the library ends its texts");
    // SAFETY: there is a NUL in it.
    unsafe { CStr::from_ptr(characters.as_ptr()) }.to_string_lossy().into_owned()
}
"""


def rust_tiers(header):
    fields, values = "", []
    for number, (name, comment) in enumerate(tiers(header)):
        fields += rust_doc(comment, "    ") + f"    pub {name}: T,\n"
        values.append(f"{name}: values[{number}]")
    value = f"ByTier {{ {', '.join(values)} }}"
    if len(value) > 92:  # rustfmt breaks longer lines
        value = "ByTier {\n" + "".join(f"            {each},\n" for each in values) + "        }"
    return (
        "\n/// One value for each tier.\n#[derive(Clone, Copy, Debug, PartialEq)]\n#[non_exhaustive]\n"
        f"pub struct ByTier<T> {{\n{fields}}}\n\nimpl<T: Copy> ByTier<T> {{\n"
        f"    fn of(values: &[T]) -> Self {{\n        {value}\n    }}\n}}\n"
    )


def rust_reports(header):
    rust = Rust(header)
    text = RUST_REPORTS_PREAMBLE + rust_tiers(header)
    for report in REPORTS:
        struct = header.struct(report.struct)
        fields, values = "", ""
        for field in struct.said:
            type, value = rust.type(field.type), f"raw.{field.name}"
            if field.type.name == "char":
                type, value = "String", f"text(&{value})"
            elif is_bool(field):
                type, value = "bool", f"{value} != 0"
            elif is_by_tier(field):
                one = rust.type(Type(field.type.name, lengths=field.type.lengths[1:]))
                type, value = f"ByTier<{one}>", f"ByTier::of(&{value})"
            fields += rust_doc(comment_of(header, report, field), "    ")
            fields += f"    pub {field.name}: {type},\n"
            values += f"            {field.name}: {value},\n"
        text += f"\n{rust_doc(struct.comment, '')}#[derive(Clone, Debug, PartialEq)]\n#[non_exhaustive]\n"
        text += f"pub struct {report.rust} {{\n{fields}}}\n\n"
        text += f"impl From<&sys::{report.struct}> for {report.rust} {{\n"
        text += f"    fn from(raw: &sys::{report.struct}) -> Self {{\n"
        text += f"        {report.rust} {{\n{values}        }}\n    }}\n}}\n"
    return text


PYTHON_REPORTS_PREAMBLE = '''\
"""Reports of the library as dataclasses, with a field for every field of the C struct.

Written by generate_abi.py; do not edit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
'''


def python_tiers(header):
    named = tiers(header)
    text = "\n\n@dataclass(frozen=True)\nclass ByTier(Generic[T]):\n"
    text += python_doc("One value for each tier (enum offload_tier)") + "\n"
    for name, comment in named:
        text += f"    {name}: T\n" + python_doc(comment)
    for operator, word in {"+": "add", "-": "sub"}.items():
        values = ", ".join(f"self.{name} {operator} other.{name}" for name, _ in named)
        text += f"\n    def __{word}__(self: ByTier[int], other: ByTier[int]) -> ByTier[int]:\n"
        text += f"        return ByTier({values})\n"
    return text


def python_type(field):
    if is_bool(field):
        return "bool"
    if field.type.lengths:  # an array: indexed by tier, by kind of state, or by node
        counts = "dict[str, int]" if "enum offload_state_kind" in field.comment else "dict[int, int]"
        if not is_by_tier(field):
            return counts
        return f"ByTier[{counts if len(field.type.lengths) > 1 else 'int'}]"
    return PYTHON_HINTS[PYTHON_SCALARS[field.type.name]]


def python_reports(header):
    text = PYTHON_REPORTS_PREAMBLE + python_tiers(header)
    for report in REPORTS:
        if not report.python:
            continue
        struct = header.struct(report.struct)
        text += f"\n\n@dataclass(frozen=True)\nclass {report.python}:\n"
        text += python_doc(f"{struct.comment.rstrip('.')} ({report.struct})") + "\n"
        for field in struct.said:
            type = python_type(field)
            zero = f" = {python_zero(header, type)}" if report.is_sum else ""
            text += f"    {field.name}: {type}{zero}\n"
            text += python_doc(comment_of(header, report, field))
    return text


def python_zero(header, type):
    if type == "ByTier[int]":
        return f"ByTier({', '.join('0' for _ in tiers(header))})"
    return "0.0" if type == "float" else "0"


PYTHON_WORDS = {"1: ": "True: ", "0: ": "False: ", "UINT64_MAX": "2**64 - 1"}


def python_doc(comment):
    text = sentence(comment, PYTHON_WORDS)
    if '"' in text or "\\" in text:
        raise ValueError(f"no docstring can be made of {text!r}")
    lines = textwrap.wrap(f'"""{text}"""', 96)
    return "".join(f"    {line}\n" for line in lines)


# ------------------------------------------------------------------------------------- the library


def step_totals(header):
    lines = "".join(f"  totals.{field.name} += result.{field.name};\n" for field in summed_fields(header))
    return f"""\
// Adds what a step's result and the totals both have. Written by bindings/generate_abi.py; do not
// edit.
#pragma once

#include "offload.h"

namespace hybridopt {{

inline void AddToTotals(const {RESULT}& result, {STATS}& totals) {{
{lines}}}

}}  // namespace hybridopt
"""


# ------------------------------------------------------------------------------------------ files


def outputs(header, algorithms):
    raw_crate, crate = HERE / "rust" / "hybridopt-sys", HERE / "rust" / "hybridopt" / "src"
    abi = HERE / "python" / "src" / "hybridopt" / "abi"
    return {
        abi / "generated.py": Python(header, algorithms).text,
        abi / "reports.py": python_reports(header),
        raw_crate / "src" / "generated.rs": Rust(header).text,
        raw_crate / "tests" / "layout" / "names.rs": rust_names(header),
        crate / "algorithm.rs": rust_algorithms(header, algorithms),
        crate / "group.rs": rust_group(header, algorithms),
        crate / "report.rs": rust_reports(header),
        TOTALS: step_totals(header),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a file is not up to date")
    check = parser.parse_args().check
    header = Header(HEADER.read_text())
    algorithms = Algorithms(ALGORITHMS.read_text(), header)
    for path, text in outputs(header, algorithms).items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"FAILED: {path} does not match {HEADER} and {ALGORITHMS}; run {__file__}")
        else:
            print(f"{path.name} matches {HEADER.name} and {ALGORITHMS.name}")


if __name__ == "__main__":
    main()
