"""The key that entries of the cache are signed with: 32 random bytes in the cache directory, for this user's eyes only.

    HMAC-SHA-256 (key, what to sign)  →  signature

Only who can read the key can write an entry that is believed. The first process that needs a key makes it. A key that others
may have read is replaced, and what it has signed is compiled anew. It is read each time that it is needed, which takes
microseconds: so processes agree even if the directory is emptied under them.
"""

import hmac
import logging
import os
from pathlib import Path

from gossamer.runtime import cache_files

log = logging.getLogger("gossamer")

SIGNATURE_BYTES = 32
_KEY_BYTES = 32


def signature(base: Path, signed: bytes) -> bytes:
    """The signature of this user's cache in directory `base`. OSError if there is no key and none can be made."""
    return hmac.digest(_key(base / "key"), signed, "sha256")


def is_signature(base: Path, signed: bytes, given: bytes) -> bool:
    """Whether `given` is the signature; how long that takes says nothing about how much of it is right."""
    return hmac.compare_digest(signature(base, signed), given)


def _key(path: Path) -> bytes:
    try:
        return _read(path)
    except FileNotFoundError:
        cache_files.create(path, os.urandom(_KEY_BYTES))
    except OSError as problem:
        log.warning("kernel cache: the key %s cannot be used (%s), a new one is made", path, problem)
        cache_files.replace(path, os.urandom(_KEY_BYTES))
    return _read(path)


def _read(path: Path) -> bytes:
    key = cache_files.read(path, _KEY_BYTES, cache_files.OTHERS_ANYTHING)
    if len(key) < _KEY_BYTES:
        raise OSError(f"it has {len(key)} bytes instead of {_KEY_BYTES}")
    return key
