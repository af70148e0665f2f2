"""Writes files so that a crash, a full disk or a killed process never leaves a broken one: temporary name, sync, rename."""

import os


def write_atomic(path, data):
    """Replaces path by data (bytes) or raises OSError and leaves the old file untouched."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
