"""One process on the stand-in device: `python -m tests.placement.steps IMPL FOLDER NAME ...` prints, as JSON, what each
scenario waited for.

IMPL is `torch` or a release of Transformer Engine. Owns the scenarios and the set-up of a process: Megatron-Core's
constants name the stand-in instead of the CPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.placement.device import DEVICE, StandIn

STAND_IN = StandIn()
STEPS = 3
"""The last one is counted: the first ones make states."""


def install(impl: str) -> None:
    """The stand-in in place of the CPU: where Megatron-Core names a GPU's device, and where megaswift chooses one."""
    if impl == "torch":
        import megaswift.engine.megatron  # noqa: F401 - the table of substitutions, before megatron.core
    else:
        os.environ["MEGASWIFT_TE_RELEASE"] = impl
        from tests.te import registry

        registered = registry._counted
        registry._counted = lambda name, function: STAND_IN.kernel(registered(name, function))
        import tests.te.preload  # noqa: F401 - the same, with Transformer Engine
        from tests.te.cuda import Cuda

        Cuda.current_device = lambda self: DEVICE  # type: ignore[method-assign]
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megaswift.engine.megatron import engine
    from megaswift.engine.megatron.cpu import cuda_stubs, device
    from megaswift.engine.torch import data_parallel_context

    functions = [device.unwrap_decorators(device.resolve_symbol(row.symbol)[2]) for row in device.CONSTANTS]
    for function in [*functions, MoEAlltoAllTokenDispatcher.__init__]:
        function.__code__ = _with_constants(function.__code__)
    device.compute_device = lambda: DEVICE
    torch.cuda.current_device = lambda: DEVICE  # type: ignore[assignment,return-value]
    torch_context = data_parallel_context.TorchContext.__init__

    def on_the_stand_in(self: Any, *args: Any, **kwargs: Any) -> None:
        torch_context(self, *args, **kwargs)
        self.device = DEVICE

    data_parallel_context.TorchContext.__init__ = on_the_stand_in  # type: ignore[method-assign]
    configure, norm = engine.transformer_config, cuda_stubs.sum_of_squares

    def on_the_device(*args: Any) -> Any:
        config = configure(*args)
        config.use_cpu_initialization = False  # as with CUDA: modules make their weights on the device
        return config

    engine.transformer_config = on_the_device
    cuda_stubs.sum_of_squares = lambda tensors, _: norm(tensors, DEVICE)  # apex's kernel, which this replaces, stays


def _with_constants(value: Any) -> Any:
    """Code whose constant "cpu", by the table of substitutions, is the stand-in."""
    if isinstance(value, str):
        return DEVICE.type if value in ("cpu", "cuda") else value
    if isinstance(value, tuple):
        return tuple(_with_constants(v) for v in value)
    return value.replace(co_consts=_with_constants(value.co_consts)) if hasattr(value, "co_consts") else value


@contextmanager
def engine_of(text: str, folder: Path, **options: Any) -> Iterator[tuple[Any, Any]]:
    """(engine with its weights, case) on the stand-in."""
    from tests.parity import measure, models
    from tests.parity.cases import parse

    case = parse(text)
    source = models.build(case.model, folder / case.model)
    with STAND_IN.running():
        engine, context = measure.build(case, source, case.world, **options)
        try:
            yield engine, case
        finally:
            context.close()


def step(text: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Waits of one optimizer step, and its loss."""
    from megaswift.losses.sft import CrossEntropy
    from tests.parity.cases import global_batch

    with engine_of(text, folder, **options) as (engine, case):
        losses = []
        for number in range(STEPS):
            STAND_IN.counted()
            losses.append(engine.train_batch(global_batch(case, number), CrossEntropy(), 1e-3).loss)
        return {"waits": STAND_IN.counted(), "losses": losses, "microbatches": len(global_batch(case, 0))}


def saving(text: str, folder: Path) -> dict[str, Any]:
    """A step, a checkpoint, an export, and the checkpoint read again: nothing is counted, but nothing may mix."""
    from megaswift.losses.sft import CrossEntropy
    from tests.parity.cases import global_batch

    with engine_of(text, folder) as (engine, case):
        engine.train_batch(global_batch(case, 0), CrossEntropy(), 1e-3)
        target = folder / f"saved-{case.model}"
        target.mkdir()
        engine.save(target)
        engine.export(folder / f"exported-{case.model}", folder / case.model)
        engine.load(target)
        loss = engine.train_batch(global_batch(case, 1), CrossEntropy(), 1e-3).loss
        return {"losses": [loss]}


USUAL = "--torch_dtype float32 --report_to none --max_steps 3 --logging_steps 1 --gradient_accumulation_steps 2"
TASKS = {
    "sft": "--max_length 32",
    "dpo": "--max_length 32",
    "grpo": "--max_length 32 --num_generations 2 --max_completion_length 4 --beta 0.1 --reward_funcs format",
    "ppo": "--max_length 32 --max_completion_length 4 --beta 0.1 --reward_funcs format",
}


def run(text: str, folder: Path) -> dict[str, Any]:
    """A whole run of a task (its first word; the others are more options) to its export. Counted is what the last
    iteration of its loop waits for: data or rollouts, step and log."""
    from megaswift.config import load_config
    from megaswift.engine.megatron.engine import MegatronEngine
    from megaswift.engine.torch.engine import TorchEngine
    from megaswift.trainers.run import run_training
    from tests.trainers import inputs

    task, *more = text.split()
    home = folder / text.replace(" ", "_")
    home.mkdir()
    if task in ("dpo", "kto"):
        inputs.write_preferences(home, 32)
        words = inputs.preference_inputs(home, task)
    else:
        words = inputs.write_inputs(home)
    words += [*USUAL.split(), *TASKS[task].split(), "--output_dir", str(home / "out"), *more]
    seen = []

    def marked(function: Any) -> Any:
        def train_batch(*args: Any, **kwargs: Any) -> Any:
            seen.append(STAND_IN.counted())
            return function(*args, **kwargs)

        return train_batch

    for kind in (MegatronEngine, TorchEngine):
        kind.train_batch = marked(kind.train_batch)  # type: ignore[method-assign]
    with STAND_IN.running():
        run_training(load_config(task, words))
    return {"waits": seen[-1]}


SCENARIOS: dict[str, Callable[[str, Path], dict[str, Any]]] = {"step": step, "save": saving, "run": run}


def main() -> None:
    """See the module."""
    impl, folder, *names = sys.argv[1:]
    install(impl)
    results = {}
    for name in names:
        kind, _, text = name.partition(":")
        results[name] = SCENARIOS[kind](text, Path(folder))
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
