import numpy as np
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ruitong_lib import schema
from ruitong_lib.testing import DEFAULTS, synthetic_shards

# Everything that Python calls a character, lone surrogates among them, and what escaping could stumble over.
CHARACTERS = st.one_of(st.characters(), st.sampled_from(["\\", "\0", "u", "0", "\ud800", "中", "\n", '"']))
TEXTS = st.text(CHARACTERS, max_size=12)


@given(TEXTS)
@settings(max_examples=300)
def test_escape_is_reversible_and_holds_what_netcdf_can(text):
    escaped = schema.escape(text)
    assert schema.unescape(escaped) == text
    assert "\0" not in escaped
    escaped.encode("utf-8")  # no lone surrogate is left


@given(TEXTS, TEXTS)
def test_escape_keeps_texts_apart(one, two):
    assert (schema.escape(one) == schema.escape(two)) == (one == two)


@st.composite
def shards(draw):
    """A shard with arbitrary texts, ids and lengths; values are NaN, the largest and the smallest among others."""
    ids = draw(st.lists(TEXTS, min_size=1, max_size=8, unique=True))
    n, width, k = len(ids), draw(st.integers(1, 5)), draw(st.integers(2, 4))
    texts = st.lists(TEXTS, min_size=n, max_size=n)
    names = {"prompt": ids, "category": draw(texts), "language": draw(texts)}
    text_tokens = draw(st.booleans())
    cell = DEFAULTS | {"max_new_tokens": width, "anchor": draw(TEXTS), "model": draw(TEXTS), "seed": draw(SEEDS)}
    ds = schema.new_shard(cell, "x.00000000", names, n_positions=width, k=k, text_tokens=text_tokens)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ds["n_tokens"].values[:] = rng.integers(0, width + 1, (1, 2, n))
    valid = schema.valid_positions(ds).values
    ds["token_id"].values[:] = np.where(valid, rng.integers(0, 2**31 - 1, valid.shape), -1)
    for name in ("logprob", "top_logprob", "anchor_logprob"):
        some = [0.0, -0.0, np.nan, -np.inf, -1e-45, np.finfo(np.float32).min, -1.1]
        ds[name].values[:] = rng.choice(np.array(some, dtype=np.float32), ds[name].shape)
    ds["top_token_id"].values[:] = rng.integers(-1, 2**31 - 1, ds["top_token_id"].shape)
    ds["text"].values[0] = draw(texts)
    ds["prompt_sha256"].values[0] = [f"{i}" for i in range(n)]
    if text_tokens:
        ds["token_text"].values[0, 0, 0] = draw(st.lists(TEXTS, min_size=width, max_size=width))
    return ds


SEEDS = st.integers(0, 2**63 - 1)


@given(shards())
@settings(max_examples=8)
def test_round_trip_is_identical(tmp_path_factory, ds):
    path = schema.save(ds, tmp_path_factory.mktemp("round") / "x.nc")
    back = schema.load(path)
    xr.testing.assert_identical(back, ds)
    for v in schema.VARIABLES:
        if v.name in ds and v.dtype != "str":
            assert back[v.name].dtype == v.dtype
            np.testing.assert_array_equal(back[v.name].values.view(np.int8), ds[v.name].values.view(np.int8))


POOL = synthetic_shards([{"hardware": f"card-{i}"} for i in range(3)], n_prompts=5, n_positions=5, k=4, vocab=20).shards


@given(st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.integers(2, 4)), min_size=1, max_size=3))
@settings(max_examples=25)
def test_combine_loses_nothing(parts):
    """Whatever prompts and alternatives the cells have, each comes back as it was, and what is added is padding."""
    made = [s.isel(prompt=sorted(rows), k=slice(k)) for s, (rows, k) in zip(POOL, parts, strict=False)]
    ds = schema.combine(made)
    assert set(ds["prompt"].values) == {p for s in made for p in s["prompt"].values}
    assert ds.sizes["k"] == max(s.sizes["k"] for s in made)
    for shard in made:
        back = schema.select(ds, str(shard["cell"].values[0]))
        assert sorted(back["prompt"].values) == sorted(shard["prompt"].values)
        back = back.sel(prompt=shard["prompt"].values)
        for v in schema.VARIABLES:
            if v.name not in shard:
                continue
            got = back[v.name]
            if "k" in got.dims:
                added = got.isel(k=slice(shard.sizes["k"], None)).values
                np.testing.assert_array_equal(added, np.full(added.shape, v.fill, dtype=added.dtype))
                got = got.isel(k=slice(shard.sizes["k"]))
            np.testing.assert_array_equal(got.values, shard[v.name].values, err_msg=v.name)
