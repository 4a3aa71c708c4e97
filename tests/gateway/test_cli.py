"""The command line as a user meets it: in a process of its own, one line per mistake."""

import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import serve
from gateway.config import ENGINE_FIELDS, FIELD_OF_FLAG, SERVER_FIELDS
from tests.gateway.commands.running import clean_environment, tidegate


def test_every_option_has_a_flag_and_every_flag_an_option():
    flags = set(inspect.signature(serve).parameters) - {"model", "config", "print_config"}
    assert {FIELD_OF_FLAG.get(flag, flag) for flag in flags} == SERVER_FIELDS | ENGINE_FIELDS


def test_the_help_of_serve_names_each_options_variable():
    shown = tidegate("serve", "--help").stdout
    for flag in set(inspect.signature(serve).parameters) - {"config", "print_config"}:
        assert f"(TIDEGATE_{flag.upper()})" in shown


COMMANDS = ("serve", "generate", "chat", "doctor", "inspect", "top", "pull")


def test_the_help_lists_every_command_in_one_line_each():
    result = tidegate("--help", COLUMNS="80")
    assert result.returncode == 0
    listed = [line.split() for line in result.stdout.partition("Commands:\n")[2].splitlines()]
    assert [words[0] for words in listed] == list(COMMANDS)
    assert all(words[-1].endswith(".") and not words[-1].endswith("...") for words in listed)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_that_says_what_it_does_and_shows_defaults_once(command):
    result = tidegate(command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: tidegate {command} ")
    assert len(result.stdout.splitlines()[2].strip()) > 20


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell):
    # Away from a terminal the shell is named instead of recognised.
    script = tidegate("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert (script.returncode, script.stderr) == (0, "")
    assert f"_TIDEGATE_COMPLETE=complete_{shell}" in script.stdout
    words = {"COMP_WORDS": "tidegate ins", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "tidegate ins"}
    done = tidegate(
        stdin=b"",
        _TIDEGATE_COMPLETE=f"complete_{shell}",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
        **words,
    )
    assert "inspect" in done.stdout
    assert "serve" not in done.stdout


def test_the_version_is_printed_without_loading_anything_heavy():
    code = (
        "import sys; from gateway.cli import main; sys.argv = ['tidegate', '--version']\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'aiohttp', 'tokenizers', 'numpy', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("tidegate ")


WRITE_A_FILE = (
    "give the path of a TOML file to --config or TIDEGATE_CONFIG "
    "(`tidegate serve --print-config` writes one), or neither"
)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--port", "abc"], "tidegate: --port is 'abc'; it must be a whole number"),
        (["serve", "--port", "70000"], "tidegate: --port is 70000; it must be between 0 and 65535"),
        (["serve", "--device", "tpu"], "tidegate: --device is 'tpu'; it must be one of auto, cpu, cuda"),
        (["serve", "--block-size", "0"], "tidegate: --block-size is 0; it must be between 1 and 256"),
        (
            ["serve", "--config", "/nowhere.toml"],
            "tidegate: /nowhere.toml: cannot be read: No such file or directory; " + WRITE_A_FILE,
        ),
    ],
)
def test_a_wrong_option_ends_in_one_line_and_a_code(arguments, line):
    result = tidegate(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", line + "\n")


def test_an_unknown_option_is_named_without_a_traceback():
    result = tidegate("serve", "--prot", "1")
    assert result.returncode == 2
    assert "No such option: --prot" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_variable_is_named():
    result = tidegate("serve", TIDEGATE_MAX_RUNNING="many")
    assert (result.returncode, result.stderr) == (
        1,
        "tidegate: TIDEGATE_MAX_RUNNING is 'many'; it must be a whole number\n",
    )


def test_a_model_that_cannot_be_fetched_ends_in_one_line(tmp_path):
    result = tidegate(
        "pull", TIDEGATE_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS=""
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert (
        "could not be downloaded (pip said: No matching distribution found" in result.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize("kind", ["missing", "truncated", "not a model", "a directory"])
def test_a_model_file_that_is_no_use_ends_in_one_line(tmp_path, kind):
    path = tmp_path / "model.gguf"
    match kind:
        case "truncated":
            path.write_bytes(b"GGUF\3\0\0\0\1")
        case "not a model":
            path.write_bytes(b"PK\3\4 and so on")
        case "a directory":
            path.mkdir()
    result = tidegate("serve", str(path), "--port", "0")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert str(path) in last


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file; give the path of a .gguf file or of a model folder"),
        (
            b"Dear reader, this is a letter.",
            'starts with "Dear" and should start with "GGUF"; give the path of',
        ),
        (b"GGUF\3\0\0\0" + b"\1" * 90, "it is truncated or damaged; download or copy it again"),
    ],
)
def test_a_model_file_that_is_no_use_says_the_next_step(tmp_path, content, said):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    result = tidegate("serve", str(path), "--port", "0", "--executor", "thread")
    assert result.returncode == 1
    assert said in result.stderr.splitlines()[-1]
    if content is None:
        assert "model_loading" not in result.stderr, "it is known before anything starts"


def test_a_model_path_that_cannot_be_one_ends_before_anything_starts():
    result = tidegate("serve", "/" + "x" * 5000, "--model-id", "m")
    assert result.returncode == 1
    assert "File name too long; check the path" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no-such-host.invalid", "the host cannot be resolved ("),
        ("192.0.2.1", "it is no address of this machine; choose another --host"),
    ],
)
def test_a_host_that_cannot_be_listened_on_is_told_apart_from_a_busy_port(tmp_path, host, said):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    result = tidegate("serve", str(tmp_path / "model.gguf"), "--host", host)
    assert result.returncode == 1
    assert result.stderr.startswith(f"tidegate: cannot listen on {host}:8000: ")
    assert said in result.stderr
    assert "--port" not in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-model-len", "99999"], "--max-model-len is 99999; the model's own context is 8192 tokens"),
        (["--kv-bytes", "900T"], f"--kv-bytes is {900 << 40}; the KV pool would take "),
    ],
)
def test_what_the_model_or_the_machine_cannot_give_is_refused_by_flag(default_model_path, arguments, said):
    result = tidegate("serve", str(default_model_path), "--port", "0", *arguments)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"tidegate: {said}")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [["generate", "Hi"], ["chat"]])
def test_a_command_without_a_server_names_the_variable_too(default_model_path, words):
    result = tidegate(*words, "--model", str(default_model_path), TIDEGATE_MAX_MODEL_LEN="99999")
    assert result.returncode == 1
    assert "tidegate: TIDEGATE_MAX_MODEL_LEN is 99999; the model's own context is 8192" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(("redirections", "code"), [(">&-", 0), ("<&-", 0), ("2>&-", 0), (">/dev/full", 1)])
def test_closed_or_full_streams_are_no_traceback(redirections: str, code: int) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m gateway --version {redirections}"
    ended = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    if code:
        assert ended.stderr == "tidegate: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["doctor --port 0 --threads 1", "serve --print-config"])
def test_a_reader_who_has_seen_enough_is_no_failure(default_model_path: Path, command: str) -> None:
    tidegate_command = f"{shlex.quote(sys.executable)} -m gateway {command}"
    ended = subprocess.run(
        ["bash", "-c", f"{tidegate_command} | true; exit ${{PIPESTATUS[0]}}"],
        env=clean_environment({"TIDEGATE_MODEL": str(default_model_path)}),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
