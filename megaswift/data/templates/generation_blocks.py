"""Attributes the `{% generation %}` blocks of a rendered conversation to the assistant's messages.

A template may mark a turn with several blocks (reasoning, content and calls apart), with none, or several turns with
one block. Where all of them carry loss, nobody needs to know whose a block is; here some do not.

Left out: where the turns stand (`turns.py`), which of them carry loss (`render.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from megaswift.data.templates.message_loss import TurnLoss

_Span = tuple[int, int]


def blocks_at_turns(
    text: str, blocks: Sequence[_Span], turns: Sequence[Sequence[_Span]], wanted: Sequence[TurnLoss]
) -> list[list[_Span]] | None:
    """Returns the blocks of each message, by the places of its turn.

    A block that lies over several turns is cut where each begins; what the template writes between a turn that carries
    loss and one that does not carries none. A block apart from all turns, such as an end of turn, goes with the turn
    right before it, else with the next one.

    Args:
        text: The rendered conversation.
        blocks: Its blocks, as character ranges in order.
        turns: The character ranges of each message; none for one that the template omits, or whose place is unknown.
        wanted: The loss of each message.

    Returns:
        The character ranges of each message that are in blocks; None where no turn is known.
    """
    places = sorted((begin, end, n) for n, spans in enumerate(turns) for begin, end in spans)
    shared = [[place for place in places if _overlaps(text, block, place)] for block in blocks]
    # One block a message, as most templates have it: the places of empty turns need not be known then
    owners = [{owner for _, _, owner in own} for own in shared]
    if owners == [{n} if spans else set() for n, spans in enumerate(turns)]:
        return [[block] for block in blocks]
    if not places:
        return None
    owned: list[list[_Span]] = [[] for _ in turns]
    for block, inside in zip(blocks, shared, strict=True):
        if not inside:
            owned[_neighbour(text, block, places)].append(block)
            continue
        begin = block[0]
        for (_, end, n), (following, _, other) in zip(inside, inside[1:], strict=False):
            if n == other:
                continue
            cut = following if wanted[n] and wanted[other] else min(end, following)
            owned[n].append((begin, cut))
            begin = following
        owned[inside[-1][2]].append((begin, block[1]))
    return owned


def blocks_within_turns(blocks: Sequence[_Span], turns: Sequence[Sequence[_Span]]) -> list[list[_Span]]:
    """Returns what lies in blocks of each message's turn, as character ranges."""
    owned = []
    for spans in turns:
        common = [(max(a, begin), min(b, end)) for a, b in blocks for begin, end in spans]
        owned.append([(a, b) for a, b in common if a < b])
    return owned


def _overlaps(text: str, block: _Span, place: tuple[int, int, int]) -> bool:
    """Whether a turn and a block share more than white space, or a blank turn stands in the block."""
    begin = max(block[0], place[0])
    end = min(block[1], place[1])
    return bool(text[begin:end].strip()) if text[place[0] : place[1]].strip() else begin <= end


def _neighbour(text: str, block: _Span, places: Sequence[tuple[int, int, int]]) -> int:
    """The message with which a block goes that is in no turn."""
    before = [place for place in places if place[1] <= block[0]]
    after = [place for place in places if place[0] >= block[1]]
    if before and (not after or not text[before[-1][1] : block[0]].strip()):
        return before[-1][2]
    return after[0][2] if after else places[-1][2]


def blocks_by_prefixes(blocks: Sequence[_Span], prefixes: Sequence[Sequence[_Span] | None]) -> list[list[_Span]] | None:
    """Returns the blocks of each message, by those of the conversations that end with each.

    Args:
        blocks: The blocks of the whole conversation, as character ranges in order.
        prefixes: The blocks of the conversation up to each message of the assistant; None where the template refuses
            it.

    Returns:
        The blocks that each message adds; None where a shorter conversation is rendered differently.
    """
    owned = []
    count = 0
    for shorter in prefixes:
        if shorter is None or len(shorter) < count or list(shorter) != list(blocks[: len(shorter)]):
            return None
        owned.append(list(blocks[count : len(shorter)]))
        count = len(shorter)
    return owned if count == len(blocks) else None
