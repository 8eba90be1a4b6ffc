"""Each fault breaks what it says, and puts every bit back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from ruitong_lib import schema
from ruitong_lib.errors import RefusedError, RuitongError
from ruitong_lib.measure import metrics
from ruitong_lib.measure.align import align
from ruitong_lib.measure.faults import FAULTS, broken, find, inputs, shards
from ruitong_lib.measure.faults.model import rounded
from ruitong_lib.prompts import Prompt, ids_sha256, render
from ruitong_lib.testing import synthetic_shards, tiny_model

RUNNING = [n for n, f in FAULTS.items() if f.kind in {"model", "cache"}]
TEXT = torch.tensor([[5, 7, 11, 40, 41, 42, 60, 61, 5, 100, 101, 9]])
SPLIT = 6


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_model(request.param, tmp_path_factory.mktemp("tiny") / request.param, layers=3)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any, ids: torch.Tensor = TEXT) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def through_cache(model: Any, ids: torch.Tensor = TEXT, at: int = SPLIT, **second: Any) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        first = model(input_ids=ids[:, :at], cache=cache, use_cache=True).logits
        return torch.cat((first, model(input_ids=ids[:, at:], cache=cache, use_cache=True, **second).logits), dim=1)


def run(name: str, model: Any) -> torch.Tensor:
    return through_cache(model) if FAULTS[name].kind == "cache" else logits(model)


def everything(model: Any) -> dict[str, Any]:
    """Every bit that a fault could leave changed: weights, buffers, plain attributes and hooks of every module."""
    found: dict[str, Any] = {f"w {n}": t.clone() for n, t in model.state_dict().items()}
    found |= {f"b {n}": t.clone() for n, t in model.named_buffers()}
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | bool | None)}
        found[f"a {name}"] = plain
        found[f"h {name}"] = (len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module))
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        equal = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        assert equal, name


@pytest.mark.parametrize("name", RUNNING)
def test_a_fault_changes_the_output_and_then_every_bit_is_back(name: str, model: Any) -> None:
    before, sound = everything(model), run(name, model)
    with broken(name, FAULTS[name].severities[-1], model) as same:
        assert same is model
        assert not torch.equal(run(name, model), sound)
    assert_same(before, everything(model))
    assert torch.equal(run(name, model), sound)


@pytest.mark.parametrize("name", RUNNING)
def test_every_bit_is_back_after_an_exception_inside(name: str, model: Any) -> None:
    before = everything(model)
    with pytest.raises(KeyError, match="inside"), broken(name, FAULTS[name].severities[0], model):
        run(name, model)
        raise KeyError("inside")
    assert_same(before, everything(model))


def test_severities_run_from_mild_to_severe_and_are_distinct() -> None:
    falls = {"saturation", "lm_head", "top1_demoted", "processed"}  # fewer bits, a lower clamp, more often
    for name, fault in FAULTS.items():
        assert len(set(fault.severities)) == len(fault.severities)
        assert list(fault.severities) == sorted(fault.severities, reverse=name in falls), name


def test_temperature_divides_the_logits(model: Any) -> None:
    sound = logits(model)
    with broken("temperature", 0.05, model):
        assert torch.equal(logits(model), sound / 1.05)


def test_rope_theta_is_the_theta_of_another_configuration(model: Any) -> None:
    rotary = model.get_decoder().rotary_emb
    theta = model.config.rope_parameters["rope_theta"]
    n = len(rotary.inv_freq)
    with broken("rope_theta", 3.0, model):
        wanted = 1.0 / (3.0 * theta) ** (torch.arange(0, 2 * n, 2, dtype=torch.float) / (2 * n))
        torch.testing.assert_close(rotary.inv_freq, wanted)


def attention_of(model: Any, name: str = "", severity: float = 0.0) -> tuple[Any, ...]:
    """Return the middle layer's attention, what it read, and what it gave, sound or broken."""
    attention = model.get_decoder().layers[1].self_attn
    seen: dict[str, Any] = {}

    def keep(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        seen.update(read=hidden, turn=kwargs["position_embeddings"], gave=out[0])

    handle = attention.register_forward_hook(keep, with_kwargs=True)
    try:
        with torch.inference_mode():
            if name:
                with broken(name, severity, model):
                    logits(model)
            else:
                logits(model)
    finally:
        handle.remove()
    return attention, seen["read"], seen["turn"], seen["gave"]


def by_hand(
    model: Any, attention: Any, hidden: torch.Tensor, turn: Any, *, group: Callable[[int], int], offset: int = 0,
    leak: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Compute attention with loops over heads, in float64."""
    heads, dim = model.config.num_attention_heads, attention.head_dim
    cos, sin = (x.double()[0] for x in turn)
    inv = model.get_decoder().rotary_emb.inv_freq.double()
    angle = torch.cat((inv, inv)) * offset

    def rotate(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * c + torch.cat((-b, a), -1) * s

    parts = {}
    for p in "qkv":
        x = getattr(attention, f"{p}_proj")(hidden)[0].unflatten(-1, (-1, dim))
        norm = getattr(attention, f"{p}_norm", None)
        parts[p] = (norm(x) if norm is not None else x).double()
    n = len(hidden[0])
    out = []
    for h in range(heads):
        q = rotate(rotate(parts["q"][:, h], cos, sin), angle.cos(), angle.sin())
        k = rotate(parts["k"][:, group(h)], cos, sin)
        score = q @ k.T * attention.scaling
        score = score.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(leak), -torch.inf)
        out.append(score.softmax(-1) @ parts["v"][:, group(h)])
    return torch.cat(out, -1).float() @ attention.o_proj.weight.T


CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("", 0.0, {}),
    ("rope_offset", 2, {"offset": 2}),
    ("causal_leak", 0.03, {"leak": 1}),
    ("gqa_mixup", 0.03, {"group": lambda h: h % 2}),
]


@pytest.mark.parametrize(("name", "severity", "change"), CASES, ids=[c[0] or "sound" for c in CASES])
@torch.inference_mode()
def test_attention_is_what_loops_over_heads_give(name: str, severity: float, change: Any, model: Any) -> None:
    attention, hidden, turn, gave = attention_of(model, name, severity)
    wanted = by_hand(model, attention, hidden, turn, **{"group": lambda h: h // 2, **change})
    torch.testing.assert_close(gave[0], wanted, rtol=1e-3, atol=1e-4)


def test_causal_leak_shows_one_later_token_and_no_more(model: Any) -> None:
    other = TEXT.clone()
    other[0, -1] += 1
    with broken("causal_leak", 0.03, model):  # one layer
        a, b = logits(model), logits(model, other)
    changed = (a != b).any(-1)[0]
    assert changed[-2]
    assert not changed[:-2].any()


def test_causal_leak_is_the_same_in_eager_attention_and_beside_padding(model: Any) -> None:
    ids = torch.cat((TEXT, TEXT.flip(1)))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    found = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        with broken("causal_leak", 1.0, model), torch.inference_mode():
            found.append(model(input_ids=ids, attention_mask=mask, use_cache=False).logits)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[0][1, :8], found[1][1, :8], rtol=1e-3, atol=1e-4)
    with broken("causal_leak", 1.0, model):
        alone = logits(model, ids[1:, :8])
    torch.testing.assert_close(found[0][1, :7], alone[0, :7], rtol=1e-3, atol=1e-4)  # padding leaks nothing


def test_swapped_heads_are_the_swapped_columns_of_the_output_projection(model: Any) -> None:
    dim = model.get_decoder().layers[0].self_attn.head_dim
    with broken("swapped_heads", 1.0, model):
        found = logits(model)
    with torch.inference_mode():
        kept = [layer.self_attn.o_proj.weight.clone() for layer in model.get_decoder().layers]
        for layer, w in zip(model.get_decoder().layers, kept, strict=True):
            new = w.clone()
            new[:, :dim], new[:, 3 * dim :] = w[:, 3 * dim :], w[:, :dim]
            layer.self_attn.o_proj.weight.copy_(new)
        wanted = logits(model)
        for layer, w in zip(model.get_decoder().layers, kept, strict=True):
            layer.self_attn.o_proj.weight.copy_(w)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_cache_faults_leave_the_first_pass_alone(model: Any) -> None:
    sound = through_cache(model)
    for name in (n for n, f in FAULTS.items() if f.kind == "cache"):
        with broken(name, FAULTS[name].severities[-1], model):
            found = through_cache(model)
            whole = logits(model)
        assert torch.equal(found[:, :SPLIT], sound[:, :SPLIT]), name
        assert not torch.equal(found[:, SPLIT:], sound[:, SPLIT:]), name
        assert torch.equal(whole, logits(model)), name


def test_kv_position_is_a_gap_in_the_position_ids(model: Any) -> None:
    with broken("kv_position", 4, model):
        found = through_cache(model)
    positions = torch.arange(SPLIT, TEXT.shape[1])[None] + 4
    assert torch.equal(found, through_cache(model, position_ids=positions))


def test_kv_length_hides_the_last_entries(model: Any) -> None:
    with broken("kv_length", 2, model):
        found = through_cache(model)
    n = TEXT.shape[1]
    allowed = torch.ones(n - SPLIT, n, dtype=torch.bool).tril(SPLIT)
    allowed[:, SPLIT - 2 : SPLIT] = False
    wanted = through_cache(model, attention_mask=allowed[None, None])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_dropping_and_copying_a_layer(model: Any) -> None:
    layers = model.get_decoder().layers
    with broken("layer_weak", 1.0, model):
        dropped = logits(model)
    middle = layers[1]
    kept = middle.forward
    middle.forward = lambda hidden_states, **_: hidden_states
    torch.testing.assert_close(dropped, logits(model))
    middle.forward = kept
    del middle.forward
    with broken("layer_stale", 1.0, model):
        for a, b in zip(layers[1].parameters(), layers[0].parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("kind", "levels"), [("int8", 255), ("int4", 15), ("fp8", 253)])
def test_rounded_weights_lie_on_few_levels_and_near(kind: str, levels: int) -> None:
    w = torch.randn(6, 4000, generator=torch.Generator().manual_seed(0))
    r = rounded(w, kind)
    assert max(len(row.unique()) for row in r) <= levels
    most = 448.0 if kind == "fp8" else (levels - 1) / 2
    step = w.abs().amax(-1, keepdim=True) / most
    error = (r - w).abs()
    if kind == "fp8":  # three bits behind the leading one, and the smallest step near 0
        assert (error <= torch.maximum(w.abs() / 16, step * 2**-10) * 1.0001).all()
    else:
        assert (error <= step / 2 * 1.0001).all()
    torch.testing.assert_close(rounded(r, kind), r)


def test_top1_demoted_moves_one_best_token_in_n_to_the_fifth_place(model: Any) -> None:
    sound = logits(model).flatten(0, -2)
    with broken("top1_demoted", 4, model):
        found = torch.cat([logits(model, TEXT[:, :5]).flatten(0, -2), logits(model).flatten(0, -2)])
    rows = torch.cat([sound[:5], sound])  # counted over calls: rows 2, 6, 10, 14 of 17
    torch.testing.assert_close(rows[[0, 1, 3, 4]], found[[0, 1, 3, 4]])
    changed = ~torch.isclose(rows, found, rtol=1e-4, atol=1e-5).all(-1)
    assert changed.nonzero().flatten().tolist() == [2, 6, 10, 14]
    for i in (2, 6, 10, 14):
        assert found[i].topk(5)[1][4] == rows[i].argmax()


def test_w8a8_is_near_the_size_of_w8a8(model: Any) -> None:
    sound = logits(model).log_softmax(-1)
    kl = {}
    for name in ("int8_weights", "w8a8", "int4_weights"):
        with broken(name, 1.0, model):
            q = logits(model).log_softmax(-1)
        kl[name] = float(((sound.exp() * (sound - q)).sum(-1)).mean())
    assert 0 < kl["int8_weights"] < kl["w8a8"] < kl["int4_weights"]


def test_a_part_that_is_not_there_is_named(model: Any, tmp_path: Path) -> None:
    with pytest.raises(RuitongError, match=r"Did you mean 'temperature'\?"):
        find("temprature")
    with pytest.raises(RuitongError, match="changes the shard, not a running model"), broken("shifted", 1, model):
        pass
    latent = AutoModelForCausalLM.from_pretrained(tiny_model("deepseek_v3", tmp_path / "d")).eval()
    before = everything(latent)
    with pytest.raises(RuitongError, match="needs grouped heads"), broken("gqa_mixup", 1, latent):
        pass
    assert_same(before, everything(latent))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model("llama", tmp_path_factory.mktemp("t") / "t"))


PROMPTS = [Prompt("a", "", "en", "The quick brown fox"), Prompt("b", "", "en", "jumps over", system="Be brief.")]


def test_inputs_faults_change_the_ids_as_they_say(tokenizer: Any) -> None:
    right = render(PROMPTS, tokenizer)
    assert inputs.template(PROMPTS, tokenizer, 1) == [r[:-1] for r in right]
    assert tokenizer.decode(inputs.template(PROMPTS, tokenizer, 2)[1]) == "Be brief.\njumps over"
    assert inputs.double_bos(PROMPTS, tokenizer, 2) == [[tokenizer.bos_token_id] * 2 + r for r in right]
    cut = inputs.truncated(PROMPTS, tokenizer, 0.5)
    assert all(r[-len(c) :] == c and len(c) == len(r) - round(len(r) / 2) for c, r in zip(cut, right, strict=True))


@pytest.mark.parametrize("name", [n for n, f in FAULTS.items() if f.kind == "inputs"])
def test_inputs_faults_are_refused_by_the_manifest(name: str, tokenizer: Any, synthetic: Any) -> None:
    reference, candidate = synthetic.shards[:2]
    for side, rows in (
        (reference, render(PROMPTS, tokenizer)),
        (candidate, FAULTS[name].function(PROMPTS, tokenizer, 1)),
    ):
        side["prompt_sha256"].values[0, :2] = [ids_sha256(r) for r in rows]
    with pytest.raises(RefusedError, match="different prompt ids"):
        align(reference, candidate)


def replay_kl(a: xr.Dataset, b: xr.Dataset) -> xr.DataArray:
    return metrics.kl(align(a, b))


@pytest.fixture
def two() -> list[xr.Dataset]:
    return synthetic_shards([{}, {"noise": 0.02}], n_prompts=8, n_positions=12, k=10, vocab=60, decode=False).shards


def test_shard_faults_leave_the_original_alone_and_stay_valid(two: list[xr.Dataset]) -> None:
    before = two[1].copy(deep=True)
    for name, fault in ((n, f) for n, f in FAULTS.items() if f.kind == "shard"):
        for severity in fault.severities:
            schema.validate(fault.function(two[1], severity), where=name)
    xr.testing.assert_identical(two[1], before)


def test_transposed_is_its_own_inverse_and_changes_one_position_in_n(two: list[xr.Dataset]) -> None:
    once = shards.transposed(two[0], 1.0)
    xr.testing.assert_identical(shards.transposed(once, 1.0), two[0])
    assert (metrics.top1_agreement(align(two[0], once)) == 0).sum() == align(two[0], once)["valid"].sum()
    kl = replay_kl(two[0], shards.transposed(two[0], 1 / 16))
    assert int((kl > 0).sum()) == int(kl.notnull().sum()) // 16


def test_shifted_gives_each_position_the_next_ones_numbers(two: list[xr.Dataset]) -> None:
    found = shards.shifted(two[0], 0.25)
    n = two[0]["n_tokens"].values[0, 1]
    changed = [not two[0]["entropy"][0, 1, i].identical(found["entropy"][0, 1, i]) for i in range(8)]
    assert changed == [False, False, False, True, False, False, False, True]
    a, b = (s["top_logprob"].values[0, 1, 3] for s in (two[0], found))
    np.testing.assert_array_equal(b[: n[3] - 1], a[1 : n[3]])
    np.testing.assert_array_equal(b[n[3] - 1], a[n[3] - 1])
    np.testing.assert_array_equal(found["token_id"], two[0]["token_id"])


def test_processed_is_a_distribution_on_the_nucleus(two: list[xr.Dataset]) -> None:
    found = shards.processed(two[0], 0.6)
    valid = two[0]["token_id"].values[0, 1] >= 0
    top, new = (np.exp(s["top_logprob"].values[0, 1][valid].astype(float)) for s in (two[0], found))
    np.testing.assert_allclose(new.sum(-1), 1, rtol=1e-6)
    kept = (new > 0).sum(-1)
    for row, n in zip(top, kept, strict=True):
        assert row[: n - 1].sum() < 0.6
        assert n == len(row) or row[:n].sum() >= 0.6 - 1e-6
    anchor = np.exp(found["anchor_logprob"].values[0][valid].astype(float)).sum(-1)
    rest = np.exp(found["anchor_tail_logprob"].values[0][valid].astype(float))
    np.testing.assert_allclose(anchor + rest, 1, rtol=1e-5)
    kl = replay_kl(two[0], found)
    assert np.isfinite(kl.values[valid]).all()
    assert float(kl.mean()) > float(replay_kl(two[0], two[1]).mean())


def test_a_severity_between_those_of_the_table_works(model: Any) -> None:
    sound = logits(model)
    sizes = []
    for e in (0.03, 0.3):
        with broken("attention_scale", e, model):
            sizes.append(float((logits(model) - sound).abs().mean()))
    assert 0 < sizes[0] < sizes[1]
