"""The small durable JSON key-value store of an object."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from typing import Any

from celery_lifecycle import validate
from celery_lifecycle.deployment import Deployment
from celery_lifecycle.model import ObjectRef


class Storage(MutableMapping[str, Any]):
    """JSON values of one object by key; outside a run each write is stored at once.

    It is a mutable mapping: `storage["key"] = value`, `storage.get("key")`, `del storage["key"]`, iteration in key order.
    Keys: 1 to 200 bytes; values: JSON of at most 2 MB.

    Raises:
        PayloadError: a value is not JSON or too large.
        NameInvalid: a key is not allowed.
    """

    def __init__(self, deployment: Deployment, ref: ObjectRef) -> None:
        self._deployment = deployment
        self._ref = ref

    def __getitem__(self, key: str) -> Any:
        text = self._read(validate.name(key, "storage key"))
        if text is None:
            raise KeyError(key)
        return json.loads(text)

    def __setitem__(self, key: str, value: Any) -> None:
        self._write(validate.name(key, "storage key"), validate.payload(value, "storage value"))

    def __delitem__(self, key: str) -> None:
        if self._read(validate.name(key, "storage key")) is None:
            raise KeyError(key)
        self._write(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self.list())

    def set(self, key: str, value: Any) -> None:
        """The same as `storage[key] = value`."""
        self[key] = value

    def delete(self, key: str) -> bool:
        """Remove a key. Returns whether it was there."""
        if self._read(validate.name(key, "storage key")) is None:
            return False
        self._write(key, None)
        return True

    def list(self, prefix: str = "") -> dict[str, Any]:
        """All values whose key begins with `prefix`, in key order.

        Raises:
            NameInvalid: no key begins with it, as it is not allowed.
        """
        if prefix != "":
            validate.name(prefix, "storage prefix")
        return {key: json.loads(text) for key, text in sorted(self._read_all(prefix).items())}

    def _read(self, key: str) -> str | None:
        return self._deployment.store.objects.get_value(self._ref, key)

    def _read_all(self, prefix: str) -> dict[str, str]:
        return dict(self._deployment.store.objects.list_values(self._ref, prefix))

    def _write(self, key: str, text: str | None) -> None:
        self._deployment.store.objects.put_values(self._ref, {key: text})


class RunStorage(Storage):
    """The storage inside a run: writes are kept until the finish of the link is accepted, and stored with it."""

    def __init__(self, deployment: Deployment, ref: ObjectRef) -> None:
        super().__init__(deployment, ref)
        self.pending: dict[str, str | None] = {}

    def _read(self, key: str) -> str | None:
        return self.pending[key] if key in self.pending else super()._read(key)

    def _read_all(self, prefix: str) -> dict[str, str]:
        values = super()._read_all(prefix)
        for key, text in self.pending.items():
            if key.startswith(prefix):
                values.pop(key, None)
                if text is not None:
                    values[key] = text
        return values

    def _write(self, key: str, text: str | None) -> None:
        self.pending[key] = text
