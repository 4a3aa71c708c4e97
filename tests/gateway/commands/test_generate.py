"""`tidegate generate`: the answer on stdout, the speed on stderr, one line for every mistake."""

import re
import signal
import subprocess

import pytest

from tests.gateway.commands.running import clean_environment, command, tidegate

QUESTION = "What is the capital of France? Answer in one short sentence."
SPEED = re.compile(
    r"prompt \d+ tokens, 0 cached, [\d.]+ tokens/s; output \d+ tokens, [\d.]+ tokens/s; "
    r"first token after [\d.]+ s(; cut at the limit of tokens)?\n"
)


@pytest.mark.slow
def test_the_answer_goes_to_stdout_and_its_speed_to_stderr(with_model):
    result = tidegate("generate", QUESTION, "--temperature", "0", "--max-tokens", "32", **with_model)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert SPEED.fullmatch(result.stderr), result.stderr


@pytest.mark.slow
def test_a_raw_prompt_from_stdin_is_completed_without_a_template(with_model):
    result = tidegate(
        *("generate", "-", "--raw", "--temperature", "0", "--max-tokens", "4"),
        stdin=b"1 2 3 4 5 6 7",
        **with_model,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" 8")
    assert "output 4 tokens" in result.stderr
    assert "cut at the limit of tokens" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "closed pipe"])
def test_a_user_who_has_read_enough_ends_it_quietly(with_model, how):
    arguments = command("generate", "--raw", "1 2 3 4 5", "--temperature", "0", "--max-tokens", "2000")
    with subprocess.Popen(
        arguments, env=clean_environment(with_model), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        if how == "interrupt":
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=60)
            assert running.returncode == 130
        else:
            running.stdout.close()
            assert running.stderr is not None
            said = running.stderr.read()
            assert running.wait(60) == 0
    assert b"Traceback" not in said
    assert said.strip() in (b"", b"Aborted.")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["x", "--temperature", "3"], "--temperature is '3'; it must be a number between 0 and 2"),
        (["x", "--temperature", "nan"], "--temperature is 'nan'; it must be a number between 0 and 2"),
        (["x", "--top-p", "0"], "--top-p is '0'; it must be a number between 0.0001 and 1"),
        (["x", "--max-tokens", "1.5"], "--max-tokens is '1.5'; it must be a whole number between 1 and "),
        (["x", "--seed", "one"], "--seed is 'one'; it must be a whole number between "),
        (["x", "--model", "/nope.gguf"], "/nope.gguf: there is no such file"),
        (["x", "--device", "tpu"], "--device is 'tpu'; it must be one of auto, cpu, cuda"),
        (["  "], "the prompt is empty"),
        (["-"], "the prompt is empty"),
        (["x", "--raw", "--system", "y"], "--raw takes no --system"),
    ],
)
def test_a_mistake_ends_in_one_line(arguments, line, default_model_path):
    result = tidegate("generate", *arguments, TIDEGATE_MODEL=str(default_model_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"tidegate: {line}")
    assert result.stderr.count("\n") == 1


def test_stdin_that_is_no_text_is_refused_in_one_line(default_model_path):
    result = tidegate("generate", "-", stdin=b"caf\xe9", TIDEGATE_MODEL=str(default_model_path))
    assert (result.returncode, result.stderr) == (
        1,
        "tidegate: stdin is not UTF-8: byte 3 cannot be read\n",
    )
