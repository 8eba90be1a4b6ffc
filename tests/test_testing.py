import subprocess
import sys

import numpy as np
import pytest
import xarray as xr
from scipy.special import rel_entr

from ruitong_lib import schema
from ruitong_lib.errors import RuitongError
from ruitong_lib.testing import FAMILIES, synthetic_shards, tiny_model

SIZES = {"n_prompts": 6, "n_positions": 10, "k": 5, "vocab": 30}


class TestSynthetic:
    def test_seeded(self):
        one, two, other = (synthetic_shards(**SIZES, seed=s) for s in (3, 3, 4))
        for a, b in zip(one.shards, two.shards, strict=True):
            xr.testing.assert_identical(a, b)
        assert (one.log_probs != other.log_probs).any()
        assert {s["cell"].item() for s in one.shards}.isdisjoint(s["cell"].item() for s in other.shards)

    def test_one_more_cell_changes_no_other(self):
        few = synthetic_shards([{}, {"noise": 0.1}], **SIZES)
        more = synthetic_shards([{}, {"noise": 0.1}, {"noise": 0.3, "hardware": "b"}], **SIZES)
        for a, b in zip(few.shards, more.shards[:2], strict=True):
            xr.testing.assert_identical(a, b)

    def test_exact_kl(self):
        s = synthetic_shards([{}, {"noise": 0.3}], **SIZES)
        p, q = np.exp(s.log_probs)
        np.testing.assert_allclose(p.sum(-1), 1)
        exact = (rel_entr(p, q).sum(-1) + rel_entr(q, p).sum(-1)) / 2
        valid = np.arange(10) < s.n_tokens[:, None]
        np.testing.assert_allclose(s.exact_kl().values, np.where(valid, exact, np.nan), rtol=1e-9)
        assert s.exact_kl(1, 1).max() == 0
        assert s.exact_kl().attrs["units"] == "nat"

    def test_replay_holds_the_known_distribution(self):
        s = synthetic_shards([{"noise": 0.3}], **SIZES)
        c = s.shards[0].isel(cell=0)
        for p, n in enumerate(s.n_tokens):
            lp = s.log_probs[0, p, :n]
            ids = c["anchor_token_id"].values[p, :n]
            np.testing.assert_allclose(c["anchor_logprob"].values[p, :n], np.take_along_axis(lp, ids, -1), rtol=1e-6)
            best = c["top_logprob"].sel(scoring="replay").values[p, :n]
            np.testing.assert_allclose(best, -np.sort(-lp, -1)[:, :5], rtol=1e-6)
            mass = np.exp(best.astype(float)).sum(-1) + np.exp(c["tail_logprob"].sel(scoring="replay").values[p, :n])
            np.testing.assert_allclose(mass, 1, rtol=1e-5)
            entropy = c["entropy"].sel(scoring="replay").values[p, :n]
            np.testing.assert_allclose(entropy, -(np.exp(lp) * lp).sum(-1), rtol=1e-5)

    def test_decode_is_greedy_and_ends_by_itself(self):
        s = synthetic_shards([{}, {"noise": 0.5}], **SIZES)
        base, noisy = (x.isel(cell=0) for x in s.shards)
        token = base["token_id"].values
        np.testing.assert_array_equal(token[0], token[1])  # without noise it writes the anchor's text
        assert (noisy["token_id"].values[0] != noisy["token_id"].values[1]).any()
        for c in (base, noisy):
            d = c.sel(scoring="decode")
            np.testing.assert_array_equal(d["token_id"].values, d["top_token_id"].values[..., 0])
            ended = d["finish_reason"].values == schema.FINISH.index("eos")
            assert ended.any()
            last = np.take_along_axis(d["token_id"].values, d["n_tokens"].values[:, None].astype(int) - 1, 1)[:, 0]
            np.testing.assert_array_equal(last == 29, ended)

    def test_prompts_are_clusters(self):
        s = synthetic_shards([{}, {"noise": 0.05}], n_prompts=60, n_positions=20, k=5, vocab=30, spread=1.0)
        even = synthetic_shards([{}, {"noise": 0.05}], n_prompts=60, n_positions=20, k=5, vocab=30, spread=0.0)
        spreads = [np.log(x.exact_kl().mean("position")).std() for x in (s, even)]
        assert spreads[0] > 1.4  # KL goes with the square of the scale: 2 × 1
        assert spreads[1] < 0.7

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cells": [{"precison": "fp16"}]}, "unknown field 'precison'. Did you mean 'precision'"),
            ({"k": 30}, "k must be from 2 to vocab - 1 = 29, got 30"),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises(RuitongError, match=message):
            synthetic_shards(**(SIZES | options))

    def test_needs_no_torch(self):
        code = (
            "import sys, ruitong_lib.testing as t; t.synthetic_shards(n_prompts=2); assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


class TestTinyModel:
    @pytest.fixture(scope="class", params=FAMILIES)
    @staticmethod
    def folder(request, tmp_path_factory):
        return tiny_model(request.param, tmp_path_factory.mktemp(request.param), vocab_size=600)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_loads_and_is_neither_flat_nor_broken(self, folder, dtype):
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        with torch.inference_mode():
            logits = model(torch.arange(4, 44)[None]).logits[0].float()
        assert logits.shape == (40, 600)
        assert logits.isfinite().all()
        lp = logits.log_softmax(-1)
        entropy = -(lp.exp() * lp).sum(-1)
        assert 0.5 < entropy.mean() < 0.8 * np.log(600)

    def test_tokenizer_takes_any_text(self, folder):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = "Hello 你好 мир 😀\n\t\x00 é"
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
        assert len(tokenizer) <= 400
        assert tokenizer.eos_token == "<|im_end|>"

    def test_seeded_and_the_callers_generator_is_left_alone(self, tmp_path):
        import torch

        torch.manual_seed(5)
        before = torch.get_rng_state()
        files = [tiny_model("llama", tmp_path / str(i), seed=s) / "model.safetensors" for i, s in enumerate((1, 1, 2))]
        assert torch.equal(torch.get_rng_state(), before)
        one, two, other = (f.read_bytes() for f in files)
        assert one == two != other

    def test_a_real_vocabulary(self, tmp_path):
        import json

        folder = tiny_model("qwen3", tmp_path / "m", vocab_size=151_936, hidden_size=16, layers=1, chat_template=False)
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 151_936
        assert not (folder / "chat_template.jinja").exists()

    @pytest.mark.parametrize(
        ("family", "options", "message"),
        [
            ("gpt9", {}, "family must be one of qwen3, llama, deepseek_v2"),
            ("llama", {"vocab_size": 99}, "at least 300"),
        ],
    )
    def test_errors(self, tmp_path, family, options, message):
        with pytest.raises(RuitongError, match=message):
            tiny_model(family, tmp_path, **options)
