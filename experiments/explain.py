"""Errors of configurations as one sentence that names the option, the value and what would be right."""

from __future__ import annotations

import re
from pathlib import Path

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from experiments.options import closest
from tova.errors import UsageError

CONF = Path(__file__).resolve().parent.parent / "conf"


def explain(error: BaseException) -> str | None:
    """The sentence for an error a user can mend; None for one that is not the user's."""
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _missing(error)
    if isinstance(error, OverrideParseException):
        word = str(error.override).removeprefix("++")
        return f"{word}: is no valid override; write option=value, and quote values with special characters"
    if isinstance(error, ConfigCompositionException | HydraException | OmegaConfBaseException):
        return _composition(error)
    return None


_EXTRAS = dict.fromkeys(("submitit_slurm", "submitit_local"), ("hydra-submitit-launcher", "cluster"))
"""Launchers that come with a package of their own, and the extra that has it."""


def _missing(error: MissingConfigException) -> str:
    group, _, choice = str(error.missing_cfg_file or "").rpartition("/")
    choices = list(error.options or [])
    if group == "policy":
        from tova.policies import MERGING, merges  # loads torch, which a mistake in an option need not wait for

        if choice in MERGING:
            return f"policy={merges(choice)}"
    if group == "hydra/launcher" and choice in _EXTRAS:
        package, extra = _EXTRAS[choice]
        return f"{group}={choice}: needs the package {package}; pip install -e '.[{extra}]'"
    if group and choices:
        return f"{group}={choice}: there is no such {group}{closest(choice, choices)}; there are {', '.join(choices)}"
    return " ".join(str(error).split())


def _composition(error: BaseException) -> str:
    text = " ".join(str(error).split())
    cause = error.__cause__
    both = text if cause is None else f"{text} {' '.join(str(cause).split())}"
    both = both.replace("'++", "'")  # which options.relaxed has put there
    if match := re.search(r"Could not override '([^']+)'", both):
        return unknown(match.group(1))
    if match := re.search(r"Key '([^']+)' is not in struct full_key: (\S+)", both):
        return unknown(match.group(2))
    if match := re.search(r"Ambiguous value for argument '([^']+)'", both):
        return f"{match.group(1)}: several values make a sweep; add -m (or --multirun) before them"
    if match := re.search(r"Sweep parameters '([^']+)' requires --multirun", both):
        return f"{match.group(1)}: several values make a sweep; add -m (or --multirun)"
    if match := re.search(r"Could not delete from config. '([^']+)' does not exist", both):
        return f"~{match.group(1)}: there is no such option to take away"
    if match := re.search(r"In '[^']+': Could not find '([^']+)'", both):
        return f"{match.group(1)}: there is no such configuration"
    return text


def unknown(key: str) -> str:
    """That there is no option ``key``, and which there are beside it."""
    parent, _, last = key.rpartition(".")
    known = _options(parent)
    where = f" of {parent}" if parent else ""
    return f"{key}: there is no such option{closest(last, known)}; the options{where} are {', '.join(known)}"


def _options(parent: str) -> list[str]:
    """Names the default configuration has under ``parent``, and the groups at the top."""
    import yaml

    config = yaml.safe_load((CONF / "config.yaml").read_text())
    groups = {p.name for p in CONF.iterdir() if p.is_dir() and any(p.glob("*.yaml"))}
    if not parent:
        return sorted((config.keys() | groups) - {"defaults"})
    nodes = [yaml.safe_load(p.read_text()) for p in (CONF / parent).glob("*.yaml")] if parent in groups else []
    for part in parent.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    found = {str(key) for node in (*nodes, config) if isinstance(node, dict) for key in node}
    return sorted(found - {"_target_", "defaults"})
