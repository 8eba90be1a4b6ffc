"""Every grid of params/: it loads, it has the cells it names, each row has a floor, and it can be shown offline."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ruitong_lib import grid, paths, schema
from ruitong_lib.cell import Cell, from_text
from ruitong_lib.cli import app
from ruitong_lib.errors import RuitongError
from ruitong_lib.gridfile import load_grid
from ruitong_lib.measure import floor as floors
from ruitong_lib.measure.align import axis_name, differs_in
from ruitong_lib.prompts import load_prompts
from ruitong_lib.testing import synthetic_shards

GRIDS = sorted(p for p in paths.PARAMS.glob("*.yml") if "defaults" in yaml.safe_load(p.read_text(encoding="utf-8")))
MODELS = ("qwen3-8b", "llama-3.1-8b", "deepseek")
N_CELLS = {"demo": 10, "smoke": 4, "oracle": 10, "lesson": 6, **dict.fromkeys(MODELS, 16)}
# Rows that have no floor, and where that is said.
NO_FLOOR = {"smoke": {"batch size"}}  # "its numbers say nothing"


def test_every_grid_loads_and_the_benchmarks_are_among_them() -> None:
    assert {*N_CELLS} <= {p.stem for p in GRIDS}
    for path in GRIDS:
        loaded = load_grid(path)
        assert loaded.reference == loaded.cells[0]


@pytest.mark.parametrize("path", [p for p in GRIDS if p.stem in {*N_CELLS} - {*MODELS[1:]}], ids=lambda p: p.stem)
def test_a_grid_loads_and_each_of_its_rows_has_a_floor(path: Path) -> None:
    loaded = load_grid(path)
    cells = [loaded.anchor, *loaded.cells, *([loaded.oracle] if loaded.oracle else [])]
    assert len(cells) == N_CELLS[path.stem]
    load_prompts(loaded.anchor.prompts)
    # The rule itself, on made-up numbers of cells like these; all on one machine but the oracle.
    fields = [c for c in schema.CELL_COORDS if c in Cell.__dataclass_fields__ and c != "anchor"]
    made = [{n: getattr(c, n) for n in fields} | {"hardware": c.device, "noise": 0.01} for c in cells]
    made = [{n: v for n, v in m.items() if n in (*schema.CELL_COORDS, "noise")} for m in made]
    shards = synthetic_shards(made, n_prompts=2, n_positions=4, vocab=30, decode=False).shards
    ds = schema.combine(shards)
    rungs = floors.ladder(ds)
    reference = str(shards[1]["cell"].values[0])
    assert ds["precision"].sel(cell=reference) == "bf16"
    without = set()
    for shard in (s for i, s in enumerate(shards) if i != 1):
        candidate = str(shard["cell"].values[0])
        if floors.floor_for(ds, reference, candidate, rungs=rungs) is None:
            without.add(axis_name(differs_in(ds.sel(cell=reference), ds.sel(cell=candidate))))
    assert without == NO_FLOOR.get(path.stem, set())


@pytest.mark.parametrize("name", MODELS)
def test_the_grids_of_the_benchmark(name: str) -> None:
    path = paths.PARAMS / f"{name}.yml"
    defaults = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"]
    assert "thinking" in defaults  # said, not left to a default
    assert (defaults["prompts"], defaults["max_new_tokens"]) == ("core-61", 64)
    loaded = load_grid(path)
    have = {(c.precision, c.batch_size, c.composition, c.attention) for c in loaded.cells}
    for precision in ("bf16", "fp16", "w8a8"):
        assert {(precision, b, 0, "sdpa") for b in (1, 8, 32)} <= have
    assert {("bf16", 1, 0, "eager"), ("bf16", 8, 1, "sdpa"), ("bf16", 32, 1, "sdpa")} <= have
    assert loaded.anchor.precision == "fp32"
    assert loaded.oracle is not None
    assert (loaded.oracle.precision, loaded.oracle.device) == ("fp32", "cpu")
    # One shape for all models, so what the first one's rows have, theirs have too.
    first, own = load_grid("params/qwen3-8b.yml"), loaded.anchor
    assert tuple(dataclasses.replace(c, model=own.model, thinking=own.thinking) for c in first.cells) == loaded.cells


def test_other_models_of_one_file_keep_their_own_outcome() -> None:
    path = paths.PARAMS / "deepseek.yml"
    one, two = load_grid(path), load_grid(path, model="deepseek-ai/DeepSeek-V2-Lite-Chat")
    assert {c.model for c in (two.anchor, *two.cells, two.oracle)} == {"deepseek-ai/DeepSeek-V2-Lite-Chat"}  # type: ignore[union-attr]
    assert one.name == "deepseek"
    assert two.name == "deepseek.deepseek-v2-lite-chat"
    assert grid.status_path(one) != grid.status_path(two)


def test_a_dry_run_on_the_cpu_names_every_cell(tmp_path: Path) -> None:
    command = ["grid", "params/qwen3-8b.yml", "--dry-run", "--json", "--outputs", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--set", "max_new_tokens=8", "--set", "revision=1234"])
    assert done.exit_code == 0
    rows = json.loads(done.stdout)
    assert len(rows) == len({r["label"] for r in rows}) == 16
    assert not any(r["collected"] or r["missing"] for r in rows)
    assert [r["role"] for r in rows][:2] == ["anchor", "reference"]
    assert rows[-1]["role"] == "oracle"
    assert all(r["label"].startswith("qwen3-8b.") for r in rows)
    plain = CliRunner().invoke(app, command)
    assert not {r["label"] for r in rows} & {r["label"] for r in json.loads(plain.stdout)}  # other numbers


def test_a_dry_run_for_a_device_that_is_not_here() -> None:
    command = ["grid", "params/qwen3-8b.yml", "--device", "npu", "--dry-run"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert done.stdout.count(" npu ") == 15
    assert "oracle    cpu" in done.stdout
    assert "have no labels yet: device 'npu' needs torch_npu" in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("max_new_tokens", "--set takes name=value, got 'max_new_tokens'"),
        ("max_new_token=8", "unknown parameter 'max_new_token'. Did you mean 'max_new_tokens'"),
        ("max_new_tokens=many", "max_new_tokens must be int, got 'many'"),
        ("deterministic=1", "deterministic must be bool, got 1"),
    ],
)
def test_a_bad_override(given: str, message: str) -> None:
    with pytest.raises(RuitongError) as e:
        from_text([given])
    assert message in str(e.value)


def test_overrides_have_the_types_of_a_cell() -> None:
    found = from_text(["revision=1234", "batch_size=4", "thinking=true", "max_memory=0=40GiB,cpu=60GiB"])
    assert found == {"revision": "1234", "batch_size": 4, "thinking": True, "max_memory": "0=40GiB,cpu=60GiB"}


def test_an_override_that_makes_two_cells_one() -> None:
    with pytest.raises(RuitongError, match="is the same as"):
        load_grid("params/qwen3-8b.yml", batch_size=8, composition=0)
