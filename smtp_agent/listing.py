"""Listings: what Postfix's queue holds, as `postqueue -j` says."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from contract.envelope import dispatch_of
from contract.operators import OTHER, domain_of
from smtp_agent.postfix import Postfix, PostfixError

_TIMEOUT: Final = 120.0
"""Seconds; ten thousand messages take two at most, and a queue may hold many more."""


class Listing(Struct, frozen=True):
    """What the queue held.

    Attributes:
        dispatch_ids: of the messages that are ours.
        domains: messages by the recipient's domain, whoever they are from, in whatever part of the queue.
    """

    dispatch_ids: frozenset[int] = frozenset()
    domains: Mapping[str, int] = {}

    def by_operator(self, operator_of: Mapping[str, str]) -> Counter[str]:
        """Messages by operator; a domain that no operator names is one of `other`."""
        held: Counter[str] = Counter()
        for domain, number in self.domains.items():
            held[operator_of.get(domain, OTHER)] += number
        return held


class _Recipient(Struct):
    address: str


class _Entry(Struct):
    sender: str
    recipients: list[_Recipient]


_ENTRY: Final = msgspec.json.Decoder(_Entry)


def read_listing(output: bytes) -> Listing:
    """The listing that `postqueue -j` printed: one JSON object a message, a line each (postqueue(1)).

    Raises:
        PostfixError: it is no such listing.
    """
    dispatch_ids: set[int] = set()
    domains: Counter[str] = Counter()
    # Postfix passes octets of an address on as they came.
    for line in output.decode(errors="replace").split("\n")[:-1]:
        try:
            entry = _ENTRY.decode(line)
        except msgspec.DecodeError as error:
            raise PostfixError(f"postqueue -j: {error}: {line[:80]!r}") from None
        if (dispatch_id := dispatch_of(entry.sender)) is not None:
            dispatch_ids.add(dispatch_id)
        domains.update(domain_of(recipient.address) for recipient in entry.recipients)
    return Listing(frozenset(dispatch_ids), domains)


async def list_queue(postfix: Postfix) -> Listing:
    """Asks Postfix what its queue holds.

    Raises:
        PostfixError: it does not say.
    """
    command = ("postqueue", "-c", str(postfix.config_directory), "-j")
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise PostfixError(f"postqueue: {error.strerror}") from None
    try:
        async with asyncio.timeout(_TIMEOUT):
            output, said = await process.communicate()
    except TimeoutError:
        raise PostfixError(f"postqueue: no listing within {_TIMEOUT:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        reason = said.decode(errors="replace").strip() or f"exit code {process.returncode}"
        raise PostfixError(f"postqueue: {reason.splitlines()[-1]}")
    return await asyncio.to_thread(read_listing, output)
