"""The cell: the frozen parameters of one run, their checks, the label, and how a notebook or a command gives them."""

import ast
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from ruitong_lib.errors import RuitongError, did_you_mean
from ruitong_lib.paths import found
from ruitong_lib.placement import memory_limits
from ruitong_lib.prompts import load_prompts

# Raise it when a change to the collectors changes numbers: finished cells are then collected again.
COLLECT_VERSION = 1

CHOICES: dict[str, tuple[Any, ...]] = {
    "engine": ("transformers", "endpoint"),
    "precision": ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "w8a8"),
    "attention": ("sdpa", "eager", "flash_attention_2"),
    "onednn_isa": (
        "",
        "AVX512_CORE_AMX_FP16",
        "AVX512_CORE_AMX",
        "AVX512_CORE_FP16",
        "AVX512_CORE_BF16",
        "AVX512_CORE",
        "AVX2",
    ),
    "scoring": ("replay", "decode", "both"),
}
# Where things are, not what is computed: in no content key and no manifest. (The anchor has its own hash.)
NOT_NUMBERS = ("outputs", "overwrite", "anchor", "base_url", "api_key_env")
# What a server decides by itself; nobody outside can see it, so a cell of engine 'endpoint' leaves it at the default.
SERVERS_OWN = ("checkpoint", "attention", "onednn_isa", "deterministic", "max_memory", "threads")
DEVICES = ("auto", "cpu", "cuda", "rocm", "npu", "xpu", "mps")
RANGES: dict[str, tuple[int, int]] = {
    "batch_size": (1, 65_536),
    "composition": (0, 2**31 - 1),
    "threads": (0, 4096),
    "seed": (0, 2**63 - 1),
    "repeat": (0, 2**31 - 1),
    "max_new_tokens": (1, 1_000_000),
    "top_k": (2, 1000),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """The parameters of one run. Every field but those of ``NOT_NUMBERS`` can change numbers.

    Raises
    ------
    RuitongError
        From the constructor, for a value of the wrong type, outside its range or not among the choices.
    """

    model: str = "smollm2-135m"  #: hub id, local folder, or smollm2-135m (embedded, needs no download)
    revision: str = ""  #: hub revision; empty is the default branch
    checkpoint: str = ""  #: w8a8: a checkpoint of `model` that was quantised elsewhere; empty: quantised here
    engine: str = "transformers"  #: transformers, or endpoint: a server that speaks the OpenAI protocol
    device: str = "cpu"  #: auto, cpu, cuda, rocm, npu, xpu, mps; with an index: npu:1 (endpoint: not used)
    precision: str = "bf16"  #: fp64, fp32, tf32, bf16, fp16, fp8, w8a8
    batch_size: int = 1
    composition: int = 0  #: which prompts share a batch: 0 is the set's order, n a shuffle seeded with n
    attention: str = "sdpa"  #: sdpa, eager, flash_attention_2
    onednn_isa: str = ""  #: cap on the CPU's instruction set (AVX512_CORE); empty is none
    deterministic: bool = False  #: deterministic algorithms of torch and of the device's libraries
    max_memory: str = ""  #: spread a large model: auto, or 0=40GiB,cpu=60GiB,disk=200GiB; empty is one device
    threads: int = 0  #: CPU threads; 0 is one a core
    seed: int = 0  #: torch.manual_seed; greedy decoding draws nothing, a stochastic layer would
    repeat: int = 0  #: number of the rerun
    prompts: str = "core-16"  #: a prompt set of params/prompts, or a YAML or JSONL file
    thinking: bool = False  #: enable_thinking of the chat template
    max_new_tokens: int = 48
    scoring: str = "replay"  #: replay (the anchor's text), decode (its own), both
    anchor: str = ""  #: the shard whose text is replayed; empty: this cell is the anchor and replays its own text
    top_k: int = 20
    base_url: str = ""  #: endpoint: the server's address, e.g. http://127.0.0.1:8000/v1
    served_model: str = ""  #: endpoint: the server's own name of the model; empty is `model`
    api_key_env: str = ""  #: endpoint: the environment variable that holds the key; empty sends none
    hardware: str = ""  #: endpoint: what the server runs on: here, or the label that ruitong doctor prints there
    outputs: str = ""  #: folder for generated files; empty is the repository's outputs/
    overwrite: bool = False  #: collect again although the shard is there

    def __post_init__(self) -> None:
        """Check every field before anything is loaded."""
        check_types(dataclasses.asdict(self))
        # A grid runs its cells in another folder, so a path that is here is kept whole.
        for name in ("model", "checkpoint"):
            if (value := getattr(self, name)) and Path(value).is_dir():
                object.__setattr__(self, name, str(Path(value).resolve()))
        if self.prompts.partition("#")[0].endswith((".yml", ".yaml", ".jsonl")):
            file, sign, subset = self.prompts.partition("#")
            object.__setattr__(self, "prompts", f"{found(file).resolve()}{sign}{subset}")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                shown = ", ".join(repr(a) for a in allowed)
                raise RuitongError(f"{name} must be one of {shown}, got {value!r}." + did_you_mean(str(value), allowed))
        kind, _, index = self.device.partition(":")
        if kind not in DEVICES or (":" in self.device and not index.isdecimal()):
            raise RuitongError(
                f"device must be one of {', '.join(DEVICES)}, with an index where there are several (npu:1), "
                f"got {self.device!r}." + did_you_mean(kind, DEVICES)
            )
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise RuitongError(f"{name} must be from {low} to {high}, got {value}")
        if self.composition and self.batch_size == 1:
            raise RuitongError(
                f"composition={self.composition} shuffles which prompts share a batch; with batch_size=1 none do. "
                "Set batch_size above 1, or composition to 0"
            )
        if self.checkpoint and self.precision != "w8a8":
            raise RuitongError(
                f"checkpoint={self.checkpoint!r} is for precision='w8a8' (weights quantised elsewhere), got "
                f"precision={self.precision!r}; leave it empty, or ask for w8a8"
            )
        limits = memory_limits(self.max_memory, self.device)
        if limits is not None and self.precision in {"w8a8", "fp8"} and not self.checkpoint:
            raise RuitongError(
                f"max_memory={self.max_memory!r} cannot be used with precision={self.precision!r}: the weights are "
                "quantised in the memory of one machine, before they are spread. Give a quantised checkpoint, or leave "
                "max_memory empty"
            )
        self._check_endpoint()
        if not self.anchor and self.scoring == "replay":
            raise RuitongError(
                "scoring='replay' needs a text to replay: pass anchor (the .nc file of the anchor cell), "
                "or scoring='both' to make this cell the anchor of its own text"
            )
        if self.anchor and self.scoring == "decode":
            raise RuitongError("scoring='decode' replays nothing: leave anchor empty, or use scoring='both'")

    def _check_endpoint(self) -> None:
        if self.engine != "endpoint":
            for name in ("base_url", "served_model", "api_key_env", "hardware"):
                if getattr(self, name):
                    raise RuitongError(f"{name} is for engine='endpoint', got engine={self.engine!r}; leave it empty")
            return
        if not self.base_url:
            raise RuitongError("engine='endpoint' needs base_url, the server's address: http://127.0.0.1:8000/v1")
        if self.hardware == "here":  # so that a grid can be written once for every machine
            from ruitong_lib.collect.devices import hardware

            object.__setattr__(self, "hardware", hardware(self.device))
        if not self.hardware.strip():
            raise RuitongError(
                "engine='endpoint' needs hardware: what the server runs on, in your own words; 'here' for this "
                "machine's device. Next to a transformers cell of another machine, use the label that `ruitong doctor` "
                "prints there"
            )
        if self.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", self.api_key_env):
            # Not shown: people put the key itself here.
            raise RuitongError(
                "api_key_env must be the name of an environment variable, such as RUITONG_API_KEY: letters, digits and "
                "_. If you gave the key itself, it is in your notebook or grid file now: take it out"
            )
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in SERVERS_OWN:
            if getattr(self, name) != defaults[name]:
                raise RuitongError(
                    f"{name}={getattr(self, name)!r} cannot be set on a server from outside: start the server with it, "
                    f"and leave {name} at {defaults[name]!r} here"
                )

    def key(self, *, hardware: str, anchor: str) -> str:
        """Return the content key: SHA-256 over everything that changes numbers.

        Parameters
        ----------
        hardware
            Label of the hardware (:func:`ruitong_lib.collect.devices.hardware`).
        anchor
            Label of the anchor cell; empty where this cell is the anchor.
        """
        fields = dataclasses.asdict(self)
        for name in NOT_NUMBERS:
            del fields[name]
        packages = ["torch", "transformers"]
        if self.engine == "endpoint":  # what computes is the server; its version is asked for, not known beforehand
            packages = []
            for name in ("device", *SERVERS_OWN):
                del fields[name]
        elif self.precision in {"w8a8", "fp8"}:
            packages.append("compressed-tensors" if self.checkpoint else "torchao")
        if self.engine != "endpoint" and self.device.partition(":")[0] == "cpu":
            from ruitong_lib.collect.devices import cores

            fields["threads"] = self.threads or cores()  # one a core is another number on another machine
        content = {
            **fields,
            "prompts": load_prompts(self.prompts).sha256,
            "model": _model_identity(self.model),
            "checkpoint": _model_identity(self.checkpoint) if self.checkpoint else "",
            "hardware": hardware,
            "anchor": anchor,
            "collect_version": COLLECT_VERSION,
            "packages": {p: _version(p) for p in packages},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def manifest(self) -> dict[str, Any]:
        """Return the fields for a manifest; of a path on this machine the last part, which its hash identifies."""
        fields = {n: v for n, v in dataclasses.asdict(self).items() if n not in NOT_NUMBERS}
        return {n: Path(v).name if isinstance(v, str) and Path(v).is_absolute() else v for n, v in fields.items()}

    def label(self, *, hardware: str, anchor: str) -> str:
        """Return the cell's label, e.g. ``qwen3-8b.a100.bf16.b1.1f3a90c2``: a file name on every system."""
        parts = (self.model.rstrip("/").split("/")[-1], hardware, self.precision, f"b{self.batch_size}")
        return ".".join([*map(slug, parts), self.key(hardware=hardware, anchor=anchor)[:8]])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _model_identity(model: str) -> Any:
    """Identify a local folder by its files' names, sizes and times: weights may be swapped under one path."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    files = sorted(p for p in folder.iterdir() if p.suffix in {".safetensors", ".bin", ".json", ".jinja", ".model"})
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]


def slug(text: str) -> str:
    """Return ``text`` in lower case with everything but letters, digits, ``_`` and ``-`` turned into ``-``."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-") or "none"


def check_types(values: Mapping[str, Any]) -> None:
    """Check names and exact types against :class:`Cell` (``True`` is no int, ``"8"`` is no int).

    Raises
    ------
    RuitongError
        With the closest known name, or the type wanted.
    """
    known = {f.name: f.type for f in dataclasses.fields(Cell)}
    for name, value in values.items():
        if name not in known:
            close = did_you_mean(str(name), known)
            raise RuitongError(f"unknown parameter {name!r}.{close} Known are: {', '.join(known)}")
        wanted = known[name]
        if type(value) is not wanted:
            shown = wanted.__name__ if isinstance(wanted, type) else wanted
            hint = "; papermill takes text with -r" if wanted is str else ""
            hint = "; papermill takes True and False, with a capital" if wanted is bool else hint
            raise RuitongError(f"{name} must be {shown}, got {value!r} ({type(value).__name__}){hint}")


def from_text(given: Sequence[str]) -> dict[str, Any]:
    """Return parameters from a command line's ``name=value``, each in its own type.

    Raises
    ------
    RuitongError
        For a part without ``=``, an unknown name or a value of another type.
    """
    wanted, found = {f.name: f.type for f in dataclasses.fields(Cell)}, {}
    for part in given:
        name, sign, value = part.partition("=")
        if not sign:
            raise RuitongError(f"--set takes name=value, got {part!r}; e.g. --set max_new_tokens=64")
        found[name] = value if wanted.get(name) is str else yaml.safe_load(value)
    check_types(found)
    return found


def parameters(namespace: Mapping[str, Any], known: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a notebook's parameters, from its own tagged cell and the cell that papermill injected.

    papermill only logs an unknown name and runs on with the default, so the names are read from the kernel's
    history, where both cells stand: ours starts with ``# ruitong: parameters``, papermill's with ``# Parameters``.
    A cell that is run again in JupyterLab replaces its earlier self.

    Parameters
    ----------
    namespace
        ``globals()`` of the notebook.
    known
        The names allowed; by default those of the first, tagged cell.

    Raises
    ------
    RuitongError
        For a name that the tagged cell does not have.
    """
    marks = ("# ruitong: parameters\n", "# Parameters\n")
    cells = {m: s for s in namespace["In"] for m in marks if s.startswith(m)}
    if marks[0] not in cells:
        raise RuitongError("run the cell that starts with '# ruitong: parameters' first")
    own = _assigned(cells[marks[0]])
    known = own if known is None else known
    for name in [*own, *_assigned(cells.get(marks[1], ""))]:
        if name not in known:
            raise RuitongError(f"unknown parameter {name!r}.{did_you_mean(name, known)} Known are: {', '.join(known)}")
    return {name: namespace[name] for name in own}


def _assigned(source: str) -> list[str]:
    names: list[str] = []
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names += [t.id for t in targets if isinstance(t, ast.Name)]
    return names


def from_notebook(namespace: Mapping[str, Any]) -> Cell:
    """Return the cell that ``run_cell.ipynb`` was asked for, names, types and values checked."""
    return Cell(**parameters(namespace, [f.name for f in dataclasses.fields(Cell)]))
