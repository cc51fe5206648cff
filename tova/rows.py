"""Old name of :mod:`tova.side_by_side`, for one release."""

from __future__ import annotations

from tova.errors import renamed
from tova.side_by_side import SideBySide

__all__ = ["SideBySide"]

renamed("tova.rows", "tova.side_by_side")
