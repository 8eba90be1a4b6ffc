"""The table as a release: every row named, reasoned and cited by data; what changed between two."""

import copy
import json
import shutil

import numpy as np
import pytest
import yaml

from ruitong_lib import schema
from ruitong_lib.benchmark import load_benchmark
from ruitong_lib.errors import RuitongError
from ruitong_lib.report import numbers, release
from ruitong_lib.testing import synthetic_shards


@pytest.fixture
def document(release_folder):
    return release.read(release_folder)


def collected(document):
    return [r for r in document["rows"] if r["status"] == "collected"]


class TestRows:
    def test_each_measured_row_has_all_that_a_reader_needs(self, document):
        rows = collected(document)
        assert {r["axis"] for r in rows} == {"attention", "batch size", "precision"}
        for r in rows:
            assert r["metrics"]["kl"]["n"] == r["n_positions"]
            assert r["floor"]["mean_kl"] > 0
            assert r["ratio"]["lo"] < r["ratio"]["value"] < r["ratio"]["hi"]
            assert r["verdict"]["verdict"] in {"EQUIVALENT", "WITHIN MARGIN", "DIFFERENT", "INCONCLUSIVE"}
            assert r["run"] == "ruitong grid params/test.yml"
            assert set(r["provenance"]) == {"reference", "candidate"}

    def test_w8a8_is_different_and_the_floors_of_one_another_are_not(self, document):
        verdicts = {r["axis"]: r["verdict"]["verdict"] for r in collected(document)}
        assert verdicts["precision"] == "DIFFERENT"
        assert verdicts["attention"] != "DIFFERENT"

    def test_planned_rows_stand_with_the_line_that_measures_them(self, document):
        planned = [r for r in document["rows"] if r["status"] == "planned"]
        assert "ruitong grid params/large.yml --device npu" in {r["run"] for r in planned}
        assert "a.cell" in {r["candidate"] for r in planned if "candidate" in r}

    def test_each_row_is_in_the_markdown_and_the_csv(self, document, release_folder):
        text = (release_folder / "delta_table.md").read_text(encoding="utf-8")
        for r in document["rows"]:
            assert r["run"] in text
        csv = (release_folder / "delta_table.csv").read_text(encoding="utf-8")
        assert len(csv.splitlines()) == len(document["rows"]) + 1

    def test_the_same_file_makes_the_same_bytes(self, release_file, release_folder, tmp_path, benchmark):
        again = release.write(release.build(release_file, benchmark), tmp_path)
        for path in release_folder.iterdir():
            assert (again / path.name).read_bytes() == path.read_bytes()

    def test_two_rows_of_one_name_are_refused(self, release_file, benchmark):
        twice = benchmark | {"planned": benchmark["planned"] * 2}
        with pytest.raises(RuitongError, match="one name"):
            release.build(release_file, twice)


class TestHashes:
    def test_padding_of_the_aggregate_changes_no_hash(self, pad_positions):
        shard = synthetic_shards(n_prompts=4).shards[0]
        label = str(shard["cell"].values[0])
        assert release.shard_facts(pad_positions(shard, 5), label) == release.shard_facts(shard, label)

    def test_one_changed_logprob_does(self):
        shard = synthetic_shards(n_prompts=4).shards[0]
        label = str(shard["cell"].values[0])
        before = release.shard_facts(shard, label)["arrays_sha256"]
        values = shard["logprob"].values
        values[0, 1, 0, 0] = np.nextafter(values[0, 1, 0, 0], np.float32(-1))
        assert release.shard_facts(shard, label)["arrays_sha256"] != before


class TestDiff:
    def test_nothing_changed(self, document):
        assert release.diff(document, document) == []

    def test_other_data_are_named_as_the_cause(self, document):
        new = copy.deepcopy(document)
        row = collected(new)[0]
        row["metrics"]["kl"]["value"] *= 2
        new["shards"][row["candidate"]]["arrays_sha256"] = "0" * 64
        (line,) = release.diff(document, new)
        assert row["id"] in line
        assert "other data in candidate" in line
        assert "KL" in line

    def test_a_moved_margin_and_a_new_method_are_named(self, document):
        new = copy.deepcopy(document) | {"method": "9"}
        new["margins"]["kl_ratio"]["same_class"]["value"] = 3
        collected(new)[0]["verdict"]["verdict"] = "DIFFERENT"
        (line,) = release.diff(document, new)
        assert f"METHOD {document['method']} → 9" in line
        assert "gates.yml" in line

    def test_added_and_removed_rows(self, document):
        new = copy.deepcopy(document)
        gone = new["rows"].pop(0)["id"]
        new["rows"][-1]["id"] = "fresh"
        lines = release.diff(document, new)
        assert any(x.startswith("removed") and gone in x for x in lines)
        assert any(x.startswith("added") and "fresh" in x for x in lines)


def test_a_release_that_is_not_there_names_those_that_are(release_folder):
    with pytest.raises(RuitongError, match=release_folder.name):
        release.read(release_folder.parent / "1999-01-01")


def test_groups_of_one_file_come_back_apart(tmp_path):
    first, second = (schema.combine(synthetic_shards(n_prompts=n, seed=n).shards) for n in (3, 5))
    path = schema.save(first, tmp_path / "a.nc", groups={"other": second})
    assert json.loads(schema.load(path).attrs["groups"]) == ["other"]
    assert schema.load(path).drop_attrs().identical(first.drop_attrs())
    assert schema.load(path, group="other").drop_attrs().identical(second.drop_attrs())


class TestBenchmark:
    def test_ours_is_readable_and_each_planned_row_names_a_grid_that_is_there(self):
        from ruitong_lib import paths

        found = load_benchmark()
        for row in found["planned"]:
            assert row["run"].startswith("ruitong grid params/")
            assert (paths.ROOT / row["run"].split()[2]).is_file()

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("grid: []", "unknown key 'grid'"),
            ("grids: a", "must be list"),
            ("planned: [{model: a}]", "lacks hardware"),
            ("- a", "mapping"),
            ("a: [", "cannot read"),
        ],
    )
    def test_a_bad_one_is_refused(self, tmp_path, text, match):
        path = tmp_path / "b.yml"
        path.write_text(text)
        with pytest.raises(RuitongError, match=match):
            load_benchmark(path)


class TestCommand:
    """The verbs, from a data file to pages: what a person types."""

    @pytest.fixture
    def run(self, release_file, tmp_path, benchmark, monkeypatch):
        from typer.testing import CliRunner

        from ruitong_lib.cli import app

        (tmp_path / "benchmark.yml").write_text(yaml.safe_dump(benchmark, allow_unicode=True), encoding="utf-8")
        shutil.copyfile(release_file, tmp_path / "ruitong.nc")
        more = ["--outputs", str(tmp_path), "--benchmark", str(tmp_path / "benchmark.yml")]
        return lambda *verb: CliRunner().invoke(app, [*verb, *more], catch_exceptions=False)

    def test_table_then_site_then_diff(self, run, tmp_path, benchmark):
        made = run("table")
        assert made.exit_code == 0
        assert benchmark["planned"][0]["change"] in made.stdout
        assert run("site").exit_code == 0
        assert (tmp_path / "site" / "zh.html").is_file()
        assert run("table", "--diff", benchmark["version"]).stdout.strip() == "nothing changed"

    def test_results_of_other_commands_become_part_of_the_release(self, run, tmp_path, benchmark):
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "other.json").write_text('{"a": {"b": 0.125}}')
        run("table")
        assert numbers.results(tmp_path / "tables" / benchmark["version"])["other/a/b"] == 0.125

    def test_an_aggregate_without_any_grid_says_what_is_missing(self, run):
        with pytest.raises(RuitongError, match="no grid of the benchmark is collected"):
            run("aggregate")
