"""What is run: a real model from a package, any model of the hub or a folder, or a random one for trying things out.

Each class is named by ``_target_`` in a file of ``conf/model``. A model says who it is without being loaded
(``identity``, which decides the address of its results) and loads to the evicting attention (``load``). Weights are
read from safetensors only, and a model's own code runs only where ``trust_remote_code`` says so.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from experiments import assets, folders, options
from experiments.hub import check_id, find_model
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
    parameters: ClassVar[int] = 134_515_008

    def __post_init__(self) -> None:
        _dtype_name(self.dtype)

    def identity(self) -> dict[str, Any]:
        return {"package": assets.SMOLLM2.requirement, "sha256": self._sha256, "dtype": self.dtype}

    def load(self, device: str) -> Loaded:
        folder = _converted(self.label, self._sha256, lambda: next(iter(assets.fetch(assets.SMOLLM2).values())))
        return _load(str(folder), self.dtype, device, {"revision": self._sha256[:12]}, local=True)

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
    parameters: ClassVar[int] = 268_098_176

    def __post_init__(self) -> None:
        _dtype_name(self.dtype)

    def identity(self) -> dict[str, Any]:
        packages = [part.requirement for part in assets.GEMMA3.parts]
        return {"package": packages, "sha256": assets.GEMMA3.sha256, "dtype": self.dtype}

    def load(self, device: str) -> Loaded:
        sha256 = assets.GEMMA3.sha256
        folder = _converted(self.label, sha256, lambda: assets.fetch_joined(assets.GEMMA3))
        return _load(str(folder), self.dtype, device, {"revision": sha256[:12]}, local=True)


_RECORD = "sha256.json"
"""What a converted model's files were when they were made."""


def _converted(label: str, sha256: str, fetch: Callable[[], Path]) -> Path:
    """The folder with the dequantised model, made of the GGUF file that ``fetch`` gets on first use."""
    # Older versions tokenize the packaged files otherwise, and cannot load what newer ones have saved.
    require("transformers", "5.20", f"model={label}")
    folder = assets.cache_dir() / "models" / f"{label}-{sha256[:12]}"
    if _as_made(folder):
        return folder
    source = fetch()
    with assets.locked(folder.name) as cache:
        if _as_made(folder):
            return folder
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        again = ", whose converted form is not as it was made," if folder.exists() else ""
        print(f"converting {source.name}{again} to safetensors (once)", file=sys.stderr, flush=True)
        _quiet()
        with tempfile.TemporaryDirectory(dir=cache, prefix=".convert-") as scratch:
            made = Path(scratch, "model")
            model = AutoModelForCausalLM.from_pretrained(
                str(source.parent),
                gguf_file=source.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                trust_remote_code=False,
            )
            tokenizer = AutoTokenizer.from_pretrained(
                str(source.parent), gguf_file=source.name, trust_remote_code=False
            )
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            record = {path.name: assets.digest(path) for path in sorted(made.iterdir())}
            (made / _RECORD).write_text(json.dumps(record, indent=1))
            folder.parent.mkdir(exist_ok=True)
            if folder.exists():  # another process may still read it: its files live on until they are closed
                os.replace(folder, Path(scratch, "old"))
            os.replace(made, folder)
    return folder


def _as_made(folder: Path) -> bool:
    """Whether a converted model is there and each of its files is what was written."""
    try:
        record = json.loads((folder / _RECORD).read_text())
        return bool(record) and all(assets.intact(folder / name, sha256) for name, sha256 in record.items())
    except (OSError, ValueError, AttributeError):
        return False


def require(package: str, oldest: str, what: str) -> None:
    """Raise if an installed package is older than ``what`` needs."""
    from importlib.metadata import version

    there = version(package)
    if tuple(int(n) for n in there.split(".")[:2]) < tuple(int(n) for n in oldest.split(".")):
        raise UsageError(f"{what}: needs {package} {oldest} or newer, this is {there}; models of the hub need no more")


@dataclass(frozen=True)
class Hub:
    """Any causal language model by hub id, or a local folder.

    A folder is known by what is in it, whatever it is called; a model of the hub by its commit, which a branch such as
    ``main`` is resolved to.

    Attributes:
        device_map: passed to transformers; None puts the whole model on one device.
        trust_remote_code: run the code that comes with the model, where transformers has none of its own for it.
    """

    name: str
    revision: str = "main"
    dtype: str = "float32"
    device_map: str | int | dict[str, Any] | None = None
    trust_remote_code: bool = False
    label: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        _dtype_name(self.dtype)
        _check_device_map(self.device_map)
        options.boolean("model.trust_remote_code", self.trust_remote_code)
        folder = self._folder
        if folder is None:
            check_id("model.name", self.name, self.revision, "model.name=")
        if not self.label:
            object.__setattr__(self, "label", Path(self.name).name if folder is None else folder.resolve().name)
        if not self.note:
            object.__setattr__(self, "note", f"{self.name} ({self.dtype})")

    @property
    def _folder(self) -> Path | None:
        return assets.folder_of("model.name", self.name)

    def identity(self) -> dict[str, Any]:
        how: dict[str, Any] = {"dtype": self.dtype}
        if self.device_map is not None:
            how["device_map"] = self.device_map
        if self.trust_remote_code:
            how["trust_remote_code"] = True
        folder = self._folder
        if folder is not None:
            return {"folder": folders.content(folder, code=self.trust_remote_code), **how}
        found = find_model(self.name, str(self.revision))
        return {"hub": self.name, "commit": found.commit or f"{self.revision}, not resolved", **how}

    def load(self, device: str) -> Loaded:
        how: dict[str, Any] = {"device_map": self.device_map, "trust_remote_code": self.trust_remote_code}
        folder = self._folder
        if folder is not None:
            return _load(str(folder), self.dtype, device, {}, local=True, **how)
        found = find_model(self.name, str(self.revision))
        found.check()
        revision = found.commit or str(self.revision)
        return _load(
            self.name, self.dtype, device, {"revision": revision}, local=found.offline, revision=revision, **how
        )


_SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")


def _check_device_map(value: Any) -> None:
    named = isinstance(value, str) and (value in _SPREADING or re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d+)?", value))
    numbered = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not (value is None or named or numbered or (isinstance(value, dict) and value)):
        raise UsageError(
            f"model.device_map={options.shown(value)}: must be null (the whole model on `device`), one of "
            f"{', '.join(_SPREADING)}, a device such as cuda:1, or parts of the model with the device of each"
        )


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

    def __post_init__(self) -> None:
        _dtype_name(self.dtype)
        for name, most in (("layers", 1024), ("heads", 1024), ("kv_heads", 1024), ("head_dim", 4096)):
            options.integer(f"model.{name}", getattr(self, name), 1, most)
        options.integer("model.seed", self.seed, 0)
        if self.heads % self.kv_heads:
            raise UsageError(f"model.kv_heads={self.kv_heads}: must divide model.heads, which is {self.heads}")
        if self.head_dim % 2:
            raise UsageError(f"model.head_dim={self.head_dim}: must be even, for rotary positions")

    @property
    def parameters(self) -> int:
        """How many it has."""
        hidden, vocabulary = self.heads * self.head_dim, 384
        attention = 2 * hidden * hidden + 2 * hidden * self.kv_heads * self.head_dim
        layer = attention + 3 * hidden * 2 * hidden + 2 * hidden
        return 2 * vocabulary * hidden + self.layers * layer + hidden

    def identity(self) -> dict[str, Any]:
        return {
            "random_llama": [self.layers, self.heads, self.kv_heads, self.head_dim],
            "seed": self.seed,
            "dtype": self.dtype,
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
        model = model.to(device=device, dtype=getattr(torch, self.dtype)).eval()
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
    provenance: dict[str, Any],
    *,
    local: bool,
    revision: str = "main",
    device_map: Any = None,
    trust_remote_code: bool = False,
) -> Loaded:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

    import tova

    _quiet()
    common: dict[str, Any] = {
        "local_files_only": local,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    folder = Path(name) if Path(name).is_dir() else None
    if folder is not None:
        folders.check(folder, trust_remote_code)
    part = "tokenizer"
    try:
        if folder is None and trust_remote_code:
            config = PretrainedConfig.get_config_dict(name, local_files_only=local, revision=revision)[0]
            if elsewhere := folders.code_elsewhere(config):
                raise ValueError(f"its code lies in another repository, which may change: {elsewhere}")
        tokenizer = AutoTokenizer.from_pretrained(name, **common)
        part = "model"
        model, found = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=getattr(torch, dtype),
            device_map=device_map,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # said below, tensor by tensor
            **common,
        )
    except Exception as e:  # transformers, and what it loads with, raise errors of many kinds
        raise UsageError(f"model.name={name}: {folders.why(e, part, folder, offline=local)}") from e
    lacking = [*sorted(found["missing_keys"]), *(key for key, *_ in found["mismatched_keys"])]
    if lacking:
        what = "is" if len(lacking) == 1 else f"and {len(lacking) - 1} more are"
        raise UsageError(
            f"model.name={name}: {lacking[0]} {what} not among its weights, in the shape config.json asks for: it "
            "would run with random ones"
        )
    if device_map is None:
        model = model.to(device)
    if folder is None:
        _check_blobs(name, revision)
    return Loaded(tova.enable(model.eval()), tokenizer, provenance)


def _check_blobs(name: str, commit: str) -> None:
    """Raise if weights in the hub's cache are not what the hub has: it keeps them under their sha256."""
    import huggingface_hub

    there = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=commit)
    for path in sorted(Path(there).parent.glob("*.safetensors")) if isinstance(there, str) else []:
        kept = path.resolve()
        if re.fullmatch("[0-9a-f]{64}", kept.name) and assets.digest(kept) != kept.name:
            raise UsageError(f"model.name={name}: {kept} is not what the hub has (sha256 differs); delete it")


def _dtype_name(dtype: Any) -> str:
    return options.one_of("model.dtype", dtype, DTYPES)


def _quiet() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
