"""Errors of configurations as one sentence that names the option, the value and what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from tova.errors import UsageError


def explain(error: BaseException) -> str | None:
    """The sentence for an error a user can mend; None for one that is not the user's."""
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: is no valid override; write option=value, and quote values with special characters"
    if isinstance(error, ConfigCompositionException | HydraException | OmegaConfBaseException):
        return _composition(error)
    return None


def _missing(error: MissingConfigException) -> str:
    group, _, choice = str(error.missing_cfg_file or "").rpartition("/")
    choices = list(error.options or [])
    if group == "policy":
        from tova.policies import MERGING, merges  # loads torch, which a mistake in an option need not wait for

        if choice in MERGING:
            return f"policy={merges(choice)}"
    if group and choices:
        return f"{group}={choice}: there is no such {group}{_closest(choice, choices)}; there are {', '.join(choices)}"
    return " ".join(str(error).split())


def _composition(error: BaseException) -> str:
    text = " ".join(str(error).split())
    cause = error.__cause__
    both = text if cause is None else f"{text} {' '.join(str(cause).split())}"
    if match := re.search(r"Could not override '([^']+)'", both):
        return _unknown(match.group(1))
    if match := re.search(r"Key '([^']+)' is not in struct full_key: (\S+)", both):
        return _unknown(match.group(2))
    if match := re.search(r"Ambiguous value for argument '([^']+)'", both):
        return f"{match.group(1)}: several values make a sweep; add -m (or --multirun) before them"
    if match := re.search(r"In '[^']+': Could not find '([^']+)'", both):
        return f"{match.group(1)}: there is no such configuration"
    return text


def _unknown(key: str) -> str:
    parent, _, last = key.rpartition(".")
    known = _options(parent)
    where = f" of {parent}" if parent else ""
    return f"{key}: there is no such option{_closest(last, known)}; the options{where} are {', '.join(known)}"


def _options(parent: str) -> list[str]:
    """Names the default configuration has under ``parent``, and the groups at the top."""
    from pathlib import Path

    from omegaconf import DictConfig, OmegaConf

    conf = Path(__file__).parent.parent / "conf"
    config = OmegaConf.load(conf / "config.yaml")
    assert isinstance(config, DictConfig)
    groups = sorted(p.name for p in conf.iterdir() if p.is_dir() and any(p.glob("*.yaml")))
    if not parent:
        return sorted({*(str(k) for k in config if k != "defaults"), *groups})
    if parent in groups:
        found: set[str] = set()
        for path in (conf / parent).glob("*.yaml"):
            loaded = OmegaConf.load(path)
            if isinstance(loaded, DictConfig):
                found |= {str(k) for k in loaded if k not in ("_target_", "defaults")}
        return sorted(found)
    node = OmegaConf.select(config, parent)
    return sorted(str(k) for k in node) if isinstance(node, DictConfig) else []


def _closest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]}?)" if match else ""
