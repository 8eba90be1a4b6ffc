"""Gates: the shipped items, the shard's option logprobs, the table of answers, and its bounds."""

import importlib.util
import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import yaml
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ruitong_lib import RefusedError, RuitongError, paths, schema
from ruitong_lib.cell import Cell
from ruitong_lib.cli import app
from ruitong_lib.collect.forward import Anchor
from ruitong_lib.collect.transformers import collect, with_options
from ruitong_lib.measure import answers, gates, shares
from ruitong_lib.measure.gates import answer_table, gate_table
from ruitong_lib.prompts import Prompt, load_prompts, option_ids, render

ITEMS = load_prompts("gates").prompts


class TestItems:
    def test_the_file_is_what_its_generator_writes(self):
        path = paths.PROMPTS / "generate_gates.py"
        spec = importlib.util.spec_from_file_location("generate_gates", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert (paths.PROMPTS / "gates.yml").read_text(encoding="utf-8") == module.text()

    def test_enough_and_varied(self):
        with_options = [i for i in ITEMS if i.options]
        assert len(ITEMS) >= 300
        assert len(with_options) >= 300  # the constrained form needs as many for a verdict
        assert len({i.id for i in ITEMS}) == len({i.text for i in ITEMS}) == len(ITEMS)
        assert {i.language for i in ITEMS} == {"en", "zh"}
        assert {i.parser for i in ITEMS} == set(answers.PARSERS)
        count = Counter(i.gate for i in ITEMS)
        assert set(count) == {"classification", "choice", "truth", "numeric", "extraction", "code"}
        assert min(count.values()) >= 25
        assert all(len(i.text) < 400 for i in ITEMS)
        for gate in ("choice", "truth"):  # always saying one thing gains little
            keys = Counter((i.language == "zh" and gate == "truth", i.key) for i in ITEMS if i.gate == gate)
            assert max(keys.values()) < 0.65 * sum(n for k, n in keys.items() if k[0] == max(keys, key=keys.get)[0])

    @pytest.mark.parametrize("item", ITEMS, ids=lambda i: i.id)
    def test_each_item_can_be_answered(self, item):
        answers.check(item)
        key = answers.key_answer(item)
        said = {
            "choice": f"The answer is ({item.key}).",
            "label": f"{item.key}。" if item.language == "zh" else f"Answer: {item.key.capitalize()}.",
            "number": f"The answer is {item.key}.",
            "pattern": f"It says {item.key} there.",
            "exact": f'"{item.key}"',
            "json": f"```json\n{item.key}\n```",
            "python": f"```python\ndef {item.key}:\n    return 0\n```",
        }[item.parser]
        assert answers.parse(said, item) == key
        if item.gate in {"choice", "extraction"}:
            assert item.parser == "json" or item.key in item.text
        assert answers.parse("I do not know.", item) in ({"i do not know"} if item.parser == "exact" else {None})

    def test_lettered_options_stand_in_the_text_and_differ(self):
        for item in (i for i in ITEMS if i.gate == "choice"):
            lines = re.findall(r"^([A-D])\. (.+)$", item.text, re.M)
            assert [letter for letter, _ in lines] == list("ABCD")
            assert len({content for _, content in lines}) == 4

    def test_subsets(self):
        few, fewer = load_prompts("gates-60").prompts, load_prompts("gates-12").prompts
        assert (len(few), len(fewer)) == (60, 12)
        assert len({i.gate for i in few}) == len({i.gate for i in fewer}) == 6
        assert {i.language for i in few} == {"en", "zh"}

    def test_the_hash_holds_options_and_no_key(self, tmp_path):
        def sha(item: str) -> str:
            path = tmp_path / "x.yml"
            path.write_text(f"prompts: [{{id: a, text: x, gate: g, parser: label, {item}}}]")
            return load_prompts(str(path)).sha256

        assert sha("options: ['a', 'b'], key: a") == sha("options: ['a', 'b'], key: b")
        assert sha("options: ['a', 'b']") != sha("options: ['a', 'c']")

    @pytest.mark.parametrize(
        ("item", "message"),
        [
            ("options: [yes, no]", "options must be a list of texts (quote yes, no and numbers), got [True, False]"),
            ("options: [a]", "options must be two or more different texts"),
            ("options: [a, a]", "options must be two or more different texts"),
            ("options: ab", "options must be a list of texts"),
            ("tolerance: -1", "tolerance must be a number from 0, got -1"),
            ("tolerance: '1'", "tolerance must be a number from 0, got '1'"),
            ("tolerance: .nan", "tolerance must be a number from 0, got nan"),
        ],
    )
    def test_bad_facts(self, tmp_path, item, message):
        path = tmp_path / "x.yml"
        path.write_text(f"prompts: [{{id: a, text: x, {item}}}]")
        with pytest.raises(RuitongError, match=re.escape(message)):
            load_prompts(str(path))

    def test_published_prompts_have_good_facts_and_no_text(self):
        document = yaml.safe_load((paths.PARAMS / "corpora.yml").read_text(encoding="utf-8"))
        known = {sha for members in document["categories"].values() for sha in members}
        assert set(document["gates"]) <= known
        for item in gates._published():
            answers.check(item)
            assert item.text == ""


@pytest.fixture(scope="module")
def shards(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[xr.Dataset]:
    """An anchor in fp32 and a cell in bf16 that replays it."""
    more: dict[str, Any] = {"model": str(tiny_folder), "prompts": "gates-12", "max_new_tokens": 4, "threads": 1}
    anchor = collect(Cell(precision="fp32", scoring="both", **more))
    path = schema.save(anchor, tmp_path_factory.mktemp("gates") / f"{anchor['cell'].values[0]}.nc")
    return [anchor, collect(Cell(precision="bf16", scoring="both", anchor=str(path), **more))]


class TestCollector:
    def test_each_option_has_its_exact_logprob(self, tiny_folder, shards):
        prompts = load_prompts("gates-12").prompts
        model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
        ids = option_ids(prompts, tokenizer)
        found = gates.option_logprobs(shards[0])
        assert set(found) == set(ids) == {p.id for p in prompts if p.options}
        for p, prompt_ids in zip(prompts, render(prompts, tokenizer), strict=True):
            if not p.options:
                continue
            with torch.inference_mode():
                lp = model(input_ids=torch.tensor([prompt_ids])).logits[0, -1].double().log_softmax(-1)
            assert set(found[p.id]) == set(p.options)
            for option, value in found[p.id].items():
                i = ids[p.id][option]
                assert (
                    i
                    == tokenizer.encode(tokenizer.decode(prompt_ids) + option, add_special_tokens=False)[
                        len(prompt_ids)
                    ]
                )
                assert value == pytest.approx(float(lp[i]), abs=1e-4)

    def test_every_cell_scores_the_same_ids(self, shards):
        a, b = shards
        np.testing.assert_array_equal(a["anchor_token_id"].values, b["anchor_token_id"].values)
        assert schema.provenance(a)["anchor_sha256"] == schema.provenance(b)["anchor_sha256"]
        assert schema.provenance(a)["options"] == schema.provenance(b)["options"]
        top = a["top_token_id"].sel(scoring="decode").values[0]
        np.testing.assert_array_equal(a["anchor_token_id"].values[0][:, 1:4], top[:, 1:4])  # position 0 alone changes
        np.testing.assert_array_equal(a["anchor_token_id"].values[0][:, 0, 0], top[:, 0, 0])

    def test_the_gate_table_of_real_shards(self, shards, tmp_path):
        for s in shards:  # as two files, with no model
            schema.save(s, tmp_path / f"{s['precision'].values[0]}.nc")
        a, b = (schema.load(tmp_path / f"{p}.nc") for p in ("fp32", "bf16"))
        table = answer_table(a, b)
        assert Counter(table["form"]) == {
            "free": 12,
            "constrained": sum(bool(i.options) for i in load_prompts("gates-12").prompts),
        }
        assert (table["reference_margin"][table["form"] == "constrained"] >= 0).all()
        same = gate_table(a, a)
        assert {r["changed"] for r in same} == {0}

    def test_options_take_the_places_of_the_least_likely(self):
        top = np.arange(10, 16, dtype=np.int32).reshape(1, 1, 6).repeat(2, 1)
        anchor = Anchor("a", np.zeros((1, 2), np.int32), top, np.array([2]))
        ids = with_options(anchor, ["p"], {"p": {"x": 13, "y": 1, "z": 2}}).top_token_id
        assert ids.tolist() == [[[10, 11, 12, 13, 1, 2], [10, 11, 12, 13, 14, 15]]]
        assert top[0, 0].tolist() == [10, 11, 12, 13, 14, 15]  # the given one is left alone
        ids = with_options(anchor, ["p"], {"p": {"a": 15, "b": 10, "c": 1, "d": 2, "e": 3}}).top_token_id
        assert ids[0, 0].tolist() == [10, 11, 1, 2, 3, 15]
        assert with_options(anchor, ["q"], {}).sha256 == anchor.sha256

    def test_too_many_options_are_refused_before_the_model(self, tmp_path):
        path = tmp_path / "x.yml"
        path.write_text("prompts: [{id: a, text: x, gate: g, parser: label, options: ['1', '2', '3']}]")
        with pytest.raises(RuitongError, match=r"'a' has 3 options, which need top_k=4 or more: .* got top_k=3"):
            collect(Cell(model="no-such-model", prompts=str(path), scoring="both", top_k=3))

    def test_options_that_begin_alike_have_no_constrained_form(self, tiny_folder):
        tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
        items = [
            Prompt("a", "", "en", "x", options=("yes", "no")),
            Prompt("b", "", "en", "x", options=("1234", "1235")),
            Prompt("c", "", "en", "x"),
        ]
        assert set(option_ids(items, tokenizer)) == {"a"}
        plain = AutoTokenizer.from_pretrained(tiny_folder)
        plain.chat_template = None
        assert option_ids(items, plain) == {}  # both follow a space, a token of its own here
        lines = [items[0]._replace(text="x\n")]
        assert option_ids(lines, plain)["a"]["no"] == plain.encode("x\nno")[len(plain.encode("x\n"))]


OPTIONS = {"yes": 7, "no": 8}
SET = [
    *[Prompt(f"t{i}", "truth", "en", f"Is {i} even?", gate="truth", parser="label", options=("yes", "no"),
             key="no" if i % 2 else "yes") for i in range(8)],
    *[Prompt(f"n{i}", "numeric", "en", f"{i} + 1?", gate="numeric", parser="number", key=str(i + 1)) for i in range(4)],
]  # fmt: skip


COUNT = itertools.count()


def shard(
    texts: dict[str, str] | None = None,
    margins: dict[str, float] | None = None,
    *,
    items: list[Prompt] = SET,
    name: str = "a",
    **fields: Any,
) -> xr.Dataset:
    """A shard that answers with its key, but for the given texts and the given lp(yes) − lp(no)."""
    coords = {n: np.zeros(1, t if t != "str" else "U1")[0] for n, t in schema.CELL_COORDS.items()}
    coords |= {"prompts": "made", "precision": "bf16", **fields}
    ds = schema.new_shard(
        coords,
        f"made.{name}.{next(COUNT):08x}",
        {"prompt": [i.id for i in items], "category": [i.gate for i in items], "language": ["en"] * len(items)},
        n_positions=1,
        k=3,
    )
    ds["prompt_sha256"].values[0] = [f"sha-{i.id}" for i in items]
    ds["text"].values[0] = [(texts or {}).get(i.id, i.key) for i in items]
    ds["n_tokens"].values[0], ds["state"].values[0], ds["finish_reason"].values[0] = 1, 0, 0
    ds["token_id"].values[0], ds["position_state"].values[0] = 1, 0
    for row, i in enumerate(items):
        gap = (margins or {}).get(i.id, 1.0 if i.key == "yes" else -1.0)
        ds["anchor_token_id"].values[0, row, 0] = [1, 8, 7]
        ds["anchor_logprob"].values[0, row, 0] = [-0.5, -3 - max(gap, 0), -3 + min(gap, 0)]
    found = {"options": {i.id: OPTIONS for i in items if i.options}, "weights_sha256": "w"}
    ds["provenance"].values[0] = json.dumps(found)
    return ds


class TestAnswers:
    def test_by_hand(self):
        a = shard({"t1": "yes and no", "n0": "1"}, {"t0": 0.25})
        b = shard({"t1": "No.", "n0": "The answer is 2.", "n1": "two"}, {"t0": -0.5, "t2": 4.0})
        t = answer_table(a, b, items=SET).set_index(["form", "prompt"])
        assert len(t) == 12 + 8
        free, constrained = t.loc["free"], t.loc["constrained"]
        assert free.index[free["changed"]].tolist() == ["t1", "n0"]
        assert free.loc["t1", "reference_answer"] is None
        assert free.loc["t1", "candidate_answer"] == "no"
        assert free.loc["n1", ["reference_answer", "candidate_answer"]].tolist() == ["2", "2"]
        assert free.loc["n0", ["reference_correct", "candidate_correct"]].tolist() == [True, False]
        assert free["reference_margin"].isna().all()
        assert constrained.index[constrained["changed"]].tolist() == ["t0"]
        assert constrained.loc["t0", ["reference_answer", "candidate_answer"]].tolist() == ["yes", "no"]
        assert constrained.loc["t0", ["reference_margin", "candidate_margin"]].tolist() == [0.25, 0.5]
        assert constrained["inside_floor"].isna().all()

    def test_inside_the_floor(self):
        a, b = shard({}, {"t0": 0.25, "t2": 0.0}), shard({}, {"t0": -0.7, "t2": 0.3, "t4": 3.0})
        floor = shard({}, {"t0": 1.0}), shard({}, {"t0": 0.75, "t2": 0.9, "t3": -1.0})  # largest change 0.25
        assert gates.margin_limit(*floor) == pytest.approx(0.5)
        t = answer_table(a, b, floor=floor, items=SET).set_index(["form", "prompt"])
        assert t.loc["constrained"].query("inside_floor").index.tolist() == ["t2"]  # the larger of both margins counts
        assert t.loc["free", "inside_floor"].isna().all()

    @pytest.mark.parametrize("options", [("yes", "no"), ("no", "yes")])
    def test_a_tie_goes_to_the_option_that_the_item_lists_first(self, options):
        items = [SET[0]._replace(options=options)]
        t = answer_table(*[shard({}, {"t0": 0.0}, items=items)] * 2, items=items)
        row = t[t["form"] == "constrained"].iloc[0]
        assert (row["reference_answer"], row["reference_margin"]) == (options[0], 0.0)

    def test_a_missing_logprob_leaves_no_constrained_form(self):
        b = shard()
        b["anchor_logprob"].values[0, 0, 0, 1] = np.nan
        t = answer_table(shard(), b, items=SET)
        assert "t0" not in t["prompt"][t["form"] == "constrained"].tolist()
        rows = gate_table(shard(), b, items=SET)
        assert (rows[-1]["form"], rows[-1]["n"], rows[-1]["unscored"]) == ("constrained", 7, 1)
        assert (rows[-2]["gate"], rows[-2]["n"], rows[-2]["unscored"]) == ("truth", 7, 1)

    def test_only_what_was_collected(self):
        a, b = shard(), shard()
        b["state"].values[0, 0] = schema.STATES.index("missing")
        assert set(answer_table(a, b, items=SET)["form"]) == {"constrained"}
        b["provenance"].values[0] = json.dumps({"weights_sha256": "w"})
        with pytest.raises(RefusedError, match=r"no gate can be read .*neither a decode .*nor a replay"):
            answer_table(a, b, items=SET)

    def test_cut_at_the_limit(self):
        a, b = shard({"n0": "The total is 1"}), shard({"n0": "The total is 1"})
        b["finish_reason"].values[0, 0] = schema.FINISH.index("length")
        t = answer_table(a, b, items=SET).set_index(["form", "prompt"])
        assert t.loc[("free", "n0"), ["reference_answer", "candidate_answer"]].tolist() == ["1", None]

    def test_blocks_of_prompts(self):
        keep = [1, 9]
        t = answer_table(shard().isel(prompt=keep), shard().isel(prompt=keep), items=SET)
        assert t["prompt"].tolist() == ["t1", "n1", "t1"]


class TestRefusals:
    def test_other_prompts_and_weights(self):
        with pytest.raises(RefusedError, match="different prompts"):
            answer_table(shard(), shard(items=SET[:5]), items=SET)
        other = shard()
        other["prompt_sha256"].values[0, 0] = "else"
        with pytest.raises(RefusedError, match="different prompt ids for 1 of 12 prompts"):
            answer_table(shard(), other, items=SET)
        other = shard()
        other["state"].values[0, 0, 3] = schema.STATES.index("nan_logits")
        with pytest.raises(RefusedError, match="in state nan_logits for 1 of 12"):
            answer_table(shard(), other, items=SET)

    def test_other_token_limits(self):
        a, b = shard(max_new_tokens=24), shard(max_new_tokens=8)
        with pytest.raises(RefusedError, match="decoded up to 24 and 8 tokens, so their texts are cut at other places"):
            answer_table(a, b, items=SET)
        assert set(answer_table(a, b, items=SET, forms=("constrained",))["form"]) == {"constrained"}
        assert {r["form"] for r in gate_table(a, b, (b, b), items=SET, forms=("constrained",))} == {"constrained"}

    def with_set(self, spec: str, sha: str) -> xr.Dataset:
        ds = shard()
        found = {**schema.provenance(ds), "cell": {"prompts": spec}, "prompts": {"sha256": sha}}
        ds["provenance"].values[0] = json.dumps(found)
        return ds

    def test_the_prompt_set_is_found_and_checked(self, tmp_path):
        path = tmp_path / "mine.yml"
        rows = [{k: list(v) if isinstance(v, tuple) else v for k, v in i._asdict().items() if v} for i in SET]
        path.write_text(yaml.safe_dump({"prompts": rows}))
        ds = self.with_set(str(path), load_prompts(str(path)).sha256)
        assert gates.gate_items(ds) == tuple(SET)
        assert len(answer_table(ds, ds)) == 20
        elsewhere = self.with_set("mine.yml", load_prompts(str(path)).sha256)  # a shard keeps no folder
        with pytest.raises(RefusedError, match=r"'mine\.yml' of .* is not here; give its file"):
            gates.gate_items(elsewhere)
        assert gates.gate_items(elsewhere, str(path)) == tuple(SET)
        with pytest.raises(RefusedError, match=r"has SHA-256 .* here, made\.a\.[0-9a-f]{8} was collected with abc…"):
            gates.gate_items(self.with_set(str(path), "abc"))
        with pytest.raises(RefusedError, match=r"set .gates-61. of .* is not here; give its file .*Did you mean"):
            gates.gate_items(self.with_set("gates-61", "abc"))
        with pytest.raises(RefusedError, match="does not say which prompt set it ran"):
            gates.gate_items(shard())
        with pytest.raises(RefusedError, match="ran 'made', which has no gate items; collect prompts='gates'"):
            gates.gate_items(self.with_set("core-16", load_prompts("core-16").sha256))
        rows[0]["parser"] = "lable"
        path.write_text(yaml.safe_dump({"prompts": rows}))
        with pytest.raises(RuitongError, match="item 't0': parser must be one of"):
            gates.gate_items(self.with_set(str(path), load_prompts(str(path)).sha256))

    def test_a_floor_over_other_items(self):
        few = shard(items=SET[:9])
        with pytest.raises(RefusedError, match=r"the floor answered 9 items in the free form and lacks 3 of .*12"):
            gate_table(shard(), shard(), (few, few), items=SET)

    def test_an_aggregate(self):
        both = xr.concat(
            [shard(), shard(name="b")], dim="cell", data_vars="all", coords="minimal", compat="override", join="outer"
        )
        with pytest.raises(RefusedError, match="holds 2 cells"):
            answer_table(both, shard(), items=SET)


class TestBounds:
    @pytest.mark.parametrize(("k", "n"), [(0, 1), (0, 61), (0, 300), (8, 300), (9, 300), (3, 10), (10, 10), (59, 60)])
    def test_against_scipy(self, k, n):
        # a two-sided 90 % interval has one-sided 95 % ends
        exact = stats.binomtest(k, n).proportion_ci(0.90, method="exact")
        assert shares.upper_bound(k, n) == pytest.approx(exact.high, abs=1e-12)
        assert shares.lower_bound(k, n) == pytest.approx(exact.low, abs=1e-12)

    def test_by_hand(self):
        for n in (1, 22, 61, 300):
            assert shares.upper_bound(0, n) == pytest.approx(1 - 0.05 ** (1 / n))
            assert shares.lower_bound(n, n) == pytest.approx(0.05 ** (1 / n))
        assert f"{shares.upper_bound(0, 61):.1%}" == "4.8%"
        assert f"{shares.upper_bound(0, 300):.1%}" == "1.0%"
        assert shares.upper_bound(8, 300) < 0.05 < shares.upper_bound(9, 300)
        assert shares.upper_bound(5, 5) == 1.0
        assert shares.lower_bound(0, 5) == 0.0
        assert math.isnan(shares.upper_bound(0, 0))
        assert math.isnan(shares.lower_bound(0, 0))

    def test_items_needed(self):
        assert shares.items_needed(0, 61, 0.05, least=300) == 300
        assert shares.items_needed(0, 10, 0.05, least=1) == 59
        n = shares.items_needed(9, 300, 0.05, least=300)
        assert n > 300
        assert shares.upper_bound(math.ceil(0.03 * n), n) < 0.05
        assert shares.items_needed(3, 60, 0.05, least=300) is None
        assert shares.items_needed(499, 10_000, 0.05, least=300, most=1000) is None


def big(n: int, changed: int, start: int = 0) -> tuple[list[Prompt], xr.Dataset, xr.Dataset]:
    """n numeric items; the candidate answers `changed` of them, from `start`, with another number."""
    items = [Prompt(f"n{i:04}", "numeric", "en", "x", gate="numeric", parser="number", key="1") for i in range(n)]
    other = {i.id: "2" for i in items[start : start + changed]}
    return items, shard(items=items), shard(other, items=items, name="b")


def free(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(r for r in rows if r["gate"] == "all" and r["form"] == "free")


class TestTable:
    def test_counts_by_hand(self):
        a = shard({"t1": "maybe", "t3": "who knows", "n3": "9"})
        b = shard({"t1": "no", "t3": "perhaps", "t5": "yes", "n0": "7", "n3": "4"})
        floor = shard(), shard({"n0": "8", "n2": "nothing"}, batch_size=8)
        rows = {(r["form"], r["gate"]): r for r in gate_table(a, b, floor, items=SET)}
        assert list(rows) == [
            ("free", "truth"),
            ("free", "numeric"),
            ("free", "all"),
            ("constrained", "truth"),
            ("constrained", "all"),
        ]
        r = rows[("free", "all")]
        assert (r["n"], r["silent"]) == (11, 1)  # t3 is silent on both sides; that the floor answers it shows nothing
        assert (r["changed"], r["floor_changed"], r["beyond"]) == (4, 2, 3)  # t1 t5 n0 n3; n0 n2; t1 t5 n3
        assert r["difference"] == pytest.approx(2 / 11)
        assert (r["unparseable_reference"], r["unparseable_candidate"]) == (1, 0)
        assert (r["lost"], r["gained"]) == (2, 2)  # t5 n0; t1 n3
        assert r["p_direction"] == stats.binomtest(2, 4).pvalue
        assert r["beyond_bound"] == shares.upper_bound(3, 11)
        assert r["floor_bound"] == shares.upper_bound(2, 11)
        assert r["floor"] == "batch size"
        assert rows[("free", "numeric")]["changed"] == 2
        alone = free(gate_table(a, b, items=SET))
        assert (alone["n"], alone["silent"], alone["changed"], alone["floor_changed"]) == (11, 1, 4, None)
        assert alone["bound"] == shares.upper_bound(4, 11)

    @pytest.mark.parametrize(
        ("n", "changed", "verdict", "needed"),
        [
            (300, 0, "EQUIVALENT", None),
            (300, 8, "EQUIVALENT", None),
            (61, 0, "INCONCLUSIVE", 300),
            (299, 0, "INCONCLUSIVE", 300),
            (300, 150, "INCONCLUSIVE", None),
        ],
    )
    def test_without_a_floor(self, n, changed, verdict, needed):
        items, a, b = big(n, changed)
        r = free(gate_table(a, b, items=items))
        assert (r["verdict"], r["n_needed"]) == (verdict, needed)
        assert ("no floor was given" in r["reason"]) == (
            changed == 150
        )  # which is no DIFFERENT: a floor may explain it

    def test_nine_of_300_need_more(self):
        items, a, b = big(300, 9)
        r = free(gate_table(a, b, items=items))
        assert r["verdict"] == "INCONCLUSIVE"
        assert r["n_needed"] > 300
        assert f"{r['n_needed']} items would do" in r["reason"]

    @pytest.mark.parametrize(
        ("changed", "floor_changed", "start", "verdict"),
        [
            (60, 0, 0, "DIFFERENT"),
            (60, 60, 0, "EQUIVALENT"),  # the floor changed the very same items
            (60, 60, 200, "INCONCLUSIVE"),  # as many others: no evidence either way
            (60, 20, 200, "DIFFERENT"),
            (24, 0, 0, "INCONCLUSIVE"),
            (0, 60, 0, "EQUIVALENT"),
        ],
    )
    def test_the_floor_is_subtracted_item_by_item(self, changed, floor_changed, start, verdict):
        items, a, b = big(300, changed)
        _, *floor = big(300, floor_changed, start)
        r = free(gate_table(a, b, tuple(floor), items=items))
        assert r["verdict"] == verdict
        assert r["difference"] == pytest.approx((changed - floor_changed) / 300)

    @pytest.mark.parametrize(
        ("n", "changed", "beyond", "floor_only", "verdict"),
        [
            (400, 108, 8, 100, "INCONCLUSIVE"),  # few beyond a floor that explains almost anything
            (354, 180, 5, 170, "INCONCLUSIVE"),
            (300, 0, 0, 60, "EQUIVALENT"),  # nothing changed at all
            (354, 6, 4, 3, "EQUIVALENT"),
        ],
    )
    def test_a_noisy_floor_excuses_nothing(self, n, changed, beyond, floor_only, verdict):
        found = shares.decide(n, changed, beyond, floor_only)
        assert found["verdict"] == verdict
        assert ("noisy by itself" in found["reason"]) == (verdict == "INCONCLUSIVE")

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_pair_is_not_its_own_floor(self, order):
        items, a, b = big(300, 200)
        b = b.assign_coords(cell=["other"])
        with pytest.raises(RefusedError, match="the floor is this pair itself"):
            gate_table(a, b, (a, b)[::order], items=items)

    def test_the_price_of_a_small_excess(self):
        """A pair whose excess is exactly the margin is called equivalent in at most 5 % of samples."""
        rng = np.random.default_rng(0)
        drawn = rng.binomial(300, 0.05, size=4000)
        called = np.mean([shares.upper_bound(int(k), 300) < 0.05 for k in drawn])
        assert called <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 4000)

    def test_silence_is_no_equality(self):
        items, a, b = big(400, 0)
        for s in (a, b):
            s["text"].values[0, :200] = "I cannot say"
        r = free(gate_table(a, b, items=items))
        assert (r["n"], r["silent"], r["verdict"], r["n_needed"]) == (200, 200, "INCONCLUSIVE", 300)
        a["text"].values[0], b["text"].values[0] = "I cannot say", "who knows"
        r = free(gate_table(a, b, items=items))
        assert (r["n"], r["silent"], r["verdict"], r["reason"]) == (0, 400, "INCONCLUSIVE", "no answers at all")
        assert math.isnan(r["bound"])

    def test_a_key_is_not_needed(self):
        items, a, b = big(300, 60)
        items = [i._replace(key="") for i in items]
        r = free(gate_table(a, b, items=items))
        assert (r["changed"], r["lost"], r["gained"]) == (60, 0, 0)
        assert math.isnan(r["p_direction"])


class TestCommand:
    def run(self, tmp_path: Path, changed: int, *options: str, n: int = 300) -> tuple[int, str]:
        items, a, b = big(n, changed)
        path = tmp_path / "set.yml"
        rows = [{"id": i.id, "text": "x", "gate": "numeric", "parser": "number", "key": "1"} for i in items]
        path.write_text(yaml.safe_dump({"prompts": rows}))
        for name, s in (("a", a), ("b", b)):
            found = schema.provenance(s) | {
                "cell": {"prompts": "set.yml"},
                "prompts": {"sha256": load_prompts(str(path)).sha256},
            }
            s["provenance"].values[0] = json.dumps(found)
            s["top_logprob"].values[:] = s["logprob"].values[:] = -1.0
            schema.save(s, tmp_path / f"{name}.nc")
        files = [str(tmp_path / f"{x}.nc") for x in "ab"]
        floor = ["--floor", files[0], files[0]] if "--floor" in options else []
        result = CliRunner().invoke(
            app, ["gates", *files, *floor, "--prompts", str(path), *[o for o in options if o != "--floor"]]
        )
        return result.exit_code, result.output

    def test_exit_codes_and_text(self, tmp_path):
        code, out = self.run(tmp_path, 3)
        assert code == 0
        assert "free: EQUIVALENT: 3 of 300 changed: at most 2.6 %, inside the margin of 5 %" in out
        assert self.run(tmp_path, 0, n=20)[0] == 3
        assert self.run(tmp_path, 0, "--form", "free")[0] == 0
        code, out = self.run(tmp_path, 100, "--floor", "--answers")
        assert code == 1
        assert "DIFFERENT" in out
        assert out.count("1 → 2") == 100

    def test_json(self, tmp_path):
        code, out = self.run(tmp_path, 3, "--json", "--answers")
        found = json.loads(out)
        assert code == 0
        assert [r["gate"] for r in found["rows"]] == ["numeric", "all"]
        assert found["rows"][-1]["difference"] is None
        assert [(r["prompt"], r["candidate_answer"], r["reference_margin"]) for r in found["changed"]] == [
            ("n0000", "2", None), ("n0001", "2", None), ("n0002", "2", None),
        ]  # fmt: skip
