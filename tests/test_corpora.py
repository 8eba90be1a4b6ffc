import copy
import functools
import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.collect import corpora
from ruitong_lib.errors import RefusedError, RuitongError
from ruitong_lib.measure import configuration, published
from ruitong_lib.measure.align import align
from ruitong_lib.measure.compare import compare

DATA = Path(os.environ.get("RUITONG_DATA") or Path(__file__).parents[2] / "shared" / "corpora")
needs_corpora = pytest.mark.skipif(
    not (DATA / "a40_61.json").is_file(),
    reason=f"no published corpora in {DATA}: ruitong fetch corpora, or RUITONG_DATA",
)
GPUS = ("a100_fp16_61", "a100_bf16_61", "a40_61", "rtx6000ada_61", "h100", "mi300x")


@functools.cache
def shard(name: str) -> xr.Dataset:
    return corpora.read(DATA / f"{name}.json")


def document() -> dict[str, Any]:
    """Two prompts, three positions, k = 2, with a string that repeats in its row."""
    entry = {
        "prompt": "one",
        "reproducible_when_warm": True,
        "sampled_tokens": ["a", "b", "c"],
        "top_tokens": [["a", "b"], ["b", "b"], ["c", "a"]],
        "top_logprobs": [[-0.1, -3.0], [-0.25, -1.75], [-0.5, -1.0]],
        "text": "abc",
        "finish_reason": "stop",
    }
    return {
        "label": "mine",
        "model": "tiny",
        "max_tokens": 3,
        "top_k": 2,
        "captured_by": "somebody@their-laptop",
        "total": 2,
        "entries": [entry, {**copy.deepcopy(entry), "prompt": "两", "finish_reason": "length"}],
    }


def write(folder: Path, doc: Any) -> Path:
    path = folder / "mine.json"
    path.write_text(doc if isinstance(doc, str) else json.dumps(doc), encoding="utf-8")
    return path


def test_import_fills_one_schema(tmp_path: Path) -> None:
    ds = corpora.read(write(tmp_path, document()), hardware="Card A", precision="bf16")
    schema.validate(ds)
    again = schema.load(schema.save(ds, tmp_path / "x.nc"))
    assert again.identical(ds)
    decode = ds.isel(cell=0).sel(scoring="decode")
    assert decode["token_text"].values.tolist() == [["a", "b", "c"]] * 2
    assert decode["logprob"].values[0].tolist() == pytest.approx([-0.1, -0.25, -0.5])
    assert (decode["token_id"] == -1).all()
    assert [schema.FINISH[i] for i in decode["finish_reason"].values] == ["eos", "length"]
    assert ds["language"].values.tolist() == ["", "zh"]
    assert (ds["state"].sel(scoring="replay") == schema.STATES.index("missing")).all()
    known = schema.provenance(ds)
    assert known["identity"] == "text"
    assert known["logprob_mode"] == "unknown"
    assert (ds["hardware"].item(), ds["precision"].item(), ds["engine"].item()) == ("Card A", "bf16", "")


def test_whose_computer_it_was_is_kept_nowhere(tmp_path: Path) -> None:
    ds = corpora.read(write(tmp_path, document()))
    path = schema.save(ds, tmp_path / "x.nc")
    assert "captured_by" not in str(ds.to_dict())
    assert b"their-laptop" not in path.read_bytes()
    assert "their-laptop" not in str(schema.load(path).to_dict())


def test_repeated_strings_are_paired_by_order(tmp_path: Path) -> None:
    first = corpora.read(write(tmp_path, document()), hardware="A")
    doc = document()
    for e in doc["entries"]:
        e["top_logprobs"][1] = [-0.5, -1.25]
    second = corpora.read(write(tmp_path, doc), hardware="B")
    pair = align(first, second, scoring="decode")
    assert pair["reference_logprob"].values[0, 1] == pytest.approx([-0.25, -1.75])
    assert pair["candidate_logprob"].values[0, 1] == pytest.approx([-0.5, -1.25])
    assert pair["reference_top_id"].values[0, 1, 0] != pair["reference_top_id"].values[0, 1, 1]
    assert pair["reference_top_id"].values[0, 0, 1] == pair["reference_top_id"].values[0, 1, 0]  # "b", first of its row


def change(path: list[Any], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(doc: dict[str, Any]) -> None:
        at: Any = doc
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(["entries", 0, "top_logprobs"], [[-0.1, -3.0]]), "entry 0: ragged: 3 sampled_tokens, 3 top_tokens, 1"),
        (change(["entries", 1, "top_tokens", 2], ["c"]), "entry 1, position 2: top_tokens has 1 alternatives"),
        (change(["entries", 1, "top_logprobs", 0], [-0.1] * 3), "position 0: top_logprobs has 3 alternatives"),
        (change(["entries", 0, "top_logprobs", 1], [0.4, -1.0]), r"entry 0, position 1: logprob 0.4 is positive"),
        (change(["entries", 1, "prompt"], "one"), "entries 0 and 1 have the same prompt 'one'"),
        (change(["entries", 1, "finish_reason"], "abort"), "finish_reason must be one of stop, length, got 'abort'"),
        (change(["entries", 1, "text"], None), "'text' must be a str, got NoneType"),
        (change(["entries", 0, "top_logprobs", 0], ["x", -1.0]), "top_logprobs must be numbers or null"),
        (change(["entries", 0, "sampled_tokens", 0], 7), "sampled_tokens must be texts, got 7"),
        (change(["total"], 3), "'total' says 3 entries, the file holds 2"),
        (change(["entries"], []), "not a corpus"),
        (change(["model"], None), "'model' must be"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str) -> None:
    doc = document()
    edit(doc)
    with pytest.raises(RuitongError, match=message):
        corpora.read(write(tmp_path, doc))


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    text = json.dumps(document())
    with pytest.raises(RuitongError, match=r"not JSON .*cut short"):
        corpora.read(write(tmp_path, text[: len(text) // 2]))
    with pytest.raises(RuitongError, match="not a corpus"):
        corpora.read(write(tmp_path, "[1, 2]"))
    with pytest.raises(RuitongError, match="cannot read"):
        corpora.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("value", "state"),
    [(-9999.0, "masked"), (-3.4e38, "masked"), (float("-inf"), "masked"), (float("nan"), "nan"), (None, "nan")],
)
def test_sentinels_become_states_never_numbers(tmp_path: Path, value: float | None, state: str) -> None:
    doc = document()
    doc["entries"][0]["top_logprobs"][1][1] = value
    ds = corpora.read(write(tmp_path, doc), hardware="A").isel(cell=0).sel(scoring="decode")
    assert schema.POSITION_STATES[ds["position_state"].values[0, 1]] == state
    assert np.isnan(ds["top_logprob"].values[0, 1]).all()
    other = corpora.read(write(tmp_path, document()), hardware="B")
    pair = align(corpora.read(write(tmp_path, doc), hardware="A"), other, scoring="decode")
    assert pair.attrs["n_not_ok"] == 1
    assert int(pair["valid"].sum()) == 5


def test_an_empty_answer_is_a_named_state(tmp_path: Path) -> None:
    doc = document()
    doc["entries"][0] |= {"sampled_tokens": [], "top_tokens": [], "top_logprobs": [], "text": ""}
    ds = corpora.read(write(tmp_path, doc))
    assert ds["state"].sel(scoring="decode").values.tolist() == [[schema.STATES.index("missing"), 0]]
    with pytest.raises(RefusedError, match="no decode for 1 of 2 prompts"):
        align(ds, corpora.read(write(tmp_path, document()), hardware="B"), scoring="decode")


def test_texts_and_ids_are_not_compared(tmp_path: Path) -> None:
    ds = corpora.read(write(tmp_path, document()))
    ids = ds.assign(provenance=("cell", np.array(["{}"], dtype=object)))
    with pytest.raises(RefusedError, match="by their text alone"):
        align(ds, ids, scoring="decode")


def test_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUITONG_DATA", str(tmp_path))
    with pytest.raises(RuitongError, match=r"corpus must be one of .*Did you mean 'mi300x'"):
        corpora.open_shard("corpus:mi300")
    with pytest.raises(RuitongError, match="ruitong fetch corpora"):
        corpora.open_shard("corpus:mi300x")
    (tmp_path / "mi300x.json").write_text(json.dumps(document()))
    with pytest.raises(RuitongError, match=r"SHA-256 .* the published file has fbdc29e84638"):
        corpora.open_shard("corpus:mi300x")
    with pytest.raises(RuitongError, match="facts must be of"):
        corpora.read(tmp_path / "mi300x.json", hardwear="A")
    path = schema.save(corpora.read(write(tmp_path, document())), tmp_path / "mine.nc")
    assert corpora.open_shard(path).identical(corpora.open_shard(str(tmp_path / "mine.json")))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A web server on this machine: its address, its folder, and what was asked of it."""
    folder, asked = tmp_path / "served", []
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, format: str, *args: Any) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}", folder, asked
        http_server.shutdown()
        thread.join()


def test_fetch_by_address_and_hash(
    server: tuple[str, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, served, asked = server
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("RUITONG_DATA", str(tmp_path / "kept"))
    good, bad = write(served, document()), served / "other.json"
    bad.write_text("{}")
    known = {"sha256": __import__("hashlib").sha256(good.read_bytes()).hexdigest()}
    monkeypatch.setitem(corpora.registry()["files"], "mine", known)
    monkeypatch.setitem(corpora.registry()["files"], "other", known)
    (path,) = corpora.fetch(["mine"], address=address)
    assert path.read_bytes() == good.read_bytes()
    assert corpora.open_shard("corpus:mine")["model"].item() == "tiny"
    corpora.fetch(["mine"], address=address)
    assert len(asked) == 1  # what is there already is kept
    with pytest.raises(RuitongError, match=r"cannot fetch the corpus other .*RUITONG_DATA"):
        corpora.fetch(["mine", "other"], address=address)
    assert not (tmp_path / "kept" / "other.json").exists()  # a file of another hash is not left behind
    with pytest.raises(RuitongError, match="cannot fetch"):
        corpora.fetch(["other"], address="http://127.0.0.1:9")
    with pytest.raises(RuitongError, match="corpus must be one of"):
        corpora.fetch(["nothing"])


# --- the published numbers -------------------------------------------------------------------------------------------


@needs_corpora
def test_every_published_file_is_known_and_read() -> None:
    for name in corpora.names():
        ds = shard(name)
        facts = corpora.registry()["files"][name]
        assert ds["hardware"].item() == facts["hardware"]
        assert ds["precision"].item() == facts["precision"]
    assert len({shard(n)["cell"].item() for n in corpora.names()}) == 10
    assert all("" not in shard(n)["category"].values for n in corpora.names())


@needs_corpora
def test_corpora_combine_into_one_aggregate() -> None:
    ds = schema.combine([shard(n) for n in GPUS])
    again = schema.select(ds, shard("mi300x")["cell"].item())
    assert int(align(shard("a40_61"), again, scoring="decode")["valid"].sum()) == 2175


@needs_corpora
@pytest.mark.parametrize(
    ("reference", "candidate", "identical", "diverged", "n", "delta_prob", "mass"),
    [
        ("a100_fp16_61", "a100_bf16_61", 43, 18, 61, "0.082487066", "0.000032929"),
        ("a40_61", "mi300x", 43, 18, 61, "0.152178295", "0.000032412"),
        ("cuda_a40_qwen3_8b", "h100", 12, 4, 16, "0.086753853", None),
        ("a40_v3", "rtx6000ada", 13, 3, 16, "0.122442606", None),
        ("a40_61", "rtx6000ada_61", 45, 16, 61, None, None),
    ],
)
def test_the_published_numbers_come_out(
    reference: str, candidate: str, identical: int, diverged: int, n: int, delta_prob: str | None, mass: str | None
) -> None:
    p = published.reproduce(shard(reference), shard(candidate))
    assert (p.identical_texts, p.diverged, p.n_prompts) == (identical, diverged, n)
    assert p.top1_agreement == 1.0  # before the first difference it cannot be anything else
    assert delta_prob is None or f"{p.max_delta_prob:.9f}" == delta_prob
    assert mass is None or f"{p.mass_delta:.9f}" == mass


@needs_corpora
def test_the_published_share_and_its_interval() -> None:
    p = published.reproduce(shard("a40_61"), shard("rtx6000ada_61"))
    shown = (
        f"{p.diverged}/{p.n_prompts} = {p.diverged_share:.1%} [{100 * p.diverged_lo:.1f}, {100 * p.diverged_hi:.1f}]"
    )
    assert shown == "16/61 = 26.2% [16.8, 38.4]"


@needs_corpora
@pytest.mark.parametrize(
    ("reference", "candidate", "agree", "at_risk", "tied"),
    [("a100_fp16_61", "a100_bf16_61", 2046, 2064, 17), ("a40_61", "mi300x", 2157, 2175, 14)],
)
def test_top1_through_the_first_difference(reference: str, candidate: str, agree: int, at_risk: int, tied: int) -> None:
    c = compare(shard(reference), shard(candidate), scoring="decode")
    assert (c.n_positions - c.notes["flips"], c.n_positions) == (agree, at_risk)
    assert c.metrics["top1_agreement"].value == pytest.approx(agree / at_risk)
    assert round(agree / at_risk, 4) == {2046: 0.9913, 2157: 0.9917}[agree]
    assert c.notes["tied_flips"] == tied


@needs_corpora
def test_every_gpu_flip_is_a_near_tie() -> None:
    largest = {}
    for i, a in enumerate(GPUS):
        for b in GPUS[i + 1 :]:
            flipped, gap, _ = configuration.flip_gaps(align(shard(a), shard(b), scoring="decode"))
            largest[a, b] = gap[flipped].max()
    assert len(largest) == 15
    assert max(largest.values()) <= 0.54
    assert largest["a100_fp16_61", "a100_bf16_61"] <= 0.25
    assert largest["a40_61", "mi300x"] <= 0.25


@needs_corpora
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("service_first", [False, True])
def test_the_service_is_another_configuration_not_a_drift(gpu: str, service_first: bool) -> None:
    sides = [shard(gpu), shard("ascend_dashscope_61")]
    with pytest.raises(RefusedError, match="difference of configuration") as e:
        compare(*(sides[::-1] if service_first else sides), scoring="decode")
    text = str(e.value)
    for piece in ("60 of 61 texts differ", "repeats only 24 of 61", "nat (median)", "does not declare its precision"):
        assert piece in text
    for word in ("Ascend", "NVIDIA", "AMD", "better", "worse", "inferior"):
        assert word not in text


@needs_corpora
def test_the_evidence_against_the_service() -> None:
    pair = align(shard("a40_61"), shard("ascend_dashscope_61"), scoring="decode", strict=False)
    flipped, gap, _ = configuration.flip_gaps(pair)
    assert round(float(np.median(gap[flipped])), 1) == 2.4
    assert gap[flipped].max() == pytest.approx(12.7, abs=0.1)
    assert flipped.sum(1).max() == 1  # nothing after the first difference is compared
    # The published "15.02 % (367/2443)" compares positions of two different sentences.
    assert published.agreement_past_divergence(shard("a40_61"), shard("ascend_dashscope_61")) == (367, 2443)
