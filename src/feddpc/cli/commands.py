"""Commands and groups of commands whose help and messages read the same with every version of typer and click."""

from __future__ import annotations

import click
from typer.core import TyperCommand, TyperGroup

from feddpc.cli.flags import SECTIONS


class Command(TyperCommand):
    """A command; an unknown flag that is a key of the configuration is explained."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help text."""
        return _unescape(super().get_help(ctx))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments and flags, by section."""
        _write_sections(self, ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the flags."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _explain(error, self, ctx) from None


class Group(TyperGroup):
    """Commands below one name; a mistyped one is corrected, and unknown flags are explained as for a command."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help text."""
        return _unescape(super().get_help(ctx))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags by section, then the commands."""
        _write_sections(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the flags before the name of a command."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _explain(error, self, ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first word names."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchOption:
            raise
        except click.UsageError:  # typer and click 8.4 each add their suggestion
            from difflib import get_close_matches

            near = " or ".join(map(repr, get_close_matches(args[0], self.commands)))
            hint = f" Did you mean {near}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx) from None


def _write_sections(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the parameters of a command by their ``rich_help_panel``, which typer uses only where rich prints."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        usual = "Arguments" if isinstance(parameter, click.Argument) else "Options"
        if record := parameter.get_help_record(ctx):
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
    order = ("Arguments", *SECTIONS)
    for name in sorted(sections, key=lambda name: order.index(name) if name in order else len(order)):
        with formatter.section(name):
            formatter.write_dl(sections[name])


def _unescape(text: str) -> str:
    """Remove the backslashes that typer puts before brackets for rich, which does not print our help."""
    return text.replace("\\[", "[")


def _explain(error: click.NoSuchOption, command: click.Command, ctx: click.Context) -> click.UsageError:
    """Return an error that names ``--set`` if the unknown flag is a key that the command takes there."""
    if not any("--set" in parameter.opts for parameter in command.params):
        return error
    key = error.option_name.lstrip("-").replace("-", "_")
    how = _settable(key)
    return click.UsageError(f"No such option {error.option_name!r}: use --set {how}", ctx) if how else error


def _settable(key: str) -> str | None:
    from dataclasses import fields

    from feddpc import methods
    from feddpc.config import option_tables, plain_keys

    if option_tables().get(key) == key:
        return f"{key}.KEY=VALUE"
    hyper = {field.name for name in methods.names() for field in fields(methods.get(name))}
    return f"{key}=VALUE" if key in {*plain_keys(), *hyper} else None
