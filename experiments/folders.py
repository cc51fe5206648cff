"""A model's folder: which of its files are read, what is in them, and what is wrong with it, in one sentence."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

from experiments import assets, options
from tova.errors import UsageError

_TOKENIZER = (
    "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "spiece*", "tekken.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
"""Names under which a tokenizer is found in a model's folder."""


def content(folder: Path, *, code: bool) -> str:
    """Of a local model: the sha256 of all that is loaded, by names within the folder."""
    files = _files(folder)
    files += sorted(folder.glob("**/*.py")) if code else []
    large = sum(path.stat().st_size for path in files)
    if large > 2**31:
        size = f"{large / 2**30:.1f} GiB"
        _say_once(f"reading the {size} of {folder}, to know it by its content (once for as long as it is not changed)")
    try:
        lines = [f"{path.relative_to(folder).as_posix()} {assets.digest(path)}" for path in files]
    except OSError as e:
        raise _refused(folder, f"{Path(e.filename or '').name} cannot be read ({e.strerror})") from e
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


_SAID: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        print(text, file=sys.stderr, flush=True)


def _refused(folder: Path, why: str) -> UsageError:
    return UsageError(f"model.name={folder}: {why}")


def _files(folder: Path) -> list[Path]:
    """What transformers reads of a local model; raises for what the folder lacks."""
    config = _json(folder, "config.json")
    if (folder / "adapter_config.json").exists():
        base = _json(folder, "adapter_config.json").get("base_model_name_or_path")
        raise _refused(
            folder,
            f"holds an adapter of {base} (adapter_config.json), which is not applied here; merge the two with peft's "
            "merge_and_unload and save that, or delete the file if they are",
        )
    tokenizer = sorted({path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file()})
    if not any(path.parent == folder and not path.name.startswith(("special", "chat")) for path in tokenizer):
        raise _refused(folder, "the folder has no tokenizer (tokenizer.json or the like)")
    others = [folder / "generation_config.json"] if (folder / "generation_config.json").is_file() else []
    return [folder / "config.json", *others, *_weights(folder, config), *tokenizer]


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        raise _refused(folder, f"the folder has no {name}{_instead(folder, name)}")
    try:
        found = json.loads(path.read_bytes())
    except OSError as e:
        raise _refused(folder, f"{name} cannot be read ({e.strerror})") from e
    except ValueError as e:
        raise _refused(folder, f"{_pointed(path) or f'{name} is not JSON ({e})'}") from e
    if not isinstance(found, dict):
        raise _refused(folder, f"{name} must be a JSON object, and is a {type(found).__name__}")
    return found


def _instead(folder: Path, name: str) -> str:
    """What a folder without ``name`` has, where that explains it."""
    below = sorted(path.parent for path in folder.glob(f"*/{name}"))
    if below:
        return f"; is {below[0]} meant?"
    if list(folder.glob("snapshots/*/" + name)):
        return f"; it is the hub's cache, is {next(iter(folder.glob('snapshots/*')))} meant?"
    if (folder / "adapter_config.json").exists():
        return "; it holds an adapter (adapter_config.json): merge it into its model with peft's merge_and_unload"
    if list(folder.glob("*.gguf")):
        return "; a GGUF file has to be converted to safetensors first (transformers: from_pretrained(gguf_file=...))"
    return ""


def _weights(folder: Path, config: dict[str, Any]) -> list[Path]:
    """The files of weights that transformers reads, and their index."""
    named = config.get("transformers_weights")
    index = folder / "model.safetensors.index.json"
    if isinstance(named, str):
        index = folder / named
    elif (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.suffix == ".safetensors" and index.is_file():
        return [index]
    if not index.is_file():
        raise _refused(folder, _no_weights(folder))
    shards = _json(folder, index.name).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise _refused(folder, f"{index.name} names no files of weights (weight_map)")
    names = sorted({str(name) for name in shards.values()})
    lacking = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise _refused(folder, f"{lacking[0]}{more} of {len(names)} files of weights is missing ({index.name})")
    return [index, *(folder / name for name in names)]


def _no_weights(folder: Path) -> str:
    pickles = "has its weights as pickles only ({}), which may run any code; convert them to safetensors"
    for pattern, what in (
        ("model-*-of-*.safetensors", "has {} and no model.safetensors.index.json, which says what is where"),
        ("*.bin", pickles),
        ("*.pt*", pickles),
        ("*.gguf", "has its weights as GGUF only ({}); convert them to safetensors (transformers: gguf_file=...)"),
        ("*.safetensors", "has no model.safetensors, only {}"),
    ):
        if found := sorted(path.name for path in folder.glob(pattern)):
            return f"the folder {what.format(found[0])}"
    return "the folder has no weights (model.safetensors or the like)"


def check(folder: Path, trust_remote_code: bool) -> None:
    """Raise for a local model of which transformers knows no causal language model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    _files(folder)
    config = _json(folder, "config.json")
    kind = config.get("model_type")
    quantised = config.get("quantization_config") or {}
    method = str(quantised.get("quant_method", ""))
    if not any(known.startswith(method) for known in AUTO_QUANTIZATION_CONFIG_MAPPING):  # bitsandbytes_4bit
        raise _refused(folder, f"is quantised by {method}, which transformers {transformers.__version__} does not know")
    own = config.get("auto_map")
    if isinstance(own, dict):
        if trust_remote_code and (elsewhere := code_elsewhere(config)):
            raise _refused(
                folder,
                f"its code lies in another repository, which may change ({elsewhere}, in config.json's auto_map); copy "
                "it into the folder",
            )
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or trust_remote_code:
            return
        raise _refused(
            folder,
            f"transformers {transformers.__version__} has no code for its kind ({kind}), and the folder's own is run "
            "only where you say so: read it, then add model.trust_remote_code=true",
        )
    if not kind:
        raise _refused(folder, "config.json names no model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        raise _refused(
            folder,
            f"config.json names the model_type {kind}, which transformers {transformers.__version__} does not know"
            f"{options.closest(kind, CONFIG_MAPPING_NAMES)}",
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise _refused(folder, f"config.json names the model_type {kind}, which is no causal language model")


def code_elsewhere(config: dict[str, Any]) -> str:
    """The first class of a model's own code that lies in another repository than the model; empty if there is none."""
    own = config.get("auto_map")
    named = own.values() if isinstance(own, dict) else ()
    return next((str(where) for where in named if "--" in str(where)), "")


def why(error: Exception, part: str, folder: Path | None, *, offline: bool) -> str:
    """Why a part of a model, itself or its tokenizer, could not be loaded."""
    from safetensors import SafetensorError

    whole = str(error).strip() or type(error).__name__
    said = whole.split("\n")[0].rstrip(".: ")
    if package := _package(whole, part, folder):
        return f"the {part} needs a package that is not installed: pip install {package} ({said})"
    if isinstance(error, ImportError) and "GPU" not in said:
        return f"the {part} needs a package that is not installed ({said})"
    if isinstance(error, SafetensorError):
        return _broken(folder, said)
    if "trust_remote_code" in whole:
        return "its own code is run only where you say so: read it, then add model.trust_remote_code=true"
    if "use_safetensors" in whole:
        return "it has no safetensors at this revision; other files of weights are pickles, which may run any code"
    if folder is not None and part == "tokenizer":
        for path in sorted(folder.glob("*token*.json")):
            try:
                json.loads(path.read_bytes())
            except (OSError, ValueError) as e:
                return _pointed(path) or f"the tokenizer cannot be loaded ({path.name}: {e})"
    if folder is None and offline and isinstance(error, OSError):
        return f"not complete on this machine, and the hub cannot be reached ({said})"
    if isinstance(error, OSError | ValueError):
        return f"the {part} cannot be loaded ({said})"
    return f"the {part} cannot be loaded ({type(error).__name__}: {said})"


def _package(said: str, part: str, folder: Path | None) -> str:
    """The package to install, where an error or the folder's files tell."""
    if part == "tokenizer":
        plain = folder is not None and not (folder / "tokenizer.json").exists()
        for package, module, files in (
            ("sentencepiece protobuf", "sentencepiece", ("*.model",)),
            ("tiktoken", "tiktoken", ("*.tiktoken",)),
            ("mistral-common", "mistral_common", ("tekken.json",)),
        ):
            there = plain and folder is not None and any(path for pattern in files for path in folder.glob(pattern))
            if there and importlib.util.find_spec(module) is None:
                return package
    match = re.search(r"pip install (?:-U |--upgrade )*'?([\w.-]+(?:\[[\w,]+\])?(?:[<>=]=?[\w.]+)?)", said)
    match = match or re.match(r"No module named '(\w+)", said)
    return match.group(1).rstrip(".") if match and match.group(1) not in ("transformers", "git") else ""


def _broken(folder: Path | None, said: str) -> str:
    """Which file of weights is not readable."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")) if folder is not None else []:
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as e:
            return _pointed(path) or f"{path.name} is broken, or was not copied to its end ({e})"
    return f"a file of its weights is broken, or was not fetched to its end ({said})"


def _pointed(path: Path) -> str:
    """The sentence for a file that is a pointer of Git LFS; empty if it is none."""
    with path.open("rb") as f:
        if f.read(23) == b"version https://git-lfs":
            return f"{path.name} is a pointer of Git LFS, not the file itself; fetch it with git lfs pull"
    return ""
