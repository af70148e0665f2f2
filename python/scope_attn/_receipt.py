"""What the attention calls of one video did."""
from __future__ import annotations

import collections
import dataclasses
import json
import os
from typing import Any, Optional, Union


@dataclasses.dataclass(frozen=True)
class Call:
    """One self-attention call. Reading a density or seconds waits for a call on a GPU."""

    expert: str  # the pipeline's name of the transformer
    layer: int
    step: int
    branch: str
    why: str  # it ran dense; "": it ran sparse
    stats: Any  # of a call that the library ran; None: the pipeline's own attention did
    _time: Any  # seconds, or two CUDA events

    @property
    def sparse(self) -> bool:
        return not self.why

    @property
    def density(self) -> float:
        """Kept pairs / all pairs; 1 for a dense call."""
        return self.stats.density if self.sparse else 1.0

    @property
    def seconds(self) -> float:
        if isinstance(self._time, float):
            return self._time
        start, end = self._time
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def to_dict(self) -> dict[str, Any]:
        return dict(expert=self.expert, layer=self.layer, step=self.step, branch=self.branch, sparse=self.sparse, why=self.why,
                    warm=bool(self.sparse and self.stats.warm), density=self.density, seconds=self.seconds)


class Receipt:
    """Every self-attention call of the latest video: `calls`, a summary when printed, to_json().

    Nothing here waits for the GPU until it is looked at.
    """

    def __init__(self, **settings: Any):
        self.settings = settings
        self.calls: list[Call] = []

    @property
    def density(self) -> Optional[float]:
        """Mean over sparse calls; None: there was none."""
        sparse = [call.density for call in self.calls if call.sparse]
        return sum(sparse) / len(sparse) if sparse else None

    def to_dict(self) -> dict[str, Any]:
        return dict(**self.settings, density=self.density, calls=[call.to_dict() for call in self.calls])

    def to_json(self, path: Union[str, os.PathLike]):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")

    def __str__(self) -> str:
        told = self.settings["settings"]
        lines = [f"{self.settings['method']} ({', '.join(f'{name}={value}' for name, value in told.items())}), schedule of {self.settings['model']}"]
        if not self.calls:
            return "\n".join([*lines, "no calls yet"])
        rows: dict[tuple[str, str], list[Call]] = collections.defaultdict(list)
        for call in self.calls:
            rows[call.expert, call.why].append(call)
        steps = len({call.step for call in self.calls})
        lines.append(f"{steps} of {self.settings['steps']} steps, {len(self.calls):,} self-attention calls")
        for (expert, why), calls in rows.items():
            what = f"dense: {why}" if why else f"sparse, mean density {sum(call.density for call in calls) / len(calls):.3f}"
            lines.append(f"  {expert:14}{len(calls):7,} calls {sum(call.seconds for call in calls):9.2f} s  {what}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Receipt of {len(self.calls)} calls; print it>"
