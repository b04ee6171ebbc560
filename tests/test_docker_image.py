"""docker/Dockerfile.cpu, really built: its own steps by buildah, on a base system of Debian's packages in place of the
base image, since registries of images may be out of reach. Then its entry point and the quickstart in it.

`scripts/setup_slow_tier.sh` installs buildah and debootstrap. Needs root, Debian's and Python's package indexes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from megaswift.version import __version__
from tests.network_namespaces import machines, why_not
from tests.sources import ROOT
from tests.test_docker import arguments, compose, filled_in

DOCKERFILE = ROOT / "docker" / "Dockerfile.cpu"
MISSING = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: scripts/setup_slow_tier.sh"),
    pytest.mark.skipif(os.geteuid() != 0, reason="buildah and debootstrap need root"),
]


class Builder:
    """buildah with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = ["--root", str(folder / "store"), "--runroot", str(folder / "runroot")]

    def __call__(self, command: str, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["buildah", *self.places, command, *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )
        assert not check or done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done


class Container:
    """A container of the image. `run` does what `docker run IMAGE WORDS` does: entry point, then the words or CMD."""

    def __init__(self, build: Builder, image: str) -> None:
        self.build, self.name = build, build("from", image).stdout.strip()
        self.config = json.loads(build("inspect", "--type", "image", image).stdout)["OCIv1"]["config"]

    def run(self, *words: str, options: Sequence[str] = (), check: bool = True) -> subprocess.CompletedProcess[str]:
        started = [*self.config["Entrypoint"], *(words or self.config["Cmd"])]
        return self.build("run", "--isolation", "chroot", *options, self.name, "--", *started, check=check)


def pip_settings(folder: Path) -> list[str]:
    """This machine's settings of pip (index, certificate, local wheels) as volumes of the build."""
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    settings = {name: value for name, value in re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", listed, re.MULTILINE)}
    volumes = []
    for number, path in enumerate(sorted({Path(p) for v in settings.values() for p in re.findall(r"/[\w./-]+", v)})):
        if path.is_dir():  # an index refers to files beside its folder
            folder_of_files = path.parent if path.name == "simple" else path
            volumes += ["--volume", f"{folder_of_files}:{folder_of_files}:ro"]
        elif path.is_file():  # elsewhere: a package of the image may write a file of this name
            place = f"/mnt/pip/{number}"
            volumes += ["--volume", f"{path}:{place}:ro"]
            settings = {name: re.sub(rf"{re.escape(str(path))}(?=\s|$)", place, v) for name, v in settings.items()}
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    return [*volumes, "--volume", f"{file}:/etc/pip.conf:ro"]


def base_system(build: Builder, suite: str) -> str:
    """A container with the packages that a base image of Debian has."""
    folder = build.folder / "base"
    subprocess.run(["debootstrap", "--variant=minbase", suite, str(folder)], check=True, capture_output=True)
    empty = build("from", "scratch").stdout.strip()
    build("add", "-q", empty, folder, "/")
    shutil.rmtree(folder)
    return empty


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    folder = tmp_path_factory.mktemp("image")
    build = Builder(folder)
    base = arguments(DOCKERFILE)["BASE"]
    suite = re.fullmatch(r"debian:(\w+)-slim", base)
    assert suite is not None
    empty = base_system(build, suite[1])
    build("commit", "-q", empty, f"localhost/{base}")
    given = ["--isolation", "chroot", "--build-arg", f"BASE=localhost/{base}", *pip_settings(folder)]
    build("bud", *given, "-t", "megaswift:cpu", "-f", DOCKERFILE, ROOT)
    yield Container(build, "megaswift:cpu")
    build("rm", "--all")
    build("rmi", "--all", "--force")


def test_both_forms_of_docker_run(container: Container) -> None:
    assert container.run("--version").stdout.strip() == __version__
    assert container.run("sft", "--help").stdout.startswith("megaswift sft")
    assert container.run("bash", "-c", "cd / && megaswift sft --help").stdout.startswith("megaswift sft")
    assert "usage: megaswift COMMAND" in container.run().stdout
    wrong = container.run("sfd", check=False)
    assert wrong.returncode == 2 and "sft" in wrong.stderr
    assert container.run("sft", "--dataset", "no.jsonl", check=False).returncode == 2


def test_the_package_in_the_image_is_this_one(container: Container) -> None:
    listing = container.run("python", "-c", "import megaswift; print(megaswift.__file__)").stdout.strip()
    assert listing.startswith("/opt/venv/")
    compared = container.run(
        "diff", "-rq", "-x", "__pycache__", "/source/megaswift", str(Path(listing).parent),
        options=("--volume", f"{ROOT}:/source:ro"),
    )  # fmt: skip
    assert compared.stdout == ""


def test_the_quickstart_runs_in_it(container: Container, tmp_path: Path) -> None:
    """The checkout, without its environment, is mounted; the model, the data and the answers are the script's."""
    mounted = ("--volume", f"{ROOT}:/source:ro", "--volume", f"{tmp_path}:/work")
    script = "bash /source/scripts/quickstart.sh --env /opt/venv --output /work/quick"
    said = container.run("bash", "-c", script, options=mounted).stdout
    scores = {when: int(share) for when, share in re.findall(r"held-out questions, (before|after): (\d+)%", said)}
    assert scores["after"] >= 90 > scores["before"] and (tmp_path / "quick/run/hf/model.safetensors").exists()
    again = ("sft", "--model", "/work/quick/model", "--dataset", "/source/scripts/quickstart/data/train.jsonl#64")
    more = ("--max_steps", "2", "--max_length", "128", "--global_batch_size", "8", "--torch_dtype", "float32")
    container.run(*again, *more, "--output_dir", "/work/again", options=mounted)
    assert len((tmp_path / "again/metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_the_two_nodes_of_the_compose_file_are_one_run(container: Container, tmp_path: Path) -> None:
    """Each service in a network namespace, with the variables, the folder and the command of the file."""
    mounted = ("--volume", f"{ROOT}:/source:ro", "--volume", f"{tmp_path}:/work")
    quick = "/source/scripts/quickstart"
    container.run("python", f"{quick}/make_model.py", f"{quick}/data", "/work/model", options=mounted)
    data = f"{quick}/data/train.jsonl#64"
    run = {"task": "sft", "model": "/work/model", "dataset": data, "output_dir": "/work/out", "tp": 2, "pp": 2}
    run |= {"max_steps": 2, "max_length": 128, "global_batch_size": 8, "torch_dtype": "float32"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    build, nodes = container.build, []
    with machines(tmp_path / "net") as hosts:
        (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
        with (tmp_path / "hosts").open("a") as file:
            file.writelines(f"{host.address} node{i}\n" for i, host in enumerate(hosts))
        for i, host in enumerate(hosts):
            service = compose()["services"][f"node{i}"]
            words = ["buildah", *build.places, "run", "--isolation", "chroot", "--no-hosts", "--hostname", f"node{i}"]
            words += [*mounted, "--volume", f"{tmp_path}/hosts:/etc/hosts:ro", "--workingdir", service["working_dir"]]
            words += [word for name, value in service["environment"].items() for word in ("--env", f"{name}={value}")]
            name = build("from", "megaswift:cpu").stdout.strip()
            started = [*container.config["Entrypoint"], *(filled_in(word, {}) for word in service["command"])]
            nodes.append(
                subprocess.Popen(
                    host.words([*words, name, "--", *started]),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, "TMPDIR": str(build.folder)},
                )
            )
        said = [node.communicate(timeout=500)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) >= 2
    assert (tmp_path / "out/hf/model.safetensors").exists()


def test_a_node_of_kubernetes_starts_in_it(container: Container, tmp_path: Path) -> None:
    """Manifests give a command of their own, `bash -c ...`, in place of the entry point; KubeRay a login shell."""
    from megaswift.clusters.pods import node_command
    from tests.clusters.jobs import job

    command = node_command(job("kubernetes", nodes=1, gpus=0, workdir="/tmp/run"), [], "megaswift --version && pwd")
    done = container.build("run", "--isolation", "chroot", container.name, "--", *command)
    assert done.stdout.split() == [__version__, "/tmp/run"]
    assert container.run("bash", "-lc", "command -v megaswift").stdout.strip() == "/opt/venv/bin/megaswift"
