"""scripts/docs builds the site; its links lead to pages and to places on them, and it needs no network; options of
commands stay in one line. Usage: site_test.py SOURCE_DIR"""

import html.parser
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

PAGES = {"index", "CONCEPTS", "examples", "python_reference", "rust_reference", "guides/resume", "source/include/offload.h", "source/examples/01_hello.c"}

TEXTS = [
    ("index", '<span class="option">--quick</span>', "a browser may break the line behind the hyphens of an option"),
    ("CONFIGURATION", "<code>Device<wbr>Index<wbr>Without<wbr>Such<wbr>ADevice</code>", "the table is wider than the page of a laptop"),
    ("PYTORCH", '(<a href="NUMERICS.html">docs/NUMERICS.md</a>)', "the name of a page is no link"),
]


class Page(html.parser.HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.ids = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("img", "script", "link") and (values.get("src") or values.get("href")):
            self.loads.append(values.get("src") or values["href"])


def broken(site):
    written = (path for path in site.rglob("*.html") if path.name != "404.html")
    pages = {path: Page(path) for path in written if path.parts[len(site.parts)] != "rust"}  # rustdoc's own
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    yield f"{path.relative_to(site)} loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                yield f"{path.relative_to(site)}: {link} leads to no file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{path.relative_to(site)}: {link} leads to no place"


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve()
    if subprocess.run([root / "scripts/docs"]).returncode:
        sys.exit("FAILED: scripts/docs does not build the site")
    site = root / "build/site"
    missing = sorted(page for page in PAGES if not (site / f"{page}.html").exists())
    if missing or (sentences := sorted(set(broken(site)))):
        sys.exit("\n".join([*(missing or sentences), "FAILED: the site lacks pages, or links lead nowhere (above)"]))
    for page, text, fault in TEXTS:
        if text not in (site / f"{page}.html").read_text():
            sys.exit(f"FAILED: {page}.html lacks {text}: {fault}")
    print(f"{len(list(site.rglob('*.html')))} pages, and every link leads somewhere")
