"""Key files: what is read, what is refused and in which words."""

import hashlib
import os
from pathlib import Path

import pytest

from core import ConfigError
from gateway.api_keys import MAX_FILE_BYTES, MAX_KEYS, read_key_file

KEY = "tide-0123456789abcdef"
OTHER = "tide-fedcba9876543210"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def key_file(folder: Path, text: str | bytes, *, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("line", "tenant"),
    [
        (f"alice: {KEY}", "alice"),
        (f"alice:{KEY}", "alice"),
        (f"  alice :  {KEY}  ", "alice"),
        (f"alice: sha256:{sha256(KEY)}", "alice"),
        (f"alice: sha256:{sha256(KEY).upper()}", "alice"),
    ],
)
def test_a_name_and_a_key_or_its_hash_stand_on_a_line(tmp_path: Path, line: str, tenant: str) -> None:
    keys = read_key_file(key_file(tmp_path, f"# staff\n\n{line}\r\n")).keys
    assert len(keys) == 1
    assert keys.tenant_of(KEY) == tenant
    assert keys.tenant_of(OTHER) is None


def test_a_key_without_a_name_stands_for_itself_plain_or_hashed(tmp_path: Path) -> None:
    plain = read_key_file(key_file(tmp_path, f"{KEY}\n{OTHER}\n")).keys
    hashed = read_key_file(key_file(tmp_path, f"sha256:{sha256(KEY)}\n")).keys
    assert plain.tenant_of(KEY) == hashed.tenant_of(KEY)
    assert plain.tenant_of(KEY) not in (None, plain.tenant_of(OTHER))
    assert sha256(KEY)[:6] not in str(plain.tenant_of(KEY))  # logs do not help to guess


def test_two_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    keys = read_key_file(key_file(tmp_path, f"a: {KEY}\na: {OTHER}\n")).keys
    assert keys.tenant_of(KEY) == keys.tenant_of(OTHER) == "a"


def test_no_key_stays_in_memory_in_the_clear(tmp_path: Path) -> None:
    keys = read_key_file(key_file(tmp_path, f"a: {KEY}\n")).keys
    assert KEY not in repr(vars(keys))


@pytest.mark.parametrize("key", ["", " ", KEY[:-1], KEY + "0", KEY.upper(), "\ud800", "é" * 20, sha256(KEY)])
def test_anything_but_the_key_is_nobodys(tmp_path: Path, key: str) -> None:
    assert read_key_file(key_file(tmp_path, f"a: {KEY}\n")).keys.tenant_of(key) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        ("short\n", "line 1: a key is 16 to 512"),
        (f"a: {KEY}\nb: has spaces in it, many\n", "line 2: a key is 16 to 512"),
        ("a: sha256:12ab\n", "line 1: a sha256 hash has 64"),
        ("sha256:" + "g" * 64, "line 1: a sha256 hash has 64"),
        ("a: abcdefghijklmnop\x0bqrstuvwxyzabcdefgh\n", "line 1: a key is 16 to 512"),
        ("a: abcdefghijklmnop\rqrstuvwxyzabcdefgh\n", "line 1: a key is 16 to 512"),
        (f"my name: {KEY}\n", "line 1: a name is 1 to 64"),
        (f": {KEY}\n", "line 1: a name is 1 to 64"),
        (f"a: {KEY}\nb: {KEY}\n", "line 2: this key stands there twice"),
        (f"a: {KEY}\nsha256:{sha256(KEY)}\n", "line 2: this key stands there twice"),
        (b"\xff\xfe\x00", "is not text"),
        (b"#" * (MAX_FILE_BYTES + 1), "is larger than"),
        ("".join(f"key-number-{i:020d}\n" for i in range(MAX_KEYS + 1)), "has more than"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_without_its_secrets(
    tmp_path: Path, text: str | bytes, problem: str
) -> None:
    path = key_file(tmp_path, text)
    with pytest.raises(ConfigError) as refusal:
        read_key_file(path)
    said = str(refusal.value)
    assert path in said
    assert problem in said
    assert "\n" not in said
    assert KEY not in said
    assert "has spaces" not in said


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "null byte"])
def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "keys"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match="keys"):
        read_key_file(str(path) + ("\0" if kind == "null byte" else ""))


def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="everybody may write"):
        read_key_file(key_file(tmp_path, KEY, mode=0o602))


def test_plain_keys_that_everybody_may_read_are_warned_about_and_hashes_are_not(tmp_path: Path) -> None:
    warning = read_key_file(key_file(tmp_path, KEY, mode=0o644)).warning
    assert warning is not None
    assert "everybody may read" in warning
    assert read_key_file(key_file(tmp_path, KEY, mode=0o640)).warning is None
    assert read_key_file(key_file(tmp_path, f"sha256:{sha256(KEY)}", mode=0o644)).warning is None


def test_a_key_is_compared_with_every_known_one_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = read_key_file(key_file(tmp_path, f"a: {KEY}\nb: {OTHER}\n")).keys
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr("gateway.api_keys.hmac.compare_digest", compare)
    for key in (KEY, OTHER, "wrong", ""):
        compared.clear()
        keys.tenant_of(key)
        assert compared == [(32, 32)] * 2
