"""Commands and groups of commands whose help and messages read the same with every version of typer and click."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    import click
    from click import Command as Base
    from click import Option
    from click.exceptions import NoSuchOption, UsageError
else:
    # Typer 0.20 uses click, later versions a copy of it in a package of their own.
    _package = TyperCommand.__mro__[1].__module__.rpartition(".")[0]
    _exceptions = import_module(f"{_package}.exceptions")
    Base, Option = object, getattr(import_module(f"{_package}.core"), "Option", None)
    NoSuchOption, UsageError = _exceptions.NoSuchOption, _exceptions.UsageError


class _Explained(Base):
    """Writes the flags by section, and explains an unknown flag that is a key of the configuration."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments and flags by their ``rich_help_panel``, which typer uses only where rich prints."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record := _help_record(parameter, ctx):
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for name in sorted(sections, key=_place) if len(sections) > 1 else sections:
            with formatter.section(name):
                formatter.write_dl(sections[name])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the flags."""
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            key = error.option_name.lstrip("-").replace("-", "_")
            takes_set = any("--set" in parameter.opts for parameter in self.params)
            if not takes_set or (how := _settable(key)) is None:
                raise
            raise UsageError(f"No such option {error.option_name!r}: use --set {how}", ctx) from None


class Command(_Explained, TyperCommand):
    """A command."""


class CommandGroup(_Explained, TyperGroup):
    """Commands below one name; a mistyped one is corrected."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags by section, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first word names."""
        try:
            return super().resolve_command(ctx, args)
        except NoSuchOption:
            raise
        except UsageError:  # typer and click 8.4 each add their suggestion
            near = " or ".join(map(repr, get_close_matches(args[0], self.list_commands(ctx))))
            hint = f" Did you mean {near}?" if near else ""
            raise UsageError(f"No such command {args[0]!r}.{hint}", ctx) from None


class LazyGroup(CommandGroup):
    """Commands that are imported when they are used, so that the help of the group itself is quick."""

    #: By name: ``MODULE:FUNCTION`` or ``MODULE:GROUP``, and the line that the help text shows.
    lazy: dict[str, tuple[str, str]]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a command."""
        if name not in self.lazy:
            return None
        module, _, attribute = self.lazy[name][0].partition(":")
        command: Any = getattr(import_module(module), attribute)
        parent = typer.Typer(rich_markup_mode=None)
        if isinstance(command, typer.Typer):
            parent.add_typer(command, name=name)
        else:
            parent.command(name, cls=Command)(command)
        return typer.main.get_group(parent).commands[name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.lazy.items()])


def _help_record(parameter: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    """Return name and help of a parameter; typer's own function imports rich, which takes a tenth of a second."""
    if Option is None:
        return parameter.get_help_record(ctx)
    if isinstance(parameter, Option):
        return Option.get_help_record(parameter, ctx)
    words = [getattr(parameter, "help", None), "[required]" if parameter.required else None]
    return " ".join(parameter.get_usage_pieces(ctx)), "  ".join(word for word in words if word)


def _place(section: str) -> int:
    """Return where a section of the help text stands."""
    from feddpc.cli.flags import SECTIONS

    order = ("Arguments", *SECTIONS)
    return order.index(section) if section in order else len(order)


def _settable(key: str) -> str | None:
    """Return what ``--set`` takes for a key of the configuration or a hyper-parameter."""
    from dataclasses import fields

    from feddpc import methods
    from feddpc.config import OPTION_TABLES, PLAIN_KEYS

    if OPTION_TABLES.get(key) == key:
        return f"{key}.KEY=VALUE"
    hyper = {field.name for name in methods.names() for field in fields(methods.get(name))}
    return f"{key}=VALUE" if key in {*PLAIN_KEYS, *hyper} else None
