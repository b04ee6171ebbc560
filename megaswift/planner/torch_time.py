"""Time of a step on a torch engine: transformers' layers, and the exchanges of DDP, ZeRO and FSDP2.

Products, attention and launches are those of `layer_time.py`. Elementwise operations are not fused: each tensor that a
layer keeps is written and read once forward, and read twice and its gradient written once backward. Gradients are
reduced in float32: by DDP and ZeRO-1 in the last backward pass of a step, by the others in each. ZeRO-3 and FSDP2
gather the weights for both passes of each micro-batch; ZeRO-1 and 2 after a step. What a pass does not hide counts.
"""

from __future__ import annotations

from dataclasses import replace

from megaswift.memory.step_options import StepOptions
from megaswift.memory.torch_activations import GATHERING, kept_by_torch_layer
from megaswift.memory.torch_estimate import TorchRun
from megaswift.planner.layer_time import Seconds, head_time, layer_time
from megaswift.planner.machine import Machine
from megaswift.planner.step_time import StepTime

LAUNCHES = (120, 220)
"""Kernels of a layer's forward and backward pass without fusion. An assumption, not measured here."""
EXPOSED_AFTER_STEP = ("zero1", "zero2")
REDUCED_ONCE = ("ddp", "zero1")


def torch_step_time(run: TorchRun, options: StepOptions, machine: Machine) -> StepTime:
    """Returns the time of a step with these options."""
    one = run.setup(options)
    setup = one.setup
    layers = run.spec.num_layers
    kept = sum(size for name, size in kept_by_torch_layer(one, 1).items() if not name.startswith("weights "))
    time = layer_time(setup, 1, machine)
    launch = machine.shares.launch_us * 1e-6
    forward = _with_launches(replace(time.forward, elementwise=2 * kept / machine.memory_rate), LAUNCHES[0] * launch)
    backward = _with_launches(replace(time.backward, elementwise=3 * kept / machine.memory_rate), LAUNCHES[1] * launch)
    head_forward, head_backward = head_time(setup, machine)
    every, trained = run.elements
    casts = Seconds(elementwise=6 * every / machine.memory_rate) if one.autocast else Seconds()
    ahead = forward * layers + head_forward + casts
    back = backward * layers + head_backward
    recomputes = options.model.recompute_granularity == "full"
    again = forward.total * layers if recomputes else 0.0

    # exchanges, and what the passes do not hide of them
    m = options.passes
    reduce_kind = "all_reduce" if run.kind == "ddp" else "reduce_scatter"
    reduce = machine.seconds(reduce_kind, 4 * trained, run.layout, "dp")
    width = setup.width
    gather = machine.seconds("all_gather", width * every, run.layout, "dp")
    behind = back.total + again
    if run.kind in GATHERING:
        exchanged = m * (max(0.0, gather - ahead.total) + max(0.0, gather + reduce - behind))
    else:
        times = 1 if run.kind in REDUCED_ONCE else m
        exchanged = times * max(0.0, reduce - behind)
    if run.kind in EXPOSED_AFTER_STEP:
        exchanged += machine.seconds("all_gather", width * trained, run.layout, "dp")

    # gradients are read twice, for their norm and the update, and zeroed; states are read and written
    own = trained if run.kind == "ddp" else trained / run.layout.world_size
    optimizer = own * (3 * 4 + 2 * 8 + 2 * 4 + width) / machine.memory_rate
    links = {"dp": machine.link(run.layout, "dp")} if run.layout.world_size > 1 else {}
    return StepTime((ahead + back) * m, again * m, 0.0, 0.0, exchanged, optimizer, 0.0, links)


def _with_launches(gpu: Seconds, host: float) -> Seconds:
    return replace(gpu, host=max(0.0, host - gpu.gpu))
