"""The backlog: what Postfix still has to deliver, operator by operator."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from contract.lifetime import rest
from contract.metrics import tell_all
from contract.operators import MAX_CHUNK
from contract.outage import RETRIES
from smtp_agent import metrics
from smtp_agent.listing import list_queue
from smtp_agent.postfix import Postfix, PostfixError

logger = logging.getLogger(__name__)

_LISTING_SECONDS: Final = 5.0
_SHARE: Final = 20.0
"""A listing takes Postfix up to two seconds for ten thousand messages: at most a twentieth of the time goes into them."""


class Backlog:
    """The last listing of Postfix's queue, by operator; deferred mail is part of it.

    A lane waits while Postfix holds more than about a minute's worth for its operator: what piles up while an operator is
    silent comes out in one burst when it is back.
    """

    def __init__(self, postfix: Postfix) -> None:
        self._postfix = postfix
        self.held: Counter[str] = Counter()
        """Recipients that wait, by operator."""
        self.listed_at: datetime | None = None

    def exceeds(self, operator: str, limit: int | None) -> bool:
        """Whether Postfix holds more than a minute's worth; without a limit that is a chunk."""
        return self.held[operator] > (limit or MAX_CHUNK)

    async def watch(
        self, operator_of: Callable[[], Mapping[str, str]], stop: asyncio.Event
    ) -> None:
        """Lists the queue again and again until told to stop.

        Args:
            operator_of: gives the operator of each domain.
            stop: ends it.
        """
        clock = asyncio.get_running_loop().time
        away = False
        while not stop.is_set():
            began = clock()
            try:
                listing = await list_queue(self._postfix)
            except PostfixError as error:
                # What it held last still counts.
                RETRIES.labels("listing").inc()
                if not away:
                    logger.warning("listing: %s; trying until it works", error)
                away = True
            else:
                if away:
                    logger.warning("listing: works again")
                away = False
                self.held = listing.by_operator(operator_of())
                self.listed_at = datetime.now(UTC)
                operators = {*operator_of().values(), *self.held}
                tell_all(
                    metrics.QUEUE, {(operator,): self.held[operator] for operator in operators}
                )
            await rest(stop, max(_LISTING_SECONDS, _SHARE * (clock() - began)))
