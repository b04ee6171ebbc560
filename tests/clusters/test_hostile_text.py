"""What a user writes reaches the run as it is, through every launcher's shell and manifest, and starts nothing else.
Covers: node_script, kubernetes_pods."""

from __future__ import annotations

import random
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.clusters.job import RenderedJob
from megaswift.clusters.job_folder import write_job_files
from megaswift.clusters.scheduler import scheduler_of
from tests.clusters.jobs import job
from tests.clusters.programs import expanded_by_kubernetes, program, run_here

PIECES = (
    "$(touch X)",
    "`touch X`",
    "; touch X #",
    "'",
    '"',
    "$HOME",
    "${HOME}",
    "$(HOME)",
    "$$(HOME)",
    "\\",
    "&& touch X",
    "$$x$$",
    "$$$$",
    "$é",
)
PIECES += ("!x", "*", "~", "%j", "#", "-n", " ", "é", "中", "|", ">X", "{a,b}", "=", ":", "- ", "%", "\u2028")
KUBERNETES = ["job", "trainjob", "pytorchjob", "mpijob", "volcano"]
ALWAYS = (
    ("$(touch X)`touch X`'\"; touch X", "$(HOME) $$(HOME) $HOME", "a b'c"),
    ("", "'", "$(x)"),
    ("Write $$x$$, $$$$y $é; $(NNODES) and $$(NNODES) stay", "$$(NNODES) $$5 $é $(touch X) `touch X`", "a$$b"),
)
LAUNCHERS = ["local", "slurm", "ssh", "dlc", "ray", "rayjob", "raycluster"]
LAUNCHERS += KUBERNETES


def commands(rendered: RenderedJob, launcher: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What a node starts, and the variables that its scheduler sets."""
    if launcher == "slurm":
        return ["bash", str(folder / "job.sh")], {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]"}
    if launcher == "dlc":
        command = next(w for w in rendered.commands[-1] if w.startswith("--command="))
        return ["bash", "-c", command.removeprefix("--command=")], {"RANK": "1", "WORLD_SIZE": "2"}
    if launcher == "ssh":
        return ["bash", str(folder / "node-1.sh")], {}
    if launcher == "local":
        return ["bash", str(folder / "job.sh")], {}
    if launcher == "ray":
        words = list(rendered.commands[-1])
        entry = " ".join(words[words.index("--") + 1 :])  # `ray job submit` joins the words and quotes each
        entry = shlex.join(words[words.index("--") + 1 :])
        return ["bash", "-c", entry], yaml.safe_load(rendered.files["runtime_env.yaml"])["env_vars"]
    documents = list(yaml.safe_load_all(rendered.files["job.yaml"]))
    if launcher in ("rayjob", "raycluster"):
        return _as_kuberay_starts_it(documents)
    container = _container(documents[-1], launcher)
    environ: dict[str, str] = {}
    for entry_ in (one for one in container["env"] if "value" in one):
        environ[entry_["name"]] = expanded_by_kubernetes(entry_["value"], environ)
    mine = {
        "job": {"JOB_COMPLETION_INDEX": "1"},
        "volcano": {"VC_TASK_INDEX": "1"},
        "trainjob": {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"},
        "mpijob": {},
    }
    environ |= mine.get(launcher, {"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    return [expanded_by_kubernetes(word, environ) for word in container["command"]], environ


def _as_kuberay_starts_it(documents: list[dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """The driver: in KubeRay's pod `bash -c "ray job submit [--runtime-env-json "JSON"] -- ENTRYPOINT ;"`, whose
    arguments the kubelet expands (KubeRay 1.6, common/job.go); its variables are those of the head's container."""
    spec = documents[-1]["spec"]
    cluster = spec.get("rayClusterSpec") or documents[-2]["spec"]
    env = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    environ: dict[str, str] = {}
    for entry in (one for one in env if "value" in one):
        environ[entry["name"]] = expanded_by_kubernetes(entry["value"], environ)
    assert "runtimeEnvYAML" not in spec, "KubeRay passes it in double quotes, in which bash runs $(...)"
    return ["bash", "-c", expanded_by_kubernetes(f"bash -c '\"$@\"' -- {spec['entrypoint']} ;", environ)], environ


def _container(manifest: dict[str, Any], kind: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]
    if kind == "trainjob":
        found: dict[str, Any] = spec["trainer"]
        return found
    spec = spec["tasks"][0] if kind == "volcano" else spec
    replicas = {"pytorchjob": ("pytorchReplicaSpecs", "Worker"), "mpijob": ("mpiReplicaSpecs", "Launcher")}
    for name in replicas.get(kind, ()):
        spec = spec[name]
    pod = spec["template"]
    first: dict[str, Any] = pod["spec"]["containers"][0]
    return first


def texts(launcher: str, count: int = 6) -> list[tuple[str, str, str]]:
    """A word of the command line, a variable's value and a folder's name, drawn anew for each launcher."""
    draw = random.Random(launcher)

    def one() -> str:
        return "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 5)))

    return [*ALWAYS, *((one(), one(), one()) for _ in range(count))]


@pytest.mark.wide
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_text_arrives_as_it_is(launcher: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for word, value, name in texts(launcher):
        tmp_path = tmp_path_factory.mktemp("job")
        place = tmp_path / ("w" if launcher.startswith("ray") else "w " + name.replace("/", "_"))
        place.mkdir()
        options: dict[str, Any] = {"environment": {"MINE": value}, "overrides": ("--system", word)}
        kind = launcher if launcher in KUBERNETES else None
        real = "kubernetes" if kind else "ray" if launcher.startswith("ray") else launcher
        options |= (
            {"kind": kind} if kind else {"python": str(program(tmp_path))} if real in ("local", "slurm", "ssh") else {}
        )
        on_pods = {"submit_to": launcher, "image": "i", "ray_version": "2.51.0"}
        options |= on_pods if launcher in ("rayjob", "raycluster") else {}
        options |= {"python": str(program(tmp_path))} if launcher == "ray" else {}
        made = job(
            real, workdir=str(place), folder=tmp_path / "out" / name.replace("/", "_")[:8].strip(".") / "j", **options
        )
        rendered = scheduler_of(real).render(made)
        write_job_files(made, rendered)
        command, environ = commands(rendered, launcher, made.folder)
        (arrived,) = run_here(command, tmp_path, **environ)
        words = arrived["words"]
        start = words.index("train")
        assert words[start + 2 : start + 4] == ["--system", word]
        assert arrived["environ"]["MINE"] == value
        if real != "ray":
            assert arrived["folder"] == str(place)
            assert (arrived["environ"]["NNODES"], arrived["environ"]["NPROC_PER_NODE"]) == ("2", "8")
            assert arrived["environ"]["NODE_RANK"] == ("0" if real in ("slurm", "local") else "1")
        assert not list(tmp_path.rglob("X")) and not Path("/X").exists()


@pytest.mark.parametrize("value", ["tab\there", "two\nlines"])
def test_the_configuration_arrives_as_it_is(value: str, tmp_path: Path) -> None:
    """In the manifest's ConfigMap and in DLC's command."""
    text = f"task: sft\n# {value} 'quoted' $(HOME) `x`\nsystem: \"é\"\n"
    made = job("kubernetes", run_text=text, folder=tmp_path / "k")
    manifest = next(yaml.safe_load_all(scheduler_of("kubernetes").render(made).files["job.yaml"]))
    assert manifest["data"]["run.yaml"] == text
    dlc = scheduler_of("dlc").render(job("dlc", run_text=text, folder=tmp_path / "d", workdir=str(tmp_path)))
    line = (
        dlc.files["command.sh"]
        .partition("\ncd -- ")[0]
        .replace("/tmp/megaswift-run.yaml", shlex.quote(str(tmp_path / "got")))
    )
    subprocess.run(["bash", "-c", line], check=True)
    assert (tmp_path / "got").read_text() == text
