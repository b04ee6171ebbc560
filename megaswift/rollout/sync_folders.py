"""Weight and adapter sync through folders, below a root that trainer and samplers both see."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megaswift.base.atomic_writes import safetensors_errors_as_oserror
from megaswift.base.plain_files import refuse_links_outside
from megaswift.errors import Problem, UserError, first_line

SHARD_BYTES = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Files of the model's folder that are copied beside the weights."""


class SyncRounds:
    """One folder below `root` per sync; the previous one is removed once the next has been loaded."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root = root
        self.kind = kind
        self.round = 0
        self.last: Path | None = None
        self._created_root = False
        """Whether this object created `root`."""

    def begin(self) -> Path:
        """The path of the next folder, not created yet. Named with this process's id, as runs may share `root`."""
        self.round += 1
        self._created_root |= not self.root.exists()
        if self.round == 1 and self.root.is_relative_to(SHARED_MEMORY):
            self._remove_abandoned()
        return self.root / f"{self.kind}-{os.getpid()}-{self.round}"

    def _remove_abandoned(self) -> None:
        """Removes what killed processes of this machine have left in memory."""
        for path in self.root.glob(f"{self.kind}-*-*"):
            process = path.name.split("-")[1]
            if process.isdecimal() and not Path("/proc", process).exists():
                shutil.rmtree(path, ignore_errors=True)

    def taken(self, folder: Path) -> None:
        """All samplers have loaded `folder`: removes the previous one."""
        self.close()
        self.last = folder

    def close(self) -> None:
        """Removes the last folder, and `root` where this object created it and it is empty."""
        if self.last is not None:
            shutil.rmtree(self.last, ignore_errors=True)
            with suppress(OSError):
                if self._created_root:
                    self.root.rmdir()
        self.last = None


class WeightFolder(SyncRounds):
    """Weight sync: each round is a Hugging Face model folder."""

    def __init__(self, root: Path, model: Path) -> None:
        super().__init__(root, "weights")
        self.model = model

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> Path:
        """Writes the weights to a new folder, shard by shard as they arrive; UserError where it cannot be written."""
        folder = self.begin()
        try:
            folder.mkdir(parents=True)
            found = [file for pattern in CONFIG_FILES for file in self.model.glob(pattern) if file.is_file()]
            files = [file for file in found if not file.name.endswith(".index.json")]
            refuse_links_outside(self.model, files)
            for file in files:
                shutil.copyfile(file, folder / file.name)
            self._shards(folder, weights)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise UserError(
                Problem(
                    str(folder),
                    f"weights for the sampler cannot be written ({first_line(error)})",
                    "use a folder with free space for the model",
                )
            ) from None
        return folder

    def _shards(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        weight_map: dict[str, str] = {}
        shard: dict[str, Tensor] = {}
        size = total = number = 0

        def close() -> None:
            name = f"model-{number:05d}.safetensors"
            with safetensors_errors_as_oserror(folder / name):
                save_file(shard, folder / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, name))
            shard.clear()

        for name, tensor in weights:
            if shard and size + tensor.nbytes > SHARD_BYTES:
                close()
                size = 0
                number += 1
            shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size = size + tensor.nbytes
            total = total + tensor.nbytes
        close()
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
