"""New weights and adapters as folders of files, below one that trainer and samplers both see."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megaswift.disk import safetensors_to
from megaswift.errors import Problem, UserError, first_line

SHARD_BYTES = 1 << 30
CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""What goes with the weights into a folder that a server reads, from the model's own."""


class SyncRounds:
    """A folder of its own for each round, below `root`; the one before goes when the next is taken."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.kind = root, kind
        self.round = 0
        self.last: Path | None = None
        self._made = False
        """Whether `root` was not there before."""

    def begin(self) -> Path:
        """The folder of a new round, which is not there yet. Its name has this process's number: runs may share
        `root`."""
        self.round += 1
        self._made |= not self.root.exists()
        return self.root / f"{self.kind}-{os.getpid()}-{self.round}"

    def taken(self, folder: Path) -> None:
        """The samplers have read it: the round before is not needed any more."""
        self.close()
        self.last = folder

    def close(self) -> None:
        """Removes what is left, and `root` with it where it is this run's and nobody else has something there."""
        if self.last is not None:
            shutil.rmtree(self.last, ignore_errors=True)
            with suppress(OSError):
                if self._made:
                    self.root.rmdir()
        self.last = None


class WeightFolder(SyncRounds):
    """Rounds of weights, each a Hugging Face folder."""

    def __init__(self, root: Path, model: Path) -> None:
        super().__init__(root, "weights")
        self.model = model

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """A new folder with these weights, written in shards as they come."""
        folder = self.begin()
        try:
            folder.mkdir(parents=True)
            for pattern in CONFIG_FILES:
                for file in self.model.glob(pattern):
                    if not file.name.endswith(".index.json"):
                        shutil.copyfile(file, folder / file.name)
            self._shards(folder, weights)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise UserError(
                Problem(
                    str(folder),
                    f"weights for the sampler cannot be written ({first_line(error)})",
                    "a folder with room for the model",
                )
            ) from None
        return folder

    def _shards(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        where: dict[str, str] = {}
        shard: dict[str, Tensor] = {}
        size = total = number = 0

        def close() -> None:
            name = f"model-{number:05d}.safetensors"
            with safetensors_to(folder / name):
                save_file(shard, folder / name, metadata={"format": "pt"})
            where.update(dict.fromkeys(shard, name))
            shard.clear()

        for name, tensor in weights:
            if shard and size + tensor.nbytes > SHARD_BYTES:
                close()
                size, number = 0, number + 1
            shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size, total = size + tensor.nbytes, total + tensor.nbytes
        close()
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
