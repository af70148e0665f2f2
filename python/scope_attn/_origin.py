"""Which library made a result: for every JSON that the package writes."""
from __future__ import annotations

from typing import Optional

from . import _c_api


def origin() -> dict[str, Optional[str]]:
    """Its version and commit; None: the library does not say its commit."""
    library = _c_api.library()
    commit = getattr(library, "commit", None)
    return dict(version=library.version().decode(), commit=commit and commit().decode())
