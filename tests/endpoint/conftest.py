"""A served model that is none: a deterministic distribution behind the shapes of servers, and faults on demand."""

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ruitong_lib.cell import Cell
from ruitong_lib.collect.served import vocabulary
from ruitong_lib.collect.served.client import Client
from ruitong_lib.collect.served.vocabulary import Vocabulary
from ruitong_lib.prompts import Prompt, render
from ruitong_lib.testing.models import _tokenizer

V = 400
EOS = 3
PROMPTS = (("a", "Hello", "en"), ("b", "同一个模型", "zh"), ("c", "Why?", "en"), ("d", "def f():", "code"))
KEY = "sk-not-to-be-seen-1234567890"


@pytest.fixture(scope="session")
def words() -> Vocabulary:
    return Vocabulary(_tokenizer(V, chat_template=True))


@pytest.fixture(scope="session")
def folder(words: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local model folder: the tokenizer, and weights that are hashed and never loaded."""
    path = tmp_path_factory.mktemp("served") / "tiny-served"
    words.tokenizer.save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.6, "top_k": 20}')
    return path


load_tokenizer = vocabulary.load


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, words: Vocabulary) -> None:
    """Load the tokenizer once; retries wait 0 s, but still refuse a wait that is too long."""
    monkeypatch.setattr(vocabulary, "load", lambda _: words)
    wait = Client._wait
    monkeypatch.setattr(Client, "_wait", lambda self, attempt, asked: 0.0 * wait(self, attempt, asked))


def logits(ids: list[int], temperature: float = 1.0) -> Any:
    """A distribution over the vocabulary that depends on the last ids alone; now and then the text ends."""
    rng = np.random.default_rng([5, len(ids) % 7, *ids[-3:]])
    x = rng.standard_normal(V) * 3
    x[:4] = -20
    x[EOS] = 20 if rng.random() < 0.12 else -20
    return x / temperature


def log_softmax(x: Any) -> Any:
    shifted = x - x.max()
    return shifted - math.log(np.exp(shifted).sum())


@dataclasses.dataclass
class Fake:
    """An OpenAI-compatible server; the fields say what it can do, ``mend`` may spoil what it answers."""

    words: Vocabulary
    takes_ids: bool = True
    returns_ids: bool = True
    completions: bool = True
    chat: bool = True
    max_k: int = 30
    prompt_logprobs: bool = True
    echo: bool = False
    processed: bool = False
    refuses: tuple[str, ...] = ()
    says_names: bool = True
    key: str = ""
    extra_prompt: tuple[int, ...] = ()  # what the chat template of this server adds
    usage: bool = True
    noise: float = 0.0
    owner: str = "vllm"
    name: str = "served"
    mend: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None
    before: Callable[[int, dict[str, Any]], httpx.Response | None] | None = None
    asked: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    in_flight: int = 0
    most: int = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": {"message": "invalid key"}})
        if request.method == "GET":
            pages: dict[str, Any] = {
                "/v1/models": {"data": [{"id": self.name, "owned_by": self.owner, "max_model_len": 4096}]},
                "/version": {"version": "9.9"},
            }
            return httpx.Response(200, json=pages[path]) if path in pages else httpx.Response(404, json={})
        ask = json.loads(request.content)
        self.asked.append((path, ask))
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)
        try:
            return self.answer(path, ask)
        finally:
            self.in_flight -= 1

    def answer(self, path: str, ask: dict[str, Any]) -> httpx.Response:
        if self.before is not None and (early := self.before(len(self.asked), ask)) is not None:
            return early
        bad = [n for n in self.refuses if n in ask]
        if bad:
            named = f"{bad[0]}: extra inputs are not permitted" if self.says_names else "bad request"
            return httpx.Response(400, json={"error": {"message": named}})
        chat = path.endswith("/chat/completions")
        if not (chat and self.chat) and not (path == "/v1/completions" and self.completions):
            return httpx.Response(404, json={"detail": "Not Found"})
        if not chat and isinstance(ask["prompt"], list) and not self.takes_ids:
            return httpx.Response(400, json={"error": {"message": "prompt must be a string"}})
        k = ask.get("top_logprobs") if chat else ask.get("logprobs")
        if max(k or 0, ask.get("prompt_logprobs") or 0) > self.max_k:
            return httpx.Response(400, json={"error": {"message": f"logprobs must be at most {self.max_k}"}})
        body = self.respond(ask, chat=chat, k=k)
        if self.mend is not None:
            changed = self.mend(body, ask)
            if isinstance(changed, httpx.Response):
                return changed
            body = changed
        return httpx.Response(200, text=json.dumps(body))

    def prompt(self, ask: dict[str, Any], *, chat: bool) -> list[int]:
        if chat:
            switch = ask.get("chat_template_kwargs") or {}
            text = self.words.tokenizer.apply_chat_template(
                ask["messages"], add_generation_prompt=True, tokenize=False, **switch
            )
            return [*self.extra_prompt, *self.words.tokenizer.encode(text, add_special_tokens=False)]
        if isinstance(ask["prompt"], str):
            return self.words.tokenizer.encode(ask["prompt"], add_special_tokens=ask.get("add_special_tokens", True))
        return list(ask["prompt"])

    def distribution(self, ids: list[int], temperature: float) -> Any:
        x = logits(ids, (temperature or 1e-3) if self.processed else 1.0)
        if self.noise:
            x = x + self.noise * np.random.default_rng([len(self.asked), *ids[-2:]]).standard_normal(V)
        return log_softmax(x)

    def respond(self, ask: dict[str, Any], *, chat: bool, k: int | None) -> dict[str, Any]:
        ids = self.prompt(ask, chat=chat)
        new: list[int] = []
        rows = []
        temperature = ask.get("temperature", 1)
        rng = np.random.default_rng([ask.get("seed") or 0, 5])
        for _ in range(ask.get("max_tokens", 16)):
            lp = self.distribution([*ids, *new], temperature)
            token = int(lp.argmax()) if not temperature else int(rng.choice(V, p=np.exp(log_softmax(lp / temperature))))
            rows.append((token, lp))
            new.append(token)
            if token == EOS:
                break
        with_ids = self.returns_ids and ask.get("return_token_ids")
        named = self.returns_ids and ask.get("return_tokens_as_token_ids")

        def name(i: int) -> str:
            return f"token_id:{i}" if named else self.words.tokenizer.decode([i])

        def best(lp: Any) -> list[int]:
            return [int(i) for i in np.argsort(-lp, kind="stable")[:k]]

        choice: dict[str, Any] = {
            "index": 0, "finish_reason": "stop" if new[-1] == EOS else "length", "stop_reason": None,
        }  # fmt: skip
        text = self.words.decode(new)
        if chat:
            choice["message"] = {"role": "assistant", "content": text}

            def entry(i: int, lp: Any) -> dict[str, Any]:
                text = self.words.tokenizer.decode([i])
                return {"token": name(i), "logprob": float(lp[i]), "bytes": list(text.encode())}

            choice["logprobs"] = k and {
                "content": [{**entry(t, lp), "top_logprobs": [entry(i, lp) for i in best(lp)]} for t, lp in rows]
            }
        else:
            choice["text"] = text
            choice["logprobs"] = k and {
                "tokens": [name(t) for t, _ in rows],
                "token_logprobs": [float(lp[t]) for t, lp in rows],
                "top_logprobs": [{name(i): float(lp[i]) for i in best(lp)} for _, lp in rows],
            }
        if with_ids:
            choice |= {"token_ids": new, "prompt_token_ids": ids}
        if self.prompt_logprobs and ask.get("prompt_logprobs"):
            choice["prompt_logprobs"] = [
                None,
                *[self.scored(ids, t, ask["prompt_logprobs"]) for t in range(1, len(ids))],
            ]
        if self.echo and ask.get("echo") and k:
            lps = [self.distribution(ids[:t], 1) for t in range(1, len(ids))]
            own = choice["logprobs"]
            own["tokens"] = [name(i) for i in ids] + own["tokens"]
            own["token_logprobs"] = [
                None,
                *[float(lp[i]) for lp, i in zip(lps, ids[1:], strict=True)],
                *own["token_logprobs"],
            ]
            own["top_logprobs"] = [
                None,
                *[{name(i): float(lp[i]) for i in best(lp)} for lp in lps],
                *own["top_logprobs"],
            ]
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(ids) + len(new)}
        return {"choices": [choice]} | ({"usage": usage} if self.usage else {})

    def scored(self, ids: list[int], t: int, k: int) -> dict[str, Any]:
        lp = self.distribution(ids[:t], 1)
        order = [int(i) for i in np.argsort(-lp, kind="stable")]
        wanted = [ids[t], *[i for i in order[:k] if i != ids[t]]] if ids[t] not in order[:k] else order[:k]
        return {str(i): {"logprob": float(lp[i]), "rank": order.index(i) + 1, "decoded_token": "x"} for i in wanted}


@pytest.fixture
def prompt_ids(words: Vocabulary) -> list[list[int]]:
    """The prompts as the model reads them."""
    return render([Prompt(i, "", x, t) for i, t, x in PROMPTS], words.tokenizer)


@pytest.fixture
def fake(words: Vocabulary) -> Fake:
    return Fake(words)


@pytest.fixture
def cell(folder: Path, tmp_path: Path) -> Callable[..., Cell]:
    prompts = tmp_path / "four.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": i, "text": t, "language": x}) for i, t, x in PROMPTS))

    def make(**more: Any) -> Cell:
        base = {
            "engine": "endpoint", "base_url": "http://served.test/v1", "model": str(folder), "hardware": "card-a",
            "prompts": str(prompts), "max_new_tokens": 11, "scoring": "both", "outputs": str(tmp_path / "out"),
        }  # fmt: skip
        return Cell(**{**base, **more})

    return make
