"""Precisions: what is loaded, what is quantised, what is refused, and where fp16 overflowed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xarray as xr
from transformers import AutoModelForCausalLM, AutoTokenizer

from ruitong_lib import RefusedError, RuitongError, compare, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import models, overflow, precision, run_cell
from ruitong_lib.collect.transformers import collect
from ruitong_lib.report.markdown import to_markdown
from ruitong_lib.report.table import delta_rows
from ruitong_lib.testing import tiny_model

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


def cell(folder: Path, **more: Any) -> Cell:
    base = {"model": str(folder), "prompts": "core-4", "max_new_tokens": 6, "scoring": "both", "precision": "bf16"}
    return Cell(**{**base, "threads": 1, **more})


@pytest.fixture(scope="module")
def anchor(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    out = str(tmp_path_factory.mktemp("anchor"))
    return run_cell(cell(tiny_folder, precision="fp32", outputs=out), progress=False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp64", torch.float64),
        ("fp32", torch.float32),
        ("tf32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("w8a8", torch.bfloat16),
        ("fp8", torch.bfloat16),
    ],
)
def test_load_dtype(name: str, dtype: torch.dtype) -> None:
    assert precision.load_dtype(name) == dtype


def test_each_dtype_is_the_one_computed_in_and_they_are_ordered(
    tiny_folder: Path, anchor: tuple[Path, xr.Dataset]
) -> None:
    exact = collect(cell(tiny_folder, precision="fp64", anchor=str(anchor[0]), scoring="replay"))
    assert schema.provenance(exact)["precision"]["weights"] == "torch.float64"
    distance = {}
    for name in ("fp32", "fp16", "bf16", "w8a8"):
        shard = collect(cell(tiny_folder, precision=name, anchor=str(anchor[0]), scoring="replay"))
        distance[name] = compare(exact, shard).metrics["kl"].value
    assert distance["fp32"] < 1e-9 < distance["fp16"] < distance["bf16"] < distance["w8a8"]


def test_a_dtype_that_is_not_the_one_asked_for_is_refused(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float16)
    with pytest.raises(RuitongError, match=r"needs weights in torch.bfloat16, but the model holds torch.float16"):
        precision.apply(model, "bf16")


class TestFp8:
    def test_refused_on_a_cpu_before_the_model_is_loaded(
        self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(models, "load", lambda _: pytest.fail("the model was loaded"))
        with pytest.raises(RuitongError, match=r"compute capability 8.9 on .*this is device 'cpu'\. Use w8a8, bf16"):
            collect(cell(tiny_folder, precision="fp8"))

    @pytest.mark.parametrize(("capability", "allowed"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
    def test_nvidia(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], allowed: bool) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        if allowed:
            precision.check("fp8", CUDA)
        else:
            with pytest.raises(RuitongError, match=r"this is NVIDIA A100-SXM4-80GB \(compute capability 8.0\)"):
                precision.check("fp8", CUDA)

    @pytest.mark.parametrize(("arch", "allowed"), [("gfx90a:sramecc+:xnack-", False), ("gfx942:sramecc+", True)])
    def test_amd(self, monkeypatch: pytest.MonkeyPatch, arch: str, allowed: bool) -> None:
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=arch))
        if allowed:
            precision.check("fp8", CUDA)
        else:
            with pytest.raises(RuitongError, match=r"this is AMD Instinct \(gfx90a\)"):
                precision.check("fp8", CUDA)

    def test_the_recipe_names_the_flavour_of_the_weights(
        self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # torchao's quantiser runs anywhere once its look at the hardware is taken out; its products do not.
        from torchao.quantization import quant_api

        monkeypatch.setattr(quant_api, "_check_hardware_support", lambda _: None)
        model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16)
        before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
        recipe = precision.apply(model, "fp8")
        assert recipe["fp8_flavour"] == "float8_e4m3fn"
        assert recipe["weights"] == "float8_e4m3fn, symmetric, per output channel"
        assert (recipe["linear_layers"], recipe["left_out"]) == (14, ["lm_head"])
        after = model.model.layers[0].mlp.up_proj.weight.dequantize()
        # three bits of mantissa: half a step is 2^-4 of the value, and small values have the step of 2^-9 of the scale
        scale = before.float().abs().amax(1, keepdim=True) / 448
        assert ((after - before).abs() <= before.abs() / 16 + scale * 2**-9).float().mean() > 0.99

    def test_nothing_else_is_refused_here(self) -> None:
        for name in ("fp64", "fp32", "bf16", "fp16", "w8a8"):
            precision.check(name, CPU)


class TestW8A8:
    def test_a_mixture_whose_experts_would_stay_in_bf16_is_refused(self, tmp_path: Path) -> None:
        folder = tiny_model("qwen3_moe", tmp_path / "moe")
        with pytest.raises(
            RuitongError, match=r"would quantise \d+% of the weights and leave .*mlp.experts.down_proj.*in bf16"
        ):
            collect(cell(folder, precision="w8a8"))

    def test_the_share_is_recorded(self, tiny_folder: Path) -> None:
        recipe = models.load(cell(tiny_folder, precision="w8a8")).manifest["precision"]
        assert recipe["share_quantised"] == 1.0
        assert recipe["weights"] == "int8, symmetric, per output channel"


def quantised(folder: Path, out: Path, scheme: str = "W8A8") -> Path:
    """Quantise a model with compressed-tensors itself and save it as its tools do."""
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen")
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            highest = module.weight.data.float().abs().amax(1, keepdim=True) / 127.5
            module.weight_scale.data.copy_(highest.expand_as(module.weight_scale))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out


class TestCompressedTensors:
    @pytest.fixture(scope="class")
    @staticmethod
    def checkpoint(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return quantised(tiny_folder, tmp_path_factory.mktemp("quantised") / "tiny-w8a8")

    @pytest.fixture(scope="class")
    @staticmethod
    def shard(checkpoint: Path, tiny_folder: Path, anchor: tuple[Path, xr.Dataset]) -> xr.Dataset:
        return collect(cell(tiny_folder, checkpoint=str(checkpoint), precision="w8a8", anchor=str(anchor[0])))

    def test_it_runs_as_it_is_and_its_recipe_is_in_the_manifest(
        self, shard: xr.Dataset, anchor: tuple[Path, xr.Dataset]
    ) -> None:
        found = schema.provenance(shard)
        recipe = found["precision"]
        assert recipe["weights"] == "int8, symmetric, static per channel"
        assert recipe["activations"] == "int8, symmetric, dynamic per token"
        assert (recipe["left_out"], recipe["targets"], recipe["linear_layers"]) == (["lm_head"], ["Linear"], 14)
        assert recipe["format"] == "int-quantized"
        assert recipe["arithmetic"].startswith("simulated")
        assert found["quantized_checkpoint"] is True
        assert found["weights_sha256"] != schema.provenance(anchor[1])["weights_sha256"]

    def test_against_its_named_base_it_is_a_precision_row_with_a_note(
        self, shard: xr.Dataset, anchor: tuple[Path, xr.Dataset], tiny_folder: Path
    ) -> None:
        result = compare(anchor[1], shard)
        assert result.axis == "precision"
        assert result.notes["weights"] == "weights quantised elsewhere; identity not proven"
        here = collect(cell(tiny_folder, precision="w8a8", anchor=str(anchor[0]), scoring="replay"))
        ours = compare(anchor[1], here).metrics["kl"].value
        # the same recipe from two makers: as far from fp32, within a factor of 4
        assert ours / 4 < result.metrics["kl"].value < ours * 4
        assert "weights" not in compare(anchor[1], here).notes
        with pytest.raises(RefusedError, match="different weights"):
            compare(here, shard)  # two quantisers under one precision: no axis, and no proof that the base is one
        rows = delta_rows(schema.combine([anchor[1], shard]), reference=anchor[1]["cell"].item())
        assert "identity not proven" in to_markdown(rows)

    def test_without_a_named_base_it_is_another_model(self, checkpoint: Path, anchor: tuple[Path, xr.Dataset]) -> None:
        alone = collect(cell(checkpoint, precision="w8a8", anchor=str(anchor[0]), scoring="replay"))
        assert schema.provenance(alone)["base_named"] is False
        with pytest.raises(RefusedError, match="different weights"):
            compare(anchor[1], alone)

    @pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
    def test_a_dtype_that_its_weights_no_longer_have(self, checkpoint: Path, name: str) -> None:
        with pytest.raises(RuitongError, match=rf"is quantised \(compressed-tensors\), so precision='{name}'"):
            models.load(cell(checkpoint, precision=name))

    def test_checkpoint_is_for_w8a8_and_for_quantised_ones(self, checkpoint: Path, tiny_folder: Path) -> None:
        with pytest.raises(RuitongError, match="is for precision='w8a8'"):
            cell(tiny_folder, checkpoint=str(checkpoint))
        with pytest.raises(RuitongError, match="is not quantised; leave checkpoint empty"):
            models.load(cell(tiny_folder, checkpoint=str(tiny_folder), precision="w8a8"))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"quant_method": "gptq"}, "is quantised with 'gptq'; taken are compressed-tensors with int8 weights"),
            ({"weights": {"num_bits": 4}}, "weights that are int4"),
            ({"weights": {"num_bits": 8, "type": "float"}}, "weights that are float8"),
            ({"input_activations": None}, "input activations that are not quantised"),
        ],
    )
    def test_other_recipes_are_refused_before_the_weights_are_read(
        self, checkpoint: Path, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        config["quant_method"] = change.pop("quant_method", "compressed-tensors")
        config["config_groups"]["group_0"] |= change
        with pytest.raises(RuitongError, match=message):
            precision.of_checkpoint(config, "w8a8", "x")

    def test_the_package_is_optional(self, checkpoint: Path) -> None:
        code = (
            "import importlib.util, sys\nfind = importlib.util.find_spec\n"
            "importlib.util.find_spec = lambda name, *a: None if name == 'compressed_tensors' else find(name, *a)\n"
            "import json\nfrom ruitong_lib.collect import precision\n"
            "config = json.load(open(sys.argv[1] + '/config.json'))['quantization_config']\n"
            "try:\n precision.of_checkpoint(config, 'w8a8', 'x')\nexcept ValueError as e:\n print(e)\n"
        )
        said = subprocess.check_output([sys.executable, "-c", code, str(checkpoint)], text=True)
        assert "pip install 'ruitong[compressed]'" in said


class TestOverflow:
    @pytest.fixture(scope="class")
    @staticmethod
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A model whose second layer's activations pass 65,504 on their way: fine in bf16, not in fp16."""
        made = tiny_model("qwen3", tmp_path_factory.mktemp("overflow") / "tiny", layers=3)
        model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
        with torch.no_grad():
            for part in ("gate_proj", "up_proj"):
                model.get_submodule(f"model.layers.1.mlp.{part}").weight.mul_(300)
            model.get_submodule("model.layers.1.mlp.down_proj").weight.div_(90_000)
        model.save_pretrained(made)
        return made

    @pytest.fixture(scope="class")
    @staticmethod
    def shards(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[xr.Dataset, xr.Dataset]:
        out = str(tmp_path_factory.mktemp("out"))
        path, good = run_cell(cell(folder, outputs=out), progress=False)
        return good, collect(cell(folder, precision="fp16", anchor=str(path)))

    def test_the_first_layer_is_named(self, shards: tuple[xr.Dataset, xr.Dataset]) -> None:
        good, bad = shards
        assert (good["state"].values == schema.STATES.index("ok")).all()
        assert "overflow" not in schema.provenance(good)
        assert (bad["state"].values == schema.STATES.index("nan_logits")).any()
        found = schema.provenance(bad)["overflow"]
        # gate × up overflows between two layers, in the arithmetic of the MLP itself
        assert found["layer"] == "model.layers.1.mlp"
        assert found["prompt"] in set(bad["prompt"].values)
        assert found["non_finite_weights"] is False

    def test_the_comparison_and_the_table_say_it(self, shards: tuple[xr.Dataset, xr.Dataset]) -> None:
        with pytest.raises(RefusedError, match=r"nan_logits .*first layer that overflowed is model.layers.1.mlp;"):
            compare(*shards)
        good, _ = shards
        rows = delta_rows(schema.combine(shards), reference=good["cell"].item())
        assert [r["status"] for r in rows] == ["refused"]
        assert "the first layer that overflowed is model.layers.1.mlp" in to_markdown(rows)

    def test_no_second_pass_where_nothing_overflowed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(overflow, "first_layer", lambda *_: pytest.fail("a second pass"))
        collect(cell(folder))

    def test_where_it_is(self, tiny_folder: Path) -> None:
        def first(damage: Any) -> dict[str, Any]:
            model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
            with torch.inference_mode():
                damage(model)
                found = overflow.first_layer(model, [5, 6, 7], CPU)
                for module in model.modules():
                    assert not module._forward_hooks
                    assert not module._forward_pre_hooks
            return found

        def weight(name: str, value: float) -> Any:
            return lambda m: m.get_submodule(name).weight.view(-1)[:64].fill_(value)

        assert first(lambda _: None) == {"layer": "", "non_finite_weights": False}
        inf = first(weight("model.layers.0.self_attn.q_proj", torch.inf))
        assert inf == {"layer": "model.layers.0.self_attn.q_proj", "non_finite_weights": True}
        assert first(weight("lm_head", torch.nan))["layer"] == "lm_head"
        assert first(weight("model.norm", torch.nan))["layer"] == "model.norm"
