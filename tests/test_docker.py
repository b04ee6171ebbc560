"""The images, as far as they can be checked without building: steps, files and arguments of each Dockerfile, what the
entry point starts, the services of the compose file."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megaswift.cli import COMMANDS
from megaswift.config import load_config
from megaswift.launchers.options.launch import LaunchConfig
from megaswift.launchers.torchrun_launcher import torchrun_environment
from tests.sources import ROOT

FOLDER = ROOT / "docker"
DOCKERFILES = sorted(FOLDER.glob("Dockerfile*"))
ENTRYPOINT = FOLDER / "entrypoint.sh"
INSTRUCTIONS = ("ARG", "FROM", "ENV", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "CMD")
COMMIT = re.compile(r"[0-9a-f]{40}")


def steps(file: Path) -> list[tuple[str, str]]:
    """Instructions with their text; comments and line breaks are gone."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in joined.splitlines() if line.strip()]


def arguments(file: Path) -> dict[str, str]:
    """Build arguments with their defaults."""
    texts = (text.partition("=") for name, text in steps(file) if name == "ARG")
    return {name: "".join(shlex.split(value)) for name, _, value in texts}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda p: p.name)
def test_steps(file: Path) -> None:
    found = steps(file)
    assert [name for name, _ in found if name not in INSTRUCTIONS] == []
    assert [text for name, text in found if name == "FROM"] == ["${BASE}${BASE_DIGEST:+@${BASE_DIGEST}}"]
    for name, text in found:
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", text], check=True)
            assert "apt-get install" not in text or "rm -rf /var/lib/apt/lists/*" in text
    listed = [json.loads(text) for name, text in found if name in ("ENTRYPOINT", "CMD")]
    assert listed == [["megaswift-entrypoint"], ["--help"]]
    assert ("COPY", "docker/entrypoint.sh /usr/local/bin/megaswift-entrypoint") in found


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda p: p.name)
def test_every_file_that_is_copied_is_there(file: Path) -> None:
    sources = [word for name, text in steps(file) if name == "COPY" for word in text.split()[:-1]]
    assert sources and [word for word in sources if not (ROOT / word).exists()] == []


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda p: p.name)
def test_every_argument_is_used_after_it_is_declared(file: Path) -> None:
    """And an argument before FROM in FROM alone, since a stage does not see it."""
    found = steps(file)
    start = next(i for i, (name, _) in enumerate(found) if name == "FROM")
    declared: dict[str, int] = {}
    for i, (name, text) in enumerate(found):
        if name == "ARG":
            declared[text.partition("=")[0]] = i
    for argument, i in declared.items():
        users = [j for j, (name, text) in enumerate(found) if name != "ARG" and re.search(rf"\$\{{{argument}\b", text)]
        assert users and min(users) > i and all((j <= start) == (i < start) for j in users), argument


def test_sources_are_held_at_a_commit() -> None:
    """A tag can be moved."""
    for file in DOCKERFILES:
        for name, text in steps(file):
            if name == "RUN" and "github.com" in text:
                fetched = re.findall(r"git fetch .*? https://\S+ \"\$\{(\w+)\}\"", text)
                assert len(fetched) == text.count("https://github.com") and "git clone" not in text
                assert all(COMMIT.fullmatch(arguments(file)[argument]) for argument in fetched)


def test_the_cuda_image_compiles_what_runs_use() -> None:
    """Transformer Engine without the part against NCCL's device API, which would meet two releases of NCCL; apex, vLLM
    and the like on request, and nothing of it has run."""
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    built = [words for name, words in steps(FOLDER / "Dockerfile") if name == "RUN"]
    (engine,) = [words for words in built if "transformer-engine" in words]
    assert engine.startswith("NVTE_WITH_NCCL_EP=0 pip install")
    switches = {name: value for name, value in arguments(FOLDER / "Dockerfile").items() if value in ("0", "1")}
    assert switches == dict.fromkeys(("APEX", "FLASH_ATTN", "DEEPEP", "VLLM"), "0")
    for name in switches:
        assert any(f'if [ "${{{name}}}" = 1 ]' in words for words in built)
    assert "Not run: no build of it, with or without the arguments" in text


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda p: p.name)
def test_threads_are_the_launcher_s_to_share_out(file: Path) -> None:
    """It leaves a variable as it finds it: one thread for HostAdam, tokenizers and checksums."""
    environ = dict(word.split("=", 1) for name, text in steps(file) if name == "ENV" for word in shlex.split(text))
    assert "OMP_NUM_THREADS" not in environ
    given = torchrun_environment(LaunchConfig(nproc_per_node=1), environ)
    assert given["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


def test_the_ascend_image_is_refused_with_the_reason() -> None:
    (run,) = [text for name, text in steps(FOLDER / "Dockerfile.ascend") if name == "RUN"]
    done = subprocess.run(["sh", "-c", run], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "does not run on Ascend" in done.stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `megaswift` that prints its words, and another program."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("megaswift", "other"):
        (folder / name).write_text(f'#!/bin/sh\nprintf "{name}"; for word in "$@"; do printf "|%s" "$word"; done\n')
        (folder / name).chmod(0o755)
    return folder


def started(programs: Path, *words: str) -> str:
    shell = shutil.which("dash") or "sh"
    environ = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.check_output([shell, str(ENTRYPOINT), *words], text=True, env=environ)


@pytest.mark.parametrize("command", [*COMMANDS, "help", "version", "megatron", "--help", "-h", "--version"])
def test_a_command_or_an_option_goes_to_megaswift(command: str, programs: Path) -> None:
    """Also where another program has the command's name, as ImageMagick's convert."""
    (programs / command).write_text("#!/bin/sh\necho wrong\n")
    (programs / command).chmod(0o755)
    assert started(programs, command, "a b", "$HOME") == f"megaswift|{command}|a b|$HOME"


def test_other_words_are_a_program(programs: Path) -> None:
    assert started(programs, "other", "sft", "a b") == "other|sft|a b"
    assert started(programs, "bash", "-c", "megaswift sft 'x y' && echo '|end'") == "megaswift|sft|x y|end\n"
    assert started(programs, "no-such-program", "x") == "megaswift|no-such-program|x"  # which names the known commands
    assert started(programs) == "megaswift"


def test_the_entry_point_can_be_executed() -> None:
    assert os.access(ENTRYPOINT, os.X_OK)
    assert ENTRYPOINT.read_text().startswith("#!/bin/sh\n")


TEXT = {"type": "string"}
LIST = {"type": "array", "items": TEXT}
SERVICE = {
    "command": LIST,
    "working_dir": TEXT,
    "volumes": LIST,
    "init": {"type": "boolean"},
    "stop_grace_period": {"type": "string", "pattern": r"^\d+[smh]$"},
    "shm_size": {"type": "string", "pattern": r"^\d+[kmg]b$"},
    "ulimits": {
        "type": "object",
        "additionalProperties": {
            "anyOf": [
                {"type": "integer"},
                {
                    "type": "object",
                    "properties": {"soft": {"type": "integer"}, "hard": {"type": "integer"}},
                    "required": ["soft", "hard"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "image": TEXT,
    "networks": LIST,
    "network_mode": {"enum": ["host", "none", "bridge"]},
    "ipc": TEXT,
    "environment": {"type": "object", "additionalProperties": TEXT},
    "depends_on": LIST,
    "profiles": LIST,
    "devices": LIST,
    "cap_add": LIST,
    "deploy": {"type": "object"},
}
"""Fields of a service in the Compose Specification, of those that the file has."""


def compose() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))


def test_compose_s_fields_are_those_of_the_specification() -> None:
    """Written down from its schema (compose-spec.json)."""
    made = compose()
    schema = {"type": "object", "properties": SERVICE, "required": ["image"], "additionalProperties": False}
    assert {key for key in made if not key.startswith("x-")} == {"name", "services", "networks"}
    for service in made["services"].values():
        jsonschema.validate(service, schema)
        assert not ("networks" in service and "network_mode" in service)  # Docker refuses both
        assert set(service.get("networks", ())) <= set(made["networks"])
        assert set(service.get("depends_on", ())) <= set(made["services"])
    (device,) = made["services"]["host"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


@pytest.mark.skipif("MEGASWIFT_SCHEMAS" not in os.environ, reason="MEGASWIFT_SCHEMAS is not set (CONTRIBUTING.md)")
@pytest.mark.slow
def test_compose_against_the_schema_itself() -> None:
    file = Path(os.environ["MEGASWIFT_SCHEMAS"]) / "compose-spec.json"
    if not file.exists():
        pytest.skip(f"no {file.name} in MEGASWIFT_SCHEMAS")
    schema = jsonschema.Draft7Validator(json.loads(file.read_text(encoding="utf-8")))
    assert [error.message for error in schema.iter_errors(compose())] == []


def filled_in(text: str, environ: dict[str, str]) -> str:
    """`${NAME:-default}`, as Compose replaces it."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: environ.get(found[1]) or found[2], text)


def test_the_services_are_the_nodes_of_one_run() -> None:
    """As the launcher reads their variables; and on two hosts with those of the comment."""
    services = compose()["services"]
    launches = []
    for service, given in (
        ("node0", {}),
        ("node1", {}),
        ("host", {"MASTER_ADDR": "10.0.0.1"}),
        ("host", {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}),
    ):
        environ = {name: filled_in(value, given) for name, value in services[service]["environment"].items()}
        task, file = (filled_in(word, given) for word in services[service]["command"])
        assert (task, file) == ("train", "run.yaml")
        launch = load_config("sft", ["--model", "m", "--dataset", "d"], environ=environ).launch
        launches.append(
            (launch.nnodes, launch.node_rank, launch.nproc_per_node, launch.master_addr, launch.master_port)
        )
    assert launches == [
        (2, 0, 2, "node0", 29500),
        (2, 1, 2, "node0", 29500),
        (2, 0, 8, "10.0.0.1", 29500),
        (2, 1, 8, "10.0.0.1", 29500),
    ]
    assert launches[0][3] in services and "profiles" not in services["node0"]
