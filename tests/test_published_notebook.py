import ast
import os
from pathlib import Path

import nbformat
import pandas as pd
import papermill as pm
import pytest
from papermill.exceptions import PapermillExecutionError

from ruitong_lib import paths

NOTEBOOK = paths.NOTEBOOKS / "published_corpora.ipynb"
DATA = Path(os.environ.get("RUITONG_DATA") or Path(__file__).parents[2] / "shared" / "corpora")
needs_corpora = pytest.mark.skipif(
    not (DATA / "a40_61.json").is_file(),
    reason=f"no published corpora in {DATA}: ruitong fetch corpora, or RUITONG_DATA",
)
# Jupyter's own deprecations and sockets are not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")


@needs_corpora
@pytest.mark.slow
@pytest.mark.parametrize("folder", [paths.ROOT, paths.NOTEBOOKS])
def test_it_runs_from_the_root_and_from_its_own_folder(folder: Path, tmp_path: Path) -> None:
    given = {"data": str(DATA), "simulations": 40, "outputs": str(tmp_path)}
    done = pm.execute_notebook(NOTEBOOK, tmp_path / "done.ipynb", given, cwd=folder, progress_bar=False)
    text = "".join(o.get("text", "") for c in done.cells for o in c.get("outputs", []))
    assert "nothing that bf16 rounding on both sides does not explain" in text
    assert "a difference of configuration" in text
    assert "their-laptop" not in text
    table = pd.read_csv(tmp_path / "tables" / "published_corpora.csv")
    assert table["verdict"].value_counts().to_dict() == {"EQUIVALENT": 14, "REFUSED": 6, "WITHIN MARGIN": 1}
    assert len(list((tmp_path / "figures").glob("published_*.svg"))) == 4


@needs_corpora
@pytest.mark.slow
def test_an_unknown_parameter_stops_it(tmp_path: Path) -> None:
    with pytest.raises(PapermillExecutionError, match="Did you mean 'simulations'"):
        pm.execute_notebook(NOTEBOOK, tmp_path / "x.ipynb", {"simulation": 40}, progress_bar=False)


def test_it_is_stripped_and_defines_nothing() -> None:
    nb = nbformat.read(NOTEBOOK, 4)
    code = [c for c in nb.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in code)
    tagged = [c for c in code if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert tagged[0].source.startswith("# ruitong: parameters\n")
    nodes = [n for c in code for n in ast.walk(ast.parse(c.source))]
    assert not [n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    assert "captured_by" not in NOTEBOOK.read_text(encoding="utf-8")
