"""Groups of commands that load the module of a command when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LazyCommand(NamedTuple):
    """A command that is not loaded yet.

    Attributes:
        module: its module below `arroyo_dagster.cli`, which adds it to its group.
        help: the first sentence of its help.
        is_group: whether it is a group of commands.
        runs_user_code: whether it runs functions of the user, which may need any package.
    """

    module: str
    help: str
    is_group: bool = False
    runs_user_code: bool = False


class LazyGroup(click.Group):
    """A group that lists its commands without loading them.

    Most commands load pyarrow, some load Spark. `--help` and shell completion need neither.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, LazyCommand] | None = None,
        sections: Mapping[str, tuple[str, ...]] | None = None,
        **given: Any,
    ):
        super().__init__(*args, **given)
        self.lazy = dict(lazy or {})
        self.sections = dict(sections or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, those that are not loaded included."""
        return sorted({*self.commands, *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, and load its module first if it is not loaded yet."""
        if cmd_name not in self.commands and cmd_name in self.lazy:
            importlib.import_module(f"arroyo_dagster.cli.{self.lazy[cmd_name].module}")
        return self.commands.get(cmd_name)

    def get_group(self, name: str) -> LazyGroup | None:
        """Return a group in this group; None for a command, which is not loaded."""
        entry = self.lazy.get(name)
        if entry is not None and not entry.is_group:
            return None
        command = self.get_command(click.Context(self), name)
        return command if isinstance(command, LazyGroup) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a command line, and set the defaults of its options.

        `ctx.obj` of the outermost group returns them, by the words and the command.
        """
        called = self.lazy.get(args[0])
        if called is not None and not (called.is_group or called.runs_user_code):
            ctx.with_resource(light_imports())
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            self._refuse(ctx, args[0])
        name, command, rest = super().resolve_command(ctx, args)
        helped = bool({"-h", "--help"} & set(rest))  # a wrong file hides no help
        if name and command and not isinstance(command, click.Group) and not helped:
            words = (*_words(ctx), name)
            ctx.default_map = {name: ctx.obj(command, words)} if callable(ctx.obj) else None
        if command is not None and any(option.name == "spark" for option in command.params):
            from arroyo_dagster.cli.spark import split_spark  # its command has loaded it

            rest = split_spark(rest)
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section; those that are in none come last."""
        rows = dict(self._listed(ctx))
        if not rows:
            return
        width = max(map(len, rows))
        for title, names in self.sections.items():
            listed = [(name.ljust(width), rows.pop(name)) for name in names if name in rows]
            with formatter.section(title):
                formatter.write_dl(listed)
        if rows:
            with formatter.section("Other" if self.sections else "Commands"):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command, or of an option of this group."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=text)
            for name, text in self._listed(ctx)
            if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def _refuse(self, ctx: click.Context, name: str) -> None:
        import difflib

        close = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
        also = f" Did you mean {close[0]}?" if close else ""
        ctx.fail(f"No such command {name!r}.{also}")

    def _listed(self, ctx: click.Context) -> list[tuple[str, str]]:
        rows = []
        for name in self.list_commands(ctx):
            command = self.commands.get(name)
            if name in self.lazy:
                rows.append((name, self.lazy[name].help))
            elif command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=200)))
        return rows


def _words(ctx: click.Context) -> list[str]:
    """Return the names of the groups of a context, without the program's."""
    if ctx.parent is None:
        return []
    return [*_words(ctx.parent), str(ctx.info_name)]


LazyGroup.group_class = LazyGroup


# ---- what a command keeps other packages from loading and starting, because it never uses it -----

_THREADS = "OPENBLAS_NUM_THREADS"


@contextmanager
def light_imports() -> Iterator[None]:
    """Save the processor time that other packages spend for nothing, while a command runs.

    - pyarrow loads pandas with its first array, if it is installed, as Spark requires: more than
      the rest of a short command. Only other packages that import pandas get it, for example Spark.
    - numpy starts a thread per core to multiply matrices. A setting of the user's stays.
    """
    finder, threads = _WithoutPandas(), os.environ.get(_THREADS)
    sys.meta_path.insert(0, finder)
    os.environ.setdefault(_THREADS, "1")
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if threads is None:
            os.environ.pop(_THREADS, None)


class _WithoutPandas:
    """A finder to which pandas is not installed if pyarrow asks, or this package through it."""

    def find_spec(self, name: str, *_: object) -> None:
        """Find nothing, so that the next finder is asked."""
        if name == "pandas" and _importer() in ("pyarrow", "arroyo_dagster"):
            raise ModuleNotFoundError("pyarrow needs no pandas here", name=name)


def _importer() -> str:
    """Return the package of the innermost code that is not Python's import machinery."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_MACHINERY):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_MACHINERY = ("importlib.", "_frozen_importlib")
