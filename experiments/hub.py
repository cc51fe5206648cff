"""Is the Hugging Face hub there? Asked with a timeout of seconds, before a library retries for most of a minute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tova.errors import UsageError

_TIMEOUT = 5


def require_model(name: str, revision: str) -> bool:
    """True if only a copy on this machine can be had, False if the hub answers.

    Raises:
        UsageError: neither, or the hub refuses.
    """
    import huggingface_hub

    cached = isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision), str)
    api = huggingface_hub.HfApi()
    return _ask("model.name", name, revision, cached, "the model's folder", "model.name", api.model_info)


def require_dataset(name: str, revision: str) -> bool:
    """As :func:`require_model`, for a dataset; whether a copy is here is left to ``datasets``."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = huggingface_hub.file_download.repo_folder_name(repo_id=name, repo_type="dataset")
    from pathlib import Path

    cached = (Path(HF_HUB_CACHE) / folder).exists()
    api = huggingface_hub.HfApi()
    return _ask("dataset.name", name, revision, cached, "its text files", "dataset=text dataset.path", api.dataset_info)


def _ask(
    option: str, name: str, revision: str, cached: bool, what: str, instead: str, info: Callable[..., Any]
) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        info(name, revision=revision, timeout=_TIMEOUT)
        return False
    except HFValidationError as e:
        raise UsageError(f"{option}={name}: neither a folder here nor a hub id ({e})") from e
    except HfHubHTTPError as e:
        status = getattr(e.response, "status_code", "?")
        raise UsageError(
            f"{option}={name}: the hub refuses it (HTTP {status}); check the name and revision={revision}, and whether "
            "it asks you to accept terms and log in"
        ) from e
    except Exception as e:  # whatever the HTTP library of the day raises when there is no network
        if cached:
            return True
        raise UsageError(
            f"{option}={name} is not on this machine and the hub cannot be reached ({type(e).__name__}); "
            f"copy {what} here and pass {instead}=/path/to/it"
        ) from e
