"""Commands of shell scripts: words as bash makes them, and nothing that is run or grows without bounds.

Covers: megaswift/compat/scripts/shell_syntax.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaswift.compat.scripts.shell_words import ShellCommand, shell_commands
from megaswift.errors import ConfigError

PRINTS = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('TOLD', '')]))"
SCRIPTS = {
    "quotes": """X=5; show 'a  b' "c \\"d\\" $X" e\\ f "" 'it'"'"'s' g"h i"j""",
    "joined lines": "show a \\\n  b \\\n\tc",
    "comments": "# show no\nshow a#b # c\n",
    "variables": 'X=1; Y="two words"; show $X "$Y" $Y ${X}th "${Y} $X" "end"',
    "defaults": 'E=; show ${A:-x} ${E:-y} ${E-z} "${B:-two words}" ${C:=kept} $C ${C:+set} ${D:+no}',
    "arrays": 'A=(--lr 1e-5 # why\n --name "x y"\n)\nA+=(--more)\nshow "${A[@]}" end',
    "a text of options": 'O=" --a 1 \\\n --b 2"\nshow $O',
    "arithmetic": "N=4; show $((N * 2)) $(($N + 1)) $(expr 16 / $N) $(((7 + 1) / 3))",
    "redirections": "show a > /dev/stdout 2>&1 b",
    "lists": "true && show a; show b; false || show c",
    "here documents": "cat > /dev/null <<EOF\nshow no\nEOF\nshow yes <<<word",
    "environment": "TOLD=1 show a; export TOLD=2; show b; TOLD=3; show c",
    "conditions": "if true; then\n  show a\nfi\nfor i in 1; do show b; done",
    "line breaks in quotes": "show 'a\nb' \"c\\\nd\"",
}


def seen(text: str) -> list[list[object]]:
    return [
        [[w.text for w in c.words[1:]], c.environment["TOLD"].text if "TOLD" in c.environment else ""]
        for c in shell_commands(text)
        if c.words and c.words[0].text == "show"
    ]


@pytest.mark.process
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is the oracle")
def test_words_are_bash_s(tmp_path: Path) -> None:
    """bash runs each script with a program in place of `show` that prints its arguments."""
    (tmp_path / "print.py").write_text(PRINTS)
    (tmp_path / "show").write_text(f'#!/bin/bash\nexec {sys.executable} -S -E {tmp_path / "print.py"} "$@"\n')
    (tmp_path / "show").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    text = "\n".join(f"({script}\n)" for script in SCRIPTS.values())
    done = subprocess.run(["bash", "-c", text], env=path, capture_output=True, text=True, timeout=300)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [w for s in SCRIPTS.values() for w in seen(s)]


def only(text: str) -> ShellCommand:
    (command,) = shell_commands(text)
    return command


def test_what_only_a_run_knows_stays_as_it_is_written() -> None:
    found = only('sft --model $MODEL --output_dir out/$(date +%F) --x ${1} --y ${1:-z} --n ${#A} "a $B"')
    texts = [w.text for w in found.words]
    assert texts[2] == "$MODEL" and texts[4] == "out/$(date +%F)" and texts[8] == "z" and texts[-1] == "a $B"
    unresolved = {w.text: w.unresolved for w in found.words if w.unresolved}
    assert unresolved == {
        "$MODEL": ("$MODEL",),
        "out/$(date +%F)": ("$(date +%F)",),
        "$1": ("$1",),
        "${#A}": ("${#A}",),
        "a $B": ("$B",),
    }


def test_a_text_of_options_is_split_around_what_is_unresolved() -> None:
    *_, found = shell_commands('O="--a $1 --b $(date +%F) --c"\nsft $O')
    assert [w.text for w in found.words] == ["sft", "--a", "$1", "--b", "$(date +%F)", "--c"]
    assert found.words[2].unresolved == ("$1",) and not found.words[1].unresolved


def test_a_comment_between_joined_lines_does_not_end_the_command() -> None:
    found = only("sft --a 1 \\\n  # --b 2\n  --c 3 \\\n  # the end\n")
    assert [w.text for w in found.words] == ["sft", "--a", "1", "--c", "3"] and found.line == 1


def test_lines_and_conditions() -> None:
    commands = list(shell_commands("a\n\nif b; then\n c\nfi\nd\nfor x in 1 2; do e $x; done\n"))
    assert [(c.words[0].text, c.line, c.conditional) for c in commands] == [
        ("a", 1, False),
        ("b", 3, True),
        ("c", 4, True),
        ("d", 6, False),
        ("e", 7, True),
    ]
    assert commands[-1].words[1].unresolved == ("$x",)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("if a; then M=x; else M=y; fi", "$M"),
        ("M=x; if a; then M=x; fi", "x"),
        ("M=x; case $1 in a) M=y;; esac", "$M"),
        ("M=x; while a; do export M=y; done", "$M"),
        ("M=; if a; then b ${M:=y}; fi", "$M"),
        ("M=x; if a; then M+=y; fi", "$M"),
        ("if a; then M=x; else M=y; fi; M=z", "z"),
    ],
)
def test_a_condition_leaves_a_value_to_the_run(text: str, value: str) -> None:
    *_, found = shell_commands(f"{text}\nsft $M")
    assert found.words[1].text == value and bool(found.words[1].unresolved) == (value == "$M")


def test_nothing_is_run(tmp_path: Path) -> None:
    file = tmp_path / "made"
    texts = [f"$(touch {file})", f"`touch {file}`", f"eval 'touch {file}'", f"touch {file}", f"${{X:-$(touch {file})}}"]
    texts += [f"$((X[$(touch {file})]))", f"source <(touch {file})", f"cat <<EOF\n$(touch {file})\nEOF"]
    assert [len(list(shell_commands(f"sft --model {text}"))) > 0 for text in texts] and not file.exists()


@pytest.mark.parametrize(
    "text",
    [
        "A=xx\n" + "A=$A$A\n" * 22 + "sft $A",
        "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 18,
        "A=" + "x" * 9000 + "\nsft" + " $A" * 999,
    ],
)
def test_a_script_that_grows_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expands to more than 1 MiB"):
        list(shell_commands(text))


@pytest.mark.parametrize(
    "text", ["$(" * 9999, "${A:-" * 9999, "'" * 9999, '"' * 9998, "`" * 9999, "(" * 9999, "$((" * 9999, "a\\\n" * 9999]
)
def test_unfinished_text_ends(text: str) -> None:
    assert len(list(shell_commands(text))) <= 1


def test_many_exports_are_refused() -> None:
    with pytest.raises(ConfigError, match="exports more than 500"):
        list(shell_commands("\n".join(f"export A{i}=1" for i in range(501))))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("if a; then N=2; fi; show $N", ["$N"]),
        ("if a; then N=2; show $N; fi", ["2"]),
        ("if a; then N=2; else N=2; fi; show $N", ["2"]),
        ("if a; then N=2; else N=4; fi; show $N", ["$N"]),
        ("if a; then N=2; else M=2; fi; show $N $M", ["$N", "$M"]),
        ("if a; then N=2; elif b; then N=2; fi; show $N", ["$N"]),
        ("if a; then N=2; elif b; then N=2; else N=2; fi; show $N", ["2"]),
        ("N=1; if a; then N=2; fi; show $N", ["$N"]),
        ("if a; then N=2; N=2; else :; fi; show $N", ["$N"]),
        ("if a; then N=2; fi; N=3; show $N", ["3"]),
        ("if a; then N=2; fi; if b; then M=1; else M=1; fi; show $N $M", ["$N", "$M"][:1] + ["1"]),
        ("if a; then export N=2; fi; show ${N:-5}", ["$N"]),
    ],
)
def test_what_not_every_branch_sets_is_left_to_the_run(script: str, words: list[str]) -> None:
    (command,) = (c for c in shell_commands(script) if c.words[0].text == "show")
    assert [w.text for w in command.words[1:]] == words
    assert [bool(w.unresolved) for w in command.words[1:]] == [w.startswith("$") for w in words]
