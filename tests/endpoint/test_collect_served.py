"""The collector from end to end, against a fake server: what it stores, asks, refuses, resumes and keeps secret."""

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from conftest import EOS, KEY, Fake, load_tokenizer, log_softmax, logits

from ruitong_lib import RefusedError, RuitongError, compare, schema
from ruitong_lib.cell import Cell
from ruitong_lib.collect import endpoint, finished, run_cell, shard_path
from ruitong_lib.collect.served import vocabulary
from ruitong_lib.collect.served.client import ServerError

Make = Callable[..., Cell]


def collect(cell: Cell, fake: Fake) -> Any:
    return endpoint.collect(cell, transport=httpx.MockTransport(fake))


def raw_files(cell: Cell) -> list[Path]:
    return sorted((shard_path(cell).parent / "raw" / shard_path(cell).stem).glob("*.json.gz"))


def test_every_number_is_the_servers_own(
    cell: Make, fake: Fake, prompt_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "load", load_tokenizer)
    ds = collect(cell(), fake)
    one = ds.isel(cell=0)
    assert (one["state"].values == 0).all()
    ids = prompt_ids
    for scoring in schema.SCORINGS:
        for p in range(4):
            row = one.sel(scoring=scoring).isel(prompt=p)
            n = int(row["n_tokens"])
            tokens = row["token_id"].values[:n].tolist()
            for t in range(n):
                lp = log_softmax(logits([*ids[p], *tokens[:t]]))
                best = np.argsort(-lp, kind="stable")[:20]
                assert tokens[t] == best[0]
                np.testing.assert_array_equal(row["top_token_id"].values[t], best)
                np.testing.assert_array_equal(row["top_logprob"].values[t], lp[best].astype(np.float32))
                assert row["logprob"].values[t] == np.float32(lp[tokens[t]])
    replay = one.sel(scoring="replay")
    np.testing.assert_array_equal(one["anchor_token_id"].values, one.sel(scoring="decode")["top_token_id"].values)
    np.testing.assert_array_equal(one["anchor_logprob"].values, replay["top_logprob"].values)
    assert np.isnan(one["anchor_tail_logprob"].values).all()  # a server has no logsumexp of the rest
    assert np.isnan(one["tail_logprob"].values).all()
    assert np.isnan(one["entropy"].values).all()


def test_the_manifest_says_what_is_declared_and_what_the_server_said(cell: Make, fake: Fake) -> None:
    found = schema.provenance(collect(cell(precision="fp16"), fake))
    assert found["identity"] == "ids"
    assert found["logprob_mode"] == "raw"
    assert found["declared"] == ["hardware", "precision", "weights"]
    assert found["weights"].startswith("declared")
    assert found["probe"]["server"]["name"] == "vLLM"
    assert found["probe"]["server"]["version"] == "9.9"
    assert found["generation_config_overridden"] == {"temperature": 0.6, "top_k": 20}
    assert found["warm"] == {"repeats_itself": True, "difference": found["warm"]["difference"], "largest_nat": 0.0}
    assert found["eos_token_ids"] == [EOS]
    assert found["top_k"] == {"asked": 20, "got": 20, "replay_asked": 20}
    assert "base_url" not in found["cell"]
    assert "served.test" not in json.dumps(found)


def test_a_model_that_is_named_by_a_path_leaves_its_last_part(cell: Make, fake: Fake) -> None:
    fake.name = "/home/someone/models/served"
    found = schema.provenance(collect(cell(scoring="decode"), fake))
    assert found["probe"]["model"] == "served"
    assert "someone" not in json.dumps(found)


def test_every_sampling_parameter_is_sent(cell: Make, fake: Fake) -> None:
    collect(cell(seed=7), fake)
    _, ask = fake.asked[-1]
    wanted = {
        "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "frequency_penalty": 0,
        "presence_penalty": 0, "n": 1, "stop": None, "seed": 7, "stream": False,
    }  # fmt: skip
    assert {n: ask[n] for n in wanted} == wanted


@pytest.mark.parametrize("says_names", [True, False])
def test_a_refused_parameter_is_dropped_and_recorded(cell: Make, fake: Fake, says_names: bool) -> None:
    fake.refuses, fake.says_names = ("min_p", "return_tokens_as_token_ids"), says_names
    found = schema.provenance(collect(cell(), fake))
    assert set(found["probe"]["dropped"]["completions"]) == set(fake.refuses)
    assert not set(fake.refuses) & set(found["asked"])
    assert "repetition_penalty" in found["asked"]


def test_top_k_minus_one_becomes_zero_before_it_is_dropped(cell: Make, fake: Fake) -> None:
    def no_minus_one(_: int, ask: dict[str, Any]) -> httpx.Response | None:
        if ask.get("top_k") == -1:
            return httpx.Response(400, json={"error": {"message": "top_k must be at least 0"}})
        return None

    fake.before = no_minus_one
    assert schema.provenance(collect(cell(scoring="decode"), fake))["asked"]["top_k"] == 0


def test_batch_size_is_the_number_of_requests_in_flight(cell: Make, fake: Fake) -> None:
    collect(cell(batch_size=1), fake)
    assert fake.most == 1
    collect(cell(batch_size=3), fake)
    assert fake.most == 3


def test_concurrency_changes_no_number_of_a_server_that_repeats_itself(cell: Make, fake: Fake) -> None:
    one, three = (collect(cell(batch_size=b, composition=c), fake) for b, c in ((1, 0), (3, 5)))
    for name in ("token_id", "logprob", "top_token_id", "top_logprob", "anchor_logprob", "state"):
        np.testing.assert_array_equal(one[name].values, three[name].values)


def test_a_larger_k_is_asked_for_in_replay(cell: Make, fake: Fake) -> None:
    collect(cell(top_k=5), fake)
    assert {a["prompt_logprobs"] for _, a in fake.asked[-4:]} == {20}


def test_a_k_below_what_was_asked_is_stored_as_it_came(cell: Make, fake: Fake) -> None:
    fake.max_k = 5
    ds = collect(cell(scoring="decode"), fake)
    assert ds.sizes["k"] == 5
    assert schema.provenance(ds)["top_k"]["got"] == 5
    assert (ds["state"].sel(scoring="decode").values == 0).all()
    assert (ds["state"].sel(scoring="replay").values == schema.STATES.index("missing")).all()


def test_anchor_ids_that_the_server_does_not_list_are_censored(cell: Make, fake: Fake, tmp_path: Path) -> None:
    path, anchor = run(cell(top_k=20), fake)
    fake.max_k = 20
    fake.noise = 0.5
    other = collect(cell(anchor=str(path), scoring="replay", repeat=1), fake)
    wanted = other["anchor_token_id"].values >= 0
    censored = np.isnan(other["anchor_logprob"].values) & wanted
    assert 0 < censored.sum() < wanted.sum()
    assert (other["position_state"].sel(scoring="replay").values[wanted.any(-1)] == 0).all()
    c = compare(anchor, other)
    assert np.isfinite(c.metrics["kl"].value)
    assert c.metrics["kl"].value > 0


def run(cell: Cell, fake: Fake) -> tuple[Path, Any]:
    ds = collect(cell, fake)
    return schema.save(ds, shard_path(cell)), ds


def test_a_row_against_itself_is_identical(cell: Make, fake: Fake) -> None:
    a = collect(cell(), fake)
    for scoring in ("replay", "decode"):
        c = compare(a, a, scoring=scoring)
        assert c.notes["identical"]
        assert c.metrics["kl"].value == 0


def test_a_server_that_does_not_repeat_itself_is_flagged(
    cell: Make, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    fake.noise = 0.01
    with caplog.at_level(logging.WARNING, "ruitong"):
        warm = schema.provenance(collect(cell(), fake))["warm"]
    assert warm["repeats_itself"] is False
    assert "3 repeats" in caplog.text


class TestPromptIdentity:
    def test_chat_is_used_where_ids_are_not_taken(self, cell: Make, fake: Fake) -> None:
        fake.takes_ids = False
        ds = collect(cell(scoring="decode"), fake)
        assert schema.provenance(ds)["probe"]["route"] == "chat"
        ours = collect(cell(scoring="decode"), Fake(fake.words))
        np.testing.assert_array_equal(ds["token_id"].values, ours["token_id"].values)
        assert (ds["prompt_sha256"].values == ours["prompt_sha256"].values).all()

    def test_double_bos_is_named(self, cell: Make, fake: Fake) -> None:
        fake.takes_ids, fake.extra_prompt = False, (1,)
        with pytest.raises(RuitongError, match="double BOS"):
            collect(cell(scoring="decode"), fake)

    def test_a_date_in_the_template_is_refused(self, cell: Make, fake: Fake) -> None:
        fake.takes_ids, fake.extra_prompt, fake.returns_ids = False, (40, 41, 42), False
        with pytest.raises(RuitongError, match="another chat template"):
            collect(cell(scoring="decode"), fake)

    def test_an_ignored_thinking_switch_is_named(self, cell: Make, fake: Fake) -> None:
        fake.takes_ids = False
        with pytest.raises(RuitongError, match="thinking switch"):
            fake.refuses = ("chat_template_kwargs",)  # the template's own default decides then: it does not think
            collect(cell(scoring="decode", thinking=True), fake)

    def test_each_prompt_is_checked_and_not_the_first_alone(
        self, cell: Make, fake: Fake, prompt_ids: list[list[int]]
    ) -> None:
        def third_is_longer(body: dict[str, Any], ask: dict[str, Any]) -> dict[str, Any]:
            if ask.get("prompt") == prompt_ids[2]:
                body["choices"][0]["prompt_token_ids"] = [1, *prompt_ids[2]]
                body["usage"]["prompt_tokens"] += 1
            return body

        fake.mend = third_is_longer
        c = cell(scoring="decode")
        with pytest.raises(RuitongError, match=r"prompt 'c': .*double BOS.*2 of 4 prompts of the decode are kept"):
            collect(c, fake)
        assert len(raw_files(c)) == 2

    def test_a_server_that_does_not_count_is_refused(self, cell: Make, fake: Fake) -> None:
        fake.usage, fake.returns_ids = False, False
        with pytest.raises(RuitongError, match=r"usage\.prompt_tokens"):
            collect(cell(scoring="decode"), fake)


class TestReplay:
    def test_echo_gives_the_same_numbers(self, cell: Make, fake: Fake) -> None:
        whole = collect(cell(), fake)
        fake.prompt_logprobs, fake.echo = False, True
        echoed = collect(cell(), fake)
        assert schema.provenance(echoed)["probe"]["replay"] == "echo"
        for name in ("logprob", "anchor_logprob", "top_logprob"):
            np.testing.assert_array_equal(whole[name].values, echoed[name].values)

    def test_a_server_that_cannot_is_decode_only_and_says_so(
        self, cell: Make, fake: Fake, caplog: pytest.LogCaptureFixture
    ) -> None:
        fake.prompt_logprobs = False
        ds = collect(cell(), fake)
        assert (ds["state"].sel(scoring="replay").values == schema.STATES.index("missing")).all()
        assert "decode only" in caplog.text
        assert schema.provenance(ds)["probe"]["can"]["replay"].startswith("no")

    def test_replay_alone_is_refused_there(self, cell: Make, fake: Fake) -> None:
        path, _ = run(cell(), fake)
        fake.prompt_logprobs = False
        with pytest.raises(RuitongError, match="was ignored"):
            collect(cell(scoring="replay", anchor=str(path)), fake)


class TestResume:
    def test_a_server_that_dies_leaves_what_is_measured_and_the_run_goes_on(self, cell: Make, fake: Fake) -> None:
        undisturbed = collect(cell(outputs=str(cell().outputs) + "-whole"), fake)
        c = cell()
        asked: list[Any] = []

        def dies(_: int, ask: dict[str, Any]) -> httpx.Response | None:
            asked.append(ask.get("max_tokens"))
            if asked.count(11) > 5:  # 3 warm ones, 2 prompts
                raise httpx.ConnectError("connection refused")
            return None

        fake.before = dies
        with pytest.raises(ServerError, match="2 of 4 prompts of the decode are kept; the same command goes on"):
            collect(c, fake)
        assert len(raw_files(c)) == 2
        fake.before, fake.asked = None, []
        ds = collect(c, fake)
        decodes = [a for _, a in fake.asked if a.get("max_tokens") == 11]
        assert len(decodes) == 3 + 2  # the warm ones, and the two that were missing
        for name in undisturbed.data_vars:
            if name != "provenance":
                np.testing.assert_array_equal(ds[name].values, undisturbed[name].values)

    def test_the_shard_is_made_from_the_raw_files_alone(self, cell: Make, fake: Fake) -> None:
        c = cell()
        first = collect(c, fake)
        fake.noise = 1.0
        again = collect(c, fake)
        for name in first.data_vars:
            if name != "provenance":
                np.testing.assert_array_equal(first[name].values, again[name].values)

    def test_another_server_another_key_or_a_damaged_file_is_asked_again(self, cell: Make, fake: Fake) -> None:
        c = cell(scoring="decode")
        collect(c, fake)
        files = raw_files(c)
        files[0].write_bytes(files[0].read_bytes()[:40])
        with gzip.open(files[1], "rt") as f:
            stored = json.load(f)
        with gzip.open(files[1], "wt") as f:
            json.dump({**stored, "content_key": "other"}, f)
        fake.asked = []
        collect(c, fake)
        assert sum(a.get("max_tokens") == 11 for _, a in fake.asked) == 3 + 2
        fake.owner, fake.asked = "sglang", []
        collect(c, fake)
        assert sum(a.get("max_tokens") == 11 for _, a in fake.asked) == 3 + 4

    def test_overwrite_asks_for_everything(self, cell: Make, fake: Fake) -> None:
        collect(cell(scoring="decode"), fake)
        fake.asked = []
        collect(cell(scoring="decode", overwrite=True), fake)
        assert sum(a.get("max_tokens") == 11 for _, a in fake.asked) == 3 + 4

    def test_a_finished_cell_is_not_asked_again(self, cell: Make, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        c = cell(scoring="decode")
        monkeypatch.setattr(
            endpoint, "Client", lambda *a, **k: Client_(*a, **{**k, "transport": httpx.MockTransport(fake)})
        )
        from ruitong_lib.collect.served.client import Client as Client_

        path, _ = run_cell(c, progress=False)
        assert finished(c) is not None
        fake.asked = []
        again, _ = run_cell(c, progress=False)
        assert again == path
        assert fake.asked == []


class TestFailures:
    def test_one_failing_prompt_is_a_failed_row_and_the_others_go_on(
        self, cell: Make, fake: Fake, prompt_ids: list[list[int]]
    ) -> None:
        def cannot_encode(_: int, ask: dict[str, Any]) -> httpx.Response | None:
            if ask.get("prompt") == prompt_ids[2]:
                return httpx.Response(500, text="ValueError: Out of range float values are not JSON compliant")
            return None

        fake.before = cannot_encode
        ds = collect(cell(scoring="decode"), fake)
        state = ds["state"].sel(scoring="decode").values[0]
        assert [schema.STATES[s] for s in state] == ["ok", "ok", "failed", "ok"]
        finding = next(f for f in schema.provenance(ds)["findings"] if f["name"] == "no_answer")
        assert finding["prompt"] == "c"
        assert "Out of range float values" in finding["value"]
        with pytest.raises(RefusedError, match="failed"):
            compare(ds, ds, scoring="decode")
        c = compare(ds, ds, scoring="text")
        assert c.notes["left_out"] == 1
        assert c.metrics["identical_texts"].value == 1

    def test_prompt_after_prompt_stops_the_run(self, cell: Make, fake: Fake) -> None:
        def later(body: dict[str, Any], ask: dict[str, Any]) -> Any:
            return httpx.Response(200, text="") if ask["max_tokens"] == 11 else body

        fake.mend = later
        with pytest.raises(ServerError, match=r"3 prompts in a row failed.*an empty body"):
            collect(cell(), fake)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "an empty body"),
            ('{"choices": [{"text": "a', "cut short"),
            ("<html>busy</html>", "no JSON"),
            ("[]", ""),
        ],
    )
    def test_a_server_that_answers_nothing_useful_is_reported(
        self, cell: Make, fake: Fake, text: str, problem: str
    ) -> None:
        fake.mend = lambda body, ask: httpx.Response(200, text=text)
        with pytest.raises(ServerError, match=rf"answers none of the requests.*{problem}"):
            collect(cell(), fake)

    def test_a_refusal_is_not_repeated(self, cell: Make, fake: Fake) -> None:
        def too_long(_: int, ask: dict[str, Any]) -> httpx.Response | None:
            if ask.get("max_tokens") == 11:
                return httpx.Response(400, json={"error": {"message": "maximum context length is 8 tokens"}})
            return None

        fake.before = too_long
        with pytest.raises(ServerError, match=r"refuses prompt 'a'.*maximum context length"):
            collect(cell(), fake)
        assert sum(a.get("max_tokens") == 11 for _, a in fake.asked) == 1

    def test_an_unknown_model_is_named_with_those_that_are_there(self, cell: Make, fake: Fake) -> None:
        with pytest.raises(RuitongError, match=r"no model 'servd'\. Did you mean 'served'"):
            collect(cell(served_model="servd"), fake)


class TestSecrets:
    @pytest.fixture
    def key(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("SERVED_KEY", KEY)
        return KEY

    def everything(self, folder: Path, *more: str) -> str:
        parts = list(more)
        for path in folder.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                parts.append((gzip.decompress(data) if path.suffix == ".gz" else data).decode("latin-1"))
        return "\n".join(parts)

    def test_an_echoing_server_does_not_get_it_into_any_file(
        self, cell: Make, fake: Fake, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        fake.key = key
        escaped = "".join(f"\\u{ord(c):04x}" for c in key)

        def echo(body: dict[str, Any], ask: dict[str, Any]) -> httpx.Response:
            body["choices"][0]["text"] = f"Bearer {key} says hello"
            body["request"] = {"headers": {"Authorization": f"Bearer {key}", key: 1}}
            text = json.dumps(body)[:-1] + f', "escaped": "{escaped}"' + "}"
            return httpx.Response(200, text=text, headers={"server": key, "x-echo": key})

        fake.mend = echo
        with caplog.at_level(logging.DEBUG, "ruitong"):
            path, ds = run(cell(api_key_env="SERVED_KEY"), fake)
        found = self.everything(path.parent, caplog.text, repr(ds), str(ds["text"].values))
        assert key not in found
        for file in raw_files(cell(api_key_env="SERVED_KEY")):
            stored = json.loads(gzip.decompress(file.read_bytes()))
            assert key not in repr(json.loads(stored["body"]))  # nor behind escapes
        assert "[key] says hello" in found
        assert "SERVED_KEY" not in found

    @pytest.mark.parametrize("status", [400, 401, 404, 500])
    def test_nor_into_an_error(
        self, cell: Make, fake: Fake, key: str, status: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        fake.before = lambda _, ask: httpx.Response(status, json={"error": {"message": f"Bearer {key} is not welcome"}})
        with pytest.raises(RuitongError) as e:
            collect(cell(api_key_env="SERVED_KEY"), fake)
        assert key not in str(e.value)
        assert "is not welcome" in str(e.value)
        assert key not in self.everything(tmp_path, caplog.text)

    def test_nor_a_transport_error(self, cell: Make, fake: Fake, key: str) -> None:
        def refuses(_: int, ask: dict[str, Any]) -> httpx.Response | None:
            raise httpx.ConnectError(f"cannot connect with {key}")

        fake.before = refuses
        with pytest.raises(ServerError, match=r"cannot connect with \[key\]"):
            collect(cell(api_key_env="SERVED_KEY"), fake)

    @pytest.mark.parametrize("value", ["", "sp ace-in-the-key", "ключ-ключ", "abc"])
    def test_a_key_that_cannot_be_used_is_refused_and_not_shown(
        self, cell: Make, fake: Fake, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        monkeypatch.setenv("SERVED_KEY", value)
        with pytest.raises(RuitongError, match="SERVED_KEY") as e:
            collect(cell(api_key_env="SERVED_KEY"), fake)
        assert not value or value not in str(e.value)

    def test_the_key_in_place_of_its_variable_is_refused_and_not_shown(self, cell: Make) -> None:
        with pytest.raises(RuitongError, match="name of an environment variable") as e:
            cell(api_key_env=KEY)
        assert KEY not in str(e.value)

    def test_a_password_in_the_address_is_refused_and_not_shown(self, cell: Make, fake: Fake) -> None:
        with pytest.raises(RuitongError, match="no user, password") as e:
            collect(cell(base_url=f"http://user:{KEY}@served.test/v1"), fake)
        assert KEY not in str(e.value)
