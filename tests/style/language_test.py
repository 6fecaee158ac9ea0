"""Words that an engineer whose second language is English must read twice, in docs, comments, messages and names.
Usage: language_test.py SOURCE_DIR"""

import os
import re
import sys
import tempfile
from pathlib import Path

SKIPPED = re.compile(r"build|target|dist|__pycache__|results|\..*")
ENDINGS = {".md", ".c", ".h", ".cpp", ".cu", ".inc", ".py", ".rs", ".sh", ".txt", ".cmake"}

# Each row: the pattern, what to write instead, a text that it must refuse and one that it must accept.
PATTERNS = [
    (r"(?i)who(?:so)?m?ever", "name who it is", "whoever\nwaits is told", "each thread that waits is told"),
    (r"(?i)\bso (?:many|much)\b", "name the number", "a file of so many bytes", "a file of this size"),
    (r"(?i)\banother than\b", "say 'other than', or name both", "another than the last", "a rank other than the last"),
    (r"(?i)\bfor nothing\b", "say 'without effect', or 'never for'", "it counts for\n// nothing", "it has no effect"),
    (r"(?i)\bwhich of the (?:two|both)\b", "name the two", "Which of the two does not show", "a or b"),
    (r"(?i)(?<!, )\bbut for\b", "say 'except'", "zero but for\n// its size", "not for params, but for their states"),
    (r"(?i)\bas ever\b", "say 'as usual'", "steps are made as ever", "steps are made as usual"),
    # A sentence whose subject is a clause: its verb comes as a surprise.
    (r"\b[Ww]hat (?:[a-z]+ ){1,4}ha(?:s|ve) (?:is|are|has|have|goes|stays|stands|comes)\b",
     "give the subject a name", "what a caller has is freed", "the caller's memory is freed"),
    # A last clause that lacks its noun.
    (r"\b(?:that|those|one|which|what) (?:is|are|was|were|has|have|does|do|did)[.;:](?= |$)",
     "repeat the noun", "whichever step that is.", "whichever step it is."),
]  # fmt: skip


def files_in(root):
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if not SKIPPED.fullmatch(each))
        yield from (Path(parent, name) for name in sorted(names) if Path(name).suffix in ENDINGS)


def flat(text):
    """The text with its lines joined, so that a phrase is found across line breaks. Comment marks become spaces; no
    position moves."""
    return re.sub(r"\n[ \t]*(?://[/!]?|\*(?!/)|#|>)?", lambda match: " " * len(match.group()), text)


def violations(root):
    for path in files_in(root):
        if path.name == Path(__file__).name:
            continue
        text = path.read_text()
        joined = re.sub("  +", lambda match: " " + "\0" * (len(match.group()) - 1), flat(text))
        kept = [i for i, character in enumerate(joined) if character != "\0"]
        dense = joined.replace("\0", "")
        for pattern, instead, _, _ in PATTERNS:
            for match in re.finditer(pattern, dense):
                line = text.count("\n", 0, kept[match.start()]) + 1
                yield f"{path.relative_to(root)}:{line}: '{match.group()}': {instead}"


def check_the_check():
    for pattern, _, bad, good in PATTERNS:
        for text, wanted in ((bad, 1), (good, 0)):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "a.md").write_text(text)
                found = list(violations(Path(folder)))
            if len(found) != wanted:
                sys.exit(f"FAILED: the pattern {pattern} finds {found} in '{text}'")


if __name__ == "__main__":
    check_the_check()
    found = list(violations(Path(sys.argv[1]).resolve()))
    print("\n".join(found))
    if found:
        sys.exit("FAILED: write the lines above so that nobody reads them twice")
    print(f"{len(PATTERNS)} patterns are nowhere")
