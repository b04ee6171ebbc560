"""The commands as users start them: what --help costs, exit codes, and which process reports when several fail.

Covers: megaswift/error_exit.py, megaswift/errors.py, megaswift/base/registry.py,
megaswift/base/closed_stdout.py."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaswift.cli import COMMANDS, main, usage
from megaswift.config import load_config
from megaswift.error_exit import print_error_once
from megaswift.errors import DataError, StorageError
from megaswift.options.tasks import TASKS
from megaswift.run.output import output_folder_problems
from tests.trainers.inputs import write_inputs

ROOT = Path(__file__).resolve().parent.parent


def start(*words: str, cwd: Path | None = None, **environ: str) -> subprocess.Popen:
    clean = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NPROC_PER_NODE", "NNODES")
    }
    clean["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(
        [sys.executable, *words],
        env={**clean, **environ},
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hears_ctrl_c,
    )


def hears_ctrl_c() -> None:
    """As in a terminal: a shell starts its background jobs, and so perhaps these tests, deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ran(*words: str, cwd: Path | None = None, **environ: str) -> tuple[int, str, str]:
    process = start(*words, cwd=cwd, **environ)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


HEAVY = (
    "import sys; heavy = {'torch', 'yaml', 'numpy', 'transformers', 'megatron'} & set(sys.modules); "
    "print('heavy', sorted(heavy))"
)


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["sft", "--help"],
        ["pt", "-h"],
        ["infer", "--help"],
        ["config", "--schema"],
        ["--version"],
        ["data", "show", "--help"],
    ],
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code, out, err = ran(
        "-c", f"import megaswift.cli; code = megaswift.cli.main({words}); {HEAVY}; raise SystemExit(code)"
    )
    assert code == 0 and out.rstrip().endswith("heavy []"), err


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["infer", "--model", "nowhere"], "--model nowhere: no such folder"),
        (
            ["deploy", "--model", "lora"],
            "contains the adapters of a LoRA run, not a model\n    try: --model BASE --adapters lora",
        ),
        (["export", "--model", "nowhere", "--quant", "4", "--output_dir", "new"], "--model nowhere: no such folder"),
    ],
)
def test_a_model_that_cannot_answer_is_refused_before_torch_is_imported(
    words: list[str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    code, out, err = ran(
        "-c", f"import megaswift.cli; code = megaswift.cli.main({words}); {HEAVY}; raise SystemExit(code)", cwd=tmp_path
    )
    assert code == 2 and out == "heavy []\n" and told in err, err


@pytest.mark.process
def test_import_of_the_package_is_light() -> None:
    code, out, _ = ran("-c", f"import megaswift; megaswift.SwiftConfig(tp=2); {HEAVY}")
    assert code == 0 and out.strip() == "heavy []"


@pytest.mark.process
def test_a_mistake_ends_with_2_and_no_traceback_before_torchrun_starts(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("lr: abc\n")
    for words in (
        ["-m", "megaswift", "sft", "run.yaml"],
        ["-m", "megaswift.sft", "run.yaml"],
        [str(ROOT / "megaswift/sft.py"), "run.yaml"],
        ["-m", "megaswift.pt", "run.yaml"],
    ):
        code, out, err = ran(*words, cwd=tmp_path, NPROC_PER_NODE="4")
        assert code == 2 and out == "" and "Traceback" not in err
        assert err.startswith(
            "megaswift: the configuration is wrong (3 problems)\n  - run.yaml:1 lr: abc: must be a number"
        )
    assert not list(tmp_path.glob("output*"))


def model_folder(folder: Path) -> Path:
    """As much of a model as the checks before the first process look at."""
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "head_dim": 16,
                "vocab_size": 128,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "hidden_act": "silu",
                "tie_word_embeddings": True,
                "attention_bias": False,
            }
        )
    )
    return folder


@pytest.mark.process
def test_a_layout_that_does_not_work_ends_with_2_before_torchrun_starts(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"messages": []}\n')
    code, out, err = ran(
        "-m",
        "megaswift",
        "pt",
        "--random_init",
        "--model",
        str(model_folder(tmp_path)),
        "--dataset",
        "d.jsonl",
        "--tp",
        "2",
        "--pp",
        "4",
        "--fp8_format",
        "e4m3",
        cwd=tmp_path,
        NPROC_PER_NODE="2",
    )
    assert code == 2 and out == "" and "Traceback" not in err and "ChildFailedError" not in err
    for part in ("problems)", "3 attention heads", "2 layers", "--fp8_format e4m3"):
        assert part in err, err
    assert not (tmp_path / "output").exists()


@pytest.mark.wide
def test_a_malformed_row_ends_with_2_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: the exit code is the command's own. What is left of the start is no run."""
    importlib.import_module("megaswift.engine.megatron")
    inputs = [*write_inputs(tmp_path), "--output_dir", str(tmp_path / "out")]
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"messages": 3}\n')
    built: list[int] = []
    monkeypatch.setattr("megaswift.run.build.make_engine", lambda *_: built.append(1))
    with pytest.raises(SystemExit) as ended:
        main(["sft", *inputs])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and not built and "Traceback" not in told
    assert (
        f"{tmp_path / 'data.jsonl'}:49: column messages: int 3; expected a list" in told
        and "correct the row, or give --strict false" in told
    )
    assert output_folder_problems(load_config("sft", inputs)) == []


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [["-m", "megaswift", "--help"], ["-m", "megaswift.sft", "--help"], ["-m", "megaswift", "config", "--schema"]],
)
def test_a_reader_that_leaves_early_is_no_error(words: list[str]) -> None:
    """As in `megaswift --help | head -1`; here the reader has left before anything is written."""
    inlet, outlet = os.pipe()
    os.close(inlet)
    try:
        done = subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=outlet,
            text=True,
            stderr=subprocess.PIPE,
            timeout=300,
        )
    finally:
        os.close(outlet)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
def test_another_broken_pipe_is_an_error() -> None:
    block = "with ignore_closed_stdout():\n    raise BrokenPipeError('a socket')"
    raising = f"from megaswift.base.closed_stdout import ignore_closed_stdout\n{block}"
    code, _, err = ran("-c", raising)
    assert code == 1 and "a socket" in err


@pytest.mark.process
def test_unknown_commands() -> None:
    code, _, err = ran("-m", "megaswift", "sfft")
    assert code == 2 and "did you mean sft?" in err
    assert ran("-m", "megaswift")[0] == 2
    assert ran("-m", "megaswift", "data", "shw")[0] == 2
    code, _, err = ran("-m", "megaswift", "doctor", "--verbose")
    assert code == 2 and "unrecognized arguments: --verbose" in err


@pytest.mark.process
def test_help_of_a_command_by_the_word() -> None:
    code, out, _ = ran("-m", "megaswift", "help", "data")
    assert code == 0 and out.startswith("megaswift data show DATASET")


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("deepspeed: zero3", "zero3"),
        ("deepspeed: ds.json", "zero2"),
        ("fsdp: full_shard", "fsdp2"),
        ("load_in_4bit: true\ntrain_type: lora", "auto"),
        ("load_in_4bit: true\ntrain_type: lora\nmodel: model", "ddp"),
        ("model: model", "megatron"),
        ("model: other", "ddp"),
        ("model: other\nengine: auto\nnproc_per_node: 2", "ddp"),
        ("learning_rate: 1e-4", "megatron"),
    ],
)
def test_config_prints_the_engine_of_the_run(
    text: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    sizes |= {"intermediate_size": 16, "num_key_value_heads": 2, "max_position_embeddings": 64}
    for name, kind in (("model", "llama"), ("other", "opt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind, **sizes}))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "run.yaml").write_text(text + "\n")
    assert main(["config", "run.yaml"]) == 0
    printed = capsys.readouterr().out
    assert f"\n  engine: {engine}\n" in printed
    (tmp_path / "again.yaml").write_text(printed)
    assert main(["config", "again.yaml"]) == 0 and capsys.readouterr().out == printed


@pytest.mark.process
def test_config_prints_what_it_understood(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("task: pt\nparallel: {tp: 4}\n")
    code, out, _ = ran("-m", "megaswift", "config", "run.yaml", "--lr", "1e-4", cwd=tmp_path)
    assert code == 0 and "task: pt" in out and "tensor_parallel_size: 4" in out and "learning_rate: 0.0001" in out
    code, out, _ = ran("-m", "megaswift", "config", "--schema")
    assert code == 0 and json.loads(out)["title"] == "megaswift configuration"
    assert ran("-m", "megaswift", "config", "--lr", "x")[0] == 2


def test_config_takes_a_task_and_says_what_it_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text("tp: 2\npp: 2\nengine: megatron\n")
    assert main(["config", "pt", "run.yaml"]) == 0
    said = capsys.readouterr()
    assert "task: pt" in said.out
    told = "accepted: a configuration of megaswift pt; without --nproc_per_node its layout is not checked"
    assert told in said.err
    assert main(["config", "sft", "run.yaml", "--nproc_per_node", "8"]) == 0
    assert "accepted: a configuration of megaswift sft on 8 processes" in capsys.readouterr().err
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    assert main(["config", "run.yaml"]) == 0 and "sft on 4 processes" in capsys.readouterr().err
    assert main(["config", "run.yaml", "--nproc_per_node", "6"]) == 2
    said = capsys.readouterr()
    assert "requires a multiple of 2 x 2 = 4 processes; there are 6" in said.err and not said.out


@pytest.mark.process
def test_a_script_s_own_folder_leaves_the_path(tmp_path: Path) -> None:
    """`python megaswift/sft.py` must not make megaswift/data importable as `data`; the checkpoint writer's spawn reads
    it again."""
    code, out, err = ran(
        "-c",
        f"import runpy, sys; sys.path[0] = {str(ROOT / 'megaswift')!r}\n"
        f"runpy.run_path({str(ROOT / 'megaswift/sft.py')!r}, run_name='__mp_main__')\n"
        f"print(sys.path[0]); print({str(ROOT / 'megaswift')!r} in sys.path)",
        PYTHONPATH="",
        cwd=tmp_path,
    )
    assert code == 0 and out.split("\n")[:2] == [str(ROOT), "False"], err


@pytest.mark.process
def test_ctrl_c_while_starting(tmp_path: Path) -> None:
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    process = start("-m", "megaswift", "sft", str(pipe))
    while process.poll() is None:  # opening for writing fails until the process reads
        try:
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:
            time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and err == "megaswift: stopped\n"


@pytest.mark.process
def test_under_torchrun_one_message_from_rank_0() -> None:
    code, out, err = ran(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
        str(ROOT / "megaswift/sft.py"),
        "--lr",
        "abc",
        OMP_NUM_THREADS="1",
    )
    assert code == 1 and err.count("megaswift: the configuration is wrong") == 2 and "[rank" not in err
    assert "exitcode  : 2" in err
    assert err.rstrip("=\n").splitlines()[-1].strip().startswith("try: "), "torchrun's summary ends with the message"


@pytest.mark.process
def test_torchrun_and_its_flags_must_agree() -> None:
    code, _, err = ran(
        "-m",
        "megaswift.sft",
        "--nproc_per_node",
        "4",
        "--model",
        "m",
        "--dataset",
        "d",
        LOCAL_RANK="0",
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
    )
    assert code == 2 and "--nproc_per_node 4: does not match the launcher, which started 1" in err


SPEAK = """
import os, sys
from megaswift.errors import DataError
from megaswift.error_exit import exit_worker, print_error_once
print("ready", flush=True)
exit_worker(print_error_once(DataError("row 7 is broken"), os.environ, patience=float(sys.argv[1])), os.environ)
"""


def fail(*ranks: int, patience: float) -> list[str]:
    """What each of these ranks says when they fail together; they are children of one process, as under torchrun. Rank
    0 starts when the others have failed."""
    shared = {"WORLD_SIZE": "4", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": os.urandom(8).hex()}
    started = []
    for r in ranks:
        if r == 0:
            assert [p.stdout.readline() for p in started] == ["ready\n"] * len(started)
        started.append(start("-c", SPEAK, str(patience), RANK=str(r), LOCAL_RANK=str(r), **shared))
    said = [p.communicate(timeout=300)[1] for p in started]
    assert all(p.returncode == 2 for p in started) and not any("Traceback" in s for s in said)
    return said


@pytest.mark.process
def test_the_others_are_silent_when_rank_0_speaks() -> None:
    assert [bool(s) for s in fail(2, 1, 0, patience=200)] == [False, False, True]


@pytest.mark.process
def test_a_mistake_of_another_rank_alone_is_seen_once() -> None:
    said = [s for s in fail(1, 3, patience=1) if s]
    assert len(said) == 1 and said[0].startswith("[rank ") and "row 7 is broken" in said[0]


END = """
import atexit, threading, time
from megaswift.error_exit import end_process
class Library:
    def __del__(self):
        print("freed")
kept = Library()
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
end_process(3)
"""


@pytest.mark.process
def test_a_command_s_end_leaves_out_only_what_frees_objects(tmp_path: Path) -> None:
    assert ran("-c", END) == (3, "thread\nregistered\n", "")
    (tmp_path / "end.py").write_text(END)
    _, profile, _ = ran("-m", "cProfile", str(tmp_path / "end.py"))
    assert "function calls" in profile and "freed" in profile


def test_a_restarted_attempt_speaks_again(capsys: pytest.CaptureFixture) -> None:
    shared = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": os.urandom(8).hex()}
    for attempt, speaks in (("0", True), ("0", False), ("1", True)):
        print_error_once(DataError("row 7 is broken"), {**shared, "TORCHELASTIC_RESTART_COUNT": attempt}, patience=0)
        assert ("row 7 is broken" in capsys.readouterr().err) is speaks


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_a_file_for_launchers(task: str) -> None:
    text = (ROOT / "megaswift" / f"{task}.py").read_text(encoding="utf-8")
    assert f'end_process(main("{task}"))' in text


def test_only_commands_that_exist_are_listed() -> None:
    tasks = [
        "sft",
        "pt",
        "dpo",
        "kto",
        "orpo",
        "cpo",
        "simpo",
        "rm",
        "gkd",
        "grpo",
        "ppo",
        "seq_cls",
        "token_cls",
        "embedding",
        "reranker",
        "generative_reranker",
        "rlhf",
    ]
    others = "train config data convert checkpoint report board infer deploy export eval sample"
    assert list(COMMANDS) == [
        *tasks,
        *others.split(),
        "migrate",
        "plan",
        "simulate",
        "submit",
        "jobs",
        "bench",
        "bisect",
        "doctor",
    ]
    page = usage()
    assert max(map(len, page.splitlines())) <= 80


@pytest.mark.parametrize(
    "words",
    [
        ["infer", "--model"],
        ["checkpoint", "ls"],
        ["checkpoint", "verify"],
        ["convert", "hf-to-megatron"],
        ["data", "show"],
        ["export", "--quantization_bit", "8", "--output_dir", "e", "--model"],
    ],
)
def test_a_path_that_no_file_system_can_have(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    more = {"hf-to-megatron": [str(tmp_path / "to")], "show": ["--model", str(tmp_path)]}.get(words[1], [])
    assert main([*words, "x" * 5000, *more]) == 2
    said = capsys.readouterr().err
    assert (
        "File name too long" in said and re.search(r"x{60,80}\.\.\. \(5,0\d\d characters\)", said) and len(said) < 400
    )


def test_a_path_that_no_file_system_can_have_from_python() -> None:
    with pytest.raises(StorageError, match="File name too long"):
        load_config("sft", ["--model", "m", "--dataset", "x" * 5000], environ={})
