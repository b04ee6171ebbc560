"""`megaswift bench comm`: bandwidth of collectives and point-to-point transfers for each group of a parallel layout.

Owns the command: its options, the processes and what they measure. The table, JSON file and picture are
`bandwidth_report.py`'s.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaswift.base.byte_size import byte_size_or_none, bytes_text
from megaswift.base.command_words import HELP, UserErrorArgumentParser, unknown_command_error
from megaswift.commands.training import launch_option_mismatch_problems, process_count
from megaswift.config import load_config
from megaswift.config.sections import NAMES, OPTIONS, TRAINING
from megaswift.errors import ConfigError, Problem
from megaswift.launchers import torchrun_launcher
from megaswift.launchers.cluster_variables import take_cluster_variables
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.options.variables import CHECKED, is_launched_worker
from megaswift.launchers.parent_death import PARENT, end_with_parent
from megaswift.options.command_line import read_command_line
from megaswift.options.spelling import errors_as_typed
from megaswift.parallel.layout import Layout
from megaswift.parallel.link_rates import (
    OPERATIONS,
    communication_groups,
    infiniband_rate,
    link_rate_of_device,
)
from megaswift.parallel.options.layout import ParallelConfig

if TYPE_CHECKING:
    import torch

    from megaswift.commands.bandwidth_report import GroupPlacement
    from megaswift.engine.diagnostics.communication_benchmark import CommunicationTiming

USAGE = """\
Measures all-reduce, all-gather, reduce-scatter, all-to-all and send/receive for each group of a parallel layout, all
groups of a name at once, and prints the bandwidth of the slowest one, as nccl-tests counts it. NCCL on GPUs, gloo on
CPUs. Options of the layout and of the launch are those of training, also from a run's file:

  megaswift bench comm --nproc_per_node 8 --tp 4 --output comm.json
  megaswift bench comm run.yaml --nproc_per_node 8
  torchrun --nproc_per_node 8 -m megaswift bench comm --tp 4"""
DEFAULT_SIZES = "1KiB 4KiB 16KiB 64KiB 256KiB 1MiB 4MiB 16MiB 64MiB 256MiB"
LAYOUT_OPTIONS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "ddp_timeout",
)
"""Options of the section `parallel` that change what is measured."""
PROGRESS_SECONDS = 5.0
SCRIPT = Path(__file__).parents[1] / "cli" / "main.py"


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    if argv and argv[0] not in (*HELP, "comm"):
        raise unknown_command_error("megaswift bench", argv[0], ("comm",))
    if argv[:1] != ["comm"]:
        print("megaswift bench comm     bandwidth of each group of a parallel layout (comm --help)")
        return 0 if argv else 2
    take_cluster_variables(os.environ)
    given, rest = _parser().parse_known_args(list(argv[1:]))
    if problems := [*_problems(given), *_options_without_effect(rest)]:
        raise ConfigError(problems)
    cfg = load_config(None, rest)
    with errors_as_typed(cfg.typed, NAMES):
        return _start(given, list(argv), cfg.launch, cfg.parallel, cfg.given)


def _parser() -> UserErrorArgumentParser:
    parser = UserErrorArgumentParser(prog="megaswift bench comm", description=USAGE, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--sizes", nargs="+", default=DEFAULT_SIZES.split(), metavar="SIZE", help=f"default: {DEFAULT_SIZES}"
    )
    parser.add_argument(
        "--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS, help="default: all of them"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="time for all measurements; the largest sizes are left out when it is over (default: 120)",
    )
    parser.add_argument(
        "--repeats", type=int, default=200, metavar="N", help="at most so many calls of a measurement (default: 200)"
    )
    parser.add_argument("--output", metavar="FILE.json", help="write the figures, and a picture as FILE.png")
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), help="default: nccl if there are GPUs; gloo transfers CPU memory"
    )
    parser.add_argument(
        "--link_gbps",
        "--link-gbps",
        type=float,
        metavar="GBPS",
        help="rate of the link of one process in Gbit/s, for comparison: between nodes, or within a single node "
        "(default: InfiniBand ports, NVLink or PCIe by the device's name)",
    )
    return parser


def _problems(given: argparse.Namespace) -> list[Problem]:
    problems = [
        Problem(f"--sizes {size}", "is not a size", "--sizes 1KiB 1MiB 256MiB")
        for size in given.sizes
        if byte_size_or_none(size) is None
    ]
    for name, value in (("seconds", given.seconds), ("link_gbps", given.link_gbps), ("repeats", given.repeats)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            problems.append(Problem(f"--{name} {value:g}", "is not a positive number", f"--{name} 100"))
    if given.output is not None:
        there = next(p for p in Path(given.output).absolute().parents if p.exists())
        if Path(given.output).suffix != ".json" or Path(given.output).is_dir():
            problems.append(Problem(f"--output {given.output}", "is not a file name ending in .json", "comm.json"))
        elif not there.is_dir():
            problems.append(Problem(f"--output {given.output}", f"{there} is not a folder", "use another folder"))
        else:
            try:
                tempfile.TemporaryFile(dir=there).close()
            except OSError as error:
                rule = f"cannot be written in {there}: {error.strerror}"
                problems.append(Problem(f"--output {given.output}", rule, "use another folder"))
    return problems


def _options_without_effect(words: Sequence[str]) -> list[Problem]:
    """Options of training on the command line that are no part of a layout or launch; in a file they are the run's."""
    named = [
        (g.label, OPTIONS[NAMES[g.name]]) for g in read_command_line(list(words), TRAINING).givens if g.name in NAMES
    ]
    fix = "leave it out; the layout has --tp, --pp, --cp, --ep and --etp"
    return [
        Problem(label, "has no effect on communication", fix)
        for label, option in named
        if option.section != "launch" and option.name not in LAYOUT_OPTIONS
    ]


def _start(
    given: argparse.Namespace, words: list[str], launch: LaunchConfig, parallel: ParallelConfig, named: Collection[str]
) -> int:
    """`named`: canonical names of the options that the user has given."""
    worker = is_launched_worker(os.environ)
    world = process_count(launch)
    problems = launch_option_mismatch_problems(launch) if worker else []
    if launch.launcher != "torchrun":
        rule = "is not measured: the processes are torchrun's"
        problems.append(Problem(f"--launcher {launch.launcher}", rule, "--launcher torchrun on each node"))
    elif world == 1:
        problems.append(Problem("1 process", "has no other to communicate with", "--nproc_per_node 2 or more"))
    if problems:
        raise ConfigError(problems)
    layout = Layout.from_config(parallel, world)
    if worker:
        if {PARENT, "TORCHELASTIC_RUN_ID"} & os.environ.keys():
            end_with_parent(os.environ)
        _measure(given, parallel.ddp_timeout, layout)
        return 0
    if taken := torchrun_launcher.port_in_use_problems(launch):
        raise ConfigError(taken)
    more = torchrun_launcher.environment_launch_arguments(launch, named)
    command = torchrun_launcher.torchrun_command(launch, SCRIPT, ["bench", *words, *more])
    environment = torchrun_launcher.torchrun_environment(launch, {**os.environ, CHECKED: "1"})
    return torchrun_launcher.run_torchrun_with_restarts(command, environment)


def _measure(given: argparse.Namespace, ddp_timeout: float, layout: Layout) -> None:
    """In every process: the measurements; rank 0 reports them. `ddp_timeout` in seconds."""
    import torch.distributed as dist

    from megaswift import log
    from megaswift.commands.bandwidth_report import BenchReport
    from megaswift.engine.diagnostics.communication_benchmark import CommunicationPlan, run_benchmark
    from megaswift.engine.process_group import init_default_and_gloo_process_groups

    log.quiet_libraries()
    backend, device = _backend_and_device(given.backend)
    init_default_and_gloo_process_groups(backend, ddp_timeout)
    sizes = sorted({byte_size_or_none(size) or 0 for size in given.sizes})
    plan = CommunicationPlan(communication_groups(layout), given.operations, sizes, given.seconds, given.repeats)
    placement = _placement(backend, device, given.link_gbps)
    timings, left_out = run_benchmark(plan, device, _progress(len(plan.measurements()), given.seconds))
    if log.is_main():
        report = BenchReport(layout, backend, placement, plan.groups, timings, left_out)
        print(report.table(), flush=True)
        if given.output is not None:
            report.write(Path(given.output))
            log.print_result(f"wrote {given.output} and {Path(given.output).with_suffix('.png')}")
    dist.destroy_process_group()


def _progress(measurements: int, seconds: float) -> Callable[[CommunicationTiming], None]:
    """Says what is measured and for how long, then how far it is, at most every PROGRESS_SECONDS."""
    from megaswift import log

    log.info(f"{log.count_text(measurements, 'measurement')}, for up to {seconds:g} s (--seconds)")
    began = last = time.monotonic()
    done = 0

    def tell(timing: CommunicationTiming) -> None:
        nonlocal last, done
        done += 1
        now = time.monotonic()
        if now - last >= PROGRESS_SECONDS:
            last = now
            what = f"{timing.operation} of {timing.group}, {bytes_text(timing.size)}"
            log.info(f"{done} of {measurements} after {now - began:.0f} s: {what}")

    return tell


def _backend_and_device(requested: str | None) -> tuple[str, torch.device]:
    import torch

    gpus = torch.cuda.device_count()
    local = int(os.environ["LOCAL_RANK"])
    backend = requested or ("nccl" if gpus else "gloo")
    if backend == "gloo":
        return backend, torch.device("cpu")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    if processes > gpus:
        rule = f"needs a GPU for each process: {processes} processes of this node have {gpus}"
        fix = f"--nproc_per_node {gpus}, or --backend gloo" if gpus > 1 else "--backend gloo"
        raise ConfigError(Problem("--backend nccl", rule, fix))
    torch.cuda.set_device(local)
    return backend, torch.device("cuda", local)


def _placement(backend: str, device: torch.device, link_gbps: float | None) -> GroupPlacement:
    """The nodes of all ranks and the rates of their links. Collective."""
    import torch

    from megaswift import distributed
    from megaswift.commands.bandwidth_report import GroupPlacement

    node = f"{os.environ.get('GROUP_RANK', os.environ.get('CROSS_RANK', ''))} {socket.gethostname()}".strip()
    name = torch.cuda.get_device_name(device) if backend == "nccl" else "CPU"
    ports = infiniband_rate() if backend == "nccl" else None
    every = distributed.all_gather_objects((node, name, ports))
    nodes = [one for one, _, _ in every]
    given = None if link_gbps is None else link_gbps / 8
    rates = [link_rate_of_device(one) for _, one, _ in every]
    in_node = None if None in rates else min(rate for rate in rates if rate is not None)
    shares = [None if rate is None else rate / nodes.count(one) for one, _, rate in every]
    between = None if None in shares else min(share for share in shares if share is not None)
    if len(set(nodes)) == 1:
        return GroupPlacement(nodes, name, given or in_node, None)
    return GroupPlacement(nodes, name, in_node, given or between)
