"""The rules of tests/style/shape_test.py for the source tree: one function for each rule. Each yields pairs of a
key, by which an exception can name the violation, and a sentence that says what is wrong."""

import ast
import os
import re
from pathlib import Path

FUNCTION_LINES_MAX = 70
FOLDER_FILES_MAX = 40
PRODUCT_FILES_MAX = 16  # in a folder of these:
PRODUCT = ("src", "bindings/python/src")
CPP_ENDINGS = {".c", ".h", ".cpp", ".cu", ".inc"}
SOURCE_ENDINGS = CPP_ENDINGS | {".py", ".rs"}
# Build outputs, virtual environments, caches.
SKIPPED = re.compile(r"build|target|__pycache__|\..*")


def files_in(root, endings=None, folder="."):
    """Pairs of a name, relative to the root, and a path; without endings, of every file."""
    for parent, folders, names in os.walk(root / folder):
        here = Path(parent)
        folders[:] = sorted(each for each in folders if not SKIPPED.fullmatch(each))
        for path in (here / name for name in sorted(names)):
            if endings is None or path.suffix in endings:
                yield path.relative_to(root).as_posix(), path


# ------------------------------------------------------------------------- every file has a line --


def folder_rows(text):
    """The rows of the tables of ARCHITECTURE.md for each folder of src/ and of the Python package. A row without a
    folder continues the row above."""
    rows, folder = {}, None
    for line in text.splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) < 4:
            folder = None
            continue
        named = re.search(r"`((?:src|hybridopt)/[^`]*)`", cells[1])
        if named or cells[1].strip():
            folder = named.group(1).rstrip("/") if named else None
        if folder:
            rows[folder] = rows.get(folder, "") + cells[2] + cells[3]
    return rows


def undocumented_files(root):
    rows = folder_rows((root / "docs/ARCHITECTURE.md").read_text())
    stems = {}
    for name, path in files_in(root, CPP_ENDINGS, "src"):
        stems.setdefault(Path(name).parent.as_posix(), set()).add(path.stem)
    for name, path in files_in(root, {".py"}, "bindings/python/src"):
        if path.name != "__init__.py":
            folder = Path(name).relative_to("bindings/python/src").parent.as_posix()
            stems.setdefault(folder, set()).add(path.stem)
    for folder, names in sorted(stems.items()):
        if folder == "src":
            for stem in sorted(names):
                if f"src/{stem}.cpp" not in rows:
                    yield f"src/{stem}", f"docs/ARCHITECTURE.md has no row for src/{stem}.cpp"
            continue
        if folder not in rows:
            yield folder, f"docs/ARCHITECTURE.md has no row for {folder}/"
            continue
        said = set(re.findall(r"`([a-z0-9_]+)(?:\.h)?`", rows[folder]))
        for stem in sorted(names - said):
            yield f"{folder}/{stem}", f"docs/ARCHITECTURE.md says nothing of {folder}/{stem}"
        for stem in sorted(said - names):
            yield f"{folder}/{stem}", f"docs/ARCHITECTURE.md tells of {folder}/{stem}, which is not there"


# ------------------------------------------------------------------------------- short functions --

# The parts that are not code. Line breaks stay, so that line numbers stay.
CPP_NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'
    r"(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
TYPE_HEAD = re.compile(r"^(?:template\s*<.*>\s*)?(?:typedef\s+|static\s+)*(?:class|struct|union)\b[^()=]*$", re.S)


def blank(match):
    return '""' + "\n" * match.group().count("\n")


def cpp_functions(text):
    """(name, lines) of each function in a file, namespace or class. The text must be formatted by clang-format, with
    a space before the brace of a body and none before that of an initializer."""
    code = CPP_NOISE.sub(blank, text)
    scopes, head, line, head_line = [], "", 1, 1
    for position, character in enumerate(code):
        if character == "\n":
            line += 1
        inside = bool(scopes) and scopes[-1][0] == "body"
        if character == "{":
            if inside:
                scopes.append(("body", "", 0))
                continue
            if position and not code[position - 1].isspace():
                scopes.append(("body", None, 0))  # an initializer; the head continues after it
                continue
            bare = re.sub(r"alignas\([^()]*\)|__attribute__\(\(.*?\)\)|\[\[.*?\]\]", "", head)
            bare = re.sub(r'^(?:\s|"")+', "", bare)
            if re.search(r"\bnamespace\b|\bextern\b", bare) and "(" not in bare:
                scopes.append(("scope", "", 0))
            elif TYPE_HEAD.match(bare):
                scopes.append(("scope", "", 0))
            elif "(" in bare and not bare.rstrip().endswith("="):
                scopes.append(("body", bare.strip(), head_line))
            else:
                scopes.append(("body", "", 0))
            head = ""
        elif character == "}":
            if not scopes:
                raise ValueError(f"line {line}: a brace closes what nothing has opened")
            _, name, begin = scopes.pop()
            if name:
                yield name, line - begin + 1
            if name is not None and not (scopes and scopes[-1][0] == "body"):
                head = ""
        elif not inside:
            if character == ";":
                head = ""
            elif re.fullmatch(r"\s*(?:public|private|protected|signals)\s*", head) and character == ":":
                head = ""
            else:
                if not head.strip(' \n"') and not character.isspace():
                    head_line = line
                head += character
    if scopes:
        raise ValueError("a brace is never closed")


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1


def rust_functions(text):
    """The text must be formatted by rustfmt: a function ends with the first brace that has the indent of its
    beginning."""
    lines = text.splitlines()
    for begin, line in enumerate(lines):
        match = re.match(r"( *)(?:[a-z]+(?:\([a-z]+\))? )*(?:extern \"C\" )?fn (\w+)", line)
        if not match:
            continue
        for end in range(begin, len(lines)):
            if lines[end] == match.group(1) + "}" or lines[end].rstrip().endswith((";", "{}")):
                if lines[end] == match.group(1) + "}":
                    yield match.group(2), end - begin + 1
                    break
                if end == begin:
                    break


def short_name(head):
    """The name in a C++ function's head; for TEST(Suite, Name) both."""
    test = re.match(r"(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\s*\)", head)
    if test:
        return ".".join(test.groups())
    match = re.search(r"([\w:~]+|operator\W+)\s*\(", head)
    return match.group(1).strip() if match else head[:40]


def long_functions(root):
    for name, path in files_in(root, SOURCE_ENDINGS):
        text = path.read_text()
        if "do not edit" in text[:200]:  # a generated file
            continue
        try:
            if path.suffix == ".py":
                functions = list(python_functions(text))
            elif path.suffix == ".rs":
                functions = list(rust_functions(text))
            else:
                functions = [(short_name(head), lines) for head, lines in cpp_functions(text)]
        except (ValueError, SyntaxError) as error:
            yield name, f"{name}: this test cannot read it: {error}"
            continue
        for function, lines in functions:
            if lines > FUNCTION_LINES_MAX:
                yield (
                    f"{name}:{function}",
                    f"{name}: {function} has {lines} lines, more than {FUNCTION_LINES_MAX}",
                )


# -------------------------------------------------------------------------------- whole banners --


def broken_banners(root):
    """A banner that clang-format has broken because it was wider than a line."""
    for name, path in files_in(root, CPP_ENDINGS):
        above = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            broken_below = re.match(r"\s*/\* -{4,}", line) and not line.endswith("*/")
            if broken_below or re.fullmatch(r"\s*// -+", line):
                title = (line if broken_below else above).strip("/* -")
                yield f"{name}:{title}", f"{name}:{number}: the banner '{title}' has two lines"
            above = line


# ----------------------------------------------------------------------------------- dead files --


def dead_headers(root):
    """Headers that no file includes. Installed headers are for users, so they do not count."""
    included = set()
    headers = []
    for name, path in files_in(root, CPP_ENDINGS):
        if path.suffix in {".h", ".inc"} and not name.startswith("include/"):
            headers.append(name)
        for target in re.findall(r'^\s*#\s*include\s*["<]([^">]*)', path.read_text(), re.MULTILINE):
            included.add(Path(target).name)
    for name in headers:
        if Path(name).name not in included:
            yield name, f"{name}: no file includes it"


# ---------------------------------------------------------------------------------- few per folder --


def full_folders(root):
    counts = {}
    for name, _ in files_in(root):
        folder = Path(name).parent.as_posix()
        counts[folder] = counts.get(folder, 0) + 1
    for folder, count in sorted(counts.items()):
        product = any(f"{folder}/".startswith(f"{each}/") for each in PRODUCT)
        limit = PRODUCT_FILES_MAX if product else FOLDER_FILES_MAX
        if count > limit:
            yield folder, f"{folder} has {count} files, more than {limit}"


# ------------------------------------------------------------------------------------- no circles --


def cpp_graph(root):
    graph = {}
    for name, path in files_in(root, CPP_ENDINGS, "src"):
        targets = re.findall(r'^\s*#\s*include\s*"([^"]*)"', path.read_text(), re.MULTILINE)
        graph[name] = {f"src/{target}" for target in targets if (root / "src" / target).exists()}
    return graph


def python_imports(tree, package, modules):
    """The modules that a tree imports: `from .. import abi` imports abi alone, not the package around it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield one.name
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(parts + ([node.module] if node.module else []))
            for one in node.names:
                whole = f"{base}.{one.name}"
                yield whole if whole in modules else base


def python_graph(root):
    folder = root / "bindings/python/src"
    modules = {}
    for name, path in files_in(root, {".py"}, "bindings/python/src"):
        parts = path.relative_to(folder).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (name, path)
    graph = {}
    for module, (name, path) in modules.items():
        package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
        targets = set(python_imports(ast.parse(path.read_text()), package, modules))
        graph[name] = {modules[target][0] for target in targets if target in modules and target != module}
    return graph


def rust_graph(root):
    graph = {}
    for name, path in files_in(root, {".rs"}, "bindings/rust"):
        if path.parent.name != "src" or path.name == "lib.rs":
            continue
        code = re.sub(r"//[^\n]*", "", path.read_text())
        targets = re.findall(r"\b(?:crate|super)::(\w+)", code)
        graph[name] = {
            (Path(name).parent / f"{target}.rs").as_posix()
            for target in targets
            if target != path.stem and (path.parent / f"{target}.rs").exists()
        }
    return graph


def circles(graph):
    """The sets of files that reach each other."""
    order, seen = [], set()

    def visit(start, edges, found):
        stack = [(start, iter(sorted(edges.get(start, ()))))]
        seen.add(start)
        while stack:
            node, targets = stack[-1]
            following = next((one for one in targets if one not in seen), None)
            if following is None:
                found.append(stack.pop()[0])
            else:
                seen.add(following)
                stack.append((following, iter(sorted(edges.get(following, ())))))

    for node in sorted(graph):
        if node not in seen:
            visit(node, graph, order)
    reverse = {}
    for node, targets in graph.items():
        for target in targets:
            reverse.setdefault(target, set()).add(node)
    seen.clear()
    for node in reversed(order):
        if node not in seen:
            found = []
            visit(node, reverse, found)
            if len(found) > 1 or node in graph.get(node, ()):
                yield sorted(found)


def include_circles(root):
    for graph in (cpp_graph(root), python_graph(root), rust_graph(root)):
        for circle in circles(graph):
            yield circle[0], "these include or import each other: " + ", ".join(circle)


def named_files(text):
    """The names of files in the comments of C++."""
    for line in text.splitlines():
        comment = line.partition("//")[2]
        yield from re.findall(r"(?<![\w./])[\w/]+\.(?:h|cpp|inc|cu|py|md|map)\b", comment)


def missing_files(root):
    """Files that a comment in src/ names and that do not exist in the tree; system headers that src/ includes do not
    count."""
    ends = set()
    for name, _ in files_in(root, CPP_ENDINGS | {".py", ".md", ".map"}):
        ends.update(name[at:] for at in (0, *(slash.end() for slash in re.finditer("/", name))))
    sources = [(name, path.read_text()) for name, path in files_in(root, CPP_ENDINGS, "src")]
    for _, text in sources:
        ends.update(name.rpartition("/")[2] for name in re.findall(r"#\s*include\s*<([^>]*)>", text))
    for name, text in sources:
        for named in named_files(text):
            if named not in ends:
                yield f"{name}: {named}", f"{name} names {named} in a comment, and there is no such file"


RULES = {
    "undocumented file": undocumented_files,
    "long function": long_functions,
    "broken banner": broken_banners,
    "dead header": dead_headers,
    "missing file": missing_files,
    "full folder": full_folders,
    "circle": include_circles,
}
