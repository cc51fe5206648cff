"""Shapes in signatures: ``Float[Tensor, "B T"]`` is a tensor of floats, of B rows and T tokens.

Within one signature a letter is one number. ``*rows`` stands for any number of dimensions, ``_`` for any size, and a
single letter is written with a space before it (``" T"``), so that linters do not take it for a name. To Python and to
type checkers all of these are plain tensors (:data:`typing.Annotated`); the tests check them by jaxtyping and beartype.

Letters: B rows of a batch, T tokens, V words of the vocabulary, H query heads, K key/value heads, D numbers in a key,
G kept sets, R rows of slots (B x G), S slots, L layers, n queries at a time.
"""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int

__all__ = ["Bool", "Float", "Int"]
