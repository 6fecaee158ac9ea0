"""The shape of the source tree: docs/ARCHITECTURE.md names every file, functions are short, banners fit a line,
every header is included, comments name files that exist, no folder is full, includes and imports have no cycle.
Exceptions stand in KNOWN. An entry that is not needed any more fails the test too, so the list can only get shorter.
Usage: shape_test.py SOURCE_DIR"""

import sys
import tempfile
from pathlib import Path

import shape

# The known violations, by rule.
KNOWN = {}

# ---------------------------------------------------------- trees that a rule must accept or refuse

LONG_BODY = "\n".join(f"  Call({number});" for number in range(shape.FUNCTION_LINES_MAX))
ROW = "| | | |\n|---|---|---|\n| `src/base/` | `clock` tells the time; {} | `clock.h` |\n"

PYTHON_ROW = "| | | |\n|---|---|---|\n| `hybridopt/steps/` | steps | {} |\n"
MODULES = {f"bindings/python/src/hybridopt/steps/{name}.py": "" for name in ("__init__", "step")}

# Each row: the rule, whether the tree is good, its files.
TREES = [
    ("undocumented file", True, {"src/base/clock.h": "", "docs/ARCHITECTURE.md": ROW.format("")}),
    (
        "undocumented file",
        True,
        {
            "src/base/clock.h": "",
            "src/base/shard.cpp": "",
            "docs/ARCHITECTURE.md": ROW.format("") + "| | `shard` | |\n",
        },
    ),
    (
        "undocumented file",
        False,
        {
            "src/base/clock.h": "",
            "src/base/shard.cpp": "",
            "docs/ARCHITECTURE.md": ROW.format("") + "\n| | `shard` | |\n",
        },
    ),
    (
        "undocumented file",
        False,
        {"src/base/clock.h": "", "docs/ARCHITECTURE.md": ROW.format("`gone`")},
    ),
    ("undocumented file", False, {"src/step/step.h": "", "docs/ARCHITECTURE.md": ROW.format("")}),
    ("undocumented file", True, {**MODULES, "docs/ARCHITECTURE.md": PYTHON_ROW.format("`step`")}),
    ("undocumented file", False, {**MODULES, "docs/ARCHITECTURE.md": PYTHON_ROW.format("")}),
    ("undocumented file", False, {**MODULES, "docs/ARCHITECTURE.md": PYTHON_ROW.format("`step`, `gone`")}),
    ("undocumented file", False, {**MODULES, "docs/ARCHITECTURE.md": ROW.format("")}),
    ("long function", True, {"src/a.cpp": f"namespace n {{\n{LONG_BODY}\n}}\n"}),
    ("long function", False, {"src/a.cpp": f"int F() {{\n{LONG_BODY}\n}}\n"}),
    (
        "long function",
        False,
        {"src/a.h": f"class A : public B<C()> {{\n  A() : b_{{1}}, c_(2) {{\n{LONG_BODY}\n  }}\n}};\n"},
    ),
    ("long function", False, {"tests/a.cpp": f'TEST(A, "}}") {{  // }}\n{LONG_BODY}\n}}\n'}),
    ("long function", False, {"bench/a.py": f"def f():\n{LONG_BODY.replace(';', '')}\n"}),
    ("long function", False, {"bindings/a.rs": f"    pub fn f(&self) {{\n{LONG_BODY}\n    }}\n"}),
    ("long function", False, {"src/a.cpp": "void F() {\n"}),
    ("broken banner", True, {"include/a.h": "/* ---------- steps -- */\n/* What\n * it is.\n */\n"}),
    ("broken banner", False, {"include/a.h": "/* ---------- steps --\n */\n"}),
    ("broken banner", False, {"src/a.cpp": "// ---------- steps\n// --\n"}),
    ("missing file", True, {"src/a/a.h": "// b.h, a/b.h and src/a/b.h are one\n", "src/a/b.h": ""}),
    ("missing file", True, {"src/a.h": "#include <sys/mman.h>\n// as mman.h has it\n"}),
    ("missing file", False, {"src/a/a.h": "// b.h says more\n", "src/a/b.cpp": ""}),
    ("missing file", False, {"src/a/a.h": "int a;  // c/b.h\n", "src/a/b.h": ""}),
    ("dead header", True, {"src/a/a.h": "", "src/a.cpp": '#include "a/a.h"\n'}),
    ("dead header", True, {"tests/a.h": "", "src/a.cpp": "#include <a.h>\n"}),
    ("dead header", False, {"src/a/a.h": "", "src/a.cpp": '// #include "a/a.h"\n'}),
    ("full folder", True, {f"src/a/{n}.cpp": "" for n in range(shape.PRODUCT_FILES_MAX)}),
    ("full folder", False, {f"src/a/{n}.cpp": "" for n in range(shape.PRODUCT_FILES_MAX + 1)}),
    ("full folder", False, {f"bindings/python/src/p/{n}": "" for n in range(shape.PRODUCT_FILES_MAX + 1)}),
    ("full folder", True, {f"tests/a/{n}": "" for n in range(shape.FOLDER_FILES_MAX)}),
    ("full folder", False, {f"tests/a/{n}": "" for n in range(shape.FOLDER_FILES_MAX + 1)}),
    ("circle", True, {"src/a.h": '#include "b.h"\n', "src/b.h": ""}),
    ("circle", False, {"src/a.h": '#include "b.h"\n', "src/b.h": '#include "a.h"\n'}),
    (
        "circle",
        True,
        {
            "bindings/python/src/p/__init__.py": "from .q.a import A\n",
            "bindings/python/src/p/b.py": "",
            "bindings/python/src/p/q/a.py": "from .. import b\n",
        },
    ),
    (
        "circle",
        False,
        {
            "bindings/python/src/p/__init__.py": "",
            "bindings/python/src/p/a.py": "from .b import B\n",
            "bindings/python/src/p/b.py": "def f():\n    from p import a\n",
        },
    ),
    (
        "circle",
        False,
        {"bindings/rust/c/src/a.rs": "use crate::b::B;\n", "bindings/rust/c/src/b.rs": "use crate::a::A;\n"},
    ),
]


def check_the_rules():
    """Each rule accepts its good trees and refuses its bad ones."""
    for rule, good, files in TREES:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            found = [sentence for _, sentence in shape.RULES[rule](Path(folder))]
        if good and found:
            sys.exit(f"FAILED: the rule about a {rule} refuses a good tree {files}: {found}")
        if not good and not found:
            sys.exit(f"FAILED: the rule about a {rule} accepts a bad tree {files}")


def check_the_tree(root):
    failed = False
    for rule, violations in shape.RULES.items():
        known = KNOWN.get(rule, set())
        seen = set()
        for key, sentence in violations(root):
            seen.add(key)
            if key not in known:
                print(f"{rule}: {sentence}")
                failed = True
        for key in sorted(known - seen):
            print(f"{rule}: {key} is right now; take it out of KNOWN in tests/style/shape_test.py")
            failed = True
    if failed:
        sys.exit("FAILED: the tree breaks the rules above")
    print(f"{len(shape.RULES)} rules hold, {sum(map(len, KNOWN.values()))} known exceptions")


if __name__ == "__main__":
    check_the_rules()
    check_the_tree(Path(sys.argv[1]).resolve())
