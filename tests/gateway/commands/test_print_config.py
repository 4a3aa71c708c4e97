"""`tidegate serve --print-config`: every option in force, where it came from, and readable again."""

import tomllib

import pytest

from gateway.commands.print_config import config_as_toml
from gateway.config import ENVIRONMENT_PREFIX, FLAG_OF_FIELD, build_config, gather_options
from tests.gateway.commands.running import tidegate
from tests.gateway.test_config import ANOTHER_VALUE, NEEDED


@pytest.mark.parametrize("name", sorted(ANOTHER_VALUE))
def test_every_option_is_printed_so_that_it_reads_back_the_same(tmp_path, name):
    text, _ = ANOTHER_VALUE[name]
    name = FLAG_OF_FIELD.get(name, name)
    given = {name: text, **NEEDED.get(name, {})}
    environment = {ENVIRONMENT_PREFIX + key.upper(): value for key, value in given.items()}
    options = gather_options(flags={}, environment=environment)
    config = build_config(options, checkpoint="")
    printed = config_as_toml(config, options)
    (line,) = (line for line in printed.splitlines() if line.startswith(f"{name} = "))
    assert line.endswith(f"  # {ENVIRONMENT_PREFIX}{name.upper()}")
    (tmp_path / "printed.toml").write_text(printed)
    again = gather_options(flags={}, environment={}, file=tmp_path / "printed.toml")
    assert build_config(again, checkpoint="") == config


@pytest.mark.parametrize("text", ['a"b\\c', "tab\there", "line\nbreak", "del\x7f", "é 😀", "# no comment"])
def test_any_text_survives(tmp_path, text):
    options = gather_options(flags={"cache_dir": text, "model": text}, environment={})
    config = build_config(options, checkpoint="")
    (tmp_path / "printed.toml").write_text(config_as_toml(config, options))
    again = gather_options(flags={}, environment={}, file=tmp_path / "printed.toml")
    assert build_config(again, checkpoint="") == config


def test_the_command_names_the_source_of_each_value(tmp_path):
    file = tmp_path / "tidegate.toml"
    file.write_text('port = 1\nhost = "1.1.1.1"\naliases = ["a"]\n[engine]\nblock_size = 1\n')
    result = tidegate(
        *("serve", "--print-config", "--config", str(file), "--port", "3"),
        TIDEGATE_HOST="2.2.2.2",
        TIDEGATE_PORT="2",
        TIDEGATE_CACHE=str(tmp_path),
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "port = 3  # --port\n" in result.stdout
    assert 'host = "2.2.2.2"  # TIDEGATE_HOST\n' in result.stdout
    assert f'alias = ["a"]  # aliases in {file}\n' in result.stdout
    assert f"block_size = 1  # block_size in {file}\n" in result.stdout
    assert 'log_level = "info"  # default\n' in result.stdout
    assert tomllib.loads(result.stdout)["engine"]["block_size"] == 1
    assert list(tmp_path.iterdir()) == [file], "nothing was fetched"


def test_a_wrong_option_is_refused_instead_of_printed():
    result = tidegate("serve", "--print-config", "--port", "70000")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "tidegate: --port is 70000; it must be between 0 and 65535\n"
