"""What conditions, loops, functions and lists leave of a variable: bash runs each script with every outcome of its
conditions, and a value that is called certain is the one of every run.

Covers: megaswift/compat/scripts/control_flow.py.
"""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from megaswift.compat.scripts.shell_words import shell_commands
from megaswift.errors import ConfigError

RUNS = [dict(zip("abCk", values, strict=True)) for values in itertools.product("01", "01", "xyz", "02")]
"""The outcomes of the commands `a` and `b`, what `$C` is, and how often `again` succeeds."""
SCRIPTS = {
    # script -> what `show` gets: the value where it is certain
    "if a; then N=2; fi; show $N": "$N",
    "if a; then N=2; show $N; fi": "2",
    "if a; then N=2; else N=2; fi; show $N": "2",
    "if a; then N=2; elif b; then N=2; else N=2; fi; show $N": "2",
    "if a; then N=2; elif b; then N=2; fi; show $N": "$N",
    "N=1; if a; then N=2; else show $N; fi": "1",
    "N=1; if a; then if b; then N=2; fi; fi; show $N": "$N",
    "if a; then if b; then N=2; else N=2; fi; else N=2; fi; show $N": "2",
    "if a; then if b; then N=2; else N=3; fi; else N=2; fi; show $N": "$N",
    "if a; then if b; then N=2; fi; else N=2; fi; show $N": "$N",
    "if a; then if b; then N=2; else N=2; fi; M=3; fi; show $N$M": "$N$M",
    "if N=1; a; then M=2; else M=2; fi; show $N$M": "12",
    "N=1; if a; then :; elif N=3; b; then N=3; else show $N; fi": "$N",
    "case $C in x) N=1;; y) N=1;; esac; show $N": "$N",
    "case $C in x) N=1;; y) N=1;; *) N=1;; esac; show $N": "1",
    "case $C in (x|y) N=1;; *) N=2;; esac; show $N": "$N",
    "case $C in\n x) N=1; show $N\n ;;\n esac": "1",
    "N=1; case $C in x) N=2 ;; *) show $N ;; esac": "1",
    "N=1; case $C in x) N=2 ;& y) show $N;; esac": "$N",
    "if a; then case $C in x) N=1;; *) N=1;; esac; else N=1; fi; show $N": "1",
    "if a; then case $C in x) N=1;; esac; else N=1; fi; show $N": "$N",
    "case $C in x) if a; then N=1; fi;; *) N=1;; esac; show $N": "$N",
    "for i in 1 2; do show $i; done": "$i",
    "while again; do N=3; done; show $N": "$N",
    "N=3; for i in $k; do N=3; done; show $N": "3",
    "N=1; while again; do show $N; N=2; done": "$N",
    "N=1; while again; do N=$((N * 2)); done; show $N": "$N",
    "N=1; while again; do N=2; if a; then break; fi; N=1; done; show $N": "$N",
    "while again; do N=2; show $N; done": "2",
    "N=1; for ((i = 0; i < k; i++)); do N=2; done; show $N": "$N",
    "N=1; ((N += k)); show $N": "$N",
    "N=1; let N=N+k; show $N": "$N",
    "N=1; until ! again; do :; done; show $N": "1",
    "a && N=1; show $N": "$N",
    "N=1; a && N=2; show $N": "$N",
    "N=1; a && N=1; show $N": "1",
    "a && N=1 && show $N": "1",
    "a || N=1 && show $N": "$N",
    "a && N=1 || N=1; show $N": "$N",
    "a && N=1 || N=2; show $N": "$N",
    "N=1 && M=2; show $N$M": "12",
    "export N=1 && export M=2 && show $N$M": "12",
    "a && { N=1; M=2; }; show $N$M": "$N$M",
    "a &&\n  N=1\nshow $N": "$N",
    "N=1; (N=2; show $N)": "2",
    "N=1; (N=2); show $N": "1",
    "N=1; { N=2; }; show $N": "2",
    "N=1; { N=2; } | cat; show $N": "1",
    "N=1; echo x | while read L; do N=2; done; show $N": "1",
    "N=1; if true; then N=2; fi | cat; show $N": "1",
    "N=1; { N=2; } & wait; show $N": "1",
    "N=1; f() { N=2; show $N; }; f": "2",
    "N=1; f() { show $N; }; N=2; f": "$N",
    "N=1; f() { show $N; }; f": "1",
    "N=1; f() { N=2; }; show $N": "1",
    "N=1; f() { N=2; }; f; show $N": "$N",
    "N=1; function f { N=2; }; f; show $N": "$N",
    "N=1; f() ( N=2 ); f; show $N": "$N",
    "N=1; f() { N=2; }; while again; do show $N; f; done": "$N",
    "N=1; read N <<< $k; show $N": "$N",
    "N=1; unset N; show ${N:-7}": "7",
    "N=1; if a; then unset N; fi; show ${N:-7}": "$N",
    "N=1; printf -v N $k; show $N": "$N",
    "N=1; N[0]=$k; show $N": "$N",
    "N=; a && : ${N:=3}; show $N": "$N",
    "if a; then N=2; fi; N=3; show $N": "3",
    "[[ $C == x && $k == 2 ]] && N=1; show $N": "$N",
    "if [ $k -gt 1 ]; then N=1; else N=1; fi; show $N": "1",
}
CAREFUL = [
    "N=1; if a; then :; elif N=3; b; then N=3; else show $N; fi",
    "a && N=1 || N=1; show $N",
    "N=1; f() { show $N; }; N=2; f",
    "N=1; f() { N=2; }; f; show $N",
    "N=1; function f { N=2; }; f; show $N",
    "N=1; f() ( N=2 ); f; show $N",
]
"""Every run of bash has one value, and it is left to the run all the same."""


def claims(script: str) -> list[str]:
    return [" ".join(w.text for w in c.words[1:]) for c in shell_commands(script) if c.words[0].text == "show"]


def bash_values(folder: Path, scripts: list[str]) -> dict[int, dict[str, set[str]]]:
    """By script, what its `show` gets in the runs that reach it; `show` may be tagged by its first word, `@1`."""
    parts = [
        "a() { return $a; }; b() { return $b; }; again() { (( K++ < k )); }",
        'show() { echo "$S|$*"; }',
    ]
    for number, script in enumerate(scripts):
        for run in RUNS:
            told = " ".join(f"{name}={value}" for name, value in run.items())
            parts.append(f"(S={number} K=0 {told}; a=$a\n{script}\n) 2> /dev/null")
    (folder / "all.sh").write_text("\n".join(parts))
    done = subprocess.run(["bash", str(folder / "all.sh")], capture_output=True, text=True, timeout=300)
    found: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in done.stdout.splitlines():
        number, _, text = line.partition("|")
        tag, _, value = text.rpartition(" ") if text.startswith("@") else ("", "", text)
        found[int(number)][tag].add(value)
    return found


@pytest.mark.process
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is the oracle")
def test_bash_agrees_with_the_table(tmp_path: Path) -> None:
    found = bash_values(tmp_path, list(SCRIPTS))
    seen = {script: values for n, script in enumerate(SCRIPTS) for values in found[n].values()}
    assert {s: v for s, v in seen.items() if "$" not in SCRIPTS[s]} == {
        s: {v} for s, v in SCRIPTS.items() if "$" not in v
    }
    assert [s for s, v in SCRIPTS.items() if "$" in v and len(seen[s]) == 1] == CAREFUL


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_certain(script: str) -> None:
    assert claims(script) == [SCRIPTS[script]]


class Scripts:
    """Random scripts of nested constructs, with tagged shows."""

    def __init__(self, seed: int) -> None:
        self.random, self.tags = random.Random(seed), 0

    def block(self, depth: int) -> str:
        return "; ".join(self.statement(depth) for _ in range(self.random.randint(1, 3)))

    def statement(self, depth: int) -> str:
        name = self.random.choice("NM")
        self.tags += 1
        plain = [f"{name}={self.random.randint(1, 2)}", f"show @{self.tags} ${name}"]
        if depth == 0:
            return self.random.choice(plain)
        inner = lambda: self.block(depth - 1)  # noqa: E731
        makers = [
            lambda: f"if a; then {inner()}; fi",
            lambda: f"if a; then {inner()}; else {inner()}; fi",
            lambda: f"if a; then {inner()}; elif b; then {inner()}; else {inner()}; fi",
            lambda: f"case $C in x) {inner()};; y) {inner()};; esac",
            lambda: f"case $C in x) {inner()};; *) {inner()};; esac",
            lambda: f"case $C in x) {inner()};& y) {inner()};; esac",
            lambda: f"while again; do {inner()}; done",
            lambda: f"for i in 1 2; do {inner()}; done",
            lambda: f"while again; do {inner()}; if a; then break; fi; {inner()}; done",
            lambda: f"a && {self.statement(0)}",
            lambda: f"a && {self.statement(0)} || {self.statement(0)}",
            lambda: f"b || {{ {inner()}; }} && {self.statement(0)}",
            lambda: f"({inner()})",
            lambda: f"{{ {inner()}; }}",
            lambda: f"{{ {inner()}; }} | cat",
            lambda: f"f{self.tags}() {{ {inner()}; }}; {inner()}; f{self.tags}",
            lambda: f"unset {name}",
            lambda: f"a && unset {name}",
            *[lambda: self.random.choice(plain)] * 6,
        ]
        return self.random.choice(makers)()


@pytest.mark.process
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is the oracle")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_no_value_is_certain_that_a_run_changes(seed: int, tmp_path: Path) -> None:
    """Random scripts: bash sees only the value that is called certain, in every run that gets there."""
    scripts = [Scripts(seed * 10000 + n).block(3) for n in range(40 if seed == 1 else 400)]
    found, certain = bash_values(tmp_path, scripts), 0
    for number, script in enumerate(scripts):
        for claim in claims(script):
            tag, _, value = claim.partition(" ")
            if not value.startswith("$"):
                certain += 1
                assert found[number][tag] <= {value}, (script, claim, found[number][tag])
    assert certain > len(scripts)


def test_bounds() -> None:
    with pytest.raises(ConfigError, match="nests conditions and loops more than 60 deep"):
        list(shell_commands("if a; then\n" * 61))
    with pytest.raises(ConfigError, match="too many functions and variables"):
        list(shell_commands("".join(f"f{n}() {{ A{n}=1; }}\nf{n}\n" for n in range(4000))))
    assert claims("fi; done; esac; } ) ;; show 1") == ["1"]
    assert claims("N=1; if a; then ( { case x in y) show $N") == ["1"]
