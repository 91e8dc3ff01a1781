"""Texts without the job's signature are not obeyed, and the secret behind the signatures stays secret."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from pipette_launch.agent import signature
from pipette_launch.agent import store as agent_store
from pipette_launch.agent.signature import FILE, FILE_VARIABLE, VARIABLE, Signer, find, users_secret
from pipette_launch.agent.store import AgentStore, ForgedError, Reader, RoundStore, await_all
from pipette_launch.errors import ClusterError, UsageError
from pipette_launch.facts.messages import Member

SECRET = b"the secret of this job"
LONG = "".join(map(str, range(20_000)))


def signer(secret: bytes = SECRET) -> Signer:
    """A signer of a job whose nodes all have its secret."""
    made = Signer(secret)
    made.is_on = True
    return made


def round_store(store: HashStore, generation: str = "round", secret: bytes = SECRET) -> RoundStore:
    """The store of a round of a signed job."""
    return RoundStore(store, 2, is_coordinator=True, generation=generation, signer=signer(secret))


def unsigned(store: HashStore) -> RoundStore:
    """The same store for a stranger, who has no secret."""
    return RoundStore(store, 2, is_coordinator=True)


# -- texts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [1 << 22, 7, 40])
@pytest.mark.parametrize("text", ["", "yes", "ä plan", LONG])
def test_a_signed_text_comes_back(monkeypatch: pytest.MonkeyPatch, text: str, piece_bytes: int) -> None:
    """Another agent of the job reads the text, whatever its length."""
    monkeypatch.setattr(agent_store, "MOST_BYTES", piece_bytes if len(text) < 5000 else max(piece_bytes, 1 << 9))
    store = HashStore()
    round_store(store).put("plan", text)

    assert text == round_store(store).take("plan", what="it", deadline_s=1)
    assert (text or None) == round_store(store).peek("plan")
    assert round_store(store).has("plan")


def copied(store: HashStore, key: str, source: HashStore, name: str) -> None:
    """Copy a text with its signature, as a stranger does who can read one store and write to another."""
    store.set(f"pipette/round/{key}", source.get(name))  # type: ignore[arg-type]


def without_a_signature(store: HashStore) -> None:
    """A stranger knows no secret."""
    unsigned(store).put("plan", "forged")


def long_and_without_a_signature(store: HashStore) -> None:
    """A compressed text."""
    unsigned(store).put("plan", LONG)


def with_another_secret(store: HashStore) -> None:
    """A stranger has a secret of its own."""
    round_store(store, secret=b"the secret of another job").put("plan", "forged")


def of_another_key(store: HashStore) -> None:
    """A true text under a key for which it was not signed."""
    round_store(store).put("warmup-over", "yes")
    copied(store, "plan", store, "pipette/round/warmup-over")


def of_an_earlier_round(store: HashStore) -> None:
    """A true text of a round that is over."""
    round_store(store, "earlier").put("plan", "an older plan")
    copied(store, "plan", store, "pipette/earlier/plan")


def changed(store: HashStore) -> None:
    """A true text with another last letter."""
    round_store(store).put("plan", "train")
    store.set("pipette/round/plan", store.get("pipette/round/plan")[:-1] + b"p")  # type: ignore[arg-type]


def with_a_changed_piece(store: HashStore) -> None:
    """A true compressed text with one other bit."""
    round_store(store).put("plan", LONG)
    first = store.get("pipette/round/plan")
    store.set("pipette/round/plan", first[:-1] + bytes([first[-1] ^ 1]))  # type: ignore[arg-type]


def cut_off(store: HashStore) -> None:
    """The begin of a signature."""
    store.set("pipette/round/plan", signature.SIGNED)  # type: ignore[arg-type]


FORGERIES = (
    *(without_a_signature, long_and_without_a_signature, with_another_secret, of_another_key, of_an_earlier_round),
    *(changed, with_a_changed_piece, cut_off),
)


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forged_text_counts_as_not_published(forge: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each way to read passes over it, it is counted once, and one line names its key."""
    store = HashStore()
    forge(store)
    ours = round_store(store)

    assert not ours.has("plan")
    assert not ours.glance("plan")
    assert ours.peek("plan") is None
    with pytest.raises(ClusterError, match="waited 0 s in vain for a plan"):
        ours.take("plan", what="a plan", deadline_s=0.1)
    assert 1 == ours._signer.num_refused
    line = "refused a message without this job's signature: pipette/round/plan"
    assert [line] == caplog.messages


def test_a_true_text_is_read_after_a_forged_one() -> None:
    """The agent that has to publish it replaces the forged text."""
    store = HashStore()
    unsigned(store).put("plan", "forged")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: round_store(store).take("plan", what="it", deadline_s=10))
        round_store(store).put("plan", "true")

        assert "true" == waiting.result(10)


def test_a_forged_first_word_does_not_count() -> None:
    """Agents that settle a question replace the stranger's answer by the first of their own."""
    store = HashStore()
    unsigned(store).put("verdict", "forged")

    assert ["mine", "mine"] == [round_store(store).settle("verdict", word) for word in ("mine", "yours")]


def test_a_forged_text_is_not_handed_on() -> None:
    """A child reads in the first agent's store instead of its parent's; without a true text there it is an error."""
    first, parent, own = HashStore(), HashStore(), HashStore()
    round_store(first).put("plan", LONG)
    unsigned(parent).put("plan", "forged")
    reader = Reader(own, "round", 20, lambda: parent, signer=signer())

    assert LONG == reader.read("plan", round_store(first))
    assert LONG == round_store(own).peek("plan")
    unsigned(first).put("plan", "forged")
    with pytest.raises(ForgedError, match="the first node's store has no plan with this job's signature"):
        Reader(own, "round", 1, lambda: parent, signer=signer()).read("plan", round_store(first))


def test_a_deleted_text_gives_no_order_and_is_no_forgery() -> None:
    """A stranger can delete texts; the agent that waits for one ends with an error."""
    store = HashStore()
    ours = round_store(store)
    ours.put("plan", "true")
    store.set("pipette/round/plan", "")

    assert ours.peek("plan") is None
    with pytest.raises(ClusterError, match="in vain"):
        ours.take("plan", what="a plan", deadline_s=0.1)
    assert 0 == ours._signer.num_refused


def test_a_stranger_can_only_end_a_phase_early() -> None:
    """Counters have no signatures: a false number ends a wait, and gives no order."""
    store = HashStore()
    ours = round_store(store)
    unsigned(store).count("done/train", 1)

    assert await_all(ours, "train", num_nodes=2)
    assert ours.has("over/train")
    assert not ours.has("plan")


def test_all_refused_messages_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """One line names the first, and another line at the end the number."""
    store = HashStore()
    ours = round_store(store)
    for word in ("one", "two", "two"):
        unsigned(store).put("plan", word)
        assert not ours.has("plan")
    ours._signer.end()

    assert "refused 2 messages without this job's signature" == caplog.messages[-1]
    assert 2 == len(caplog.messages)


def test_an_unsigned_job_reads_all_texts() -> None:
    """A job without a common secret works as before."""
    store = HashStore()
    unsigned(store).put("plan", "unsigned")

    assert "unsigned" == AgentStore(store, "pipette/round", limit_s=None, signer=Signer(SECRET)).peek("plan")


# -- who has the secret -------------------------------------------------------------------------------------------


def member(index: int, secret: bytes = SECRET) -> Member:
    """The introduction of an agent."""
    one = Member(token=f"token{index}", address=f"10.0.0.{index}", port=1 + index, node_rank=-1)
    return Signer(secret).introduced(one)


def test_a_job_is_signed_if_all_its_nodes_have_the_secret() -> None:
    """The first agent finds it, and the others follow."""
    one = Signer(SECRET)
    members = [member(0), member(1)]

    assert all(map(one.is_proven, members))
    assert members == [*one.admitted(members, is_signed=True)]
    assert one.is_on


@pytest.mark.parametrize(
    ("secret", "trouble", "words"),
    [
        (SECRET, "", "10.0.0.1 has another secret"),
        (b"", "no home folder", "no home folder"),
    ],
)
def test_a_job_without_a_common_secret_is_not_signed(secret: bytes, trouble: str, words: str) -> None:
    """One line gives the reason and the remedy."""
    one = Signer(secret, trouble=trouble)
    members = [member(0), member(1, b"the secret of another home")]

    assert members == [*one.admitted(members, is_signed=False)]
    assert not one.is_on
    assert f"{words}; give all nodes the same {FILE_VARIABLE}" in one.why_unsigned(members)


def test_a_signed_job_stays_signed(caplog: pytest.LogCaptureFixture) -> None:
    """A stranger that comes to a later meeting takes no part, and its claim that nothing is signed has no effect."""
    one = Signer(SECRET)
    one.admitted([member(0), member(1)], is_signed=True)
    stranger = Member(token="s", address="10.6.6.6", port=6, node_rank=-1, proof="0" * 32)  # noqa: S106, a name

    assert (member(0), member(1)) == one.admitted([member(0), stranger, member(1)], is_signed=False)
    assert one.is_on
    assert "introduction of 10.6.6.6" in caplog.messages[0]


def test_a_proof_is_of_one_address() -> None:
    """A stranger cannot put its own address into the introduction of an agent."""
    moved = Member(token="token0", address="10.6.6.6", port=1, node_rank=-1, proof=member(0).proof)  # noqa: S106

    assert not Signer(SECRET).is_proven(moved)


def test_a_late_node_without_the_secret_cannot_join() -> None:
    """It says why, and how to mend it."""
    late = Signer(b"the secret of another home", trouble="")

    with pytest.raises(ClusterError, match=r"its first node, 10\.0\.0\.0, has another secret .*two home folders"):
        late.admitted([member(0), member(1)], is_signed=True)


def test_a_secret_that_the_user_gave_is_needed_on_all_nodes() -> None:
    """A job that shall be signed never runs without signatures."""
    one = Signer(SECRET, source=VARIABLE)

    with pytest.raises(ClusterError, match=f"not all nodes have the secret of {VARIABLE}: 10.0.0.1 differs"):
        one.admitted([member(0), member(1, b"the secret of another home")], is_signed=False)


# -- the secret ---------------------------------------------------------------------------------------------------


def secret_of(found: Signer) -> bytes:
    """The secret, which no public name gives."""
    return found._secret


def test_the_first_job_of_a_user_makes_the_secret(tmp_path: Path) -> None:
    """Only the user can read the file, nothing else is left, and later jobs use the file."""
    folder = tmp_path / "cache"
    first, second = (find(folder, {}, most_nodes=2) for _ in range(2))

    assert secret_of(first) == secret_of(second)
    assert 64 == len(secret_of(first))
    assert [FILE] == [path.name for path in folder.iterdir()]
    assert [0o700, 0o600] == [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / FILE)]


AT_ONCE = 16


def test_nodes_that_start_at_once_get_one_secret(tmp_path: Path) -> None:
    """Only one of the new files becomes the user's file."""
    paths = [tmp_path / "cache" / FILE] * AT_ONCE
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = set(pool.map(users_secret, paths))

    assert 1 == len(found)
    assert [FILE] == [path.name for path in paths[0].parent.iterdir()]


def test_a_job_of_one_node_needs_no_file(tmp_path: Path) -> None:
    """Its secret exists in one process only, and is new each time."""
    first, second = (find(tmp_path / "none", {}, most_nodes=1) for _ in range(2))

    assert secret_of(first) != secret_of(second)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602, 0o644])
def test_a_secret_that_others_can_read_is_not_used(tmp_path: Path, mode: int) -> None:
    """The line about missing signatures has the reason."""
    users_secret(tmp_path / FILE)
    (tmp_path / FILE).chmod(mode)

    found = find(tmp_path, {}, most_nodes=2)

    assert b"" == secret_of(found)
    assert f"{tmp_path / FILE}: other users can read or change it; delete it" in found.why_unsigned([member(0)])


def test_a_secret_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user who can write to the folder cannot choose the secret."""
    users_secret(tmp_path / FILE)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    assert "belongs to user" in find(tmp_path, {}, most_nodes=2).why_unsigned([member(0)])


def test_without_a_place_for_the_secret_there_is_a_reason(tmp_path: Path) -> None:
    """A home folder may be missing, or be no folder."""
    (tmp_path / "file").touch()

    assert "no home folder" in find(None, {}, most_nodes=2).why_unsigned([member(0)])
    assert "File exists" in find(tmp_path / "file", {}, most_nodes=2).why_unsigned([member(0)])


def test_the_variable_with_the_secret_leaves_the_environment() -> None:
    """No worker inherits it."""
    environ = {VARIABLE: SECRET.decode(), "OTHER": "kept"}

    assert SECRET == secret_of(find(None, environ, most_nodes=1))
    assert {"OTHER": "kept"} == environ


def test_a_file_gives_the_secret(tmp_path: Path) -> None:
    """Kubernetes mounts a secret as a file, which ends with a line end or not."""
    (tmp_path / "mounted").write_bytes(SECRET + b"\n")

    assert SECRET == secret_of(find(None, {FILE_VARIABLE: str(tmp_path / "mounted")}, most_nodes=2))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({VARIABLE: "short"}, "PIPETTE_SECRET: has 5 bytes, and a secret has from 16 to 4096"),
        ({VARIABLE: "x" * 4097}, "has 4097 bytes"),
        ({FILE_VARIABLE: "/nowhere/secret"}, "PIPETTE_SECRET_FILE=/nowhere/secret: No such file"),
        ({FILE_VARIABLE: "/dev/zero"}, "has 4097 bytes"),
    ],
)
def test_a_given_secret_that_cannot_be_used_is_an_error(environ: dict[str, str], words: str) -> None:
    """A secret that the user named is never left out in silence."""
    with pytest.raises(UsageError, match=words):
        find(None, environ, most_nodes=2)


def test_nothing_shows_the_secret() -> None:
    """Neither the text of an object nor an error about a bad secret contains it."""
    one = Signer(SECRET, source=VARIABLE)
    shown = [repr(one), str(one), member(0).proof, repr(member(0))]
    with pytest.raises(UsageError) as raised:
        find(None, {VARIABLE: "tiny-secret"}, most_nodes=2)

    assert not [text for text in [*shown, str(raised.value)] if SECRET.decode() in text or "tiny" in text]
