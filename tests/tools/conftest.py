import pathlib
import sys

# The reader that was written from the format page alone judges what the tool writes.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "checkpoint"))
