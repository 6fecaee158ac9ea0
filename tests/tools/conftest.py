import pathlib
import sys

# The reader that was written only from the format page checks what the tool writes.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "checkpoint"))
