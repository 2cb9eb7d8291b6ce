"""Transport settings: what `operators.toml` may say about an operator's transport in Postfix, and in which form.

They take the place of what follows from the operator's limit (`smtp_agent/transports.py`).
"""

import re
from collections.abc import Mapping
from typing import Final

_COUNT: Final = re.compile(r"[1-9][0-9]{0,4}")
_ANY_COUNT: Final = re.compile(r"0|[1-9][0-9]{0,4}")
_TIME: Final = re.compile(r"[0-9]{1,6}[smhdw]?")
_FEEDBACK: Final = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3})?(/[1-9][0-9]{0,4})?|1/(sqrt_)?concurrency")
_HOST: Final = r"[A-Za-z0-9.-]{1,255}"

MASTER_SETTINGS: Final = {
    "maxproc": _COUNT,
    # A relay in place of the domain's own MX: `[relay.example]:587` (transport(5)).
    "nexthop": re.compile(rf"(\[{_HOST}\]|{_HOST})(:[0-9]{{1,5}})?"),
}
"""Settings that are no parameter of main.cf: processes at most (master(5)), and where mail goes."""

TRANSPORT_PARAMETERS: Final = {
    "destination_concurrency_limit": _COUNT,
    "initial_destination_concurrency": _COUNT,
    # With 1 every recipient is a destination of its own, and the other bounds bound nothing (postconf(5)).
    "destination_recipient_limit": re.compile(r"[2-9]|[1-9][0-9]{1,4}"),
    "destination_rate_delay": _TIME,
    "transport_rate_delay": _TIME,
    "destination_concurrency_failed_cohort_limit": _ANY_COUNT,
    "destination_concurrency_negative_feedback": _FEEDBACK,
    "destination_concurrency_positive_feedback": _FEEDBACK,
}
"""Parameters of main.cf that begin with the transport's name and `_` (postconf(5))."""

SMTP_PARAMETERS: Final = {
    "smtp_connection_cache_on_demand": re.compile("yes|no"),
    "smtp_connection_reuse_count_limit": _ANY_COUNT,
    "smtp_connection_reuse_time_limit": _TIME,
    "smtp_mx_session_limit": _ANY_COUNT,
    "smtp_connect_timeout": _TIME,
    "smtp_helo_timeout": _TIME,
    "smtp_mail_timeout": _TIME,
    "smtp_rcpt_timeout": _TIME,
    "smtp_data_init_timeout": _TIME,
    "smtp_data_xfer_timeout": _TIME,
    "smtp_data_done_timeout": _TIME,
    "smtp_tls_security_level": re.compile("none|may|encrypt|dane|dane-only|verify|secure"),
}
"""Parameters of smtp(8), set for the transport's own processes."""

_SETTINGS: Final = MASTER_SETTINGS | TRANSPORT_PARAMETERS | SMTP_PARAMETERS

RESERVED_NAMES: Final = re.compile(
    "anvil|bounce|bsmtp|cleanup|cyrus|default|defer|discard|dnsblog|error|flush|ifmail|lmtp|local|maildrop|mailman"
    "|pickup|postlog|proxymap|proxywrite|qmgr|relay|retry|rewrite|scache|showq|smtp|smtpd|smtps|submission"
    "|submissions|tlsmgr|tlsproxy|trace|uucp|verify|virtual"
)
"""Services that Postfix comes with, and `default`, whose parameters hold for every transport."""


class TransportError(ValueError):
    """An operator cannot have a transport in Postfix; the text is one line: operator, setting, what is wrong."""


def check_transport(operator: str, settings: Mapping[str, str | int]) -> None:
    """Refuses a name that a transport cannot have, and settings that are unknown or ill-formed.

    Raises:
        TransportError: the first fault found.
    """
    if RESERVED_NAMES.fullmatch(operator):
        raise TransportError(
            f"operator {operator!r}: Postfix has a service of that name; choose another name"
        )
    for name, value in settings.items():
        form = _SETTINGS.get(name)
        if form is None:
            known = ", ".join(sorted(_SETTINGS))
            raise TransportError(
                f"operator {operator!r}: transport has no setting {name!r}; it has {known}"
            )
        if not form.fullmatch(str(value)):
            raise TransportError(f"operator {operator!r}: transport.{name}: not {value!r}")
