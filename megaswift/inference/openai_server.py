"""What commands ask a server with OpenAI's API before they send it work. No torch."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from megaswift.errors import Problem, UserError, first_line

ANSWER_SECONDS = 30
"""A server lists its models within this time."""


def first_served_model(address: str, token: str | None) -> str:
    """Return the first model that a server lists; UserError where none is reached.

    Args:
        address: The address up to /v1.
        token: The server's token.
    """
    request = urllib.request.Request(f"{address}/models")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    what = f"--base_url {address}"
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        fix = "set MEGASWIFT_API_KEY" if error.code in (401, 403) else "give the address up to /v1"
        raise UserError(Problem(what, f"answers {error.code} to GET /models", fix)) from None
    except OSError as error:
        fix = "start a server: megaswift deploy --model DIR"
        raise UserError(Problem(what, f"is not reached: {first_line(error)}", fix)) from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(Problem(what, "does not list its models", "--served_model_name NAME")) from None
