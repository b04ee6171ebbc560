"""Files and programs of a machine."""

from __future__ import annotations

from pathlib import Path

from tests.diagnosis.fake_machine import machine, put_program, write_tree


def test_files(tmp_path: Path) -> None:
    write_tree(tmp_path, {"sys/b": " 1\n", "sys/a": ""})
    here = machine(tmp_path)
    assert here.read("sys/b") == "1" and here.read("sys/none") == here.read("sys") == ""
    assert here.folders("sys") == ["a", "b"] and here.folders("none") == []


def test_programs(tmp_path: Path) -> None:
    put_program(tmp_path / "bin", "speaks", 'echo "$1"; echo "$TONE" >&2; exit 3')
    put_program(tmp_path / "bin", "hangs", "exec sleep 60")
    (tmp_path / "bin" / "broken").write_text("#!/no/such/program\n")
    (tmp_path / "bin" / "broken").chmod(0o755)
    here = machine(tmp_path, TONE="low")
    done = here.program(["speaks", "a b"], 10)
    assert done is not None and (done.code, done.text, done.error) == (3, "a b\n", "low\n")
    assert here.program(["no-such-program"], 1) is None
    hung, broken = here.program(["hangs"], 0.2), here.program(["broken"], 1)
    assert hung is not None and hung.code == 124 and broken is not None and broken.code == 126
