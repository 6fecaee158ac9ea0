"""Links between pages lead somewhere: to a file, and to a heading of it. So do the names of pages in other
files' comments ("docs/X.md"), with the heading that may follow in quotation marks.
Usage: links_test.py SOURCE_DIR"""

import os
import re
import sys
import tempfile
from pathlib import Path

SKIPPED = re.compile(r"build|target|dist|__pycache__|\..*")
TEXTS = {".md", ".c", ".h", ".cpp", ".cu", ".inc", ".py", ".rs", ".sh", ".txt", ".toml"}


def files_in(root):
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if not SKIPPED.fullmatch(each))
        yield from (Path(parent, name) for name in sorted(names) if Path(name).suffix in TEXTS)


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(page):
    return re.findall(r"^#+ +(.*)$", without_code(page.read_text()), re.MULTILINE)


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, wanted = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists():
            yield f"the link to {target} leads to no file"
        elif wanted and wanted not in map(anchor, headings(path)):
            yield f"the link to {target} leads to no heading of {path.name}"


def broken_names(root, text):
    """In comments a name may contain a line break and the comment marks after it."""
    text = re.sub(r"\n\s*(?://|\*|#)? ?", " ", text)
    for name, heading in re.findall(r'\bdocs/(\w+\.md)(?:, "([^"]+)")?', text):
        page = root / "docs" / name
        if not page.exists():
            yield f"docs/{name} is named, and there is no such page"
        elif heading and heading not in headings(page):
            yield f'docs/{name} is named with its heading "{heading}", which it does not have'


def broken(root):
    for path in files_in(root):
        name = path.relative_to(root)
        if name.name == Path(__file__).name:
            continue
        found = list(broken_names(root, path.read_text()))
        if path.suffix == ".md":
            found += broken_links(path)
        yield from (f"{name}: {sentence}" for sentence in found)


def check_the_check():
    page = "# A page\n## What limits\n[a](#what-limits) [b](../README.md#top) ![c](https://x.y/z)\n```\n[d](no.md)\n```\n"
    good = {"docs/A.md": page, "README.md": "# Top\n[a](docs/A.md)\n", "a.h": '// docs/A.md, "What\n// limits"\n'}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "docs").mkdir()
        for name, text in good.items():
            (root / name).write_text(text)
        if found := list(broken(root)):
            sys.exit(f"FAILED: this test refuses good links: {found}")
        for text in ("[a](docs/B.md)", "[a](docs/A.md#nothing)", 'docs/A.md, "Nothing"', "see docs/B.md"):
            (root / "README.md").write_text(f"# Top\n{text}\n")
            if not list(broken(root)):
                sys.exit(f"FAILED: this test accepts '{text}'")


if __name__ == "__main__":
    check_the_check()
    if sentences := list(broken(Path(sys.argv[1]).resolve())):
        sys.exit("\n".join([*sentences, "FAILED: links and names of pages lead nowhere (above)"]))
    print("every link between pages leads to a file and to a heading")
