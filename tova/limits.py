"""What a model can be given: the words it knows and the positions it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tova.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TABLES = frozenset({"wpe", "embed_positions", "pos_encoding", "position_embeddings", "positions_embed"})
"""What modeling files call a table with a row per position; those of images have other names."""
_SIZES = ("max_position_embeddings", "n_positions", "max_target_positions")


def vocabulary(model: PreTrainedModel) -> int | None:
    """How many words the model knows; None if it does not say.

    The fewer of what can be read and what can be predicted: a head may be missing, wrapped or quantised.
    """
    found = []
    for getter in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            module = getter()
        except (AttributeError, NotImplementedError):
            continue
        rows = [getattr(module, name, None) for name in ("num_embeddings", "out_features")]
        found += [n for n in rows if isinstance(n, int)]
    if not found:
        said = getattr(model.config.get_text_config(), "vocab_size", None)
        found = [said] if isinstance(said, int) else []
    return min(found) if found else None


def positions(model: PreTrainedModel) -> int | None:
    """How many tokens the model has positions for, if it looks them up in a table; None if it computes them."""
    config = model.config.get_text_config()
    sizes = {n for n in (getattr(config, name, None) for name in _SIZES) if isinstance(n, int)}
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES:
            rows, offset = module.num_embeddings, getattr(module, "offset", 0)
            if rows in sizes or rows - offset in sizes:
                padding = module.padding_idx
                found.append(rows - (offset or (0 if padding is None else padding + 1)))
    found += [t.shape[0] for n, t in model.named_buffers() if n.rpartition(".")[2] in _TABLES and t.shape[0] in sizes]
    return min(found) if found else None


def check_text(model: PreTrainedModel, ids: Tensor) -> None:
    """Raise unless the model can read ``ids``, integers [B, T].

    Raises:
        UsageError: a token that is not in its vocabulary, or more tokens than it has positions for.
    """
    known = vocabulary(model)
    least, most = (int(n) for n in torch.aminmax(ids)) if ids.numel() else (0, 0)
    if least < 0 or (known is not None and most >= known):
        words = "" if known is None else f", the model's vocabulary has {known}"
        raise UsageError(
            f"token {least if least < 0 else most} is no word of the model{words}: was the text tokenized for another?"
        )
    room = positions(model)
    if room is not None and ids.shape[1] > room:
        raise UsageError(f"{ids.shape[1]} tokens are more than the {room} positions this model has")
