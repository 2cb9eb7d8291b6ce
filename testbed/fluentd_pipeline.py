"""What becomes of a record between Fluentd's sources and its output: labels, filters, relabelling.

Of each section every parameter is known: it is followed, it has the one value that is done here, or it changes
nothing of what is shipped. Any other is an error, so that nothing is tested that fluent.conf does not say.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from testbed.fluentd_config import ConfigurationError, Section, tag_matches, to_regexp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Record = dict[str, Any]

Filter = Callable[[Record], Record | None]
"""Returns what it makes of a record; None when it drops it."""

ROOT = ""
"""The label of what has none."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a section: those followed, those with the only value known, and those without effect here."""

    followed: frozenset[str] = frozenset()
    assumed: Mapping[str, str] = field(default_factory=dict)
    indifferent: frozenset[str] = frozenset()

    def check(self, section: Section) -> None:
        """Refuse a section that says anything else.

        Raises:
            ConfigurationError: it does; says what.
        """
        where = f"<{section.name}> of @type {section.type}" if section.type else f"<{section.name}>"
        for name in section.parameters:
            if name not in {"@type", "@id"} | self.followed | self.indifferent | set(self.assumed):
                raise ConfigurationError(f"{where}: {name} is not understood")
        for name, value in self.assumed.items():
            if section.parameters.get(name) != value:
                raise ConfigurationError(f"{where}: only {name} {value} is understood")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


KNOWN: Mapping[str, Parameters] = {
    "system": Parameters(
        assumed={"workers": "1"}, indifferent=_names("root_dir file_permission dir_permission")
    ),
    "source tail": Parameters(
        followed=_names("@label tag path pos_file max_line_size"),
        assumed={
            "follow_inodes": "true",
            "read_from_head": "true",
            "emit_unmatched_lines": "false",
        },
        indifferent=_names("refresh_interval rotate_wait"),
    ),
    # Without a time of its own a record has that of its arrival, which nobody reads.
    "parse regexp": Parameters(
        followed=_names("expression types"),
        assumed={"time_key": "no_time", "estimate_current_event": "true"},
    ),
    "source forward": Parameters(
        followed=_names("@label bind port"), assumed={"skip_invalid_event": "true"}
    ),
    "source prometheus": Parameters(indifferent=_names("bind port")),
    "source prometheus_output_monitor": Parameters(),
    "source prometheus_tail_monitor": Parameters(),
    "label": Parameters(),
    "filter grep": Parameters(),
    "regexp": Parameters(followed=_names("key pattern")),
    "filter record_transformer": Parameters(
        followed=_names("remove_keys"), indifferent=_names("enable_ruby")
    ),
    "match relabel": Parameters(followed=_names("@label")),
    "match rdkafka2": Parameters(
        followed=_names(
            "brokers topic message_key_key required_acks idempotent max_send_retries compression_codec rdkafka_options"
            " username password"
        ),
        indifferent=_names("rdkafka_delivery_handle_poll_timeout unrecoverable_error_codes"),
    ),
    "format json": Parameters(),
    "buffer file": Parameters(
        assumed={"overflow_action": "block", "retry_forever": "true", "flush_thread_count": "1"},
        indifferent=_names(
            "chunk_limit_size total_limit_size flush_mode flush_interval flush_thread_interval"
            " flush_thread_burst_interval flush_at_shutdown retry_wait retry_max_interval"
        ),
    ),
}
"""By name and plugin of the section."""


def check(section: Section) -> None:
    """Refuse a configuration that says what is not done here.

    Raises:
        ConfigurationError: it does; says what.
    """
    for each in section.sections:
        # The fields of a <record> have names of their own; `_transformer` reads all of them.
        if each.name != "record":
            kind = f"{each.name} {each.type}".strip()
            if kind not in KNOWN:
                raise ConfigurationError(f"<{each.name}> of @type {each.type} is not understood")
            KNOWN[kind].check(each)
            check(each)


@dataclass(frozen=True)
class Route:
    """The filters on the way of a tag, and whether it leads to the output."""

    filters: tuple[Filter, ...]
    delivered: bool


class Pipeline:
    """The labels of a configuration.

    Raises:
        ConfigurationError: the configuration says what is not done here.
    """

    def __init__(self, configuration: Section) -> None:
        check(configuration)
        self._labels = {ROOT: list(_steps(configuration))}
        for label in configuration.all("label"):
            self._labels[label.argument] = list(_steps(label))
        if "@ERROR" in self._labels:
            raise ConfigurationError("<label @ERROR> is not understood: it swallows failed emits")
        self._check_targets(configuration.all("source"))
        self._routes: dict[tuple[str, str], Route] = {}
        self.output = self._output()
        """The one <match> that writes to Kafka."""

    def pass_through(self, label: str, tag: str, record: Record) -> Record | None:
        """Return what becomes of a record that enters at a label; None when it does not reach the output."""
        route = self._routes.get((label, tag))
        if route is None:
            route = self._routes[label, tag] = Route(*self._follow(label, tag))
        if not route.delivered:
            return None
        passed: Record | None = record
        for apply in route.filters:
            if passed is None:
                return None
            passed = apply(passed)
        return passed

    def _follow(self, label: str, tag: str) -> tuple[tuple[Filter, ...], bool]:
        filters: list[Filter] = []
        for section, apply in self._labels[label]:
            if not tag_matches(section.argument, tag):
                continue
            if apply is not None:
                filters.append(apply)
            elif section.type == "relabel":
                further, delivered = self._follow(section.parameters["@label"], tag)
                return (*filters, *further), delivered
            else:
                return tuple(filters), True
        return tuple(filters), False

    def _check_targets(self, sources: Iterable[Section]) -> None:
        matches = (section for steps in self._labels.values() for section, _ in steps)
        for section in (*sources, *matches):
            if (target := section.parameters.get("@label", ROOT)) not in self._labels:
                raise ConfigurationError(f"there is no <label {target}>")

    def _output(self) -> Section:
        found = [
            section
            for steps in self._labels.values()
            for section, _ in steps
            if section.type == "rdkafka2"
        ]
        if len(found) != 1:
            raise ConfigurationError(f"expected one <match> of @type rdkafka2, found {len(found)}")
        return found[0]


def _steps(section: Section) -> Iterator[tuple[Section, Filter | None]]:
    """The filters, each with what it does, and the matches of a label, in order."""
    for each in section.sections:
        if each.name == "filter":
            yield each, _grep(each) if each.type == "grep" else _transformer(each)
        elif each.name == "match":
            yield each, None


def _grep(section: Section) -> Filter:
    condition = section.one("regexp").parameters
    key, pattern = condition["key"], to_regexp(condition["pattern"])
    return lambda record: record if pattern.search(str(record.get(key, ""))) else None


_SCRUB = re.compile(r'\$\{record\["(\w+)"\]\.dup\.force_encoding\("UTF-8"\)\.scrub\("\?"\)\}')


def _transformer(section: Section) -> Filter:
    removed = frozenset(section.parameters.get("remove_keys", "").split(","))
    constants: Record = {}
    scrubbed: list[tuple[str, str]] = []
    for name, value in section.one("record").parameters.items():
        if (scrub := _SCRUB.fullmatch(value)) is not None:
            scrubbed.append((name, scrub[1]))
        elif "${" in value:
            raise ConfigurationError(f"<record>: {name} {value} is not understood")
        else:
            constants[name] = value

    def transform(record: Record) -> Record:
        merged = record | constants | {name: scrub_text(record[key]) for name, key in scrubbed}
        return {name: value for name, value in merged.items() if name not in removed}

    return transform


codecs.register_error("scrub", lambda error: ("?", error.end))  # type: ignore[attr-defined]


def scrub_text(text: str) -> str:
    """Put a `?` for what is no UTF-8, as Ruby's `scrub("?")`; in `text` such bytes are surrogates."""
    return text.encode(errors="surrogateescape").decode(errors="scrub")
