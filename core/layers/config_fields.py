"""Typed reads of a checkpoint's metadata. Every lie becomes a `ValueError` naming the key."""

from collections.abc import Mapping


class Fields:
    """One metadata mapping; `prefix` goes before each key."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self.values, self.prefix = values, prefix

    def has(self, key: str) -> bool:
        return self.values.get(self.prefix + key) is not None

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """Raises `KeyError` where there is neither a value nor a default."""
        name = self.prefix + key
        value = self.values.get(name, default)
        if value is None:
            if default is None:
                raise KeyError(name)
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{name} is {value!r:.60}; it must be a number between {low:g} and {high:g}")
        return value

    def integer(self, key: str, high: int = 1 << 20, *, default: int | None = None) -> int:
        value = self.number(key, low=1, high=high, default=default)
        if value != int(value):
            raise ValueError(f"{self.prefix}{key} is {value!r}; it must be a whole number")
        return int(value)

    def require(self, key: str, *allowed: object) -> None:
        """Refuse a setting that would change the arithmetic; absent is allowed."""
        value = self.values.get(self.prefix + key)
        if value is not None and value not in allowed:
            names = ", ".join(str(item) for item in allowed)
            raise ValueError(f"{self.prefix}{key} {value!r:.60} is not supported; supported: {names}")
