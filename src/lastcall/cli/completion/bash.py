"""Completion for bash, from version 4 on; it does not need the package bash-completion."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator

from lastcall.cli.completion.grammar import CompletedCommand, CompletedValue

_SCRIPT = """\
# bash completion for lastcall: eval "$(lastcall completion bash)"

# What follows the option $2 of the command $1: sets `value`, empty if none does.
_lastcall_value() {
  value=
  case "$1 $2" in
@values@
  esac
}

# The command $1: sets its subcommands, its options, its arguments, and whether another command may follow.
_lastcall_command() {
  commands= options= arguments=() rest= another=
  case "$1" in
@commands@
  esac
}

_lastcall_offer() {  # $1: what a value is, $2: what is typed of it
  local IFS=$'\\n'
  case "$1" in
    folders) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -d -- "$2")) ;;
    files) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$2")) ;;
    words:*) IFS=' '; COMPREPLY=($(compgen -W "${1#words:}" -- "$2")) ;;
  esac
}

_lastcall_another() {  # the command that begins at the word number $1
  if declare -F _command_offset >/dev/null; then
    _command_offset "$1"
  elif ((COMP_CWORD == $1)); then
    COMPREPLY=($(compgen -c -- "${COMP_WORDS[COMP_CWORD]}"))
  else
    _lastcall_offer files "${COMP_WORDS[COMP_CWORD]}"
  fi
}

_lastcall() {
  local path= word current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
  local value commands options arguments rest another count=0 i
  COMPREPLY=()
  _lastcall_command ""
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if [[ $word == -- ]]; then
      [[ $another ]] && _lastcall_another $((i + 1))
      return
    elif [[ $word == -* ]]; then
      _lastcall_value "$path" "$word"
      if [[ $value ]]; then
        [[ ${COMP_WORDS[i+1]} == = ]] && ((i++))  # bash takes --option=value for three words
        ((i++))
      fi
    elif [[ " $commands " == *" $word "* ]]; then
      path=${path:+$path }$word
      _lastcall_command "$path"
    elif [[ $another == first ]]; then
      _lastcall_another "$i"
      return
    else
      ((count++))
    fi
  done
  if [[ $current == = ]]; then
    current=
  elif [[ $before == = ]]; then
    before=${COMP_WORDS[COMP_CWORD-2]}
  fi
  if [[ $before == -* ]]; then
    _lastcall_value "$path" "$before"
    if [[ $value ]]; then
      _lastcall_offer "$value" "$current"
      return
    fi
  fi
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  elif [[ $commands ]]; then
    COMPREPLY=($(compgen -W "$commands" -- "$current"))
  elif [[ $another == first ]]; then
    _lastcall_another "$COMP_CWORD"
  else
    _lastcall_offer "${arguments[count]:-$rest}" "$current"
  fi
}

complete -F _lastcall lastcall
"""


def script(root: CompletedCommand) -> str:
    values, commands = "\n".join(_values(root)), "\n".join(_commands(root))
    return _SCRIPT.replace("@values@", values).replace("@commands@", commands)


def _values(root: CompletedCommand) -> Iterator[str]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for command in root.all():
        for option in command.options:
            if option.value is not None:
                kinds[_kind(option.value)] += [f"{' '.join(command.path)} {name}" for name in option.names]
    for kind, names in kinds.items():
        yield f"    {'|'.join(map(shlex.quote, names))}) value={shlex.quote(kind)} ;;"


def _commands(root: CompletedCommand) -> Iterator[str]:
    for command in root.all():
        parts = [
            f"commands={shlex.quote(' '.join(each.path[-1] for each in command.below))}",
            f"options={shlex.quote(' '.join(name for option in command.options for name in option.names))}",
        ]
        if command.values:
            parts.append(f"arguments=({' '.join(shlex.quote(_kind(value)) for value in command.values)})")
            if command.values[-1].repeats:
                parts.append(f"rest={shlex.quote(_kind(command.values[-1]))}")
        if command.runs_another:
            parts.append(f"another={'later' if command.values else 'first'}")
        yield f"    {shlex.quote(' '.join(command.path))}) {' '.join(parts)} ;;"


def _kind(value: CompletedValue) -> str:
    return f"words:{' '.join(value.words)}" if value.words else value.completes.value
