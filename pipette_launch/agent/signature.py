"""Signatures of the texts that agents put into each other's stores: HMAC-SHA256 with a secret of the job or its user.

Every process that can connect to a store can write to it, and agents run the commands in these texts. So an agent
ignores every text without the signature of its job.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import threading
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipette_launch.errors import ClusterError, UsageError
from pipette_launch.facts.messages import Member
from pipette_launch.text import listed, printable

VARIABLE, FILE_VARIABLE = "PIPETTE_SECRET", "PIPETTE_SECRET_FILE"
"""Environment variables with the secret, or with the path of a file that contains the secret."""
FILE = "secret"
"""Name of the user's file in the default folder of the cache. The first job of the user makes the file."""
LEAST_BYTES, MOST_BYTES = 16, 4096
"""Fewest and most bytes of a secret."""
SIGNED = b"\1"
"""First byte of a signed text. The signature follows, and then the text."""
SIGNATURE_BYTES = hashlib.sha256().digest_size
PROOF_DIGITS = 20
"""Hexadecimal digits of an agent's proof: 80 bits, the least that RFC 2104 advises. All agents read all proofs."""
MOST_NAMED = 4
CURE = f"give all nodes the same {FILE_VARIABLE}"

logger = logging.getLogger(__name__)


class Signer:
    """Signs texts of one agent, and checks the signatures of other agents' texts.

    A job without a common secret has no signatures. A signed job stays signed until its end.
    """

    def __init__(self, secret: bytes = b"", *, source: str = "", trouble: str = "no secret was given") -> None:
        """Take the secret; `source` is the variable that names it, and makes it a duty to have it on every node.

        `trouble` is the reason why there is no secret.
        """
        self._secret, self._source, self._trouble = secret, source, trouble
        self._refused: dict[str, bytes] = {}
        """Last refused text of each key, as a digest. Agents look for the same text again and again."""
        self._lock = threading.Lock()
        self.is_on = False
        """True if all agents of the job have the same secret, so that texts are signed."""
        self.num_refused = 0

    # -- who has the secret -----------------------------------------------------------------------------------------

    def introduced(self, member: Member) -> Member:
        """Return the introduction of an agent, with the proof that it has the secret; without a secret no proof."""
        return replace(member, proof=self._proof(member) if self._secret else "")

    def _proof(self, member: Member) -> str:
        words = f"{member.token} {member.address} {member.port} {member.node_rank} {member.role}"
        return self._signature("introduction", words.encode()).hex()[:PROOF_DIGITS]

    def is_proven(self, member: Member) -> bool:
        """Return whether an introduction proves that the agent has this agent's secret."""
        return bool(self._secret) and hmac.compare_digest(member.proof, self._proof(member))

    def admitted(self, members: Sequence[Member], *, is_signed: bool) -> tuple[Member, ...]:
        """Return the agents that take part in the job: in a signed job the agents with a proof, else all agents.

        `is_signed` is the first agent's finding that all agents have its secret. Raises ClusterError if this agent does
        not have the secret of the others, or an agent lacks a secret that the user gave.
        """
        unproven = [member for member in members if not self.is_proven(member)]
        if self._source and not self.is_on and (unproven or not is_signed):
            others = _named(unproven) or "another node"
            raise ClusterError(f"not all nodes have the secret of {self._source}: {others} differs; {CURE}")
        if is_signed and not self.is_on:
            if members[0] in unproven:
                raise ClusterError(
                    f"this node cannot join: the job's messages are signed, and its first node, {members[0].address}, "
                    f"has another secret than this node ({self._trouble or 'two home folders'}); {CURE}"
                )
            self.is_on = True
        if not self.is_on:
            return tuple(members)
        for member in unproven:
            self._refuse(f"introduction of {member.address}", member.proof.encode())
        return tuple(member for member in members if member not in unproven)

    def why_unsigned(self, members: Sequence[Member]) -> str:
        """Return in one line why the messages of a job are unsigned, and the remedy."""
        why = self._trouble or f"{_named([one for one in members if not self.is_proven(one)])} has another secret"
        return f"messages between the nodes are not signed, so strangers on the network can give orders: {why}; {CURE}"

    # -- texts ------------------------------------------------------------------------------------------------------

    def signed(self, key: str, data: bytes) -> bytes:
        """Return a text with its signature, which is valid for this key only; without signatures the text itself."""
        return SIGNED + self._signature(key, data) + data if self.is_on else data

    def opened(self, key: str, data: bytes) -> bytes | None:
        """Return a text without its signature; None for a text that was deleted, or has no valid signature."""
        signature, text = body_of(data)
        if not self.is_on:
            return text
        if hmac.compare_digest(signature, self._signature(key, text)):
            return text
        if data:
            self._refuse(key, data)
        return None

    def _signature(self, key: str, data: bytes) -> bytes:
        # Keys contain no zero byte, so no two pairs of key and text give the same bytes.
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")

    def _refuse(self, key: str, data: bytes) -> None:
        digest = hashlib.sha256(data).digest()
        with self._lock:
            if self._refused.get(key) == digest:
                return
            self._refused[key] = digest
            self.num_refused += 1
            if self.num_refused == 1:
                logger.warning("refused a message without this job's signature: %s", printable(key))

    def end(self) -> None:
        """Print the number of refused messages, if it is above 1."""
        if self.num_refused > 1:
            logger.warning("refused %d messages without this job's signature", self.num_refused)


def body_of(data: bytes) -> tuple[bytes, bytes]:
    """Split a text of a store into its signature, which may be empty, and the text."""
    return (data[1 : 1 + SIGNATURE_BYTES], data[1 + SIGNATURE_BYTES :]) if data[:1] == SIGNED else (b"", data)


def _named(members: Sequence[Member]) -> str:
    return listed([member.address for member in members], MOST_NAMED)


# -- the secret -----------------------------------------------------------------------------------------------------


def find(folder: Path | None, environ: MutableMapping[str, str], *, most_nodes: int) -> Signer:
    """Return a signer with the secret of the variables, else of the user's file in `folder`, which is made if missing.

    A job of one node makes a secret of its own. The variable with the secret leaves `environ`, so that no worker
    inherits the secret. Raises UsageError if a variable gives no secret.
    """
    text = environ.pop(VARIABLE, "")
    path = environ.get(FILE_VARIABLE, "")
    if text:
        return Signer(_checked(text.encode(), VARIABLE), source=VARIABLE)
    if path:
        try:
            return Signer(_checked(_read(Path(path)), f"{FILE_VARIABLE}={path}"), source=f"{FILE_VARIABLE}={path}")
        except OSError as error:
            raise UsageError(f"{FILE_VARIABLE}={path}: {error.strerror}") from error
    if most_nodes == 1:
        return Signer(secrets.token_bytes(), trouble="")
    if folder is None:
        return Signer(trouble="this node has no home folder for the file with the secret")
    try:
        return Signer(users_secret(folder / FILE), trouble="")
    except (OSError, UsageError) as error:
        return Signer(trouble=f"{folder / FILE}: {getattr(error, 'strerror', None) or error}")


def users_secret(path: Path) -> bytes:
    """Return the secret in a file that only this user can read; make the file if it is missing.

    Nodes with one home folder may come at the same time: only one of them can link its own new file to `path`.
    Raises UsageError if other users can read or write the file.
    """
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = path.with_name(f".{FILE}.{secrets.token_hex(4)}")
        try:
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(made, path)
        finally:
            made.unlink(missing_ok=True)
    state = path.stat()
    if state.st_uid != os.geteuid():
        raise UsageError(f"belongs to user {state.st_uid} and not to you")
    if state.st_mode & 0o077:
        raise UsageError("other users can read or change it; delete it, and the next job makes another")
    return _checked(_read(path), "the secret")


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)


def _checked(secret: bytes, what: str) -> bytes:
    """Return a secret without the white space around it; errors name the secret by `what`, never by its content."""
    secret = secret.strip()
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise UsageError(f"{what}: has {len(secret)} bytes, and a secret has from {LEAST_BYTES} to {MOST_BYTES}")
    return secret
