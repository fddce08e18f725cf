"""The command `specd shell-completion`: scripts that complete specd's commands and options.

The scripts are made from the commands themselves. They hold all words, so that Tab starts no process.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any

import typer

from specd.launch import PROCESSES, new_app, settings_options


class Shell(enum.Enum):
    """The shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True)
class Words:
    """The words that can follow a command: commands and options with their help, and the values of an option."""

    commands: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, list[str]] = field(default_factory=dict)


def shell_completion(
    context: typer.Context, shell: Annotated[Shell, typer.Argument(help="The shell, which reads the script.")]
) -> None:
    """Print a script that completes specd's commands in a shell.

    For bash: source <(specd shell-completion bash), also in ~/.bashrc. For zsh the same with zsh in ~/.zshrc, behind
    compinit. For fish: specd shell-completion fish > ~/.config/fish/completions/specd.fish
    """
    tree = dict(_tree(context.find_root().command, ""))
    writer = {Shell.BASH: _bash, Shell.ZSH: _zsh, Shell.FISH: _fish}[shell]
    typer.echo(writer(tree), nl=False)


def _tree(command: Any, path: str) -> Iterator[tuple[str, Words]]:
    """Yield the words behind each command, by its path: "" is specd itself, " models list" a command of a command."""
    subcommands = {}
    for name in getattr(command, "commands", ()):
        subcommand = _with_options(name) if not path and name in PROCESSES else command.get_command(None, name)
        subcommands[name] = subcommand
    options, values = {"--help": "Show this message and exit."}, {}
    for option in command.params:
        for flag in (*option.opts, *option.secondary_opts):
            if not flag.startswith("--"):
                continue
            options[flag] = _summary(getattr(option, "help", None) or "")
            if known := _values(option):
                values[flag] = known
    yield path, Words({name: _summary(each.help or "") for name, each in subcommands.items()}, options, values)
    for name, subcommand in subcommands.items():
        yield from _tree(subcommand, f"{path} {name}")


def _values(option: Any) -> list[str]:
    """Return the values that an option can have; empty if it takes any text. Typer's versions differ in where it is."""
    annotation = getattr(getattr(option, "type_descriptor", None), "annotation", None)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [str(member.value) for member in annotation]
    choices = getattr(getattr(option, "type", None), "choices", None) or ()
    return [str(getattr(choice, "value", choice)) for choice in choices]


def _with_options(process: str) -> Any:
    """Return the command of a process with its options, which the process itself reads otherwise."""
    from specd.coordinator_settings import CoordinatorSettings
    from specd.gateway_settings import GatewaySettings
    from specd.settings import DraftWorkerSettings, TargetWorkerSettings

    classes: dict[str, Any] = {
        "draft-worker": DraftWorkerSettings,
        "target-worker": TargetWorkerSettings,
        "coordinator": CoordinatorSettings,
        "gateway": GatewaySettings,
    }
    app = new_app(process)

    @app.command(help=PROCESSES[process])
    @settings_options(classes[process])
    def run(settings: Any) -> None:
        """Do nothing: only its options are read."""

    return import_module("typer").main.get_command(app)


def _summary(text: str) -> str:
    """Return the first sentence of a help text, in a line."""
    return " ".join(text.strip().split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def _walk(tree: Mapping[str, Words], indent: str) -> str:
    """Return the lines of bash and zsh that find the command among the words before the cursor."""
    paths = "|".join(f"'{path}'" for path in tree if path)
    return f"""\
{indent}for word in "${{before[@]}}"; do
{indent}    case "$command $word" in {paths}) command="$command $word" ;; esac
{indent}done
"""


def _bash(tree: Mapping[str, Words]) -> str:
    cases = []
    for path, words in tree.items():
        for flag, values in words.values.items():
            cases.append(f"        '{path} {flag}') words='{' '.join(values)}' ;;")
    lists = [
        f"        '{path}') words='{' '.join([*words.commands, *words.options])}' ;;" for path, words in tree.items()
    ]
    return f"""\
_specd() {{
    local command= word words= before=("${{COMP_WORDS[@]:1:COMP_CWORD-1}}") previous=${{COMP_WORDS[COMP_CWORD-1]}}
{_walk(tree, "    ")}    case "$command $previous" in
{chr(10).join(cases)}
    esac
    [[ $words ]] || case "$command" in
{chr(10).join(lists)}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _specd specd
"""


def _zsh(tree: Mapping[str, Words]) -> str:
    cases = []
    for path, words in tree.items():
        for flag, values in words.values.items():
            cases.append(f"        '{path} {flag}') found=({' '.join(values)}) ;;")
    lists = []
    for path, words in tree.items():
        described = [_quoted(f"{name}:{text}") for name, text in {**words.commands, **words.options}.items()]
        lists.append(f"        '{path}') found=({' '.join(described)}) ;;")
    return f"""\
#compdef specd
_specd() {{
    local command= word previous=${{words[CURRENT-1]}}
    local -a found before=("${{(@)words[2,CURRENT-1]}}")
{_walk(tree, "    ")}    case "$command $previous" in
{chr(10).join(cases)}
    esac
    (( $#found )) || case "$command" in
{chr(10).join(lists)}
    esac
    _describe specd found || _files
}}
compdef _specd specd
"""


def _fish(tree: Mapping[str, Words]) -> str:
    paths = " ".join(f"'{path}'" for path in tree if path)
    lines = [
        "function __specd_at",
        "    set -l command ''",
        "    for word in (commandline -opc)[2..]",
        f'        contains -- "$command $word" {paths}; and set command "$command $word"',
        "    end",
        '    test "$command" = "$argv[1]"',
        "end",
    ]
    for path, words in tree.items():
        at = f"complete -c specd -n \"__specd_at '{path}'\""
        lines += [f"{at} -f -a '{name}' -d {_quoted_for_fish(text)}" for name, text in words.commands.items()]
        for flag, text in words.options.items():
            values = f" -x -a '{' '.join(words.values[flag])}'" if flag in words.values else ""
            lines.append(f"{at} -l '{flag[2:]}' -d {_quoted_for_fish(text)}{values}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _quoted_for_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
