"""clusters.yaml: where it is found, and its mistakes. Covers: cluster_options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megaswift.clusters.clusters_file import clusters_file, read_cluster
from megaswift.clusters.options import CLUSTER_OPTIONS, SAFE
from megaswift.clusters.table import SCHEDULERS
from megaswift.errors import ConfigError
from tests.sources import ROOT


def write(folder: Path, **clusters: Any) -> str:
    file = folder / "clusters.yaml"
    file.write_text(yaml.safe_dump({"clusters": clusters}))
    return str(file)


def said(folder: Path, name: str = "lab", **clusters: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        read_cluster(name, write(folder, **clusters))
    return str(refused.value)


def test_the_nearest_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": str(tmp_path / "home")}
    assert clusters_file(None, environ) is None and read_cluster("local", None, environ).launcher == "local"
    own = tmp_path / "home/.config/megaswift"
    own.mkdir(parents=True)
    write(own, lab={"launcher": "slurm"})
    assert clusters_file(None, environ) == own / "clusters.yaml"
    assert clusters_file(None, environ | {"XDG_CONFIG_HOME": str(tmp_path / "none")}) is None
    write(tmp_path, lab={"launcher": "ssh", "hosts": ["a"]})
    assert read_cluster("lab", None, environ).get("hosts") == ["a"]
    other = tmp_path / "other"
    other.mkdir()
    assert read_cluster("lab", write(other, lab={"launcher": "dlc"}), environ).launcher == "dlc"


def test_defaults(tmp_path: Path) -> None:
    cluster = read_cluster("lab", write(tmp_path, lab={"launcher": "kubernetes", "retries": 0}))
    assert (cluster.get("retries"), cluster.get("namespace"), cluster.get("partition")) == (0, "default", None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"launcher": "k8s"}, "launcher: kubernetes"),
        ({"partition": "x"}, "launcher is missing; it must be one of"),
        ({"launcher": "slrum"}, "launcher slrum must be one of local, slurm"),
        ({"launcher": "slrum"}, "did you mean slurm?"),
        ({"launcher": "slurm", "master_port": 65_536}, "master_port: must be a port, 1 to 65535"),
        ({"launcher": "slurm", "partitions": "x"}, "did you mean partition?"),
        ({"launcher": "slurm", "secret_variables": 5}, "secret_variables: must be a list of names"),
        ({"launcher": "kubernetes", "secrets": True}, "secrets: must be a mapping"),
        ({"launcher": "ssh", "hosts": ["me@-oX"]}, "hosts: must be a list of hosts"),
        ({"launcher": "slurm", "namespace": "x"}, "namespace: is not an option with launcher slurm"),
        ({"launcher": "slurm", "partition": "a; rm -rf /"}, "partition: must be a name"),
        ({"launcher": "slurm", "partition": "a\n#SBATCH --x"}, "partition: must be a name"),
        ({"launcher": "slurm", "workdir": "a\nb"}, "workdir: must be a path on one line"),
        ({"launcher": "slurm", "nodes": 0}, "nodes: must be a whole number of at least 1"),
        ({"launcher": "slurm", "nodes": True}, "nodes: must be a whole number"),
        ({"launcher": "slurm", "network": "wifi"}, "network: must be one of ethernet, roce"),
        ({"launcher": "slurm", "environment": {"HF_TOKEN": "x"}}, "secret_variables: [HF_TOKEN]"),
        ({"launcher": "kubernetes", "environment": {"HF_TOKEN": "x"}}, "secrets: {HF_TOKEN: SECRET/KEY}"),
        ({"launcher": "dlc", "environment": {"HF_TOKEN": "x"}}, "setup: export HF_TOKEN=$(cat /mnt/data/HF_TOKEN)"),
        ({"launcher": "dlc", "secret_variables": ["HF_TOKEN"]}, "setup: export NAME=$(cat /mnt/data/NAME)"),
        ({"launcher": "dlc", "secrets": {"HF_TOKEN": "a/b"}}, "secrets: is not an option with launcher dlc"),
        ({"launcher": "ray", "environment": {"HF_TOKEN": "x"}}, "where `ray start` runs"),
        (
            {"launcher": "ray", "submit_to": "rayjob", "environment": {"HF_TOKEN": "x"}},
            "secrets: {HF_TOKEN: SECRET/KEY}",
        ),
        ({"launcher": "dlc", "setup": ["a; export HF_TOKEN='hf_x'"]}, "setup: HF_TOKEN: is a secret"),
        ({"launcher": "slurm", "setup": ["API_KEY=sk-1 tool"]}, "secret_variables: [API_KEY]"),
        ({"launcher": "slurm", "environment": {"A B": "x"}}, "is not the name of a variable"),
        ({"launcher": "slurm", "environment": {"A": "x\ny"}}, "environment: must be a mapping"),
        ({"launcher": "slurm", "secret_variables": ["A=1"]}, "is not the name of a variable"),
        ({"launcher": "kubernetes", "secrets": {"$(x)": "a/b"}}, "is not the name of a variable"),
    ],
)
def test_mistakes(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert text in said(tmp_path, lab=options)


MANIFESTS = [
    *({"launcher": "kubernetes", "kind": kind} for kind in ("job", "trainjob", "pytorchjob", "mpijob", "volcano")),
    *({"launcher": "ray", "submit_to": kind} for kind in ("rayjob", "raycluster")),
]


@pytest.mark.parametrize("option", ["annotations", "node_selector"])
@pytest.mark.parametrize("cluster", MANIFESTS, ids=lambda cluster: [*cluster.values()][-1])
def test_kubernetes_keys(cluster: dict[str, Any], option: str, tmp_path: Path) -> None:
    """Kubernetes' IsQualifiedName: an optional prefix, which is a DNS subdomain, and a name."""
    wrong = ["a b", "-a", "a-", "a/b/c", "/a", "a/", "a_b/c", ".a/b", "a..b/c", "a" * 64, "p" * 254 + "/a", "schlüssel"]
    wrong += ["A/b"] if option == "node_selector" else []
    for key in wrong:
        refused = said(tmp_path, lab={**cluster, option: {"fine": 1, key: 1}})
        assert f"{option}: has the key {key!r}, which Kubernetes refuses" in refused
    right = ["a", "9", "A_b.c-D", "a" * 63, "example.com/a", "k8s.v1.cni.cncf.io/networks", "p" * 253 + "/a"]
    right += ["A/b"] if option == "annotations" else []
    read = read_cluster("lab", write(tmp_path, lab={**cluster, option: dict.fromkeys(right, 1)}))
    assert read.options[option] == dict.fromkeys(right, 1)


def test_times_and_names_are_read_as_they_are_written(tmp_path: Path) -> None:
    """YAML 1.1 reads 24:00:00 as 86400 seconds, and Slurm takes a number for minutes."""
    file = tmp_path / "c.yaml"
    file.write_text("clusters:\n  1: {launcher: slurm, time_limit: 24:00:00, nodes: 2, account: 0x1F}\n")
    cluster = read_cluster("1", str(file))
    assert (cluster.get("time_limit"), cluster.get("nodes"), cluster.get("account")) == ("24:00:00", 2, "0x1F")
    file.write_text("clusters: {a: {launcher: slurm, time_limit: 1-12, environment: {A: 1.50, B: -1, C: 1:30}}}\n")
    cluster = read_cluster("a", str(file))
    assert cluster.get("time_limit") == "1-12" and cluster.get("environment") == {"A": 1.5, "B": -1, "C": "1:30"}


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN=$(cat /mnt/data/HF_TOKEN)",
        'export HF_TOKEN="$(< /mnt/data/HF_TOKEN)"',
        "HF_TOKEN=`cat t`; export HF_TOKEN",
        "export HF_TOKEN=",
        "export SSH_KEY=~/.ssh/id SSH_KEY=/k",
        "export HF_HOME=hf PAD_TOKEN=x $HF_TOKEN=x",
    ],
)
def test_setup_may_read_a_secret(line: str, tmp_path: Path) -> None:
    assert read_cluster("lab", write(tmp_path, lab={"launcher": "dlc", "setup": [line]})).get("setup") == [line]


SECRET_LINES = (
    "huggingface-cli login --token SECRET123",
    "huggingface-cli login --token=SECRET123",
    "hf login -t SECRET123",
    "curl -H 'Authorization: Bearer SECRET123' http://x",
    "curl -H 'Authorization: Basic SECRET123' http://x",
    "wget 'https://h/x?access_token=SECRET123'",
    "echo 'machine h login me password SECRET123' > ~/.netrc",
    "git clone https://me:SECRET123@h/x",
    "curl -H 'x-api-key: SECRET123' x",
)


@pytest.mark.parametrize("line", SECRET_LINES)
def test_a_secret_in_setup_is_refused_and_not_shown(line: str, tmp_path: Path) -> None:
    refused = said(tmp_path, lab={"launcher": "slurm", "setup": ["module load cuda", line]})
    assert "setup, line 2: is a secret" in refused and "SECRET123" not in refused


BOMB = "x: &a0 [k]\n" + "".join(f"x{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
MERGES = "x: &a0 {k: v}\n" + "".join(f"x{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))


@pytest.mark.parametrize(
    "text",
    [
        f"{BOMB}clusters: {{lab: {{launcher: kubernetes, image: i, tolerations: [{{key: *a39}}]}}}}\n",
        f"{MERGES}clusters: {{lab: {{launcher: slurm}}}}\n",
        "clusters: {lab: {launcher: slurm, setup: [" + "a," * 30_000 + "]}}\n",
        "clusters: &a {lab: *a}\n",
    ],
    ids=["aliases", "merges", "long", "itself"],
)
def test_a_file_that_would_never_end_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match="contains more than 20,000 values|is not YAML"):
        read_cluster("lab", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        "clusters:\n  lab: {launcher: slurm}\n  lab: {launcher: local}\n",
        "clusters: {lab: {launcher: slurm}, lab: {launcher: local}}\n",
        "clusters: {lab: {launcher: slurm, account: a, account: b}}\n",
        "clusters: {lab: {launcher: slurm, environment: {A: 1, A: 2}}}\n",
        "clusters: {1: {launcher: slurm}, '1': {launcher: slurm}}\n",
        "clusters: {}\nclusters: {lab: {launcher: slurm}}\n",
    ],
)
def test_twins_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml, line \d: repeats the key of line \d"):
        read_cluster("lab", str(tmp_path / "c.yaml"))


def test_one_value_may_serve_several_clusters(tmp_path: Path) -> None:
    text = "base: &b {launcher: slurm, partition: gpu}\nclusters: {a: *b, lab: {<<: *b, partition: cpu}}\n"
    (tmp_path / "c.yaml").write_text(text)
    assert read_cluster("lab", str(tmp_path / "c.yaml")).get("partition") == "cpu"
    assert read_cluster("a", str(tmp_path / "c.yaml")).get("partition") == "gpu"


def test_local_is_never_a_file_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submit takes it where no cluster is named: in a stranger's checkout its setup would run unasked."""
    entry = {"launcher": "local", "setup": ["touch canary"]}
    assert "local: always means this machine" in said(tmp_path, "local", local=entry, lab={"launcher": "slurm"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="local: always means this machine"):
        read_cluster("local", None, {"HOME": str(tmp_path / "home")})


def test_a_cluster_that_hides_the_user_s_own_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "home/.config/megaswift"
    own.mkdir(parents=True)
    write(own, lab={"launcher": "slurm"}, mine={"launcher": "slurm"})
    write(tmp_path, lab={"launcher": "ssh", "hosts": ["a"]}, other={"launcher": "slurm"})
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": str(tmp_path / "home")}
    assert read_cluster("other", None, environ).launcher == "slurm" and not capsys.readouterr().err
    assert read_cluster("lab", None, environ).launcher == "ssh"
    assert "cluster lab is taken from ./clusters.yaml, not from" in capsys.readouterr().err
    assert read_cluster("lab", "clusters.yaml", environ).launcher == "ssh" and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"), [("clusters: [", "is not YAML"), ("a: 1", "has no mapping"), (None, "cannot be read")]
)
def test_files_that_are_none(content: str | None, text: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(ConfigError, match=text):
        read_cluster("lab", str(tmp_path / "c.yaml"))


def test_an_unknown_cluster_names_the_known(tmp_path: Path) -> None:
    assert "clusters there: lab, pods" in said(tmp_path, "prod", lab={"launcher": "slurm"}, pods={"launcher": "ray"})


def test_names_are_harmless_in_a_shell() -> None:
    assert not any(
        SAFE.fullmatch(text) for text in ["a b", "a;b", "$(x)", "`x`", "a'b", 'a"b', "a\nb", "a|b", "a>b", ""]
    )


def test_every_option_is_documented_and_read() -> None:
    page = (ROOT / "docs/launch.md").read_text(encoding="utf-8")
    code = "\n".join(
        f.read_text(encoding="utf-8")
        for f in [*(ROOT / "megaswift/clusters").glob("*.py"), ROOT / "megaswift/commands/submit.py"]
    )
    for option in CLUSTER_OPTIONS:
        assert f"| `{option.name}` |" in page and option.about in page, option.name
        assert len(option.about) <= 100 and set(option.launchers) <= set(SCHEDULERS)
        assert code.count(f'"{option.name}"') >= 2, f"nothing reads {option.name}"
