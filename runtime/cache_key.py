"""Signs entries of the cache with a key: 32 random bytes in a file of the cache directory that only this user may read.

    HMAC-SHA-256 (key, what to sign)  →  signature

Only a process that can read the key can write an entry that Gossamer trusts. The first process that needs a key makes it. A key
that others may have read is replaced; entries that it has signed are compiled again. The file is read at every use, which takes
microseconds. So processes agree even if somebody empties the directory while they run.
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
    """Returns the signature of `signed` in the cache directory `base`. Raises OSError if no key exists and none can be made."""
    return hmac.digest(_key(base / "key"), signed, "sha256")


def is_signature(base: Path, signed: bytes, given: bytes) -> bool:
    """Whether `given` is the signature. The comparison takes the same time whatever part of it is right."""
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
