"""Fluentd's configuration language, as much of it as deploy/fluentd/fluent.conf uses."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LEXEME = re.compile(
    r"""
    \s*(?:
        \#[^\n]*                                                # a comment
      | </(?P<end>[a-z_]+)>
      | <(?P<start>[a-z_]+)(?:[ ]+(?P<argument>[^>\n]+))?>
      | (?P<name>[@\w]+)[ ]+(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^\n]+))
    )
    """,
    re.VERBOSE | re.DOTALL,
)

EMBEDDED = re.compile(r"#\{(?P<code>[^}]*)\}")

FROM_ENVIRONMENT = re.compile(
    r"""
    ENV\['(?P<name>\w+)'\]
    (?:
        [ ]\|\|[ ]'(?P<default>[^']*)'
      | \.to_s\[(?P<valid>/.*/)\][ ]or[ ]raise[ ]Fluent::ConfigError,[ ]'(?P<complaint>[^']*)'
    )
    """,
    re.VERBOSE,
)

FOREIGN = re.compile(r"\\[hHRKXZGg]|\\p\{|\[\[:|&&|\(\?[imx~]|\}\+")
"""What Ruby's Onigmo reads otherwise than Python's `re`, or alone."""


class ConfigurationError(ValueError):
    """The text is not of the subset that is understood here; says where."""


@dataclass(frozen=True)
class Section:
    """A section such as `<match fairpost.**>`: its parameters, and the sections within it."""

    name: str
    argument: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)

    @property
    def type(self) -> str:
        """The plugin's name (`@type`)."""
        return self.parameters.get("@type", "")

    def all(self, name: str, plugin: str | None = None) -> Iterator[Section]:
        """Yield the sections of that name, of that plugin only if one is given, in order."""
        for section in self.sections:
            if section.name == name and plugin in (None, section.type):
                yield section

    def one(self, name: str, plugin: str | None = None) -> Section:
        """Return the only section of that name and plugin.

        Raises:
            ConfigurationError: there is none, or more than one.
        """
        found = list(self.all(name, plugin))
        if len(found) != 1:
            raise ConfigurationError(f"expected one <{name}> of @type {plugin}, found {len(found)}")
        return found[0]


def parse(text: str, environment: Mapping[str, str] = os.environ) -> Section:
    """Parse a configuration, and put the environment's values where it asks for them.

    Raises:
        ConfigurationError: the text is not understood.
    """
    root = Section("")
    open_sections = [root]
    position, end = 0, len(text.rstrip())
    while position < end:
        lexeme = LEXEME.match(text, position)
        if lexeme is None:
            raise ConfigurationError(f"line {_line(text, position)}: not understood")
        position = lexeme.end()
        if lexeme["start"]:
            section = Section(lexeme["start"], lexeme["argument"] or "")
            open_sections[-1].sections.append(section)
            open_sections.append(section)
        elif lexeme["end"]:
            if open_sections.pop().name != lexeme["end"]:
                raise ConfigurationError(
                    f"line {_line(text, position)}: </{lexeme['end']}> closes nothing"
                )
        elif lexeme["name"]:
            plain, quoted = lexeme["plain"], lexeme["quoted"]
            value = plain.strip() if quoted is None else _evaluate(quoted, environment)
            open_sections[-1].parameters[lexeme["name"]] = value
    if open_sections != [root]:
        raise ConfigurationError(f"<{open_sections[-1].name}> is not closed")
    return root


def to_regexp(literal: str) -> re.Pattern[str]:
    """Compile a regexp literal of Fluentd (`/.../`, Ruby's Onigmo).

    Raises:
        ConfigurationError: it is no literal, or Python's `re` does not have what it uses.
    """
    if not (literal.startswith("/") and literal.endswith("/")):
        raise ConfigurationError(f"not a regexp: {literal}")
    source = re.sub(r"\(\?<(?=[A-Za-z_])", "(?P<", literal[1:-1])
    if (foreign := FOREIGN.search(source)) is not None:
        raise ConfigurationError(f"Python's re has no {foreign[0]} as Ruby means it: {literal}")
    # In Ruby ^ and $ are a line's ends, \z the text's, and \w \d \s are ASCII.
    return re.compile(source.replace(r"\z", r"\Z"), re.MULTILINE | re.ASCII)


def tag_matches(pattern: str, tag: str) -> bool:
    """Whether a tag matches the pattern of a <filter> or <match>: `*` is one part, `**` any number of them.

    Raises:
        ConfigurationError: the pattern is of another kind.
    """
    if not re.fullmatch(r"[\w.*-]+", pattern):
        raise ConfigurationError(f"only one pattern of names, * and ** is understood: {pattern}")
    source = re.escape(pattern).replace(r"\.\*\*", r"(?:\..*)?").replace(r"\*\*", ".*")
    return re.fullmatch(source.replace(r"\*", r"[^.]*"), tag) is not None


def _evaluate(quoted: str, environment: Mapping[str, str]) -> str:
    def value(embedded: re.Match[str]) -> str:
        code = FROM_ENVIRONMENT.fullmatch(embedded["code"].strip())
        if code is None:
            raise ConfigurationError(
                "only ENV['NAME'] || 'default' and ENV['NAME'].to_s[/valid/] or raise"
                f" Fluent::ConfigError, 'complaint' are understood: {embedded[0]}"
            )
        if code["valid"] is None:
            return environment.get(code["name"], code["default"])
        valid = to_regexp(code["valid"]).search(environment.get(code["name"], ""))
        if valid is None:
            raise ConfigurationError(code["complaint"])
        return valid[0]

    return EMBEDDED.sub(value, quoted)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
