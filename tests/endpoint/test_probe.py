"""The probe: what it finds out about a server, and what it says can be measured with it."""

import json
from typing import Any

import httpx
import pytest
from conftest import Fake
from typer.testing import CliRunner

from ruitong_lib.cli import app
from ruitong_lib.collect import endpoint
from ruitong_lib.collect.served.probe import slope
from ruitong_lib.collect.served.servers import choose_model
from ruitong_lib.errors import RuitongError


def probe(fake: Fake, folder: Any = "", **more: Any) -> dict[str, Any]:
    return endpoint.probe_server(
        "http://served.test/v1", model=str(folder), transport=httpx.MockTransport(fake), **more
    )


def test_a_server_that_can_do_everything(fake: Fake, folder: Any) -> None:
    r = probe(fake, folder)
    assert r["server"]["name"] == "vLLM"
    assert (r["model"], r["route"], r["token_ids"]) == ("served", "completions", "return_token_ids")
    assert r["max_k"] == 20  # of those asked for: 50 was refused
    assert "at most 30" in r["k_asked"]["50"]
    assert (r["replay"], r["replay_max_k"]) == ("prompt_logprobs", 20)
    assert (r["logprob_mode"], r["temperature_in_logprobs"]) == ("raw", "no")
    assert r["slopes"]["T=0.5"]["slope"] == pytest.approx(1, abs=1e-6)
    assert (r["seeds"], r["thinking"]) == ("honoured", "honoured")
    assert r["can"]["decode"].startswith("yes") and r["can"]["replay"].startswith("yes")
    json.dumps(r, allow_nan=False)


def test_without_a_tokenizer_ids_of_our_own_are_sent(fake: Fake) -> None:
    r = probe(fake)
    assert r["token_id_prompts"]
    assert r["replay"] == "prompt_logprobs"


def test_a_temperature_in_the_logprobs_is_seen(fake: Fake, folder: Any) -> None:
    fake.processed = True
    r = probe(fake, folder)
    assert r["logprob_mode"] == "processed"
    assert r["temperature_in_logprobs"] == "yes"
    assert r["slopes"]["T=0.5"]["slope"] == pytest.approx(2, rel=1e-3)


def test_a_server_with_texts_alone(fake: Fake, folder: Any) -> None:
    def no_logprobs(body: dict[str, Any], ask: dict[str, Any]) -> dict[str, Any]:
        body["choices"][0].pop("logprobs")
        body["choices"][0].pop("prompt_logprobs", None)
        return body

    fake.mend = no_logprobs
    r = probe(fake, folder)
    assert r["max_k"] == 0
    assert r["can"]["decode"] == "texts only: it sends no logprobs"
    assert r["can"]["replay"].startswith("no")
    assert r["logprob_mode"] == "unknown"


def test_a_k_that_is_silently_capped(fake: Fake, folder: Any) -> None:
    def five(body: dict[str, Any], ask: dict[str, Any]) -> dict[str, Any]:
        for rows in (body["choices"][0].get("logprobs") or {}).get("top_logprobs") or []:
            for name in list(rows)[5:]:
                del rows[name]
        return body

    fake.mend = five
    r = probe(fake, folder)
    assert r["k_asked"] == {"1": 1, "5": 5, "20": 5}
    assert r["max_k"] == 5


def test_masked_alternatives_do_not_count(fake: Fake, folder: Any) -> None:
    def masked(body: dict[str, Any], ask: dict[str, Any]) -> dict[str, Any]:
        for rows in (body["choices"][0].get("logprobs") or {}).get("top_logprobs") or []:
            for name in list(rows)[4:]:
                rows[name] = -9999.0
        return body

    fake.mend = masked
    assert probe(fake, folder)["max_k"] == 4


def test_chat_alone(fake: Fake, folder: Any) -> None:
    fake.completions = False
    r = probe(fake, folder)
    assert r["route"] == "chat"
    assert not r["token_id_prompts"]
    assert r["can"]["replay"].startswith("no")
    assert "is checked" in r["can"]["prompt identity"]


def test_an_ignored_seed_and_thinking_switch(fake: Fake, folder: Any) -> None:
    def before(n: int, ask: dict[str, Any]) -> None:
        ask["seed"] = n
        ask.get("chat_template_kwargs", {}).clear()

    fake.before = before
    r = probe(fake, folder)
    assert (r["seeds"], r["thinking"]) == ("ignored", "ignored")


def test_a_server_that_counts_other_tokens_does_not_take_ids(fake: Fake, folder: Any) -> None:
    def one_more(body: dict[str, Any], ask: dict[str, Any]) -> dict[str, Any]:
        if isinstance(ask.get("prompt"), list):
            body["usage"]["prompt_tokens"] += 1
        return body

    fake.mend = one_more
    r = probe(fake, folder)
    assert r["route"] == "chat"
    assert "ids were sent" in r["refused"]["completions"]


SGLANG: dict[str, Any] = {
    "/get_server_info": {"version": "0.5", "speculative_algorithm": "EAGLE", "disable_radix_cache": True},
    "owner": "x",
}
LLAMA: dict[str, Any] = {
    "/props": {"build_info": "b6000", "default_generation_settings": {"params": {"speculative.n_max": 16}}},
    "owner": "llamacpp",
}


@pytest.mark.parametrize(
    ("pages", "name", "version", "speculation", "prefix_cache"),
    [
        ({"owner": "vllm"}, "vLLM", "9.9", "unknown", "unknown"),
        ({"/metrics": 'vllm:cache_config_info{enable_prefix_caching="True"} 1.0\nvllm:spec_decode_num_drafts_total 3'},
         "vLLM", "9.9", "on", "on"),
        ({"/metrics": 'vllm:cache_config_info{enable_prefix_caching="False"} 1.0'}, "vLLM", "9.9", "off", "off"),
        (SGLANG,
         "SGLang", "0.5", "EAGLE", "off"),
        (LLAMA,
         "llama.cpp", "b6000", "up to 16 tokens", "unknown"),
        ({"/info": {"version": "3.0", "max_concurrent_requests": 1}, "owner": ""}, "TGI", "3.0", "unknown", "unknown"),
        ({"/api/version": {"version": "0.12"}, "owner": "library"}, "Ollama", "0.12", "unknown", "unknown"),
    ],
)  # fmt: skip
def test_what_servers_say_of_themselves(
    fake: Fake, pages: dict[str, Any], name: str, version: str, speculation: str, prefix_cache: str
) -> None:
    fake.owner = pages.get("owner", "vllm")

    async def server(request: httpx.Request) -> httpx.Response:
        page = pages.get(request.url.path)
        if page is not None:
            return httpx.Response(200, text=page) if isinstance(page, str) else httpx.Response(200, json=page)
        return await fake(request)

    r = endpoint.probe_server("http://served.test/v1", transport=httpx.MockTransport(server))["server"]
    assert (r["name"], r["version"], r["speculation"], r["prefix_cache"]) == (name, version, speculation, prefix_cache)


def test_the_model_is_named_or_the_only_one() -> None:
    assert choose_model(["a"], "", "hub/id") == "a"
    assert choose_model(["a", "hub/id"], "", "hub/id") == "hub/id"
    assert choose_model([], "", "hub/id") == "hub/id"
    with pytest.raises(RuitongError, match="lists 2 models: a, b"):
        choose_model(["a", "b"], "", "hub/id")


def test_slope_of_known_rows() -> None:
    x = {i: -0.5 * i for i in range(5)}
    s, offset, n = slope(x, {i: 2 * v + 0.25 for i, v in x.items()} | {9: -1.0})
    assert (s, n) == (pytest.approx(2), 5)
    assert offset == pytest.approx(-0.75)
    assert str(slope({1: -1.0}, {1: -1.0})[0]) == "nan"


def test_the_command(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    real = endpoint.probe_server
    monkeypatch.setattr(endpoint, "probe_server", lambda url, **k: real(url, **k, transport=httpx.MockTransport(fake)))
    run = CliRunner().invoke(app, ["probe", "http://served.test/v1"])
    assert run.exit_code == 0, run.output
    assert "vLLM 9.9, model served" in run.output
    assert "largest k" in run.output
    run = CliRunner().invoke(app, ["probe", "http://served.test/v1", "--json"])
    assert json.loads(run.output)["max_k"] == 20


def test_native_llama_cpp(fake: Fake, folder: Any) -> None:
    """A server with llama.cpp's own path alone."""

    async def native(request: httpx.Request) -> httpx.Response:
        if request.method == "GET" or request.url.path != "/completion":
            return httpx.Response(404, json={})
        ask = json.loads(request.content)
        body = fake.respond(
            {"prompt": ask["prompt"], "max_tokens": ask["n_predict"], "temperature": ask["temperature"],
             "seed": ask["seed"], "return_token_ids": True, "return_tokens_as_token_ids": True},
            chat=False, k=ask.get("n_probs"),
        )  # fmt: skip
        choice, found = body["choices"][0], []
        for token, own, top in zip(*(choice["logprobs"] or {"a": [], "b": [], "c": []}).values(), strict=True):
            named = [{"id": int(i.split(":")[1]), "token": "x", "logprob": v} for i, v in top.items()]
            found.append({"id": int(token.split(":")[1]), "token": "x", "logprob": own, "top_logprobs": named})
        out = {"content": choice["text"], "tokens": choice["token_ids"], "stop_type": "limit",
               "tokens_evaluated": len(ask["prompt"]), "tokens_predicted": len(choice["token_ids"])}  # fmt: skip
        return httpx.Response(200, json=out | ({"completion_probabilities": found} if found else {}))

    r = endpoint.probe_server("http://served.test", model=str(folder), transport=httpx.MockTransport(native))
    assert (r["route"], r["max_k"]) == ("native", 200)
    assert r["logprob_mode"] == "raw"
    assert r["can"]["replay"].startswith("no")
