"""Slurm: a batch script with one launcher a node, which saves and queues itself again before its time is over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megaswift.clusters.job import Job, RenderedJob, SubmittedJob
from megaswift.clusters.local_processes import printed_file
from megaswift.clusters.shell_lines import HEADER, preparation_lines, shell_words
from megaswift.errors import EXIT_HARDWARE, EXIT_MACHINE_TAKEN, EXPLAINED, ConfigError, Problem

SCRIPT = "job.sh"
LOG = "slurm-%j.log"
FIRST_PORT = 20_000
PORTS = 10_000
SICK_NODES = "sick-nodes"
"""File of the job's folder: nodes whose GPUs had errors, one a line (`trainers/hooks/gpu_health.py` writes it)."""
RESOLVED = 'getent hosts "$MASTER_ADDR" >/dev/null || MASTER_ADDR="$SLURM_LAUNCH_NODE_IPADDR"'
"""Names of nodes need not be in the network's name service."""
ENDED = "ended"
"""File of the job's folder, with the job's id after it: exit code and time of the end, written by the script."""
FAILURES = "failures"
"""File of the job's folder, with the job's id after it: a line for each failure of the run, written by the script.
Slurm's own count (SLURM_RESTART_COUNT) also has the starts after a time limit, a lost node or a preemption."""
NO_PROGRAM = (126, 127)
"""Exit codes of a shell that cannot run the command, as where `setup` did not find the environment."""
CANCELLED = 128 + 15
"""Exit code of a run that SIGTERM has ended, as scancel does: queued again it would come back."""
CLOCK_SECONDS = 10
"""By which the time between two signals may be off."""
LAST_NODE_SECONDS = 1800
"""After the first node has ended the others may still save; a node that waits for a lost one ends by itself."""
SIMPLE = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "reservation": "reservation",
    "constraint": "constraint",
    "gres": "gres",
    "time_limit": "time",
    "memory_per_node": "mem",
}
"""Our option and sbatch's."""


class SlurmScheduler:
    """sbatch, squeue, scancel."""

    shares_files = True
    id_pattern = re.compile(r"[1-9][0-9]{0,17}")

    def problems(self, job: Job) -> list[Problem]:
        """GPUs are asked for in one way."""
        if job.cluster.get("gres") and "gpu" in str(job.cluster.get("gres")) and not job.gpus_per_node:
            return [Problem(f"{job.cluster.name}: gres", "asks for GPUs, and gpus_per_node is 0", "set gpus_per_node")]
        return []

    def warnings(self, job: Job) -> list[str]:
        """About cores, of which Slurm reserves one for a task."""
        if job.cluster.get("cpus_per_node") or job.cluster.get("exclusive"):
            return []
        text = "without cpus_per_node or exclusive Slurm reserves one core of each node, unless the partition's default"
        return [f"cluster {job.cluster.name}: {text} reserves more: set cpus_per_node: N"]

    def render(self, job: Job) -> RenderedJob:
        """The script and sbatch's command line; paths are words of it, because sbatch expands % in its header."""
        log = str(job.folder / LOG.replace("%j", "\0")).replace("%", "%%").replace("\0", "%j")
        names = job.cluster.get("secret_variables") or []
        exported = ",".join(["ALL", *names]) if names else "ALL"
        command = ["sbatch", "--parsable", f"--export={exported}", f"--output={log}", str(job.folder / SCRIPT)]
        return RenderedJob({SCRIPT: "\n".join(_script(job)) + "\n"}, [command])

    def job_id(self, output: str, job: Job) -> str:
        """`123` or `123;cluster`."""
        found = re.match(r"([0-9]+)(;\S+)?$", output.strip())
        if found is None:
            raise ConfigError(Problem("sbatch", f"printed no job id: {output.strip()[:200]}"))
        return found[1]

    def status(self, job: SubmittedJob) -> Sequence[str]:
        """The queue's line; of a job that Slurm has forgotten the accounting's, else what its script has written."""
        return ["bash", "-c", _STATUS, "jobs", job.id, f"{job.folder}/{ENDED}-{job.id}"]

    def logs(self, job: SubmittedJob, follow: bool) -> Sequence[str]:
        """The script's output, which is that of all nodes."""
        return printed_file(Path(job.folder, LOG.replace("%j", job.id)), follow)

    def alive(self, job: SubmittedJob) -> Sequence[str]:
        """Looks into the queue, where a job waits too that was queued again."""
        return ["bash", "-c", _ALIVE, "jobs", job.id]

    def cancel(self, job: SubmittedJob) -> Sequence[str]:
        """SIGTERM to the run, which saves; Slurm kills what is left after its KillWait."""
        return ["scancel", "--", job.id]


_STATUS = """\
if ! command -v squeue > /dev/null; then
    echo "squeue is not on this machine: run this where the job was submitted" >&2
    exit 2
fi
queue=$(squeue --jobs "$1" --states all --format "%.10i %.20j %.10T %.12M %.6D %R" 2>&1)
code=$?
if [ "$code" = 0 ] && [ "$(wc -l <<< "$queue")" -gt 1 ]; then echo "$queue"; exit 0; fi
case "$code$queue" in 0*|*"Invalid job id"*) ;; *) echo "$queue" >&2; exit "$code" ;; esac
record=$(sacct -X --noheader --jobs "$1" --format JobID,JobName%20,State%12,ExitCode,Elapsed,End 2> /dev/null)
if [ -n "$record" ]; then echo "$record"; exit 0; fi
echo "job $1 is not in Slurm's queue any more, and Slurm's accounting has no record of it"
if [ -f "$2" ] && read -r code end < "$2"; then echo "its script ended at $end with exit code $code"; exit 0; fi
echo "its script did not get to its end: the job was cancelled, killed or lost its node (megaswift jobs logs)"
exit 1
"""
"""$1: the job's id, $2: its file ENDED. Slurm forgets a job some minutes after its end (MinJobAge)."""


_ALIVE = """\
queue=$(squeue --noheader --jobs "$1" --format %T 2>&1)
case "$?$queue" in 0|*"Invalid job id"*) exit 1 ;; esac
"""
"""$1: the job's id. The queue has nothing of a job that has ended; a controller that is away is another error."""

_CORES = (
    "cores=${SLURM_CPUS_ON_NODE:-}; "
    'case "${SLURM_JOB_CPUS_PER_NODE:-}" in *,*) cores= ;; esac  # unless nodes have different numbers of cores'
)
"""For a job that says nothing of cores: its task gets all that Slurm has reserved on a node, not one."""


def _script(job: Job) -> Iterator[str]:
    cluster = job.cluster
    yield HEADER
    yield from (f"#SBATCH --{line}" for line in _header(job))
    yield ""
    yield "# Slurm sends USR1 before the time is over: the run saves its state, and the job is queued again."
    yield "early=0 waiting= step="
    yield "on_usr1() { early=1 warned=$SECONDS; pass USR1; }"
    yield from _on_term(cluster.get("save_before_end"))
    yield 'pass() { signalled=1; if [ "$step" ]; then kill "-$1" "$step" 2>/dev/null; else waiting=$1; fi; }'
    yield "trap on_usr1 USR1"
    yield "trap on_term TERM"
    yield ""
    yield from preparation_lines(job)
    yield "set -u"  # after setup: scripts that activate environments read variables that are not set
    yield 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    port = cluster.get("master_port")
    yield f"MASTER_PORT={port if port else f'$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))'}"
    yield "MEGASWIFT_RESTARTS=${SLURM_RESTART_COUNT:-0}"
    yield f"MEGASWIFT_SICK_NODES={shell_words([str(job.folder / SICK_NODES)])}-$SLURM_JOB_ID"
    yield "export MASTER_ADDR MASTER_PORT MEGASWIFT_RESTARTS MEGASWIFT_SICK_NODES"
    yield ""
    node = f'export NODE_RANK="$SLURM_NODEID"; {RESOLVED}; exec "$@"'
    cores = ""
    if not cluster.get("cpus_per_node"):
        yield _CORES
        cores = " ${cores:+--cpus-per-task=$cores}"
    yield f"srun {shell_words([*_step(job)])}{cores} bash -c {shell_words([node])} node \\"
    yield f"    {shell_words(job.command(str(job.run_file)))} &"
    yield "step=$!"
    yield '[ -z "$waiting" ] || { sleep 1; kill "-$waiting" "$step"; }  # from before the start of srun'
    yield "signalled=1"
    yield 'while [ "$signalled" = 1 ]; do signalled=0; wait "$step"; code=$?; done  # a signal interrupts wait'
    requeues = cluster.get("requeues")
    yield from _decision(job, requeues)
    yield 'if [ "$again" = 1 ]; then'
    if requeues:
        yield from (f"    {line}" for line in _EXCLUSION)
    yield '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script'
    yield "fi"
    ended = f"{shell_words([str(job.folder / ENDED)])}-$SLURM_JOB_ID"
    yield f'echo "$code $(date -u +%FT%TZ)" > {ended}'
    yield 'exit "$code"'


def _on_term(seconds: int | None) -> Iterator[str]:
    """Slurm ends a job whose time is over `seconds` after USR1 or later; an earlier TERM is scancel's."""
    if not seconds or seconds <= CLOCK_SECONDS:
        yield "on_term() { pass TERM; }"
        return
    yield "on_term() {"
    yield f'    [ "$early" = 1 ] && [ $((SECONDS - warned)) -lt {seconds - CLOCK_SECONDS} ] && early=2  # scancel'
    yield "    pass TERM"
    yield "}"


def _decision(job: Job, requeues: int) -> Iterator[str]:
    """Lines that set `again`. The end of the time is no failure; a failure is written down before the job is queued
    again, since one that is not counted would start it for ever."""
    yield "again=0"
    yield 'case "$early $code" in'
    final = _any_of(f"? {code}" for code in (0, *EXPLAINED, *NO_PROGRAM))
    yield f"    {final}) ;;  # it ended, or would end the same way again"
    yield '    "1 "*) again=1 ;;  # its time is over'
    yield '    "2 "*) ;;  # scancel, after USR1'
    if requeues:
        file = f"{shell_words([str(job.folder / FAILURES)])}-$SLURM_JOB_ID"
        yield f'    "0 {CANCELLED}") ;;  # scancel'
        yield f'    "0 {EXIT_MACHINE_TAKEN}") again=1 ;;  # it saved, since its machine is taken away'
        yield "    *)"
        yield f'        if echo "$(date -u +%FT%TZ) exit code $code" >> {file}; then'
        yield f"            failures=$(wc -l < {file})"
        yield f'            echo "megaswift: exit code $code, failure $failures (requeues: {requeues})"'
        yield f'            [ "$failures" -le {requeues} ] && again=1'
        yield "        fi"
        yield "        ;;"
    yield "esac"


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of `case`."""
    return "|".join(text.replace(" ", r"\ ") for text in texts)


_EXCLUSION = (
    f'if [ "$code" = {EXIT_HARDWARE} ] && [ -s "$MEGASWIFT_SICK_NODES" ]; then',
    "    # Only a waiting job can avoid nodes: it is queued on hold, changed and released; this script ignores TERM.",
    '    nodes=$(sort -u "$MEGASWIFT_SICK_NODES" | paste -s -d ,)',
    '    before=$(scontrol show job "$SLURM_JOB_ID" | sed -n "s/.*ExcNodeList=\\([^ (]*\\).*/\\1/p")  # or (null)',
    '    echo "megaswift: the job is queued again without $nodes, whose GPUs report errors"',
    '    trap "" TERM',
    '    if scontrol requeuehold "$SLURM_JOB_ID"; then',
    "        for _ in 1 2 3 4 5 6 7 8 9 10; do",
    '            scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${before:+$before,}$nodes" && break',
    "            sleep 1",
    "        done",
    '        scontrol release "$SLURM_JOB_ID"',
    '        exit "$code"',
    "    fi",
    "fi",
)
"""Keeps a job that is queued again after `EXIT_HARDWARE` away from the nodes with errors."""


def _header(job: Job) -> Iterator[str]:
    cluster = job.cluster
    yield f"job-name={job.name}"
    yield f"nodes={job.nodes}"
    yield "ntasks-per-node=1"
    for ours, theirs in SIMPLE.items():
        if (value := cluster.get(ours)) is not None:
            yield f"{theirs}={value}"
    if job.gpus_per_node and not cluster.get("gres"):
        yield f"gpus-per-node={job.gpus_per_node}"
    if cores := cluster.get("cpus_per_node"):
        yield f"cpus-per-task={cores}"
    if cluster.get("exclusive"):
        yield "exclusive"
        if not cluster.get("memory_per_node"):
            yield "mem=0"  # all of the node: exclusive itself reserves its cores and GPUs only
    yield "requeue"
    yield "open-mode=append"
    if seconds := cluster.get("save_before_end"):
        yield f"signal=B:USR1@{seconds}"


def _step(job: Job) -> Iterator[str]:
    yield from (f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--wait={LAST_NODE_SECONDS}")
    if cores := job.cluster.get("cpus_per_node"):
        yield f"--cpus-per-task={cores}"  # srun does not take it from the job from Slurm 22.05 on
    if image := job.cluster.get("container_image"):
        yield f"--container-image={image}"
    if mounts := job.cluster.get("container_mounts"):
        yield f"--container-mounts={mounts}"


SCHEDULER = SlurmScheduler()
