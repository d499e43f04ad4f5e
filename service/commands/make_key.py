"""The command that makes a key for a caller."""

import hashlib
import secrets

KEY_BYTES = 32


def make_key() -> None:
    """Make a random key for a caller of a server with auth.mode keys.

    The key goes to the caller; the server's settings hold only its hash.

    \b
    Example:
      stemserve make-key
    """
    key = secrets.token_urlsafe(KEY_BYTES)
    digest = hashlib.sha256(key.encode()).hexdigest()
    print(f"key         {key}")
    print(f"key_sha256  {digest}")
