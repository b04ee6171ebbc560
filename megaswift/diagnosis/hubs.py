"""Whether the hubs of models can be reached, by the endpoints and offline switches that their clients read."""

from __future__ import annotations

import functools
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping

from megaswift.base.redaction import redacted_urls
from megaswift.diagnosis.finding import Finding
from megaswift.diagnosis.timed_calls import answers_within

LIMIT_S = 2.0
TRUE = ("1", "true", "yes", "on")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
LOCAL = "use folders as --model and --dataset"
HUGGING_FACE = "Hugging Face hub"
MODELSCOPE = "ModelScope hub"


def is_set(value: str) -> bool:
    """As huggingface_hub reads a switch."""
    return value.strip().lower() in TRUE


def hub_findings(environ: Mapping[str, str], offline: bool = False) -> Iterator[Finding]:
    """`offline`: contact none."""
    if offline:
        yield Finding("hubs", "ok", "not checked (--offline)")
        return
    switches = [f"{name}={environ[name]}" for name in OFFLINE if is_set(environ.get(name, ""))]
    endpoints = {HUGGING_FACE: endpoint(environ, "HF_ENDPOINT", "https://huggingface.co")}
    named = "MODELSCOPE_ENDPOINT" if environ.get("MODELSCOPE_ENDPOINT") else "MODELSCOPE_DOMAIN"
    endpoints[MODELSCOPE] = endpoint(environ, named, "https://www.modelscope.cn")
    if switches:
        found = f"not checked: {', '.join(switches)}; only files in the cache can be used"
        fix = f"unset it to download by hub ID, or {LOCAL}"
        yield Finding(HUGGING_FACE, "note", found, fix)
        del endpoints[HUGGING_FACE]
    answers = ask(endpoints)
    for name, address in endpoints.items():
        yield hub_finding(name, address, answers.get(name), environ)


def endpoint(environ: Mapping[str, str], variable: str, default: str) -> str:
    """With a scheme; ModelScope's variable may have none."""
    given = environ.get(variable, "").strip().rstrip("/") or default
    return given if "://" in given else f"https://{given}"


def hub_finding(name: str, address: str, error: str | None, environ: Mapping[str, str]) -> Finding:
    """`error`: None for no answer in time, empty for an answer."""
    address = redacted_urls(address)
    if error == "":
        return Finding(name, "ok", f"{address} answers")
    found = f"{address}: {error if error is not None else f'no answer within {LIMIT_S:.0f} s'}"
    if name == HUGGING_FACE and environ.get("HF_ENDPOINT"):
        return Finding(name, "problem", found, f"correct or unset HF_ENDPOINT, or {LOCAL}")
    if name == HUGGING_FACE:
        return Finding(name, "note", found, f"set HF_ENDPOINT to a mirror or https_proxy to a proxy, or {LOCAL}")
    if environ.get("MODELSCOPE_ENDPOINT") or environ.get("MODELSCOPE_DOMAIN"):
        return Finding(name, "problem", found, f"correct or unset MODELSCOPE_ENDPOINT (MODELSCOPE_DOMAIN), or {LOCAL}")
    return Finding(name, "note", found, f"only --use_hf false needs it; set https_proxy to a proxy, or {LOCAL}")


def ask(endpoints: Mapping[str, str]) -> dict[str, str]:
    """Hub to the error of a request, empty where there was an answer; hubs without an answer in time are left out."""
    return answers_within(LIMIT_S, {name: functools.partial(request, address) for name, address in endpoints.items()})


def request(address: str) -> str:
    """Its error, empty where there was an answer."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=LIMIT_S).close()
    except urllib.error.HTTPError:  # also an answer
        pass
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return str(getattr(reason, "strerror", None) or reason)
    return ""
