"""The README's lines of PyTorch run as they are."""

import pathlib
import re

README = pathlib.Path(__file__).parents[3] / "README.md"


def ten_lines():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = (block for block in blocks if "hybridopt.AdamW(" in block)
    return code


def test_ten_lines_of_pytorch_run_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    variables = {}
    for _ in range(2):
        exec(compile(ten_lines(), "README.md", "exec"), variables)
        assert variables["optimizer"].stats().steps_applied == 100
        *losses, shown = capsys.readouterr().out.split("\n", 4)
        losses = [float(line.split()[-1]) for line in losses]
        assert len(losses) == 4 and losses[-1] < losses[0]
        assert shown.startswith("AdamW (") and "offload_fraction" in shown, shown
