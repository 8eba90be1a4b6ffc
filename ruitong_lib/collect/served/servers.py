"""What a server says about itself: its name and version, its models, and settings that change numbers."""

import re
from typing import Any

from ruitong_lib.collect.served.client import Client, ServerError, message
from ruitong_lib.errors import RuitongError, did_you_mean


def choose_model(listed: list[str], wanted: str, fallback: str) -> str:
    """Return the server's name of the model: the one asked for, our own name of it, or the only one there is.

    Raises
    ------
    RuitongError
        When the server lists other models, and which one is meant is not clear.
    """
    if wanted:
        if listed and wanted not in listed:
            raise RuitongError(
                f"the server has no model {wanted!r}.{did_you_mean(wanted, listed)} It lists: {', '.join(listed)}"
            )
        return wanted
    if fallback in listed or not listed:
        return fallback
    if len(listed) == 1:
        return listed[0]
    raise RuitongError(f"the server lists {len(listed)} models: {', '.join(listed)}. Name one in served_model")


async def identify(client: Client) -> dict[str, Any]:
    """Ask the pages that servers have about themselves; what no page says is "unknown"."""
    pages: dict[str, Any] = {}
    header = ""
    for path in ("/models", "//version", "//props", "//get_server_info", "//info", "//api/version", "//metrics"):
        reply = await client.get(path)
        if reply is not None:
            header = header or reply.server
            pages[path] = reply if reply.status == 200 else None
            if path == "/models" and reply.status in {401, 403}:
                raise ServerError(f"the server refuses the key ({reply.status}: {message(reply)}); check api_key_env")
    listed = _json(pages, "/models").get("data")
    models = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    owner = next((str(m["owned_by"]) for m in models if m.get("owned_by")), "")
    props, sglang, version = (_json(pages, p) for p in ("//props", "//get_server_info", "//version"))
    tgi, ollama = _json(pages, "//info"), _json(pages, "//api/version")
    metrics = pages["//metrics"].text if pages.get("//metrics") else ""
    name, number = "unknown", "unknown"
    if "llama" in header.lower() or owner == "llamacpp" or "build_info" in props:
        name, number = "llama.cpp", str(props.get("build_info") or "unknown")
    elif owner == "sglang" or "speculative_algorithm" in sglang:
        name, number = "SGLang", str(sglang.get("version") or "unknown")
    elif owner == "vllm" or "vllm:" in metrics:
        name, number = "vLLM", str(version.get("version") or "unknown")
    elif "docker_label" in tgi or "max_concurrent_requests" in tgi:
        name, number = "TGI", str(tgi.get("version") or "unknown")
    elif owner == "library" or ollama.get("version"):
        name, number = "Ollama", str(ollama.get("version") or "unknown")
    elif owner or version:
        name, number = owner or "unknown", str(version.get("version") or "unknown")
    return {
        "name": name,
        "version": number,
        "models": [str(m.get("id")) for m in models if m.get("id")],
        "max_model_len": next((m["max_model_len"] for m in models if isinstance(m.get("max_model_len"), int)), None),
        "dtype": _said(sglang.get("dtype") or tgi.get("model_dtype") or props.get("dtype")),
        "prefix_cache": _prefix_cache(metrics, sglang),
        "speculation": _speculation(metrics, sglang, props),
    }


def _said(value: Any) -> str:
    return str(value) if value not in {None, ""} else "unknown"


def _json(pages: dict[str, Any], path: str) -> dict[str, Any]:
    reply = pages.get(path)
    return reply.body if reply is not None and isinstance(reply.body, dict) else {}


def _prefix_cache(metrics: str, sglang: dict[str, Any]) -> str:
    if isinstance(sglang.get("disable_radix_cache"), bool):
        return "off" if sglang["disable_radix_cache"] else "on"
    found = re.search(r'enable_prefix_caching="(\w+)"', metrics)
    return {"True": "on", "False": "off"}.get(found.group(1), "unknown") if found else "unknown"


def _speculation(metrics: str, sglang: dict[str, Any], props: dict[str, Any]) -> str:
    if "speculative_algorithm" in sglang:
        return str(sglang["speculative_algorithm"] or "off")
    if "vllm:" in metrics:
        return "on" if "spec_decode" in metrics else "off"
    settings = props.get("default_generation_settings")
    inner = settings.get("params", settings) if isinstance(settings, dict) else {}
    if isinstance(inner, dict) and "speculative.n_max" in inner:
        return f"up to {inner['speculative.n_max']} tokens"
    return "unknown"
