"""The interface of a source of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.core import Match, Part, Plan


class Source:
    """Proposes tokens for one session. This one has none: each source overrides what it does.

    Whatever it proposes, the target decides: a wrong token costs its verification and changes no text.
    """

    def start_prefill(self, token_ids: Sequence[int]) -> None:
        """Begin to work on the prompt, without waiting: the source will be asked soon."""

    def match(self) -> Match | None:
        """Return the tokens that it would propose next, where they cost nothing to know."""

    async def propose(self, token_ids: Sequence[int], before: Sequence[int], plan: Plan) -> Part | None:
        """Return tokens to come after a session's `token_ids` and the other sources' tokens `before`, as planned.

        A source that matches proposes the rest of its match, if that begins with the tokens `before`.
        """
        match = self.match()
        if match is None or list(match.token_ids[: len(before)]) != before:
            return None
        rest = match.token_ids[len(before) :][: plan.limit(match.source, len(before))]
        return Part(match.source, rest) if rest else None

    def committed(self, token_ids: Sequence[int]) -> None:
        """Note the tokens that a round has added to the session."""

    def close(self) -> None:
        """Free what it holds, here and in workers."""
