"""Who may ask: keys from a file, kept as hashes, each standing for a tenant.

One key per line: `key`, `name: key`, `sha256:<64 hex digits>` or `name: sha256:<64 hex digits>`.
Empty lines and lines that start with `#` are skipped. Several keys may have one name: then one can
be replaced by another without the tenant losing its cached prompts.
"""

import hashlib
import hmac
import re
import stat
from pathlib import Path

import msgspec

from core import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1024
"""Every key is compared at each request, so that the time tells nothing."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
# RFC 6750's characters of a bearer token, and long enough not to be guessed.
_KEY = re.compile(r"[A-Za-z0-9\-._~+/]{16,512}=*")
_HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")


class ApiKey(msgspec.Struct, frozen=True):
    """A key's hash, and the tenant it stands for."""

    digest: bytes
    tenant: str


class ApiKeys:
    """The keys that open the server. Immutable; never empty."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        assert keys, "nobody could ask anything"
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def tenant_of(self, key: str) -> str | None:
        """Return whose key it is, or None. Takes as long for a wrong key as for a right one."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        tenant: str | None = None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                tenant = known.tenant
        return tenant


class KeyFile(msgspec.Struct, frozen=True):
    """What a key file held, and what is risky about it in one line, if something is."""

    keys: ApiKeys
    warning: str | None = None


def read_key_file(path: str) -> KeyFile:
    """Read and hash all keys.

    A file that everybody may write is refused; one with plain keys that everybody may read is
    used with a warning, since mounted secrets often are like that.

    Raises:
        ConfigError: naming the file, and the line by its number, never by its text.
    """
    lines, mode = _read_lines(path)
    if mode & stat.S_IWOTH:
        raise ConfigError(f"{path}: everybody may write this key file: chmod o-w it")
    keys: dict[bytes, ApiKey] = {}
    has_plain = False
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        key, is_plain = _parse(text, where=f"{path}, line {number}")
        has_plain = has_plain or is_plain
        if key.digest in keys:
            raise ConfigError(f"{path}, line {number}: this key stands there twice")
        keys[key.digest] = key
        if len(keys) > MAX_KEYS:
            raise ConfigError(f"{path}: has more than {MAX_KEYS} keys")
    if not keys:
        raise ConfigError(f"{path}: holds no key; nobody could use the server")
    readable = has_plain and mode & stat.S_IROTH
    warning = f"{path}: everybody may read these keys: chmod 600 it, or keep hashes" if readable else None
    return KeyFile(ApiKeys(tuple(keys.values())), warning)


def _read_lines(path: str) -> tuple[list[str], int]:
    """The file's lines and its mode."""
    try:
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode):  # a pipe would wait for its writer
            raise ConfigError(f"{path}: is not a regular file")
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:  # a null byte in the path
        raise ConfigError(f"{path!r}: cannot be read: not a path") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").split("\n"), mode
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text") from None


def _parse(text: str, *, where: str) -> tuple[ApiKey, bool]:
    """One line as a key; True beside it if the key stood there in the clear."""
    named = ":" in text and not text.startswith("sha256:")  # no key has a colon in it
    name, secret = (part.strip() for part in text.split(":", 1)) if named else ("", text)
    if named and not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name is 1 to 64 letters, digits, '_', '.' or '-'")
    if secret.startswith("sha256:"):
        found = _HASH.fullmatch(secret)
        if found is None:
            raise ConfigError(f"{where}: a sha256 hash has 64 hexadecimal digits")
        digest, is_plain = bytes.fromhex(found[1]), False
    elif _KEY.fullmatch(secret):
        digest, is_plain = hashlib.sha256(secret.encode()).digest(), True
    else:
        raise ConfigError(f"{where}: a key is 16 to 512 letters, digits or '-._~+/', and '=' at its end")
    # A name of its own for each nameless key; one way only, and too short to try keys against.
    return ApiKey(digest, name or f"key-{hashlib.sha256(digest).hexdigest()[:8]}"), is_plain
