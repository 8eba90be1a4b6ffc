import json
import os

import numpy as np
import pytest
import xarray as xr

from ruitong_lib import schema
from ruitong_lib.errors import RuitongError
from ruitong_lib.schema import SchemaError
from ruitong_lib.testing import DEFAULTS, synthetic_shards

HARD_TEXTS = [
    "nul \0 in it",
    "lone \ud800 and \udfff",
    "back\\slash \\u0000 \\\\",
    "中文，еще 😀\n\t\r",
    "",
    "\\",
    "\ufeff\x7f",
]


@pytest.fixture
def shard():
    return synthetic_shards([{"noise": 0.05}], n_prompts=len(HARD_TEXTS), n_positions=6, k=4, vocab=20).shards[0]


class TestNewShard:
    def test_is_all_padding_and_valid(self):
        names = {"prompt": ["a", "b"], "category": ["x", "y"], "language": ["en", "zh"]}
        ds = schema.validate(schema.new_shard(DEFAULTS | LIMITS, "m.h.bf16.b1.00000000", names, n_positions=3, k=5))
        assert dict(ds.sizes) == {"cell": 1, "scoring": 2, "prompt": 2, "position": 3, "k": 5}
        for v in schema.VARIABLES:
            if not v.required:
                assert v.name not in ds
                continue
            assert ds[v.name].dims == v.dims
            values = ds[v.name].values
            fill = np.full(values.shape, v.fill, dtype=values.dtype)
            np.testing.assert_array_equal(values, fill)
        assert set(schema.CELL_COORDS) <= set(ds.coords)
        assert ds["seed"].dtype == np.int64

    def test_says_what_everything_is(self, shard, tmp_path):
        for coordinate in shard.coords.values():  # as a file of an earlier version
            coordinate.attrs.clear()
        path = schema.save(shard, tmp_path / "x.nc")
        for ds in (schema.load(path), schema.combine([shard])):
            for name, array in ds.variables.items():
                assert array.attrs["long_name"], name
                assert array.dtype.kind in "OUTb" or array.attrs["units"], name

    def test_is_writable_in_place_and_shares_nothing(self):
        names = {"prompt": ["a"], "category": [""], "language": [""]}
        one, two = (schema.new_shard(DEFAULTS | LIMITS, "x", names, n_positions=2, k=2) for _ in range(2))
        one["token_id"].values[0, 0, 0, 0] = 7
        one["text"].values[0, 0] = "longer than what was there"
        assert two["token_id"].values.max() == -1
        assert two["text"].values[0, 0] == ""

    def test_text_tokens_are_optional(self):
        names = {"prompt": ["a"], "category": [""], "language": [""]}
        ds = schema.new_shard(DEFAULTS | LIMITS, "x", names, n_positions=2, k=3, text_tokens=True)
        assert ds["token_text"].shape == (1, 2, 1, 2)
        assert ds["top_token_text"].shape == (1, 2, 1, 2, 3)
        schema.validate(ds)

    def test_attributes_follow_cf(self):
        names = {"prompt": ["a"], "category": [""], "language": [""]}
        ds = schema.new_shard(DEFAULTS | LIMITS, "x", names, n_positions=2, k=3)
        assert ds["logprob"].attrs["units"] == "nat"
        assert ds["token_id"].attrs["padding_value"] == -1
        assert ds["state"].attrs["flag_meanings"].split() == list(schema.STATES)
        assert ds["state"].attrs["flag_values"].dtype == np.int8
        assert all(ds[v.name].attrs["long_name"] for v in schema.VARIABLES if v.required)


LIMITS = {"max_new_tokens": 3, "anchor": ""}


class TestRoundTrip:
    def test_identical(self, shard, tmp_path):
        shard["text"].values[0] = HARD_TEXTS
        before = shard.copy(deep=True)
        path = schema.save(shard, tmp_path / "new" / "folder" / "x.nc")
        xr.testing.assert_identical(shard, before)  # saving changes nothing in memory
        back = schema.load(path)
        xr.testing.assert_identical(back, before)
        assert back["text"].values[0].tolist() == HARD_TEXTS
        for name in back.variables:
            if back[name].dtype.kind not in "OUT":
                assert back[name].dtype == before[name].dtype, name

    def test_twice_is_the_same_as_once(self, shard, tmp_path):
        shard["text"].values[0] = HARD_TEXTS
        once = schema.load(schema.save(shard, tmp_path / "x.nc"))
        twice = schema.load(schema.save(once, tmp_path / "x.nc"))
        xr.testing.assert_identical(twice, once)

    def test_hard_prompt_ids_and_labels(self, tmp_path):
        ids = [f"{i} {t}" for i, t in enumerate(HARD_TEXTS)]
        names = {"prompt": ids, "category": HARD_TEXTS, "language": HARD_TEXTS}
        ds = schema.new_shard(DEFAULTS | LIMITS | {"model": "C:\\models\\Qwen"}, "x", names, n_positions=2, k=2)
        back = schema.load(schema.save(ds, tmp_path / "x.nc"))
        xr.testing.assert_identical(back, ds)
        assert back["model"].item() == "C:\\models\\Qwen"
        assert back["category"].values.tolist() == HARD_TEXTS

    def test_float32_keeps_each_bit_and_nan(self, shard, tmp_path):
        raw = np.array([-0.0, -1e-45, -3.4e38, np.nan, -np.inf, -1.1], dtype=np.float32)
        shard["entropy"].values[0, 0, 0] = raw
        back = schema.load(schema.save(shard, tmp_path / "x.nc"))["entropy"].values[0, 0, 0]
        np.testing.assert_array_equal(back.view(np.int32), raw.view(np.int32))

    def test_provenance_stays_readable_json(self, shard, tmp_path):
        found = {"text": "中 \0 \\ \ud800", "none": None, "list": [1, 2.5]}
        shard["provenance"].values[0] = json.dumps(found, ensure_ascii=True)
        path = schema.save(shard, tmp_path / "x.nc")
        assert schema.provenance(schema.load(path)) == found
        assert json.loads(xr.load_dataset(path, engine="h5netcdf")["provenance"].item()) == found

    def test_empty_provenance_is_empty(self, shard):
        shard["provenance"].values[0] = ""
        assert schema.provenance(shard) == {}

    def test_padding_is_plain_integers_on_disk(self, shard, tmp_path):
        raw = xr.load_dataset(schema.save(shard, tmp_path / "x.nc"), engine="h5netcdf", mask_and_scale=False)
        assert raw["token_id"].dtype == np.int32
        assert raw["token_id"].values.min() == -1
        assert all("_FillValue" not in raw[n].attrs for n in raw.variables)

    def test_is_compressed(self, shard, tmp_path):
        import h5py

        with h5py.File(schema.save(shard, tmp_path / "x.nc")) as f:
            assert f["top_logprob"].compression == "gzip"
            assert f["top_logprob"].shuffle

    def test_text_tokens(self, tmp_path):
        names = {"prompt": ["a"], "category": [""], "language": [""]}
        ds = schema.new_shard(DEFAULTS | LIMITS, "x", names, n_positions=2, k=2, text_tokens=True)
        ds["token_text"].values[0, 0, 0] = ["\0", "中"]
        ds["n_tokens"].values[0, 0, 0] = 2
        ds["position_state"].values[0, 0, 0] = 0
        ds["top_token_text"].values[0, 0, 0] = [["\ud800", ""], ["\\", "a"]]
        xr.testing.assert_identical(schema.load(schema.save(ds, tmp_path / "x.nc")), ds)

    def test_a_longer_text_replaces_a_loaded_one(self, shard, tmp_path):
        shard["text"].values[0] = "short"
        back = schema.load(schema.save(shard, tmp_path / "x.nc"))
        back["text"].values[0] = "much longer than before"
        assert schema.load(schema.save(back, tmp_path / "y.nc"))["text"].values[0, 0] == "much longer than before"


class TestSave:
    def test_a_failed_save_leaves_the_old_file_and_no_temporary(self, shard, tmp_path, monkeypatch):
        path = schema.save(shard, tmp_path / "x.nc")
        before = path.read_bytes()

        def full(*_args, **_kwargs):
            raise OSError("No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            schema.save(shard, path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["x.nc"]

    def test_an_invalid_shard_is_not_written(self, shard, tmp_path):
        with pytest.raises(SchemaError, match=r"x\.nc: variable 'entropy' is missing"):
            schema.save(shard.drop_vars("entropy"), tmp_path / "x.nc")
        assert not list(tmp_path.iterdir())


class TestLoad:
    def test_missing_file_names_its_neighbours(self, shard, tmp_path):
        with pytest.raises(SchemaError, match=r"no shard at .*y\.nc$"):
            schema.load(tmp_path / "y.nc")
        schema.save(shard, tmp_path / "x.nc")
        with pytest.raises(SchemaError, match=r"no shard at .*y\.nc; the folder holds x\.nc"):
            schema.load(tmp_path / "y.nc")
        with pytest.raises(SchemaError, match="no shard at"):
            schema.load(tmp_path / "no" / "folder" / "y.nc")

    def test_a_truncated_file_is_refused(self, shard, tmp_path):
        path = schema.save(shard, tmp_path / "x.nc")
        whole = path.read_bytes()
        for keep in (0, 1, 100, len(whole) // 3, len(whole) // 2, len(whole) - 1000, len(whole) - 1):
            path.write_bytes(whole[:keep])
            with pytest.raises(SchemaError, match=r"x\.nc cannot be read as netCDF-4 .*collect the cell again"):
                schema.load(path)

    def test_another_kind_of_file(self, tmp_path):
        path = tmp_path / "x.nc"
        path.write_text("hello " * 1000)
        with pytest.raises(SchemaError, match="cannot be read as netCDF-4"):
            schema.load(path)
        xr.Dataset({"a": 1}).to_netcdf(path, engine="h5netcdf")
        with pytest.raises(SchemaError, match="schema_version is None, this version reads 1"):
            schema.load(path)

    def test_it_is_closed_after_reading(self, shard, tmp_path):
        path = schema.save(shard, tmp_path / "x.nc")
        schema.load(path)
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_exists(fd)]
        assert str(path) not in links

    def test_all_errors_are_ours(self):
        assert issubclass(SchemaError, RuitongError)


def fd_exists(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


class TestValidate:
    def invalid(self, ds, match):
        with pytest.raises(SchemaError, match=match):
            schema.validate(ds, where="here")

    def test_other_version(self, shard):
        self.invalid(
            shard.assign_attrs(schema_version=np.int64(99)), "here: schema_version is 99, this version reads 1"
        )

    @pytest.mark.parametrize("name", [*schema.CELL_COORDS, *schema.PROMPT_COORDS, "position"])
    def test_missing_coordinate(self, shard, name):
        self.invalid(shard.drop_vars(name), f"here: coordinate '{name}' is missing; present are")

    @pytest.mark.parametrize("name", [v.name for v in schema.VARIABLES if v.required])
    def test_missing_variable(self, shard, name):
        self.invalid(shard.drop_vars(name), f"here: variable '{name}' is missing")

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [("token_id", "int64"), ("logprob", "float64"), ("state", "int32"), ("n_tokens", "float32")],
    )
    def test_wrong_dtype(self, shard, name, dtype):
        self.invalid(shard.assign({name: shard[name].astype(dtype)}), f"here: {name} must be int|float.*, got {dtype}")
        wanted = shard[name].dtype
        self.invalid(shard.assign({name: shard[name].astype(dtype)}), f"{name} must be {wanted}, got {dtype}")

    def test_text_must_be_text(self, shard):
        self.invalid(shard.assign(text=shard["n_prompt_tokens"]), "text must be str, got int32")

    def test_wrong_dims(self, shard):
        turned = shard.assign(entropy=shard["entropy"].transpose("prompt", ...))
        self.invalid(turned, r"entropy must have dims \('cell', 'scoring', 'prompt', 'position'\), got \('prompt'")

    @pytest.mark.parametrize("value", [-1, len(schema.STATES)])
    def test_flag_out_of_range(self, shard, value):
        shard["state"].values[0, 0, 0] = value
        self.invalid(shard, rf"state must be one of \('ok', .*\(0 to {len(schema.STATES) - 1}\)")

    def test_order_of_scoring(self, shard):
        self.invalid(shard.isel(scoring=[1, 0]), r"scoring must be \('decode', 'replay'\), got \('replay', 'decode'\)")

    def test_duplicate_prompt(self, shard):
        self.invalid(shard.isel(prompt=[0, 1, 1]), "here: duplicate prompt 'p0001'; every label must be unique")

    def test_duplicate_cell(self, shard):
        label = shard["cell"].item()
        self.invalid(shard.isel(cell=[0, 0]), f"here: duplicate cell '{label}'")

    def test_padding_inside(self, shard):
        shard["token_id"].values[0, 0, 0, 1] = -1
        self.invalid(shard, "token_id is padding inside n_tokens; the file is damaged")
        shard["position_state"].values[0, 0, 0, 1] = schema.POSITION_STATES.index("nan")
        schema.validate(shard)  # a row that turned NaN has no token there

    def test_tokens_after_the_end(self, shard):
        n = int(shard["n_tokens"].values[0, 1].argmin())
        shard["token_id"].values[0, 1, n, shard["n_tokens"].values[0, 1, n]] = 3
        self.invalid(shard, "token_id goes on after n_tokens; the file is damaged")

    @pytest.mark.parametrize("name", ["logprob", "top_logprob", "anchor_logprob"])
    def test_positive_logprob(self, shard, name):
        shard[name].values.flat[0] = 0.5
        self.invalid(shard, f"{name} has positive values")
        shard[name].values.flat[0] = 5e-7  # float32 rounding of a sure token
        schema.validate(shard)

    def test_valid_positions_follow_n_tokens(self, shard):
        valid = schema.valid_positions(shard)
        assert valid.dims == ("cell", "scoring", "prompt", "position")
        np.testing.assert_array_equal(valid.sum("position").values, shard["n_tokens"].values)
        assert (shard["token_id"].where(valid, -1) == shard["token_id"]).all()


class TestCombine:
    @pytest.fixture
    def two(self):
        """Two cells that share three of five prompts, the second with longer rows and a larger k."""
        a = synthetic_shards([{"noise": 0.1}], n_prompts=5, n_positions=6, k=4, vocab=30).shards[0]
        b = synthetic_shards([{"hardware": "b"}], n_prompts=5, n_positions=9, k=6, vocab=30).shards[0]
        return a.isel(prompt=slice(0, 4)), b.isel(prompt=slice(1, 5))

    def test_outer_join_keeps_types_and_pads_by_the_schema(self, two):
        ds = schema.combine(two)
        assert dict(ds.sizes) == {"cell": 2, "scoring": 2, "prompt": 5, "position": 9, "k": 6}
        for v in schema.VARIABLES:
            if v.name in ds and v.dtype != "str":
                assert ds[v.name].dtype == v.dtype, v.name
                lost = ds[v.name].isel(cell=0).sel(prompt="p0004").values
                np.testing.assert_array_equal(lost, np.full(lost.shape, v.fill, dtype=v.dtype))
        assert ds["batch_size"].dtype == np.int32
        assert ds["seed"].dtype == np.int64
        assert ds["category"].values.tolist() == ["list", "code", "open", "list", "code"]
        assert ds["token_id"].attrs == two[0]["token_id"].attrs
        assert ds.attrs["title"] == "Ruitong aggregate"

    def test_each_cell_comes_back(self, two):
        ds = schema.combine(two)
        for shard in two:
            back = schema.select(ds, str(shard["cell"].values[0]))
            back = back.isel(position=slice(shard.sizes["position"]), k=slice(shard.sizes["k"]))
            for name in shard.variables:
                np.testing.assert_array_equal(back[name].values, shard[name].values, err_msg=str(name))

    def test_round_trip_of_an_aggregate(self, two, tmp_path):
        ds = schema.combine(two)
        xr.testing.assert_identical(schema.load(schema.save(ds, tmp_path / "all.nc")), ds)

    def test_of_aggregates(self, two):
        c = synthetic_shards([{"noise": 0.1}, {"hardware": "c"}], n_prompts=5, n_positions=6, k=4, vocab=30).shards[1]
        xr.testing.assert_identical(schema.combine([schema.combine(two), c]), schema.combine([*two, c]))

    def test_shards_are_not_changed(self, two):
        before = [s.copy(deep=True) for s in two]
        schema.combine(two)
        for one, copy in zip(two, before, strict=True):
            xr.testing.assert_identical(one, copy)

    def test_one_shard(self, two):
        assert schema.combine(two[:1]).sizes["cell"] == 1

    def test_none(self):
        with pytest.raises(SchemaError, match="no shards to combine; collect some cells first"):
            schema.combine([])

    def test_the_same_cell_twice(self, two):
        label = two[0]["cell"].item()
        with pytest.raises(SchemaError, match=f"duplicate cell '{label}': the same cell was given twice"):
            schema.combine([*two, two[0]])

    def test_a_changed_prompt_under_the_same_id(self, two):
        two[1]["prompt_sha256"].values[0, 0] = "0" * 64
        with pytest.raises(SchemaError, match=r"'p0001' has other token ids in .*an edited prompt needs a new id"):
            schema.combine(two)

    def test_another_tokenizer_has_its_own_prompt_ids(self, two):
        found = schema.provenance(two[1]) | {"tokenizer_sha256": "other"}
        two[1]["provenance"].values[0] = json.dumps(found)
        two[1]["prompt_sha256"].values[0] = ["0" * 64, "1" * 64, "2" * 64, "3" * 64]
        assert schema.combine(two).sizes["cell"] == 2

    def test_a_prompt_with_two_categories(self, two):
        moved = two[1].assign_coords(category=("prompt", ["list"] * 4))
        with pytest.raises(SchemaError, match="different categories or languages"):
            schema.combine([two[0], moved])

    def test_text_tokens_on_one_side(self, two):
        names = {n: two[0][n].values.tolist() for n in ("prompt", "category", "language")}
        ds = schema.new_shard(DEFAULTS | LIMITS, "texts", names, n_positions=2, k=3, text_tokens=True)
        ds["token_text"].values[0, 0, 0, 0] = "中"
        out = schema.combine([two[0], ds])
        assert out["token_text"].sel(cell="texts").values[0, 0, 0] == "中"
        assert (out["token_text"].isel(cell=0) == "").all()
        assert out["top_token_text"].dims[-1] == "k"
        assert "token_text" not in two[0]

    def test_select_leaves_out_prompts_that_never_ran(self, two):
        ds = schema.combine(two)
        one = schema.select(ds, str(two[1]["cell"].values[0]))
        assert one["prompt"].values.tolist() == ["p0001", "p0002", "p0003", "p0004"]
        assert one.sizes["cell"] == 1


class TestHashes:
    def test_by_dtype_shape_and_content(self):
        a = np.arange(6, dtype=np.int32)
        same = schema.array_sha256(a.copy())
        assert schema.array_sha256(a) == same
        assert schema.array_sha256(np.arange(12, dtype=np.int32)[::2] // 2) == same  # not by memory layout
        others = [a.astype(np.int64), a.reshape(2, 3), a + 1]
        assert len({same, *map(schema.array_sha256, others)}) == 4
        assert schema.array_sha256(a, a) != same

    def test_anchor_is_free_of_padding(self):
        rng = np.random.default_rng(0)
        token, top, n = rng.integers(0, 9, (3, 4)), rng.integers(0, 9, (3, 4, 2)), np.array([4, 2, 3])
        plain = schema.anchor_sha256(token, top, n)
        for i, m in enumerate(n):
            token[i, m:], top[i, m:] = -1, -1
        assert schema.anchor_sha256(token, top, n) == plain
        wide_token, wide_top = np.full((3, 7), -1), np.full((3, 7, 5), -1)
        wide_token[:, :4], wide_top[:, :4, :2] = token, top
        assert schema.anchor_sha256(wide_token, wide_top, n) == plain
        for array, at in ((token, (0, 3)), (top, (2, 2, 1))):
            array[at] += 1
            assert schema.anchor_sha256(token, top, n) != plain
            array[at] -= 1
        assert schema.anchor_sha256(token, top, n - 1) != plain
