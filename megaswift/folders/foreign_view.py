"""A model folder for another program's checkpoint: configuration and tokenizer of a Hugging Face folder, and the path
of the tensors. Training and inference use it as they use a checkpoint of this program.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from megaswift.errors import Problem, WeightsError, missing_path_hint
from megaswift.folders.checkpoint import FOREIGN
from megaswift.folders.side_files import side_files
from megaswift.node_download import private_folder


def foreign_model_view(tensors: Path, hf_config: Path) -> Path:
    """Return a folder with the files of `hf_config` that make a model, without weights, for the checkpoint `tensors`.

    It lies in the temporary files of this user, under a name that follows from both, and is made where it is missing.

    Raises:
        WeightsError: `hf_config` has no config.json.
    """
    if not (hf_config / "config.json").is_file():
        fix = "give the Hugging Face folder of the model that was trained"
        fix = fix if hf_config.exists() else missing_path_hint(hf_config)
        raise WeightsError(Problem(f"--hf_config {hf_config}", "has no config.json", fix))
    files = [hf_config / "config.json", *side_files(hf_config)]
    facts = [str(tensors.resolve()), str(hf_config.resolve())]
    facts += [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    home = private_folder() or Path(tempfile.mkdtemp(prefix="megaswift-"))
    view = home / f"foreign-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    if view.is_dir():
        return view
    stage = Path(tempfile.mkdtemp(dir=home))
    for path in files:
        copy = stage / path.relative_to(hf_config)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    (stage / FOREIGN).write_text(str(tensors.resolve()), encoding="utf-8")
    try:
        os.rename(stage, view)
    except OSError:  # another process was faster
        shutil.rmtree(stage)
        if not view.is_dir():
            raise
    return view
