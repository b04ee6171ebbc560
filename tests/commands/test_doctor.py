"""`megaswift doctor`: the page, JSON, exit codes."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from megaswift.cli import main
from megaswift.commands import doctor
from megaswift.diagnosis.installed import Software, installed_versions
from megaswift.errors import ConfigError
from tests.diagnosis.test_torch_build import CUDA
from tests.test_cli import HEAVY, ran

CPU = {"version": "2.10.0", "cuda": None, "cxx11_abi": True, "cuda_available": False, "nccl": None}
CPU |= {"architectures": [], "devices": []}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process that imports torch."""
    software = Software(installed_versions(), CPU, {"torch": ""})
    monkeypatch.setattr(doctor, "probe_imports", lambda names, environ: software)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.process
def test_the_report_and_what_it_imports(tmp_path: Path) -> None:
    words = ["doctor", "--offline", "--output_dir", str(tmp_path / "new" / "out")]
    code, out, err = ran(
        "-c", f"import megaswift.cli; code = megaswift.cli.main({words}); {HEAVY}; raise SystemExit(code)"
    )
    lines = out.splitlines()
    assert err == "" and lines[-1] == "heavy []" and not list(tmp_path.iterdir())
    assert lines[0].split() == ["megaswift", "0.1.0"] and ["torch", metadata.version("torch")] in [
        x.split() for x in lines
    ]
    problems = [line for line in lines if line.startswith("problem ")]
    assert code == bool(problems) and lines[-2].endswith(f"problem: {len(problems)}")
    assert f"{tmp_path}: " in out and "requirements of megaswift" in out


def test_a_problem_is_exit_code_1(quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    codes = []
    for interface in ("lo", "no-such-interface0"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        codes.append(main(["doctor", "--offline", "--json"]))
        report = json.loads(capsys.readouterr().out)
        states = {f["name"]: f for f in report["findings"]}
        assert codes[-1] == any(f["state"] == "problem" for f in report["findings"])
    assert codes[1] == 1 and states["GLOO_SOCKET_IFNAME"]["state"] == "problem" and states["GLOO_SOCKET_IFNAME"]["fix"]
    assert report["torch"] == CPU and report["versions"]["torch"] == metadata.version("torch")


def test_nodes_and_smoke(quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    started = []
    monkeypatch.setattr(
        doctor, "smoke_finding", lambda n, environ: started.append(n) or doctor.Finding("smoke run", "ok", "")
    )
    assert main(["doctor", "--offline", "--nodes", "no-such-node.invalid:29500", "--smoke"]) == 1
    out = capsys.readouterr().out
    assert "node no-such-node.invalid" in out and "the name does not resolve" in out
    assert (
        started and 1 <= started[0] <= doctor.MOST_CPU_PROCESSES and out.index("smoke run") > out.index("node no-such")
    )


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for words, told in (
        (["--verbose"], "unrecognized arguments: --verbose"),
        (["--nodes", "a:port"], "is not HOST or HOST:PORT"),
        (["--output_dir", str(tmp_path / "file")], "is a file"),
    ):
        assert main(["doctor", *words]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(ConfigError):
        doctor.main(["--nodes", ""])


def test_devices_and_no_torch() -> None:
    page = "\n".join(doctor.version_lines(Software({"torch": "2.9.0"}, CUDA, {"torch": ""})))
    assert "cuda:0                NVIDIA H100, 80.0 GiB, capability 9.0" in page and "12.8, 2.27.5" in page
    assert "layers                torch" in page, "Transformer Engine is not installed"
    assert "unknown without torch" in "\n".join(doctor.version_lines(Software({})))
