"""Every point of the reference documents that a training toolkit can answer, and what shows the answer here.

Owns the list: 122 points, by their place in a review of the documents (points about other programs are left out). A
point is accepted when every row that shows it is; any other is answered with a way out, stands on a page of docs/, or
belongs to later work.
"""

from __future__ import annotations

from dataclasses import dataclass

CLUSTERS = "issue 22: clusters, containers and their schedulers"
DATA = "issue 23: data, templates and plugins"
MEMORY = "issue 21: speed and memory"


@dataclass(frozen=True)
class Point:
    """What the documents say there, in short, and where it is answered."""

    number: int
    subject: str
    shown: tuple[str, ...] = ()
    """Labels of rows; `python: NAME`, `entry: BEGINNING`, `inference: NAME`; `tests/FILE.py::TEST`."""
    answered: tuple[str, ...] = ()
    """Rows, as above, of its items that are refused with a way out."""
    page: str = ""
    """A heading or a sentence of docs/: `PAGE: TEXT`; the point is no input."""
    later: str = ""
    """The work that it belongs to."""


ZERO = ("zero2", "zero3", "zero2 offload", "zero3 offload")
FIRST = "DDP with LoRA"
LAUNCHERS = "tests/launchers/test_other_launchers.py::test_every_launcher_starts_the_same_run"
TWO_COMMANDS = "tests/launchers/test_other_launchers.py::test_two_machines_are_two_commands"
FILES_2_3 = ("DeepSpeed file: transformers zero2", "DeepSpeed file: transformers zero3")
NUMBERS = tuple(f"DeepSpeed file: numbers zero{stage}" for stage in (1, 2, 3))
ALGORITHMS = tuple(f"algorithm {name}" for name in ("rm", "ppo", "dpo", "grpo"))
RESUMED = "tests/trainers/test_checkpoints.py::test_a_checkpoint_is_found_by_its_folder_its_run_or_latest"
MAIN = "entry: main.py --mode train --config CONFIG --algorithm sft"
RENDERED = "tests/clusters/test_rendered_files.py::test_as_read"
MANIFESTS = "tests/clusters/test_manifests.py::test_every_field_is_in_the_schemas_tables"
SLURM = "tests/clusters/test_slurm.py::test_two_nodes_train_to_their_export"
"""Jobs of clusters, which megaswift submit writes: of PAI-DLC, Kubernetes (MPIJob, PyTorchJob, ...), Ray."""

POINTS = (
    Point(1, "sft, rlhf", (FIRST, "the layout of a YAML file")),
    Point(2, "train", ("train", "tests/test_train.py::test_the_options_name_the_task")),
    Point(3, "a web page", later="no issue yet: a web UI"),
    Point(4, "engines", (FIRST, *ZERO, "fsdp", "TP 4 x PP 8 on 32", "context", "experts", "chunks of a pipeline")),
    Point(
        5,
        "download",
        ("tests/folders/test_source.py::test_a_model_id_is_requested_from_the_chosen_hub",),
    ),
    Point(6, "LoRA, QLoRA, DoRA", ("gradient checkpointing", "QLoRA by train type", "DoRA")),
    Point(7, "quantized models", ("QLoRA of the engines", "GPTQ model")),
    Point(8, "FlashAttention, GaLore, Liger", ("flash attention", "GaLore", "liger")),
    Point(
        9, "servers", ("inference: vLLM", "inference: a server"), answered=("inference: SGLang", "inference: LMDeploy")
    ),
    Point(10, "choice of an engine", page="fallback.md: ## Choosing an engine"),
    Point(11, "2.2 command", (FIRST,)),
    Point(12, "2.2 table", (FIRST, "two processes as in the guide")),
    Point(13, "2.3 torchrun", ("torchrun", "entry: megaswift/cli/sft.py", LAUNCHERS)),
    Point(14, "3.2 presets", ZERO),
    Point(15, "3.2 table", ("zero0", "zero1")),
    Point(16, "3.3 files", FILES_2_3),
    Point(17, "3.3, 3.4 commands", (*FILES_2_3, "the second machine, a file")),
    Point(18, "4.2 deepspeed beside fsdp", ("deepspeed beside fsdp",)),
    Point(19, "4.2 use_fsdp", ("fsdp",)),
    Point(20, "4.2 modes", ("fsdp", "fsdp shard grad op", "fsdp no shard")),
    Point(21, "4.2 settings", ("FSDP setting fsdp_version 2", "deepspeed beside fsdp")),
    Point(23, "5.2 Python", ("python: tensor parallelism",)),
    Point(24, "5.3 chunks", ("python: chunks of a pipeline of another model",), ("python: chunks of a pipeline",)),
    Point(25, "5.4 context", ("python: context parallelism",)),
    Point(26, "5.5 experts", ("python: experts",)),
    Point(27, "5.6 file", ("the layout of a YAML file",)),
    Point(28, "5.6 command", ("entry: megaswift/cli/_megatron/rlhf.py",)),
    Point(
        29,
        "6.2 device map",
        ("inference: a reference document: a device map", "inference: a reference document: a map in JSON"),
    ),
    Point(31, "6.3 4 bits", ("inference: a reference document: 4 bits",)),
    Point(32, "6.3 memory", page="inference.md: ## Devices"),
    Point(33, "7.1 nnodes alone", answered=("nnodes alone",)),
    Point(34, "7.1 launchers", (LAUNCHERS,)),
    Point(35, "7.1 a cloud's scheduler", (RENDERED,)),
    Point(36, "7.2 variables", ("two machines", "the second machine")),
    Point(38, "7.3 one machine", (FIRST, "torchrun", "entry: megaswift/cli/sft.py")),
    Point(39, "7.4 two machines", ("two machines", "the second machine, a file", TWO_COMMANDS)),
    Point(40, "7.4 by torchrun, no data set", answered=("no data set",)),
    Point(41, "7.5 containers", later=CLUSTERS),
    Point(42, "8.1 schedulers", (RENDERED, SLURM)),
    Point(43, "8.2 pods", (RENDERED, MANIFESTS)),
    Point(44, "8.3 NPUs", later="no issue yet: other accelerators"),
    Point(
        45,
        "8.3 names of old versions",
        ("names of old versions", "vision language", "default zero2"),
        ("InternVL in its original layout",),
    ),
    Point(
        46,
        "9.1 to 9.7",
        ("one GPU", "two processes as in the guide", "zero2", "zero3", "the second machine", "fsdp full")
        + ("TP 4 x PP 8 on 32", "entry: megaswift/cli/_megatron/sft.py"),
    ),
    Point(47, "9.8 QLoRA", ("QLoRA",)),
    Point(48, "10.1", ("gradient checkpointing", "zero2", "fsdp", "QLoRA", "flash attention", "sequence packing")),
    Point(50, "10.3 flash_attn2", ("flash_attn2", "flash_attn3")),
    Point(51, "10.3 Liger", ("liger",)),
    Point(52, "10.3 precision", ("two processes as in the guide", "float16")),
    Point(53, "10.3 workers", ("workers",)),
    Point(54, "10.3 compilation", ("compile",)),
    Point(56, "11.2 memory", ("checkpointing zero3 offload",)),
    Point(57, "11.2 4 bits", ("QLoRA of the engines",)),
    Point(58, "11.2 part of a file", ("part of a DeepSpeed file: limits",)),
    Point(59, "11.3", ("stability",)),
    Point(61, "11.4 LoRA and FSDP", ("fsdp use orig params",)),
    Point(62, "11.4 LoRA and ZeRO", ("zero2", "part of a DeepSpeed file: gathered")),
    Point(63, "11.4 images", ("freeze vit",)),
    Point(64, "11.5", ("packing",)),
    Point(65, "11.6", ("output", RESUMED)),
    Point(
        66, "appendix: variables, launchers", ("two machines", FIRST, "fsdp", "entry: megaswift/cli/_megatron/sft.py")
    ),
    Point(67, "appendix: memory", page="layouts.md: ## Memory and compute"),
    Point(68, "older GPUs", ("float16", "float16 DDP", "float16 ZeRO", "float16 FSDP")),
    Point(69, "tasks", (*ALGORITHMS, "algorithm kto", "algorithm cpo", "algorithm orpo")),
    Point(70, "quantized models; images packed", ("GPTQ model", "images packed")),
    Point(71, "installation", later="pip: it refuses Python 3.10; the extra `all` exists"),
    Point(73, "3.2 command", (FIRST,)),
    Point(74, "3.3 file", ("DeepSpeed file: a warmup from above 0",), answered=("a float16 file in a bfloat16 run",)),
    Point(75, "3.4 command", ("deepspeed beside fsdp",)),
    Point(
        76,
        "3.5 two machines",
        answered=("two machines by options, machine 0", "two machines by options, machine 1"),
    ),
    Point(77, "3.5 Slurm", (SLURM,)),
    Point(78, "4.1 batch size 0", answered=("batch size 0",)),
    Point(79, "4.1", ("gradient checkpointing", "zero2 offload", "QLoRA by train type")),
    Point(80, "4.2, 4.3", ("workers", FIRST)),
    Point(81, "offloading", ("zero3 offload", "weights on a drive", "optimizer states on a drive")),
    Point(82, "auto", ("YAML: auto",)),
    Point(84, "run_distributed.py", ("entry: scripts/run_distributed.py --nproc_per_node 4 --config",)),
    Point(
        85,
        "run_distributed.py without a task",
        (
            "entry: scripts/run_distributed.py --use_torchrun",
            "entry: scripts/run_distributed.py --nproc_per_node 4 --nn",
        ),
    ),
    Point(86, "run_distributed.py, a port", ("entry: scripts/run_distributed.py --nproc_per_node 2 --master_port",)),
    Point(87, "torchrun main.py", (MAIN,)),
    Point(88, "torch.distributed.launch", (MAIN, "entry: main.py --local_rank=0")),
    Point(89, "deepspeed main.py", ("entry: main.py --local_rank=0", LAUNCHERS)),
    Point(90, "DDP file", ("YAML: ddp", "YAML: ddp in float16")),
    Point(91, "DeepSpeed file", ("YAML: deepspeed",)),
    Point(92, "JSON files", NUMBERS),
    Point(93, "distributed file", ("YAML: every setting",)),
    Point(94, "batch", ("YAML: every setting",)),
    Point(95, "memory files", ("YAML: memory",), answered=("YAML: memory with deepspeed",)),
    Point(96, "communication files", ("YAML: communication", "YAML: loader")),
    Point(97, "learning rate files", ("YAML: learning rate", "YAML: learning rate with deepspeed")),
    Point(98, "a log to follow", ("tests/test_log.py::test_the_log_file_has_every_message_with_its_time",)),
    Point(99, "smaller batches; seed", ("YAML: without a section", "YAML: seed")),
    Point(101, "algorithms", ("train", *ALGORITHMS)),
    Point(102, "preparing data ahead", later=DATA),
    Point(103, "experiment file", ("YAML: experiment",)),
    Point(104, "recovery file", ("YAML: saving", RESUMED)),
    Point(105, "benchmark tables", page="evidence.md: ## Measured"),
    Point(
        106,
        "troubleshooting files",
        ("YAML: out of memory", "YAML: prefetch"),
        answered=("YAML: memory with deepspeed",),
    ),
    Point(109, "main.py on one and several GPUs", ("entry: main.py --config CONFIG",)),
    Point(110, "deepspeed_config", ("a profile", "deepspeed config")),
    Point(
        111,
        "memory, own trainers, batch size",
        page="outputs.md: memory_gib",
        later="no issue yet: own trainer classes",
    ),
    Point(
        112,
        "precision file",
        ("YAML: full evaluation", "full evaluation", "full evaluation in bfloat16"),
        ("precision twice",),
    ),
    Point(113, "FSDP modes", ("fsdp", "fsdp shard grad op", "fsdp hybrid", "fsdp offload")),
    Point(114, "hybrid_shard_zero2", ("fsdp hybrid zero2",)),
    Point(
        115,
        "FSDP settings",
        ("FSDP setting fsdp_version 1", "FSDP setting fsdp_version 2", "FSDP setting use_orig_params True")
        + ("FSDP setting sync_module_states True", "FSDP setting cpu_ram_efficient_loading True")
        + ("FSDP setting limit_all_gathers True", "python: settings of FSDP as a dictionary"),
    ),
    Point(
        116,
        "FSDP settings of speed",
        ("FSDP setting min_num_params 100000000", "FSDP setting forward_prefetch True")
        + ("FSDP setting backward_prefetch backward_post", "FSDP setting limit_all_gathers False"),
    ),
    Point(
        117,
        "keys of DeepSpeed",
        (*FILES_2_3, *NUMBERS, "a profile", "python: settings of DeepSpeed as a dictionary"),
    ),
    Point(118, "backends", ("backend nccl", "backend gloo"), ("backend mpi", "backend ccl")),
    Point(119, "ddp_timeout", ("ddp timeout",)),
    Point(120, "ddp_find_unused_parameters", ("find unused",)),
    Point(121, "variables of ranks", ("entry: megaswift/sft.py", LAUNCHERS)),
    Point(123, "a job for pods", (RENDERED, MANIFESTS)),
    Point(124, "tables of FSDP and ZeRO", page="fallback.md: ## Memory per rank"),
    Point(125, "a JSON file", ("DeepSpeed file: a profile, for eight processes",)),
    Point(126, "a job of DeepSpeed", ("hostfile", "deepspeed config", MANIFESTS)),
    Point(127, "Megatron-LM's training", ("Megatron-LM's arguments", "the run's own checkpoints")),
    Point(
        128,
        "Megatron-LM's model and data",
        ("Megatron-LM's arguments",),
        ("another model's sizes", "Megatron-LM's vocab-file", "Megatron-LM's merge-file", "a file of indexed data"),
    ),
    Point(129, "Ray's cluster", (RENDERED, "tests/clusters/test_ray_jobs.py::test_a_job_on_two_ray_nodes")),
    Point(131, "a bandwidth test", ("tests/test_bench.py::test_four_processes_over_gloo",)),
    Point(132, "sizes", page="fallback.md: ## Choosing an engine"),
    Point(
        133, "production: accuracy and speed", ("stability", "compile", "flash attention", "workers", "YAML: saving")
    ),
    Point(134, "production: restarts, cost", later=f"{CLUSTERS}; {MEMORY}; {DATA}"),
    Point(100, "a timeout of NCCL", later=CLUSTERS),
)
