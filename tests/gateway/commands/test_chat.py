"""`tidegate chat`: piped in line by line, and at a terminal with Ctrl-C."""

import re
import signal

import pytest

from tests.gateway.commands.running import at_terminal, tidegate

pytestmark = pytest.mark.slow


def test_a_piped_conversation_reuses_its_prefix_until_it_is_reset(with_model):
    lines = b"Say hello.\nSay it again.\n/reset\nSay hello.\n/dance\n/quit\nnever read\n"
    result = tidegate("chat", "--temperature", "0", "--max-tokens", "6", stdin=lines, **with_model)
    assert result.returncode == 0, result.stderr
    answers = result.stdout.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2] != ""
    turns = [
        tuple(map(int, found)) for found in re.findall(r"prompt (\d+) tokens, (\d+) cached", result.stderr)
    ]
    assert len(turns) == 3
    (first, cached), (second, reused), (again, kept) = turns
    assert cached == 0
    # All full blocks of the first turn are found again, by the second turn and by the repetition.
    assert reused >= first // 16 * 16 > 0
    assert second > first
    assert (again, kept) == (first, (first - 1) // 16 * 16)
    assert "there is no /dance" in result.stderr


def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_chat(with_model):
    with at_terminal("chat", "--temperature", "0", "--max-tokens", "1000", **with_model) as terminal:
        terminal.wait_for("> ")
        terminal.type("Count from 1 to 500, one number per line, without stopping.\n")
        terminal.wait_for("\n")
        terminal.wait_for("2")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("interrupted")
        terminal.wait_for("> ")
        terminal.type("/system Answer with one word.\n")
        terminal.wait_for("system message set")
        terminal.wait_for("> ")
        assert terminal.interrupt_until_it_ends() in (0, 130)


def test_a_message_that_cannot_fit_is_refused_and_the_chat_goes_on(with_model):
    lines = b"word " * 9000 + b"\nHi\n"
    result = tidegate("chat", "--temperature", "0", "--max-tokens", "3", stdin=lines, **with_model)
    assert result.returncode == 0
    assert "Traceback" not in result.stderr
    assert "context" in result.stderr
    assert result.stderr.count("; output 3 tokens") == 1


@pytest.mark.parametrize("utf8_mode", ["0", "1"])
def test_input_that_is_no_text_ends_the_chat_in_one_line(with_model, utf8_mode):
    result = tidegate("chat", stdin=b"caf\xe9\n", PYTHONUTF8=utf8_mode, **with_model)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "tidegate: stdin is not UTF-8"
    assert "Traceback" not in result.stderr
