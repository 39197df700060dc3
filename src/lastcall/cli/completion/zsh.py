"""Completion for zsh."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lastcall.cli.completion.grammar import CompletedCommand, CompletedOption, CompletedValue, Completes

_ACTIONS = {Completes.FOLDERS: "_files -/", Completes.FILES: "_files", Completes.NOTHING: " "}
_SCRIPT = """\
#compdef lastcall
# zsh completion for lastcall: eval "$(lastcall completion zsh)", below compinit

# The command behind `--`, if the cursor is there.
_lastcall_another() {
  local at=${words[(i)--]}
  (( at < CURRENT )) || return 1
  shift $at words
  (( CURRENT -= at ))
  _normal
  return 0
}

@functions@
# An autoloaded file is called for the first time as the function itself.
if [[ $funcstack[1] == _lastcall ]]; then
  _lastcall "$@"
else
  compdef _lastcall lastcall
fi
"""


def script(root: CompletedCommand) -> str:
    return _SCRIPT.replace("@functions@", "\n".join(_function(command) for command in root.all()))


def _function(command: CompletedCommand) -> str:
    lines = [f"{_name(command)}() {{"]
    if command.runs_another:
        lines.append("  _lastcall_another && return")
    if command.below:
        lines.append("  local curcontext=$curcontext state line ret=1")
    lines.append(f"  _arguments {'-C ' if command.below else ''}-s -S \\")
    specs = [*(spec for option in command.options for spec in _options(option)), *_arguments(command)]
    lines += [f"    {_quoted(spec)} \\" for spec in specs[:-1]]
    lines.append(f"    {_quoted(specs[-1])}{' && ret=0' if command.below else ''}")
    if command.below:
        lines += _dispatch(command)
    return "\n".join([*lines, "}", ""])


def _dispatch(command: CompletedCommand) -> Iterator[str]:
    yield "  case $state in"
    yield "    command)"
    yield "      local -a commands=("
    for each in command.below:
        yield f"        {_quoted(f'{each.path[-1]}:{each.help}')}"
    yield "      )"
    yield "      _describe -t commands command commands && ret=0 ;;"
    yield "    rest)"
    yield "      case $words[1] in"
    for each in command.below:
        yield f"        {each.path[-1]}) {_name(each)} && ret=0 ;;"
    yield "      esac ;;"
    yield "  esac"
    yield "  return ret"


def _options(option: CompletedOption) -> Iterator[str]:
    """One specification for each name; the other names are excluded once one is there."""
    value = "" if option.value is None else f":{option.value.name}:{_action(option.value)}"
    others = "" if option.repeats else f"({' '.join(option.names)})" if len(option.names) > 1 else ""
    for name in option.names:
        equals = "=" if option.value is not None and name.startswith("--") else ""
        yield f"{'*' if option.repeats else others}{name}{equals}[{_escaped(option.help)}]{value}"


def _arguments(command: CompletedCommand) -> Iterator[str]:
    if command.below:
        yield "1:command:->command"
        yield "*::argument:->rest"
        return
    for number, value in enumerate(command.values, 1):
        place = "*" if value.repeats else str(number)
        yield f"{place}:{'' if value.required else ':'}{_escaped(value.name)}:{_action(value)}"
    if command.runs_another and not command.values:
        yield "(-)1:command:_command_names -e"
        yield "*::arguments:_normal"


def _action(value: CompletedValue) -> str:
    return f"({' '.join(value.words)})" if value.words else _ACTIONS[value.completes]


def _name(command: CompletedCommand) -> str:
    return "_".join(("_lastcall", *command.path))


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
