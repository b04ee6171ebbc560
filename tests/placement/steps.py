"""Scenarios on the stand-in device, in the ranks of a pool (tests/parity/pool.py): what each of them waited for.

Owns the scenarios and the set-up of a rank: Megatron-Core's constants name the stand-in instead of the CPU. With a pool
of Transformer Engine's the stand-ins of its kernels are the device's, too.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.placement import collectives, torch_device_module
from tests.placement.device import AFTER_UPDATE, DEVICE, StandIn, WrongDevice

STAND_IN = StandIn()
STEPS = 2
"""The last one is counted: the first one makes states."""
LR = 1e-3


def install() -> None:
    """The stand-in in place of the CPU: where Megatron-Core names a GPU's device, and where megaswift chooses one."""
    if "transformer_engine_torch" in sys.modules:
        from tests.te import registry
        from tests.te.cuda import Cuda

        registry.LAUNCH.append(STAND_IN.launch)
        Cuda.current_device = lambda self: DEVICE  # type: ignore[method-assign]
        Cuda.synchronize = lambda self, *_: STAND_IN.synchronized()  # type: ignore[method-assign]
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    import megaswift.engine.megatron  # noqa: F401 - the table of substitutions, before megatron.core
    from megaswift import distributed
    from megaswift.engine import triton_support
    from megaswift.engine.megatron import engine, parallel_context  # noqa: F401 - collectives are bound where used
    from megaswift.engine.megatron.cpu import cuda_stubs, patches
    from megaswift.engine.torch import process_group

    triton_support.triton_launches = lambda: False  # type: ignore[assignment]  # kernels need a driver
    functions = [patches.unwrap_decorators(patches.resolve_symbol(row.symbol)[2]) for row in patches.CONSTANTS]
    for function in functions:
        function.__code__ = _with_constants(function.__code__)
    dispatcher: Any = MoEAlltoAllTokenDispatcher.__init__
    dispatcher.__code__ = _with_constants(dispatcher.__code__, ("cuda",))  # it keeps some indices in host memory
    patches.compute_device = lambda: DEVICE
    torch.cuda.current_device = lambda: DEVICE  # type: ignore[assignment,return-value]
    collectives.install(STAND_IN)
    torch_device_module.register()
    _name_the_devices_of_optimizers()
    torch.addmm = _addmm(torch.addmm)
    torch_context = process_group.TorchContext.__init__

    def on_the_stand_in(self: Any, *args: Any, **kwargs: Any) -> None:
        torch_context(self, *args, **kwargs)
        self.device = DEVICE

    process_group.TorchContext.__init__ = on_the_stand_in  # type: ignore[method-assign]
    start = parallel_context.ParallelContext._start

    def with_a_group_in_host_memory(self: Any, timeout_s: float, *args: Any) -> None:
        begun = dist.is_initialized()
        start(self, timeout_s, *args)
        if not begun:  # as beside NCCL
            distributed.start_cpu_group(timedelta(seconds=timeout_s))

    parallel_context.ParallelContext._start = with_a_group_in_host_memory  # type: ignore[method-assign]
    configure, norm = engine.transformer_config, cuda_stubs.sum_of_squares

    def on_the_device(*args: Any) -> Any:
        config = configure(*args)
        config.use_cpu_initialization = False  # as with CUDA: modules make their weights on the device
        return config

    engine.transformer_config = on_the_device
    cuda_stubs.sum_of_squares = lambda tensors, _: norm(tensors, DEVICE)  # apex's kernel, which this replaces, stays


def _addmm(function: Any) -> Callable[..., Any]:
    """With sums of another dtype than the factors', which only GPUs have."""

    def addmm(total: Any, a: Any, b: Any, *, out_dtype: Any = None, **more: Any) -> Any:
        return function(total, a.to(out_dtype or a.dtype), b.to(out_dtype or b.dtype), **more)

    return addmm


def _name_the_devices_of_optimizers() -> None:
    """Where they ask torch's C++ for the devices of their tensors, and where Transformer Engine makes its flag."""
    grouped = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def by_device(lists: Any, with_indices: bool = False) -> Any:
        groups = grouped(lists, with_indices)
        return {(lists[0][0].device if d is not None else d, t): v for (d, t), v in groups.items()}

    torch.optim.Optimizer._group_tensors_by_device_and_dtype = staticmethod(by_device)  # type: ignore[method-assign]
    if "transformer_engine_torch" in sys.modules:
        from transformer_engine.pytorch.optimizers import FusedAdam

        FusedAdam.__init__.__code__ = _with_constants(FusedAdam.__init__.__code__)


def _with_constants(value: Any, names: tuple[str, ...] = ("cpu", "cuda")) -> Any:
    """Code whose constants `names`, "cpu" by the table of substitutions, are the stand-in."""
    if isinstance(value, str):
        return DEVICE.type if value in names else value
    if isinstance(value, tuple):
        return tuple(_with_constants(v, names) for v in value)
    return value.replace(co_consts=_with_constants(value.co_consts, names)) if hasattr(value, "co_consts") else value


def case_and_options(text: str) -> tuple[Any, dict[str, Any]]:
    """Of `CASE`, or of it and options: `CASE --engine fsdp2`."""
    from tests.parity.cases import parse

    words, *options = text.split(" --")
    return parse(words), dict(option.split(" ") for option in options)


@contextmanager
def engine_of(text: str, folder: Path) -> Iterator[tuple[Any, Any]]:
    """(engine with its weights, case) on the stand-in."""
    from tests.parity import measure, models

    case, options = case_and_options(text)
    source = models.build(case.model, folder / case.model)
    with STAND_IN.running():
        engine, context = measure.build(case, source, case.world, **options)
        try:
            yield engine, case
        finally:
            context.close()


def _microbatches(engine: Any, case: Any, number: int) -> Any:
    """This rank's part of a global batch."""
    from tests.parity.cases import global_batch, own

    return own(global_batch(case, number), case.dp, engine.context.layout.coordinates(engine.context.rank).dp)


def _train(engine: Any, case: Any, number: int, loss: Any = None) -> float:
    """One optimizer step that counts its global batch itself; its loss."""
    from megaswift.losses.sft import CrossEntropy

    return engine.train_batch(_microbatches(engine, case, number), loss or CrossEntropy(), LR).loss


@contextmanager
def updates_named() -> Iterator[None]:
    """Waits after an optimizer's update was launched have it in their names."""

    def launched(*_: Any) -> None:
        STAND_IN.launched = AFTER_UPDATE

    handle = register_optimizer_step_post_hook(launched)
    try:
        yield
    finally:
        handle.remove()


def step(text: str, folder: Path) -> Any:
    """Waits of one step of the loop, neither its first nor its last; those after the update's launch are named so."""
    from megaswift.losses.sft import CrossEntropy
    from megaswift.trainers.hook import Hook, Run
    from megaswift.trainers.loop import train

    waits: list[Any] = []

    class Count(Hook):
        def on_step(self, loop: Any, step: Any) -> None:
            waits.append(STAND_IN.counted())

    with engine_of(text, folder) as (engine, case), updates_named():
        source = SimpleNamespace(epoch=0.0, state_dict=dict, taken=itertools.count())
        source.next = lambda: _microbatches(engine, case, next(source.taken))
        train(Run(engine, source, CrossEntropy(), lambda number, total: LR, STEPS + 1, [Count()]))
        return waits[STEPS - 1]


def saving(text: str, folder: Path) -> Any:
    """Waits of a checkpoint, an export, and the checkpoint read again."""
    waits = {}
    with engine_of(text, folder) as (engine, case):
        _train(engine, case, 0)
        target = folder / f"saved-{case.model}"
        target.mkdir(exist_ok=True)
        STAND_IN.counted()
        engine.save(target)
        waits["save"] = STAND_IN.counted()
        engine.export(folder / f"exported-{case.model}", folder / case.model)
        waits["export"] = STAND_IN.counted()
        engine.load(target)
        waits["load"] = STAND_IN.counted()
        _train(engine, case, 1)
    return waits


@contextmanager
def _hook(layer: Any, function: Any) -> Iterator[None]:
    handle = layer.register_forward_hook(function)
    try:
        yield
    finally:
        handle.remove()


def _mask(module: Any, inputs: Any, output: Any) -> Any:
    hidden = output[0] if isinstance(output, tuple) else output
    hidden = hidden * torch.ones(hidden.shape[:1]).view(-1, *[1] * (hidden.dim() - 1))
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _sum_over(group: Any) -> Callable[..., None]:
    def sums(module: Any, inputs: Any, output: Any) -> None:
        dist.all_reduce(torch.ones(2), group=group)

    return sums


def _seen(engine: Any, case: Any, faults: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The waits of a step, and what is seen of each fault (a context manager, and a loss): the waits that a step has
    with it and not without it, or the error."""
    for number in range(STEPS):
        STAND_IN.counted()
        _train(engine, case, number)
    usual = STAND_IN.counted()
    found: dict[str, Any] = {"none": usual}
    for name, (planted, loss) in faults.items():
        try:
            with planted:
                _train(engine, case, 0, loss)
            waits = STAND_IN.counted()
            found[name] = {k: n - usual.get(k, 0) for k, n in waits.items() if n != usual.get(k, 0)}
        except WrongDevice as error:
            found[name] = str(error)
        STAND_IN.counted()
    return found


def faults(text: str, folder: Path) -> Any:
    """What is seen of faults that are planted into a step of Megatron-Core's model."""
    from megaswift.losses.sft import CrossEntropy

    class Counting(CrossEntropy):
        def __call__(self, outputs: Any, batch: Any) -> Any:
            torch.bincount(batch.labels.reshape(-1))
            return super().__call__(outputs, batch)

    def synchronize(module: Any, inputs: Any, output: Any) -> None:
        torch.cuda.synchronize()

    with engine_of(text, folder) as (engine, case):
        layer = engine.plain[0].decoder.layers[0]
        planted = {
            "bincount": (nullcontext(), Counting()),
            "synchronize": (_hook(layer, synchronize), None),
            "mask": (_hook(layer, _mask), None),
            "sums": (_hook(layer, _sum_over(engine.context.groups.tp)), None),
        }
        return _seen(engine, case, planted)


def sharded_faults(text: str, folder: Path) -> Any:
    """What is seen of faults that are planted into a step of FSDP2: a factor from host memory on this rank's parts of
    the gradients, one on a gathered weight, a sum of gradients in host memory, a mask."""
    from megaswift.engine.torch.strategies.strategy import whole_tensor

    with engine_of(text, folder) as (engine, case):
        strategy = engine.strategy
        squared, name = strategy.squared_norm, next(iter(dict(strategy.bare.named_parameters())))

        def gradient() -> torch.Tensor:
            for part in map(strategy.local, strategy.gradients()):
                part.mul_(torch.ones(part.shape))
            return squared()

        def gathered() -> torch.Tensor:
            whole = whole_tensor(strategy, name, "weight")
            whole * torch.ones(whole.shape)
            return squared()

        planted = {f.__name__: (patch.object(strategy, "squared_norm", f), None) for f in (gradient, gathered)}
        layer = strategy.bare.model.model.layers[0]
        planted |= {"sums": (_hook(layer, _sum_over(dist.group.WORLD)), None), "mask": (_hook(layer, _mask), None)}
        return _seen(engine, case, planted)


USUAL = "--torch_dtype float32 --report_to none --max_steps 3 --logging_steps 1 --gradient_accumulation_steps 2"
TASKS = {
    "sft": "--max_length 32",
    "dpo": "--max_length 32",
    "kto": "--max_length 32 --per_device_train_batch_size 2",
    "grpo": "--max_length 32 --num_generations 2 --max_completion_length 4 --beta 0.1 --reward_funcs format",
    "ppo": "--seed 2 --max_length 32 --max_completion_length 4 --beta 0.1 --reward_funcs format",
}
"""PPO's seed is one with which no completion of the last step ends early."""
VISION = "--engine ddp --max_length 512 --per_device_train_batch_size 2 --freeze_vit false --freeze_aligner false"
"""Of an SFT run on rows with images, whose model is named in place of a task."""


def _home(text: str, folder: Path) -> Path:
    return folder / text.replace(" ", "_")


def prepare_run(text: str, folder: Path) -> None:
    """Model and data of a run, made in the tests' process: saving a transformers model imports DeepSpeed, some seconds
    that every rank would spend again."""
    from tests.parity import vision
    from tests.trainers import inputs

    task, home = text.split()[0], _home(text, folder)
    home.mkdir(exist_ok=True)
    if task in vision.KINDS:
        model, data = vision.write_model(task, home / "model"), vision.write_rows(home / "data.jsonl")
        words = ["--model", str(model), "--dataset", str(data)]
    elif task in ("dpo", "kto"):
        inputs.write_preferences(home, 32)
        words = inputs.preference_inputs(home, task)
    else:
        words = inputs.write_inputs(home)
    (home / "inputs.json").write_text(json.dumps(words))


def run(text: str, folder: Path) -> Any:
    """A whole run of a task (its first word; the others are more options) to its export. Counted is what the last
    iteration of its loop waits for: data or rollouts, the step of every model that trains, and log."""
    from megaswift.config import load_config
    from megaswift.engine.megatron.engine import MegatronEngine
    from megaswift.engine.torch.engine import TorchEngine
    from megaswift.run.training import run_training

    task, *more = text.split()
    home = _home(text, folder)
    words = json.loads((home / "inputs.json").read_text())
    words += [*USUAL.split(), *TASKS.get(task, VISION).split(), "--output_dir", str(home / "out"), *more]
    seen: list[tuple[int, dict[str, int]]] = []

    def marked(function: Any) -> Any:
        def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((id(self), STAND_IN.counted()))
            return function(self, *args, **kwargs)

        return train_batch

    for kind in (MegatronEngine, TorchEngine):
        kind.train_batch = marked(kind.train_batch)  # type: ignore[method-assign]
    with STAND_IN.running():
        run_training(load_config(task if task in TASKS else "sft", words))
    before, last = [n for n, (engine, _) in enumerate(seen) if engine == seen[0][0]][-2:]
    return dict(sum((Counter(waits) for _, waits in seen[before + 1 : last + 1]), Counter()))


SCENARIOS: dict[str, Callable[[str, Path], Any]] = {
    "step": step,
    "save": saving,
    "run": run,
    "faults": faults,
    "sharded_faults": sharded_faults,
}


def measure(rank: int, world: int, payload: tuple[Path, list[str]]) -> dict[str, Any]:
    """What each scenario `kind:text` waited for on this rank."""
    folder, names = payload
    install()
    results = {}
    for name in names:
        kind, _, text = name.partition(":")
        results[name] = SCENARIOS[kind](text, folder)
    return results
