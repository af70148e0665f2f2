"""docs/guide/demo.ipynb: its cells run as they stand, and what they show is true."""
import json
from pathlib import Path

import pytest

pytest.importorskip("PIL")
NOTEBOOK = Path(__file__).parents[2] / "docs" / "guide" / "demo.ipynb"


def test_cells(monkeypatch, capsys):
    monkeypatch.chdir(NOTEBOOK.parent)
    assert NOTEBOOK.stat().st_size < 200_000
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    committed = "".join(line for cell in cells for output in cell["outputs"] for line in output.get("text", ()))
    rows = lambda text: [line.split() for line in text.splitlines()[3:]]
    for now, then in zip(rows(said), rows(committed), strict=True):
        assert now[:2] == then[:2] and all(abs(float(a) - float(b)) < 0.02 for a, b in zip(now[2:], then[2:])), (now, then)
    for (head, density, method), (kept, error) in names["results"].items():
        assert abs(kept - density) < 0.01
        assert method == "scope-mean" or error > 1.5 * names["results"][head, density, "scope-mean"][1], (head, density, method)
    for head in ("peaked", "diffuse"):
        image = names["picture"](head)
        assert image.width > 600 and image.getextrema() == (0, 255)
