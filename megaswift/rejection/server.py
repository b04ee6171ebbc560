"""Completions from a server with OpenAI's API, several requests at a time."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megaswift.errors import Problem, UserError, first_line
from megaswift.rejection.journal import SampledCompletion
from megaswift.rejection.options.sampling import SampledCompletionOptions
from megaswift.rejection.prompts import PromptToSample

SECONDS = 1800
"""A completion takes at most so long."""
SHOWN = 300


@dataclass(frozen=True)
class ServerAnswers:
    """A model behind a server."""

    address: str
    model: str
    token: str | None
    options: SampledCompletionOptions
    tokenizer: Any

    def __call__(self, batch: Sequence[tuple[PromptToSample, int]], seed: int) -> list[SampledCompletion]:
        """One completion for each prompt; UserError where the server refuses one."""
        with ThreadPoolExecutor(len(batch)) as pool:
            return list(pool.map(self._one, [prompt for prompt, _ in batch], range(seed, seed + len(batch))))

    def _one(self, prompt: PromptToSample, seed: int) -> SampledCompletion:
        options = self.options
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "seed": seed,
            "n": 1,
        }
        optional = {"top_p": options.top_p, "top_k": options.top_k, "repetition_penalty": options.repetition_penalty}
        body |= {name: value for name, value in optional.items() if value is not None}
        if options.stop:
            body["stop"] = list(options.stop)
        if isinstance(prompt.content, str):
            choice = self._post("completions", {**body, "prompt": prompt.content})
            text = choice["text"]
        else:
            tools = {"tools": list(prompt.tools)} if prompt.tools else {}
            choice = self._post("chat/completions", {**body, "messages": list(prompt.content), **tools})
            text = choice["message"]["content"] or ""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return SampledCompletion(text, tuple(ids), choice.get("finish_reason") != "length")

    def _post(self, route: str, body: Mapping[str, Any]) -> Any:
        """The first choice of an answer."""
        request = urllib.request.Request(f"{self.address}/{route}", data=json.dumps(body).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        what = f"--base_url {self.address}"
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.load(answer)["choices"][0]
        except urllib.error.HTTPError as error:
            said = error.read()[:SHOWN].decode(errors="replace")
            rule = f"answers {error.code} to POST /{route}: {said}"
            raise UserError(Problem(what, rule, "the same command goes on where it stopped")) from None
        except OSError as error:
            fix = "the same command goes on where it stopped"
            raise UserError(Problem(what, f"is not reached: {first_line(error)}", fix)) from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(Problem(what, f"answers POST /{route} with something else than choices")) from None
