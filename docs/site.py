"""What mkdocs does not do by itself for the site: pages for README.md and other files of the repository that
pages link to, with their links; and Markdown as GitHub reads it. A hook of mkdocs.yml."""

import ast
import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
NAME = re.compile(r"(?<!\]\()(?<![\[`/\w])docs/(\w+\.md)(?![`\]\w])")  # a page that is named without a link
FENCE = re.compile(r" *(`{3,})")
ITEM = re.compile(r" *([-*]|\d+\.) ")
CODE = re.compile(r"<pre.*?</pre>|<code>.*?</code>", re.DOTALL)
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
LONG_NAME = re.compile(r"[\w.(=]{20,}(?![^<>]*>)")  # not in a tag
JOINT = re.compile(r"(?<=[._(=])(?=\w)|(?<=[a-z])(?=[A-Z])")  # between two words of a name
OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
PACKAGE = ROOT / "bindings/python/src/hybridopt"
SUBMODULES = ("__version__", "abi", "integrations", "stash")
RUSTDOC = os.environ.get("HYBRIDOPT_RUSTDOC")  # the folder that cargo doc has filled
RENAMED = {"README.md": "index.md", "examples/README.md": "examples.md"}
LANGUAGES = {".h": "c", ".cu": "cpp", ".py": "python", ".rs": "rust", ".yml": "yaml", ".sh": "bash"}


def page_of(path):
    """Where the site has a file of the repository."""
    if path in RENAMED:
        return RENAMED[path]
    if path.endswith(".md"):
        return path.removeprefix("docs/")
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def file_of(page):
    """The file of the repository that a page shows."""
    for path, renamed in RENAMED.items():
        if page == renamed:
            return path
    return f"docs/{page}" if (ROOT / "docs" / page).exists() else page


def target_of(path, link):
    """The file that a link in this file leads to, or None."""
    if re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def python_page():
    """The reference of the package's public names, which mkdocstrings fills with their docstrings."""
    module = ast.parse((PACKAGE / "__init__.py").read_text())
    names = next(ast.literal_eval(node.value) for node in module.body if ast.unparse(node).startswith("__all__ = "))
    base = "OffloadOptimizer"
    others = sorted((name for name in names if name not in (base, *SUBMODULES)), key=lambda name: (name.islower(), name))
    head = f"Written from the docstrings. All optimizers have what {base} has. docs/PYTORCH.md is the manual."
    whole = f"::: hybridopt.{base}\n    options: {{inherited_members: true}}"
    return "\n\n".join(["# Python reference", head, whole, *(f"::: hybridopt.{name}" for name in others), ""])


def rust_page():
    text = "scripts/docs found no cargo, so this site has no reference of the crates."
    if RUSTDOC:
        crates = [f"[{crate}](rust/{crate}/index.html)" for crate in ("hybridopt", "hybridopt_sys")]
        text = f"{crates[0]}, the safe crate, and {crates[1]}, the ABI. [Its guide](guides/from_rust.md)."
    return f"# Rust reference\n\n{text}\n"


def source_page(path):
    language = LANGUAGES.get(Path(path).suffix, Path(path).suffix[1:])
    return f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n"


def on_files(files, config):
    texts = {file_of(file.src_uri): Path(file.abs_src_path).read_text() for file in files.documentation_pages()}
    wanted = {"README.md", "examples/README.md", "CONTRIBUTING.md", "CHANGELOG.md", "include/offload.h"}
    files.append(File.generated(config, "python_reference.md", content=python_page()))
    files.append(File.generated(config, "rust_reference.md", content=rust_page()))
    for path in Path(RUSTDOC).rglob("*") if RUSTDOC else ():
        if path.is_file() and not path.name.startswith("."):
            name = posixpath.join("rust", path.relative_to(RUSTDOC))
            files.append(File.generated(config, name, abs_src_path=str(path)))
    while wanted:
        path = wanted.pop()
        if path.endswith(".md"):
            texts[path] = (ROOT / path).read_text()
            files.append(File.generated(config, page_of(path), content=texts[path]))
        else:
            texts[path] = ""
            files.append(File.generated(config, page_of(path), content=source_page(path)))
        linked = {target_of(each, link) for each, text in texts.items() for link, _ in LINK.findall(text)}
        wanted |= {
            each for each in linked - texts.keys() - {None} if (ROOT / each).is_file() and not each.startswith("docs/")
        }
    return files


def on_page_markdown(markdown, page, config, files):
    path = file_of(page.file.src_uri)

    def link(match):
        target = target_of(path, match[1])
        if target is None or not (ROOT / target).is_file():
            return match[0]
        here = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(page_of(target), here or ".") + match[2]

    if page.parent is None:
        page.meta["hide"] = ["navigation"]  # a list of this one page
    if page.file.src_uri.startswith("source/"):
        return markdown
    to_root = posixpath.relpath(".", posixpath.dirname(path) or ".")
    return LINK.sub(link, as_mkdocs_reads_it(markdown, to_root))


def on_page_content(html, page, config, files):
    """Keeps an option of a command in one line: a browser breaks lines behind each hyphen. In tables, which would be
    too wide for the page, a long name may break between its words."""

    def break_names(cell):
        return LONG_NAME.sub(lambda name: JOINT.sub("<wbr>", name[0]), cell[0])

    def mark(match):
        if match[0].startswith("<pre"):
            return match[0]
        return OPTION.sub(r'<span class="option">\g<0></span>', match[0])

    return CODE.sub(mark, CELL.sub(break_names, html))


def as_mkdocs_reads_it(text, to_root):
    """On GitHub two spaces stand for a level of a list, and a list may follow a paragraph without an empty line. Names of
    pages become links."""
    lines, fence, in_list, paragraph, extra = [], None, False, False, 0
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        mark = FENCE.match(line)
        if fence is None and line.strip():
            item = ITEM.match(line)
            if item and (not in_list or paragraph) and lines and lines[-1].strip():
                lines.append("")
            # A second paragraph of an item, which the next item would continue.
            paragraph = not item and in_list and indent > 0 and (paragraph or not lines[-1].strip())
            in_list = bool(item) or (in_list and (indent > 0 or bool(lines[-1].strip())))
            extra = (indent + 1) // 2 * 4 - indent if in_list else 0
        if mark and (fence is None or mark[1] == fence):
            fence = mark[1] if fence is None else None
        elif fence is None:
            line = NAME.sub(rf"[\g<0>]({to_root}/docs/\g<1>)", line)
        lines.append(" " * extra + line if line.strip() else line)
    return "\n".join(lines)
