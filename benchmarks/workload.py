"""The mail that benchmarks send: due e-mails as a shop's services publish them, about 270 bytes each."""

from typing import Final

from contract.events import DueEmail

CAMPAIGNS: Final = 20
_DOMAINS: Final = ("gmail.test", "outlook.test", "yahoo.test", "example.test")


def due_emails(count: int, *, first: int = 0) -> list[DueEmail]:
    """Due e-mails of as many users, of twenty campaigns in turn, each to four domains in turn.

    The same numbers give the same events.

    Args:
        count: how many.
        first: the number of the first user.
    """
    return [_due_email(number) for number in range(first, first + count)]


def _due_email(number: int) -> DueEmail:
    return DueEmail(
        user_id=f"user-{number:09d}",
        campaign_id=f"spring-sale-{number % CAMPAIGNS:02d}",
        email_key="offer",
        email=f"firstname.lastname.{number:09d}@{_DOMAINS[number // CAMPAIGNS % len(_DOMAINS)]}",
        variables={
            "first_name": "Zoë",
            "voucher": f"SPRING-{number:09d}",
            "link": f"https://shop.example/spring?voucher=SPRING-{number:09d}",
        },
    )
