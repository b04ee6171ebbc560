"""Options of `infer`, `deploy` and `export`, and which command has which. Names are Hugging Face's; others are
spellings of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaswift.data.options.agent_templates import AGENT_TEMPLATES
from megaswift.inference.options.backends import BackendOptions
from megaswift.models.options.model import DTYPES
from megaswift.options.option import LARGEST_SEED, but_not, is_set, option

COLD = 1e-5
"""The lowest temperature at which tokens are drawn, as in vLLM: scores divided by less overflow."""
PENALTIES = (0.01, 100.0)
"""Repetition penalties between which scores stay finite."""
OPENAI_PENALTY = 2.0
"""The largest frequency and presence penalty."""
FP8 = "fp8"
"""The quantization method that needs neither bits nor calibration."""
CALIBRATED = ("gptq", "awq")
"""The quantization methods that read calibration rows."""
CALIBRATED_BITS = {"gptq": (4, 8), "awq": (4,)}
"""Method -> the bits that vLLM and transformers compute with."""
ATTENTION = {
    **dict.fromkeys(("flash", "flash_attn", "flash_attn2", "flash_attn_2", "flash_2"), "flash_attention_2"),
    **dict.fromkeys(("flash_attn3", "flash_attn_3", "flash_3"), "flash_attention_3"),
    "flex": "flex_attention",
    "unfused": "eager",
}


def split_adapter_name(entry: str) -> tuple[str, str]:
    """`NAME=DIR` as (NAME, DIR); a folder without a name as ("", DIR)."""
    name, equals, folder = entry.partition("=")
    return (name, folder) if equals and "/" not in name and not Path(entry).exists() else ("", entry)


@dataclass(frozen=True)
class ModelPathOptions:
    """Model"""

    model: str | None = option(
        None,
        "Model folder, output directory of a run, checkpoint, or hub ID",
        aliases=("model_id_or_path", "model_name_or_path", "model_id"),
        metavar="DIR",
        common=("infer", "deploy", "export"),
    )
    model_type: str | None = option(
        None, "Expected model_type of config.json; any other value is an error", metavar="NAME"
    )
    use_hf: bool = option(True, "Hub for IDs and uploads: Hugging Face; false: ModelScope", common=("infer", "deploy"))
    model_revision: str | None = option(None, "Branch, tag or commit of the hub ID", metavar="REV")
    hf_config: str | None = option(
        None,
        "The model's Hugging Face folder, for a Megatron checkpoint of another program",
        metavar="DIR",
    )
    trust_remote_code: bool = option(
        False, "Allow Python code from the model folder to run", common=("infer", "deploy")
    )
    adapters: tuple[str, ...] = option(
        (),
        "PEFT adapter folders or the output directory of a LoRA run; several are added up; deploy: NAME=DIR for "
        "adapters that requests select by model name",
        aliases=("adapter", "mcore_adapter"),
        metavar="DIR...",
        common=("infer", "deploy", "export"),
    )

    @property
    def adapter_folders(self) -> tuple[str, ...]:
        """The folders of --adapters, without their names."""
        return tuple(folder for _, folder in self.named_adapters)

    @property
    def named_adapters(self) -> tuple[tuple[str, str], ...]:
        """(name or the empty string, folder) of each entry of --adapters."""
        return tuple(split_adapter_name(entry) for entry in self.adapters)


@dataclass(frozen=True)
class ModelLoadingOptions(ModelPathOptions):
    """Model"""

    torch_dtype: str = option(
        "auto",
        "Weight dtype; auto: the checkpoint's",
        aliases=("dtype", "model_dtype"),
        choices=("auto", "float32", "bfloat16", "float16"),
        spellings=DTYPES,
        common=("infer", "deploy"),
    )
    attn_impl: str = option(
        "auto",
        "Attention implementation of transformers; auto: its default for the model",
        aliases=("attn_implementation",),
        choices=("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
        spellings=ATTENTION,
        only_with={"infer_backend": "transformers"},
        common=("infer",),
    )
    rope_scaling: str | None = option(
        None,
        "Scale rotary positions: linear, dynamic or yarn (to max_length), or JSON",
        metavar="NAME|JSON",
        only_with={"infer_backend": "transformers"},
    )
    new_special_tokens: tuple[str, ...] = option(
        (),
        "Special tokens that the model was trained with, or a .txt file with one per line; checked to exist",
        metavar="TOKEN...",
        only_with={"server_backend": "transformers"},
    )
    merge_adapters: bool = option(
        False,
        "Merge the adapters into the weights at load time",
        aliases=("merge_lora",),
        only_with={"adapters": is_set(), "infer_backend": "transformers"},
        neutral=(False,),
    )


@dataclass(frozen=True)
class BitsandbytesOptions:
    """Quantization"""

    quantization_bit: int | None = option(
        None,
        "Quantize linear layers to 4 (NF4) or 8 bits with bitsandbytes",
        aliases=("quant_bits", "quant"),
        minimum=4,
        maximum=8,
        metavar="BITS",
        only_with={"file_backend": "transformers"},
        common=("infer", "deploy", "export"),
    )
    quant_method: str | None = option(
        None,
        "Quantization library",
        choices=("bnb",),
        spellings={"bitsandbytes": "bnb"},
        metavar="METHOD",
        only_with={"quantization_bit": is_set()},
    )
    bnb_4bit_quant_type: str = option(
        "nf4",
        "4 bits: data type",
        choices=("nf4", "fp4"),
        only_with={"quantization_bit": 4, "server_backend": "transformers"},
    )
    bnb_4bit_use_double_quant: bool = option(
        False, "4 bits: quantize the scales too", only_with={"quantization_bit": 4, "server_backend": "transformers"}
    )


@dataclass(frozen=True)
class PlacementOptions(BitsandbytesOptions):
    """Devices

    The device map is printed before loading. If --max_memory is given, only the devices in it are used."""

    device_map: str = option(
        "auto",
        "auto, balanced, balanced_low_0, sequential, a device (cpu, cuda:0), or a map of modules: JSON or JSON file",
        only_with={"infer_backend": "transformers"},
        common=("infer", "deploy"),
    )
    max_memory: str | None = option(
        None,
        "Maximum memory for weights per device: 0:20GiB,cpu:64GiB",
        metavar="SIZES",
        only_with={"infer_backend": "transformers", "automatic_placement": True},
        common=("infer", "deploy"),
    )
    offload_folder: str | None = option(
        None,
        "Folder for weights that fit on no device; they are read from disk in every step",
        aliases=("offload_dir",),
        metavar="DIR",
        only_with={"infer_backend": "transformers", "disk": True},
        common=("infer", "deploy"),
    )


@dataclass(frozen=True)
class GenerationOptions:
    """Generation

    Unset options default to the model's generation_config.json."""

    max_new_tokens: int = option(
        512,
        "Maximum number of generated tokens",
        aliases=("max_tokens",),
        minimum=1,
        unit="tokens",
        common=("infer", "deploy"),
    )
    temperature: float | None = option(
        None, "Sampling temperature; 0: greedy decoding", minimum=0, metavar="T", common=("infer", "deploy")
    )
    top_p: float | None = option(
        None,
        "Nucleus sampling: cumulative probability of candidate tokens",
        above=0,
        maximum=1,
        metavar="P",
        only_with={"temperature": but_not(0)},
        common=("infer", "deploy"),
    )
    top_k: int | None = option(
        None,
        "Number of highest-probability candidate tokens; 0: all",
        minimum=0,
        metavar="K",
        only_with={"temperature": but_not(0)},
        common=("infer",),
    )
    min_p: float | None = option(
        None,
        "Minimum probability of candidate tokens, as a share of the most likely token's",
        minimum=0,
        maximum=1,
        metavar="P",
        only_with={"temperature": but_not(0)},
    )
    repetition_penalty: float | None = option(
        None,
        "Repetition penalty; above 1: repeated tokens become less likely",
        minimum=PENALTIES[0],
        maximum=PENALTIES[1],
        metavar="X",
        common=("infer",),
    )
    frequency_penalty: float | None = option(
        None,
        "OpenAI's frequency penalty; lowers a token's logit by this for each time that the answer has it",
        minimum=-OPENAI_PENALTY,
        maximum=OPENAI_PENALTY,
        metavar="X",
        only_with={"server_backend": "transformers"},
    )
    presence_penalty: float | None = option(
        None,
        "OpenAI's presence penalty; lowers a token's logit by this once if the answer has it",
        minimum=-OPENAI_PENALTY,
        maximum=OPENAI_PENALTY,
        metavar="X",
        only_with={"server_backend": "transformers"},
    )
    num_beams: int | None = option(
        None, "Number of beams in beam search", minimum=1, metavar="N", only_with={"file_backend": "transformers"}
    )
    stop: tuple[str, ...] = option(
        (),
        "Stop strings; not included in the output",
        aliases=("stop_strings", "stop_words"),
        metavar="TEXT...",
        only_with={"server_backend": "transformers"},
        common=("infer",),
    )
    seed: int | None = option(
        None,
        "Sampling seed; default: random (prompt file: 42)",
        minimum=0,
        metavar="SEED",
        only_with={"temperature": but_not(0)},
        common=("infer",),
    )


@dataclass(frozen=True)
class ChatTemplateOptions:
    """Conversation"""

    chat_template: str | None = option(
        None,
        "Jinja file or text, or a name (qwen3), in place of the tokenizer's template",
        aliases=("template", "template_type"),
        metavar="FILE",
        free_text=True,
        common=("infer", "deploy"),
    )
    agent_template: str | None = option(
        None,
        "Format of tools and calls, as in training; default: the run's, if it is text",
        choices=AGENT_TEMPLATES,
        only_with={"server_backend": "transformers"},
    )
    system: str | None = option(
        None,
        "System message for conversations without one: text or a file",
        metavar="TEXT|FILE",
        free_text=True,
        only_with={"server_backend": "transformers"},
        common=("infer", "deploy"),
    )
    max_length: int | None = option(
        None,
        "Maximum number of prompt tokens; a longer prompt is an error; default: the model's context",
        minimum=1,
        unit="tokens",
        only_with={"server_backend": "transformers"},
        common=("infer", "deploy"),
    )
    enable_thinking: bool | None = option(
        None,
        "Variable enable_thinking of the chat template; default: the template's own",
        metavar="BOOL",
        only_with={"server_backend": "transformers"},
        common=("infer", "deploy"),
    )


@dataclass(frozen=True)
class PromptFileOptions:
    """Prompt file, instead of a conversation in the terminal"""

    dataset: tuple[str, ...] = option(
        (),
        "Prompt files, folders or hub IDs, in training's formats; no responses needed; FILE#N: first N rows",
        aliases=("val_dataset", "infer_dataset"),
        metavar="FILE...",
        common=("infer",),
    )
    load_data_args: bool = option(
        False,
        "Use the validation rows of the run that wrote the weights (from its config.yaml)",
        common=("infer",),
    )
    columns: dict[str, str] = option(
        {},
        "Column renaming: question=query, or JSON",
        metavar="FROM=TO...",
        example="question=query",
        only_with={"dataset": is_set()},
        common=("infer",),
    )
    result_path: str | None = option(
        None,
        "JSONL file to write: rows with their `response`, in input order; default: infer_result/MODEL/DATASET.jsonl",
        metavar="FILE",
        only_with={"dataset": is_set()},
        common=("infer",),
    )
    per_device_eval_batch_size: int = option(
        8,
        "Batch size; prompts of similar length are batched together",
        aliases=("max_batch_size", "batch_size"),
        minimum=1,
        unit="rows",
        only_with={"file_backend": "transformers"},
        common=("infer",),
    )
    logprobs: bool = option(
        False, "Also write the log-probability of each generated token", only_with={"dataset": is_set()}
    )
    top_logprobs: int | None = option(
        None,
        "Also write the log-probabilities of the N most likely tokens at each position",
        minimum=1,
        maximum=20,
        metavar="N",
        only_with={"dataset": is_set(), "logprobs": True},
    )


@dataclass(frozen=True)
class TerminalOptions:
    """Conversation in the terminal"""

    stream: bool = option(True, "Print an answer while it is generated; false: when it is complete", common=("infer",))


@dataclass(frozen=True)
class NodeOptions:
    """Launch"""

    nproc_per_node: int | None = option(
        None, "Processes on this node; default: one", minimum=1, unit="processes", common=("infer",)
    )
    nnodes: int | None = option(None, "Number of nodes, each started with this command", minimum=1, unit="nodes")
    node_rank: int | None = option(None, "Rank of this node, from 0", minimum=0, metavar="RANK")
    master_addr: str | None = option(None, "Address of node 0, which writes the result", metavar="HOST")
    master_port: int | None = option(
        None, "Free port on node 0; default: 29500", minimum=1, maximum=65535, metavar="PORT"
    )


@dataclass(frozen=True)
class InferProcessOptions(NodeOptions):
    """Launch

    Each process answers a share of the prompt file on its share of the GPUs. Also read from the environment:
    NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT."""

    ddp_timeout: int = option(
        600, "Timeout of processes that wait for others without progress", minimum=1, unit="seconds"
    )


@dataclass(frozen=True)
class ExportProcessOptions(NodeOptions):
    """Launch

    The same command may be started on every node: node 0 does the work, the others wait and end with its exit code.
    Also read from the environment: NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT."""

    nproc_per_node: int | None = option(None, "No effect: one process converts", minimum=1, unit="processes")


@dataclass(frozen=True)
class ServerOptions:
    """Server"""

    host: str = option(
        "127.0.0.1", "Address to bind to; any address except loopback requires a token", common=("deploy",)
    )
    port: int = option(8000, "Port; 0: any free port", minimum=0, maximum=65535, common=("deploy",))
    api_key: str | None = option(
        None,
        "Token that clients must send; safer: the environment variable MEGASWIFT_API_KEY",
        metavar="TOKEN",
        common=("deploy",),
    )
    served_model_name: str | None = option(
        None, "Model name in the API; default: name of the folder", metavar="NAME", common=("deploy",)
    )
    max_batch_size: int = option(
        8,
        "Maximum number of completions generated together",
        minimum=1,
        unit="completions",
        only_with={"server_backend": "transformers"},
        common=("deploy",),
    )
    max_waiting: int = option(
        64,
        "Maximum number of queued completions; further requests get HTTP 429",
        minimum=0,
        unit="completions",
        only_with={"server_backend": "transformers"},
        common=("deploy",),
    )
    max_body_size: str | None = option(
        None,
        "Maximum request size; default: 8MiB, or 32MiB if the model accepts images",
        metavar="SIZE",
        only_with={"server_backend": "transformers"},
    )
    log_requests: bool = option(
        True,
        "Log each request: client, path, status and duration; neither text nor token",
        aliases=("verbose",),
        only_with={"server_backend": "transformers"},
        common=("deploy",),
    )
    max_logprobs: int = option(20, "Maximum top_logprobs of a request", minimum=0, maximum=20, unit="tokens")
    owned_by: str = option(
        "megaswift", "Owner of the models in /v1/models", only_with={"server_backend": "transformers"}
    )


@dataclass(frozen=True)
class ExportOptions(BitsandbytesOptions):
    """Export"""

    quantization_bit: int | None = option(
        None,
        "Bits of linear layers: 4 or 8; bnb: NF4 or LLM.int8()",
        aliases=("quant_bits", "quant"),
        minimum=4,
        maximum=8,
        metavar="BITS",
        common=("export",),
    )
    quant_method: str | None = option(
        None,
        "Quantization method; fp8: float8 in blocks of 128 x 128; gptq, awq: integers calibrated on dataset",
        choices=("bnb", FP8, *CALIBRATED),
        spellings={"bitsandbytes": "bnb"},
        metavar="METHOD",
        only_with={"quantization_bit": is_set()},
        neutral=(FP8, *CALIBRATED),
        common=("export",),
    )

    merge_lora: bool = option(False, "Merge the adapters from --adapters into the model", common=("export",))
    to_mcore: bool = option(False, "Convert to a sharded Megatron checkpoint (torch_dist)", common=("export",))
    to_hf: bool = option(False, "Convert --mcore_model to a Hugging Face folder", common=("export",))
    mcore_model: str | None = option(
        None,
        "Megatron checkpoint to convert; a converted folder, OUT, or OUT/checkpoints/step-N",
        metavar="DIR",
        only_with={"conversion": True},
        common=("export",),
    )
    test_convert_precision: bool = option(
        False, "Compare every tensor after a conversion, bit by bit", only_with={"conversion": True}, common=("export",)
    )
    torch_dtype: str | None = option(
        None,
        "Dtype of all tensors of a conversion; default: unchanged",
        aliases=("dtype",),
        choices=("float32", "bfloat16", "float16"),
        spellings=DTYPES,
        only_with={"conversion": True},
    )
    tensor_model_parallel_size: int | None = option(
        None,
        "Intended layout of a Megatron checkpoint",
        aliases=("tp",),
        minimum=1,
        unit="ranks",
        only_with={"conversion": True},
    )
    pipeline_model_parallel_size: int | None = option(
        None, "Intended layout; only checked", aliases=("pp",), minimum=1, unit="ranks", only_with={"conversion": True}
    )
    expert_model_parallel_size: int | None = option(
        None, "Intended layout; only checked", aliases=("ep",), minimum=1, unit="ranks", only_with={"conversion": True}
    )
    output_dir: str | None = option(
        None,
        "New folder to write; default: the source with a suffix: DIR-merged, DIR-mcore",
        metavar="DIR",
        only_with={"written_folder": True},
        common=("export",),
    )
    max_shard_size: str = option("5GB", "Maximum file size", only_with={"written_folder": True}, common=("export",))

    @property
    def quantizes(self) -> bool:
        """Whether the weights are quantized."""
        return self.quantization_bit is not None or self.quant_method in (FP8, *CALIBRATED)


@dataclass(frozen=True)
class CalibrationOptions(ChatTemplateOptions):
    """Calibration of gptq and awq

    Rows are rendered and tokenized as in training, shuffled, joined and cut into sequences of max_length."""

    dataset: tuple[str, ...] = option(
        (),
        "Calibration rows: files, folders or hub IDs; FILE#N: N rows",
        metavar="FILE...",
        common=("export",),
    )
    columns: dict[str, str] = option(
        {}, "Column renaming: question=query, or JSON", metavar="FROM=TO...", example="question=query"
    )
    strict: bool = option(True, "A malformed row is an error; false: it is skipped and counted")
    max_length: int = option(2048, "Length of calibration sequences", minimum=1, unit="tokens", common=("export",))
    quant_n_samples: int = option(
        256, "Maximum number of calibration sequences", minimum=1, unit="sequences", common=("export",)
    )
    quant_batch_size: int = option(
        1, "Calibration batch size; -1: all sequences at once", minimum=-1, unit="sequences", common=("export",)
    )
    group_size: int = option(
        128, "Inputs that share a scale; -1: all inputs of an output", minimum=-1, unit="inputs", common=("export",)
    )
    seed: int = option(42, "Seed of the order of calibration rows", minimum=0, maximum=LARGEST_SEED, metavar="SEED")


@dataclass(frozen=True)
class ExportUploadOptions:
    """Upload to a hub"""

    push_to_hub: bool = option(
        False,
        "Upload the folder written to a model repository (use_hf); without one: --adapters or --model",
        common=("export",),
    )
    hub_model_id: str | None = option(
        None, "Repository, NAME or ORGANIZATION/NAME; default: the folder's name", metavar="ID", common=("export",)
    )
    hub_token: str | None = option(
        None, "Hub token; default: the token stored by the hub's client", aliases=("hf_token",), secret=True
    )
    hub_private_repo: bool = option(False, "Make a new repository private", common=("export",))
    commit_message: str | None = option(
        None,
        "Commit message; default: upload NAME",
        aliases=("hub_commit_message",),
        metavar="TEXT",
        free_text=True,
    )


@dataclass(frozen=True)
class PoolingOptions:
    """Embeddings, scores and classes

    Models that end in no head or in a classifier's give vectors, scores or classes instead of text."""

    task_type: str | None = option(
        None,
        "What the model gives; default: by its config.json and modules.json",
        choices=("causal_lm", "embedding", "reranker", "generative_reranker", "seq_cls", "token_cls"),
        metavar="NAME",
        only_with={"infer_backend": "transformers"},
    )
    pooling: str | None = option(
        None,
        "How the vectors of tokens become an embedding; default: the model folder's",
        choices=("last", "mean", "cls", "max", "weightedmean"),
        spellings={"lasttoken": "last", "last_token": "last"},
        metavar="NAME",
        only_with={"infer_backend": "transformers"},
    )
    truncation_strategy: str | None = option(
        None,
        "Texts to embed, score or classify that are too long: raise (default), or right to cut their end",
        choices=("raise", "right"),
        metavar="NAME",
        only_with={"infer_backend": "transformers"},
    )
    positive_token: str = option(
        "yes",
        "Generative reranker: the token that says that a document is relevant",
        metavar="TOKEN",
        only_with={"task_type": "generative_reranker"},
    )
    negative_token: str = option(
        "no",
        "Generative reranker: the token that says that a document is not relevant",
        metavar="TOKEN",
        only_with={"task_type": "generative_reranker"},
    )


@dataclass(frozen=True)
class CommonInferenceConfig:
    """What every command has whose model answers."""

    weights: ModelLoadingOptions
    pooling: PoolingOptions
    placement: PlacementOptions
    generation: GenerationOptions
    conversation: ChatTemplateOptions
    backend: BackendOptions


@dataclass(frozen=True)
class InferConfig(CommonInferenceConfig):
    """One `megaswift infer`, checked."""

    file: PromptFileOptions
    terminal: TerminalOptions
    launch: InferProcessOptions


@dataclass(frozen=True)
class DeployConfig(CommonInferenceConfig):
    """One `megaswift deploy`, checked."""

    server: ServerOptions


@dataclass(frozen=True)
class ExportConfig:
    """One `megaswift export`, checked."""

    source: ModelPathOptions
    export: ExportOptions
    calibration: CalibrationOptions
    upload: ExportUploadOptions
    launch: ExportProcessOptions
