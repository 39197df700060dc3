"""Completion for fish."""

from __future__ import annotations

from collections.abc import Iterator

from lastcall.cli.completion.grammar import CompletedCommand, CompletedOption, CompletedValue, Completes

_SCRIPT = """\
# fish completion for lastcall: lastcall completion fish > ~/.config/fish/completions/lastcall.fish

# What is typed so far, without options and their values: sets the command, how many arguments it has, and the
# words of another command that it runs.
function __lastcall_read
    set -g __lastcall_path
    set -g __lastcall_count 0
    set -g __lastcall_other
    set -l words (commandline -opc)
    set -l number 2
    while test $number -le (count $words)
        set -l word $words[$number]
        set number (math $number + 1)
        if test "$word" = --
            set -g __lastcall_other -- $words[$number..]
            return
        else if string match -q -- '-*' $word
            contains -- "$__lastcall_path $word" $__lastcall_valued; and set number (math $number + 1)
        else if contains -- (string trim "$__lastcall_path $word") $__lastcall_commands
            set -g __lastcall_path (string trim "$__lastcall_path $word")
        else if contains -- "$__lastcall_path" $__lastcall_first
            set -g __lastcall_other -- $words[(math $number - 1)..]
            return
        else
            set -g __lastcall_count (math $__lastcall_count + 1)
        end
    end
end

function __lastcall_at -a path  # is this the command that is typed, and its own part of the line?
    __lastcall_read
    test "$__lastcall_path" = "$path" -a (count $__lastcall_other) -eq 0
end

function __lastcall_argument -a path number  # is this its argument with this number? 0: any
    __lastcall_at $path; and test $number -eq 0 -o "$__lastcall_count" -eq (math $number - 1)
end

function __lastcall_another  # is this a part of another command?
    __lastcall_read
    test (count $__lastcall_other) -gt 0
    and contains -- "$__lastcall_path" $__lastcall_first $__lastcall_later
end

function __lastcall_offer_another
    __lastcall_read
    complete -C (string join ' ' -- (string escape -- $__lastcall_other[2..]) (commandline -ct))
end

@tables@

complete -c lastcall -f
complete -c lastcall -n __lastcall_another -a '(__lastcall_offer_another)'
@completions@
"""


def script(root: CompletedCommand) -> str:
    tables, completions = "\n".join(_tables(root)), "\n".join(_completions(root))
    return _SCRIPT.replace("@tables@", tables).replace("@completions@", completions)


def _tables(root: CompletedCommand) -> Iterator[str]:
    commands = list(root.all())
    valued = [
        f"{' '.join(command.path)} {name}"
        for command in commands
        for option in command.options
        if option.value is not None
        for name in option.names
    ]
    first = [" ".join(one.path) for one in commands if one.runs_another and not one.values]
    later = [" ".join(one.path) for one in commands if one.runs_another and one.values]
    paths = [" ".join(command.path) for command in commands if command.path]
    for name, words in (("commands", paths), ("valued", valued), ("first", first), ("later", later)):
        yield f"set -g __lastcall_{name} {' '.join(map(_quoted, words))}"


def _completions(root: CompletedCommand) -> Iterator[str]:
    for command in root.all():
        path = " ".join(command.path)
        at = _quoted(f"__lastcall_at {_quoted(path)}")
        for each in command.below:
            yield f"complete -c lastcall -n {at} -a {each.path[-1]} -d {_quoted(each.help)}"
        for option in command.options:
            yield f"complete -c lastcall -n {at} {_option(option)}"
        for number, value in enumerate(command.values, 1):
            number = 0 if value.repeats else number
            there = _quoted(f"__lastcall_argument {_quoted(path)} {number}")
            if value.completes is not Completes.NOTHING:
                yield f"complete -c lastcall -n {there} {_offer(value)}"
        if command.runs_another and not command.values:
            yield f"complete -c lastcall -n {at} -a '(__fish_complete_command)'"


def _option(option: CompletedOption) -> str:
    names = " ".join(
        f"-l {name.removeprefix('--')}" if name.startswith("--") else f"-s {name.removeprefix('-')}"
        for name in option.names
    )
    described = f"{names} -d {_quoted(option.help)}" if option.help else names
    if option.value is None:
        return described
    if option.value.completes is Completes.NOTHING:
        return f"{described} -x"
    return f"{described} -r {_offer(option.value)}"


def _offer(value: CompletedValue) -> str:
    if value.completes is Completes.FILES:
        return "-F"
    if value.completes is Completes.FOLDERS:
        return "-f -a '(__fish_complete_directories (commandline -ct))'"
    return f"-f -a {_quoted(' '.join(value.words))}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
