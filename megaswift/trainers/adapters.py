"""The PEFT folder of a LoRA run: OUT/adapter at the end, and one in each checkpoint."""

from __future__ import annotations

from pathlib import Path

from megaswift.bridge.peft_folder import write_adapter
from megaswift.engine.megatron.engine import MegatronEngine
from megaswift.engine.protocol import Engine
from megaswift.trainers import agree


def write(engine: Engine, folder: Path, base: str) -> None:
    """Adapters and fully trained modules of all ranks into `folder`, in float32 as PEFT saves them; rank 0 writes. Collective."""
    assert isinstance(engine, MegatronEngine), "only the native engine has adapters"
    assert engine.lora is not None, "only a run with adapters has an adapter folder"
    weights = engine.adapter_weights()
    if agree.rank() == 0:
        write_adapter(folder, engine.lora.plan, weights, base)
    else:
        for _ in weights:
            pass
