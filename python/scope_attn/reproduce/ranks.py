"""One list of work for every process of a torchrun; alone, a process takes all of it."""
from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterator
from typing import Any, Callable


class Ranks:
    """Ranks count through the list together, in torchrun's store: nothing is left locked where one dies."""

    def __init__(self):
        self.rank, self.count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if self.count > 1:
            from torch.distributed.rendezvous import rendezvous
            self.store = next(iter(rendezvous("env://", timeout=datetime.timedelta(days=30))))[0]

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """What rank 0 made, as JSON has it."""
        if self.count == 1:
            return make()
        if self.rank == 0:
            self.store.set(name, json.dumps(make()))
        return json.loads(self.store.get(name))

    def take(self, name: str, work: list) -> Iterator[Any]:
        if self.count == 1:
            yield from work
            return
        while True:
            i = self.store.add(name, 1) - 1
            if i >= len(work):
                return
            yield work[i]

    def wait(self, name: str):
        """Until every rank is here."""
        if self.count > 1:
            self.store.add(name, 1)
            while self.store.add(name, 0) < self.count:
                time.sleep(0.2)
