"""`megaswift submit`: a run's configuration as a job of a cluster.

Owns the command: it checks the run here, renders the job, keeps its files and hands them to the cluster's own tool.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from megaswift import log
from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.base.redaction import has_secret, is_secret, secret_lines
from megaswift.clusters.clusters_file import SECRET_OPTIONS, read_cluster, secret_fix
from megaswift.clusters.job import NCCL_OPTIONS, Cluster, Job, RenderedJob, Role, job_name
from megaswift.clusters.job_folder import jobs_folder, next_job_folder, write_job_files, write_record
from megaswift.clusters.options import KUBERNETES, RAY, SSH, options_of_launcher
from megaswift.clusters.ray_jobs import KUBERAY
from megaswift.clusters.scheduler import Scheduler, scheduler_of
from megaswift.clusters.shell_lines import shell_words
from megaswift.clusters.ssh_hosts import hosts_of, with_hosts_of_its_file
from megaswift.config import SwiftConfig, load_config
from megaswift.config.sections import NAMES, TRAINING
from megaswift.errors import ConfigError, Problem, UserError, did_you_mean_hint
from megaswift.launchers.nccl_preset import ONE_NODE
from megaswift.launchers.ray_cluster import ENGINES, ENVIRONMENTS
from megaswift.options.command_line import read_command_line
from megaswift.options.files import read_config_file
from megaswift.options.sources import GivenOptionValue
from megaswift.parallel.layout import PROCESSES
from megaswift.rollout.options.placement import ON_CPUS
from megaswift.trainers.options.checkpoint import INTERVAL, KEPT, saves_by_time

USAGE = """\
Checks a run, renders it as a job of a cluster and submits it with the cluster's own tool. clusters.yaml describes the
clusters (--clusters FILE, else ./clusters.yaml, else ~/.config/megaswift/clusters.yaml); `local` is always there. Other
options are the run's and override its file. What is submitted is kept in OUTPUT_DIR/jobs/NAME. Options of clusters:
docs/launch.md. Exit code: 0 submitted; 2 a mistake; 1 the cluster's tool failed."""
FAILED = 1
OF_LAUNCH = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "launcher", "num_workers")
"""Launch options that the job sets itself."""
SET_BY_JOB = {**dict.fromkeys(OF_LAUNCH, "--nodes N --gpus_per_node M"), "hostfile": "hostfile of an ssh cluster"}
SET_BY_JOB["master_port"] = "master_port of the cluster"
"""Options that a job's run does not take, and what does their work."""

READ_HERE = ("nodes", "gpus_per_node", "gpu_type", "workdir", "hostfile", "secret_variables")
"""Options of a cluster that are read before a job is rendered."""
CHOICES = ("kind", "submit_to")
"""Options that choose what is rendered."""
PROCESSES_LINE = f"^.*{re.escape(PROCESSES)}$"
"""The line of a layout's fix that asks for another number of processes."""
FIRST_NODE = {"NODE_RANK": "0", "MASTER_ADDR": "node-0"}
"""What a run of several nodes needs beside their number."""


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    given, rest = _parser().parse_known_args(list(argv))
    cluster = with_hosts_of_its_file(read_cluster(given.cluster, given.clusters))
    scheduler = scheduler_of(cluster.launcher)
    job, cfg = _job(given, rest, cluster, scheduler)
    problems = [*scheduler.problems(job), *_network_problems(job)]
    missing = _missing_variable_problems(job)
    problems += [] if given.dry_run else missing
    if problems := problems or [*_ignored_option_problems(job, scheduler)]:
        raise ConfigError(problems)
    job, cfg, forecast = _planned(given, job, cfg)
    lacks = _check_run(cfg, job, scheduler)
    if lacks and not given.dry_run:
        raise ConfigError(lacks)
    files = {"model": [cfg.model.model] if cfg.model.model else [], "dataset": cfg.data.dataset}
    outside = _paths_outside_mounts(files, cfg.checkpoint.output_dir, job)
    left = _still_missing(given, [*missing, *lacks])
    for text in (*scheduler.warnings(job), *outside, *_saves_by_time_warning(cfg), *left):
        log.warn(text)
    rendered = scheduler.render(job)
    if given.dry_run:
        _show(job, rendered, forecast)
        return 0
    if forecast:
        log.info(forecast)
    return _submit(job, rendered, scheduler)


def _parser() -> UserErrorArgumentParser:
    parser = UserErrorArgumentParser(prog="megaswift submit", description=USAGE, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="JOB.yaml", help="the run's configuration, as for megaswift train")
    parser.add_argument(
        "--cluster", default="local", metavar="NAME", help="a cluster of clusters.yaml (default: local)"
    )
    parser.add_argument("--clusters", metavar="FILE", help="the file with the clusters")
    parser.add_argument(
        "--nodes", type=_count, metavar="N", help="nodes (default: the run file's nnodes, the cluster's)"
    )
    parser.add_argument(
        "--gpus_per_node", "--gpus-per-node", type=_number, metavar="M", help="GPUs of a node, one process each"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="GPU in the table of megaswift plan (default: the cluster's gpu_type)"
    )
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="figures of GPUs, as for megaswift plan")
    parser.add_argument("--name", help="name of the job (default: that of the file)")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print what would be submitted")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def _job(
    given: argparse.Namespace, rest: Sequence[str], cluster: Cluster, scheduler: Scheduler
) -> tuple[Job, SwiftConfig]:
    """The job, and its run with the number of processes that it will have."""
    # Read the one configuration file; options that the job itself sets are refused.
    file = Path(given.file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(Problem(str(file), rule, "megaswift submit run.yaml --cluster NAME")) from None
    line = read_command_line(list(rest), TRAINING)
    if line.files:
        raise ConfigError(Problem(f"megaswift submit {line.files[0]}", "a job has one configuration file", str(file)))
    taken = [Problem(g.label, "is set by the job", SET_BY_JOB[g.name]) for g in line.givens if g.name in SET_BY_JOB]
    if problems := [*taken, *_misspelt(line.givens)]:
        raise ConfigError(problems)
    # Nothing secret may be written into the job's files.
    words = [str(file), *rest]
    if problems := [*_secret_problems(cluster, rest, file), *_secret_text_problems(cluster, text, rest, file)]:
        raise ConfigError(problems)
    # Load twice: the first reading gives nodes and processes, with which the second resolves the run.
    hosts = len(hosts_of(cluster)) if cluster.launcher == SSH else 1
    gpus = given.gpus_per_node if given.gpus_per_node is not None else cluster.get("gpus_per_node")
    sizes = {"nnodes": cluster.get("nodes") or hosts or 1, "nproc_per_node": gpus or 1}
    in_file = {NAMES.get(given.name) for given in read_config_file(str(file), TRAINING).givens}
    unnamed = {name.upper(): str(size) for name, size in sizes.items() if name not in in_file}
    first = load_config(None, words, complete=True, environ={**unnamed, **FIRST_NODE})
    nodes = given.nodes or first.launch.nnodes or 1
    processes = gpus or first.launch.nproc_per_node or 1
    sizes_of_job = {"NNODES": str(nodes), "NPROC_PER_NODE": str(processes)}
    cfg = load_config(None, words, complete=True, environ={**sizes_of_job, **FIRST_NODE})
    # Name the job and choose its folder, on this machine or in the image.
    name = job_name(given.name or file.stem)
    workdir = str(cluster.get("workdir") or (os.getcwd() if scheduler.shares_files else "/workspace"))
    output = Path(cfg.checkpoint.output_dir).expanduser()
    jobs = jobs_folder(str(Path(workdir) / output if scheduler.shares_files else output), scheduler.shares_files)
    folder = next_job_folder(jobs, name)
    submitted = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    job = Job(
        folder.name,
        cluster,
        text,
        tuple(rest),
        nodes,
        gpus or 0,
        processes,
        workdir,
        folder,
        sys.executable,
        roles=roles_of(cfg, bool(gpus)),
        id=f"{folder.name}-{submitted}",
    )
    return job, cfg


def roles_of(cfg: SwiftConfig, on_gpus: bool) -> tuple[Role, ...]:
    """Return the parts of a run that are Ray actors."""
    placement = cfg.placement
    gpus = cfg.vllm.vllm_tensor_parallel_size if on_gpus else 0
    engines = Role(ENGINES, placement.sampler_engines or 0, placement.cpus_per_engine, gpus)
    on_cpus = placement.environment_placement == ON_CPUS
    workers = Role(ENVIRONMENTS, placement.environment_workers if on_cpus else 0, 1, 0)
    return tuple(role for role in (engines, workers) if role.actors)


def _misspelt(givens: Sequence[GivenOptionValue]) -> Iterator[Problem]:
    """Options of the run that are none, and nearly one of submit's."""
    own = [option.removeprefix("--") for action in _parser()._actions for option in action.option_strings]
    for given in givens:
        if given.name not in NAMES and (hint := did_you_mean_hint(given.name, own)):
            yield Problem(given.label, "is not an option of megaswift submit", hint)


def _secret_problems(cluster: Cluster, rest: Sequence[str], file: Path) -> list[Problem]:
    """Secrets among the run's options, which would be kept in the job's files."""
    givens = [*read_config_file(str(file), TRAINING).givens, *read_command_line(list(rest), TRAINING).givens]
    found = [given.name for given in givens if is_secret(given.name)]
    fix = f"leave it out here; {_variable_fix(cluster)}"
    return [Problem(f"--{name}", "is a secret, which would be written into the job's files", fix) for name in found]


def _secret_text_problems(cluster: Cluster, text: str, rest: Sequence[str], file: Path) -> list[Problem]:
    """One problem that names all places with a secret in a URL, a header or a line of text; it is not printed."""
    named = {f"{file}:{number}" for number in _lines_of_secret_options(str(file))}
    places = [f"{file}, line {n}" for n in secret_lines(text) if f"{file}:{n}" not in named]
    if any(map(has_secret, rest)):
        places.append("the command line")
    options = {name: value for name, value in cluster.options.items() if name not in SECRET_OPTIONS}
    places += [
        f"cluster {cluster.name}: {name}" for name, value in options.items() if any(map(has_secret, _texts(value)))
    ]
    if not places:
        return []
    rule = "would be written into the job's files: leave the user, password, token or key out"
    fix = _variable_fix(cluster)
    return [Problem(f"credentials in a URL or text ({'; '.join(places)})", rule, fix)]


def _lines_of_secret_options(file: str) -> Iterator[int]:
    """Yields the lines of a YAML file with secret options, which `_secret_problems` names."""
    for given in read_config_file(file, TRAINING).givens:
        found = re.match(r":(\d+) ", given.spelling.removeprefix(file))
        if found and is_secret(given.name):
            yield int(found[1])


def _texts(value: Any) -> Iterator[str]:
    """Texts in an option of a cluster; a variable of a pod (`name`, `value`) as an assignment."""
    if isinstance(value, Mapping):
        if {"name", "value"} <= {*value}:
            yield f"{value['name']}={value['value']}"
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    else:
        yield str(value)


def _variable_fix(cluster: Cluster) -> str:
    fix = secret_fix(cluster.launcher, cluster.options)
    return f"a variable for the job, by cluster {cluster.name} (docs/launch.md): {fix}"


def _ignored_option_problems(job: Job, scheduler: Scheduler) -> Iterator[Problem]:
    """Options of the cluster that its rendering does not read, with these others."""
    cluster = replace(job.cluster, read={*READ_HERE})
    scheduler.render(replace(job, cluster=cluster))
    choices = [f"{name}: {cluster.get(name)}" for name in CHOICES if name in options_of_launcher(cluster.launcher)]
    which = f"launcher: {cluster.launcher}{''.join(f', {choice}' for choice in choices)}"
    for name, value in cluster.options.items():
        if name not in cluster.read and value is not None:
            yield Problem(
                f"cluster {cluster.name}: {name}", f"would be ignored: {which} has no use for it", "leave it out"
            )


def _network_problems(job: Job) -> list[Problem]:
    twice = [
        Problem(f"cluster {job.cluster.name}: environment: {variable}", f"is set by {option}, too", "leave one out")
        for option, variable in NCCL_OPTIONS.items()
        if job.cluster.get(option) is not None and variable in (job.cluster.get("environment") or {})
    ]
    return [*twice, *_preset_problems(job)]


def _preset_problems(job: Job) -> list[Problem]:
    if job.nodes == 1 or job.cluster.get("network") != ONE_NODE:
        return []
    rule = f"is for a single node, and the job has {job.nodes}: it keeps NCCL off the network"
    fix = "the name of the network: ethernet, roce or infiniband"
    return [Problem(f"cluster {job.cluster.name}: network: {ONE_NODE}", rule, fix)]


def _missing_variable_problems(job: Job) -> list[Problem]:
    names = job.cluster.get("secret_variables") or []
    missing = [n for n in names if not os.environ.get(str(n))]
    where = f"cluster {job.cluster.name}: secret_variables"
    return [Problem(where, f"{n} is not set in this shell", f"export {n}=..., or leave it out there") for n in missing]


def _still_missing(given: argparse.Namespace, missing: Sequence[Problem]) -> Iterator[str]:
    """Yield a warning for each thing that only a dry run may lack."""
    if given.dry_run:
        yield from (f"{problem.what}: {problem.rule}; to submit, {problem.fix}" for problem in missing)


def _saves_by_time_warning(cfg: SwiftConfig) -> Iterator[str]:
    """Yield a warning where no option says when checkpoints are written: how much a dead node may cost."""
    if saves_by_time(cfg.checkpoint):
        kept = cfg.checkpoint.save_total_limit or KEPT
        yield (
            f"no --save_steps: a run that takes over an hour writes a checkpoint every {INTERVAL / 60:.0f} minutes to "
            f"{cfg.checkpoint.output_dir}/checkpoints and keeps the last {kept}; a shorter one is saved at its end"
        )


def _planned(given: argparse.Namespace, job: Job, cfg: SwiftConfig) -> tuple[Job, SwiftConfig, str]:
    """Choose the layout of `--layout auto`, and forecast memory and time where the GPU is named.

    Returns:
        Job and run with the chosen options, and a line with the forecast; empty without one.

    Raises:
        ConfigError: The run does not fit its GPUs.
    """
    gpu = given.gpu or job.cluster.get("gpu_type")
    auto = cfg.parallel.layout == "auto"
    gpu = gpu or (cfg.parallel.planned_gpu if auto else None)
    if gpu is None and not auto:
        return job, cfg, ""
    if gpu is None:
        raise ConfigError(Problem("--layout auto", "needs the cluster's GPU", "--gpu h100, or gpu_type of the cluster"))
    from megaswift.commands.plan import described_model, describes_model
    from megaswift.parallel.hardware import planned_gpu
    from megaswift.planner.machine import Machine
    from megaswift.run.checks.layout_plan import forecast_text, planned_layout, words_of

    world = job.nodes * job.processes_per_node
    machine = Machine(planned_gpu(gpu, given.hardware), job.processes_per_node, cfg.model.fp8_format is not None)
    if not auto and not describes_model(cfg):
        return job, cfg, f"forecast: none, because --model {cfg.model.model} is not on this machine"
    spec = described_model(cfg)
    if not auto:
        return job, cfg, f"forecast: {forecast_text(cfg, spec, machine, world)}"
    options, text = planned_layout(cfg, spec, machine, world)
    planned = replace(job, overrides=(*job.overrides, *words_of(options)))
    return planned, cfg.replace(**options), f"layout auto: {text}"


def _check_run(cfg: SwiftConfig, job: Job, scheduler: Scheduler) -> list[Problem]:
    """Check the layout, and where the cluster sees this machine's files, model, data and output directory too.

    Returns:
        What the model's folder lacks, which a dry run may do without.

    Raises:
        ConfigError: The run cannot start.
    """
    from megaswift.folders.source import missing_model_file_problems
    from megaswift.parallel.constraints import LayoutRequest
    from megaswift.parallel.layout import size_problems
    from megaswift.run.checks.preflight import layout_data_output_problems

    lacks: list[Problem] = []
    world = job.nodes * job.processes_per_node
    axes = LayoutRequest.of(cfg.parallel, world, cfg.data.max_length, cfg.train).axes
    if not scheduler.shares_files:
        problems = size_problems(world, axes)
    elif Path(job.workdir).is_dir():
        with chdir(job.workdir):  # relative paths are the job's
            problems = [_path_on_nodes(p, job) for p in layout_data_output_problems(cfg, world)]
            if cfg.model.model and (folder := Path(cfg.model.model).expanduser()).is_dir():
                lacks = missing_model_file_problems(folder, cfg.model.random_init)
    else:
        what = f"cluster {job.cluster.name}: workdir: {job.workdir}"
        rule = f"is not a folder here, and launcher {job.cluster.launcher} shares this machine's files"
        raise ConfigError(Problem(what, rule, "make it, or leave workdir out: the folder of megaswift submit"))
    if problems:
        fix = _sizes_fix(job, axes)
        raise ConfigError([replace(p, fix=re.sub(PROCESSES_LINE, fix, p.fix, flags=re.M)) for p in problems])
    return lacks


def _path_on_nodes(problem: Problem, job: Job) -> Problem:
    """Return the problem of a path that is not there with the reason why it must be there."""
    if not problem.rule.startswith("no such"):
        return problem
    why = f"launcher {job.cluster.launcher} reads this machine's files: submit where the path exists"
    return replace(problem, fix=f"{problem.fix}; {why}")


def _paths_outside_mounts(files: Mapping[str, Sequence[str]], output_dir: str, job: Job) -> Iterator[str]:
    """For a job of pods: an output directory that ends with its pod, and files that only this machine has.

    Args:
        files: The paths that the run reads, by option.
    """
    to = job.cluster.get("submit_to")
    workdir = job.cluster.get("workdir")
    if job.cluster.launcher == RAY and to not in KUBERAY and not workdir and not Path(output_dir).is_absolute():
        yield f"--output_dir {output_dir} is below Ray's copy of the job's files: give an absolute path"
    if job.cluster.launcher != KUBERNETES and to not in KUBERAY:
        return
    base = PurePosixPath(job.workdir if workdir or job.cluster.launcher == KUBERNETES else "/")  # of an image: unknown
    mounts = [PurePosixPath(str(mount["path"])) for mount in job.cluster.get("mounts") or ()]

    def is_mounted(path: str) -> bool:
        return any((base / path).is_relative_to(mount) for mount in mounts)

    has = f"cluster {job.cluster.name} mounts {', '.join(map(str, mounts)) or 'nothing'}"
    if not is_mounted(output_dir):
        yield f"--output_dir {output_dir} is lost with its pod, unless the image or runtime mounts it: {has}"
    for name, paths in files.items():
        for path in paths:
            if Path(path).expanduser().exists() and not is_mounted(path):
                yield f"--{name} {path} is on this machine; a pod has the image's files and the mounts only: {has}"


def _sizes_fix(job: Job, axes: Mapping[str, int]) -> str:
    """The nearest numbers of nodes or of processes on each that the layout divides, by the options that set them."""
    option = "--gpus_per_node" if job.gpus_per_node else "--nproc_per_node in the file:"
    unit = math.lcm(math.prod(axes[a] for a in ("tp", "cp", "pp")), math.prod(axes[a] for a in ("etp", "ep", "pp")))
    each = unit // math.gcd(unit, job.nodes)
    nodes = unit // math.gcd(unit, job.processes_per_node)
    fewer = job.processes_per_node // each * each
    choices = []
    if fewer:
        choices.append(f"--nodes {job.nodes} {option} {fewer}")
    choices.append(f"--nodes {-(-job.nodes // nodes) * nodes} {option} {job.processes_per_node}")
    return ", or ".join(choices)


def _show(job: Job, rendered: RenderedJob, forecast: str) -> None:
    if forecast:
        print(f"# {forecast}")
    print(f"# ---- {job.run_file}\n{job.run_text}")
    for name, text in rendered.files.items():
        print(f"# ---- {job.folder / name}\n{text}")
    print("# ---- submitted by")
    for command in rendered.commands:
        print(shell_words(command))
    if rendered.not_run:
        print(f"# not run: {rendered.not_run}")


def _submit(job: Job, rendered: RenderedJob, scheduler: Scheduler) -> int:
    tool = rendered.commands[-1][0]
    if shutil.which(tool) is None:
        raise UserError(Problem(tool, "is not on this machine", "submit from a machine that has it, or use --dry_run"))
    write_job_files(job, rendered)
    output = ""
    for command in rendered.commands:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=_environment(os.environ))
        output = done.stdout
        if done.returncode:
            log.warn(f"{tool} failed with exit code {done.returncode}; the job's files are in {job.folder}")
            return FAILED
    record = write_record(job, scheduler.job_id(output, job), datetime.now(UTC).isoformat(timespec="seconds"))
    log.print_result(f"submitted {record.name} to {record.cluster} as {record.id}; its files are in {record.folder}")
    log.print_result(f"megaswift jobs status|logs|cancel {shell_words([record.folder])}")
    return 0


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the tool's environment: without the launch variables of this shell, which Slurm would hand to every
    node."""
    return {k: v for k, v in environ.items() if k.lower() not in OF_LAUNCH}
