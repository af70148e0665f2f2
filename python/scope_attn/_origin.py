"""Which library made a result, for the JSON that the package writes."""
from __future__ import annotations

from . import _c_api


def origin() -> dict[str, str]:
    """Its version, and the commit that it was built from."""
    library = _c_api.library()
    return dict(version=library.version().decode(), commit=library.commit().decode())
