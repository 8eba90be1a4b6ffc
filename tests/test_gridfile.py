import re

import pytest
import yaml

from ruitong_lib.cell import Cell
from ruitong_lib.errors import RuitongError
from ruitong_lib.gridfile import Grid, load_grid
from ruitong_lib.paths import PARAMS


class TestGrid:
    @pytest.fixture
    def grid(self, tmp_path):
        def write(document):
            path = tmp_path / "mine.yml"
            text = document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False)
            path.write_text(text, encoding="utf-8")
            return load_grid(path)

        return write

    def test_anchor_reference_and_cells(self, grid):
        g = grid(
            {
                "name": "n",
                "defaults": {"max_new_tokens": 7},
                "anchor": {"precision": "fp32"},
                "reference": {"precision": "bf16", "scoring": "both"},
                "cells": [{"batch_size": 8}, {"scoring": "decode"}],
            }
        )
        assert isinstance(g, Grid)
        assert g.name == "n"
        assert g.anchor == Cell(precision="fp32", scoring="both", max_new_tokens=7)
        assert g.reference == g.cells[0] == Cell(scoring="both", anchor="anchor", max_new_tokens=7)
        assert g.cells[1] == Cell(batch_size=8, anchor="anchor", max_new_tokens=7)
        assert g.cells[2] == Cell(scoring="decode", max_new_tokens=7)

    def test_product(self, grid):
        g = grid({"reference": {}, "product": {"precision": ["fp16", "fp32"], "batch_size": [1, 8]}})
        assert g.name == "mine"
        assert [(c.precision, c.batch_size) for c in g.cells] == [
            ("bf16", 1),
            ("fp16", 1),
            ("fp16", 8),
            ("fp32", 1),
            ("fp32", 8),
        ]

    def test_overrides_hold_for_each_cell(self, tmp_path):
        path = tmp_path / "g.yml"
        path.write_text("defaults: {outputs: a, model: m}\ncells: [{batch_size: 2}]\n")
        g = load_grid(path, outputs="/b", overwrite=True)
        assert {(c.outputs, c.overwrite, c.model) for c in (g.anchor, *g.cells)} == {("/b", True, "m")}

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ({"cells": [{"batch_size": 2}, {"batch_size": 0}]}, "cell 2: batch_size must be from 1 to 65536, got 0"),
            ({"anchor": {"precision": "x"}}, "anchor: precision must be one of"),
            ({"reference": {"seeed": 1}}, "reference: unknown parameter 'seeed'. Did you mean 'seed'?"),
            ({"reference": {1: 2}}, "reference: unknown parameter 1."),
            ({"product": {"threads": [1, "2"]}}, "product {'threads': '2'}: threads must be int, got '2'"),
            ({"product": {"threads": 1}}, "product.threads must be a list of values, got 1"),
            ({"product": [1]}, "product must be a mapping"),
            ({"cells": [3]}, "cell 1 must be a mapping of parameters, got 3"),
            ({"cells": ["bf16"]}, "cell 1 must be a mapping of parameters, got 'bf16'"),
            ({"cells": {"batch_size": 2}}, "cells must be a list"),
            ({"reference": [1]}, "reference must be a mapping of parameters, got [1]"),
            ({"defaults": [1]}, "defaults must be a mapping"),
            ({"celss": []}, "unknown key 'celss'. Did you mean 'cells'?"),
            ([1, 2], "must be a mapping with the keys name, description, defaults"),
            ("a: [", "cannot read the grid"),
            ("", "must be a mapping with the keys"),
            ({"cells": [{"batch_size": 2}, {"batch_size": 2}]}, "cell 2 is the same as cell 1; remove one"),
            ({"cells": [{"precision": "bf16"}]}, "cell 1 is the same as reference; remove one"),
            (
                {"cells": [{"threads": 2}], "product": {"threads": [1, 2]}},
                "product {'threads': 2} is the same as cell 1; remove one",
            ),
        ],
    )
    def test_errors_name_the_file_and_the_cell(self, grid, document, message):
        with pytest.raises(RuitongError, match=re.escape(message)) as e:
            grid(document)
        assert "mine.yml" in str(e.value)

    def test_missing_file(self, tmp_path):
        with pytest.raises(RuitongError, match=r"cannot read the grid .*none\.yml"):
            load_grid(tmp_path / "none.yml")

    def test_not_utf8(self, tmp_path):
        (tmp_path / "x.yml").write_bytes(b"name: \xff\xfe\n")
        with pytest.raises(RuitongError, match="cannot read the grid"):
            load_grid(tmp_path / "x.yml")

    @pytest.mark.parametrize("path", sorted(p.name for p in PARAMS.glob("*.yml") if "anchor:" in p.read_text()))
    def test_shipped_grids(self, path):
        g = load_grid(PARAMS / path)
        assert g.reference in g.cells
        assert g.anchor.scoring == "both"
        assert g.anchor not in g.cells
