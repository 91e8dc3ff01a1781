"""Tests of the file format: documents survive a file, and bad files are refused."""

from __future__ import annotations

import json
import os
import re
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts_for_tests import memory_need, tiny_cluster, tiny_measurements, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from pipette_launch.errors import FileFormatError
from pipette_launch.facts import Choice, Layout, Links, Measurements, ModelSpec, Plan, Provenance, files


def plan(placement: tuple[int, ...] = (1, 0)) -> Plan:
    """Return a plan for one host of two slots."""
    choice = Choice(
        layout=Layout(pp=2, vpp=2, layers_per_chunk=(1, 2, 2, 1)),
        placement=placement,
        schedule="interleaved-1f1b",
        step_time_s=0.5,
        breakdown_s={"compute": 0.5},
        memory=memory_need((3, 4), 5),
        bound_s=0.25,
    )
    return Plan(
        hosts=("a",),
        devices_per_host=2,
        device_kind="cpu",
        chosen=choice,
        alternatives=(choice,),
        own=choice,
        keeps_own=False,
        reasons=("a reason",),
        notes=(),
        num_layouts=7,
        dropped={"too big": 3},
        solve_s=0.1,
        provenance=Provenance(key="k", made_at="now", versions={"torch": "2"}, source="measured"),
    )


def changed(**changes: Any) -> str:
    """Return a plan's text with some fields replaced; None removes a field."""
    plain = json.loads(files.dumps(plan()))
    for name, value in changes.items():
        if value is None:
            del plain[name]
        else:
            plain[name] = value
    return json.dumps(plain)


@given(st.permutations(range(2)))
def test_a_plan_comes_back_as_it_was(placement: list[int]) -> None:
    """A plan read from its file is equal, with all nested facts."""
    made = plan(tuple(placement))

    assert made == files.loads(Plan, files.dumps(made), "here")


def test_measurements_come_back_as_they_were(tmp_path: Path) -> None:
    """Matrices, samples and optional fields survive a file."""
    made = tiny_measurements(tiny_cluster(hosts=3, devices=2))

    files.write(tmp_path / "deep" / "cluster.json", made)

    assert made == files.read(tmp_path / "deep" / "cluster.json", Measurements)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "here: not JSON"),
        ("[]", "expected a 'plan' document, found 'list'"),
        (changed(kind="cluster"), "expected a 'plan' document, found 'cluster'"),
        (changed(schema_version=1), "here: schema_version 1 is not 2"),
        (changed(hosts=None), "here: field 'hosts' is missing"),
        (changed(colour="red"), "here: unknown field 'colour'"),
        (changed(hosts="a"), "here: hosts: expected a list, found str"),
        (changed(hosts=[1]), "here: hosts[0]: expected str, found 1"),
        (changed(device_kind="tpu"), "here: device_kind: 'tpu' is not one of 'cuda', 'cpu'"),
        (changed(keeps_own=1), "here: keeps_own: expected bool, found 1"),
        (changed(num_layouts=1.5), "here: num_layouts: expected int, found 1.5"),
        (changed(dropped={"x": "y"}), "here: dropped: x: expected int, found 'y'"),
        (changed(devices_per_host=3), "here: a layout of 2 ranks for 3 slots"),
        ("[" * 5000, "here: nested too deeply"),
        ('{"kind": 1' + "0" * 5000 + "}", "here: not JSON"),
        (changed(schema_version=True), "here: schema_version True is not 2"),
        (changed(solve_s=10**400), "here: solve_s: expected float, found 1000000000"),
        (changed(solve_s=float("nan")), "here: solve_s: expected float, found nan"),
        (changed(solve_s=float("inf")), "here: solve_s: expected float, found inf"),
        (changed(solve_s=True), "here: solve_s: expected float, found True"),
        (changed(solve_s=1e101), "here: solve_s: 1e+101 is larger than the limit of 1e+100"),
        (changed(num_layouts=True), "here: num_layouts: expected int, found True"),
        (changed(num_layouts=1 << 63), "here: num_layouts: 9223372036854775808 does not fit into 64 bits"),
    ],
)
def test_a_bad_document_is_refused(text: str, expected: str) -> None:
    """The message names source, field and value."""
    with pytest.raises(FileFormatError) as caught:
        files.loads(Plan, text, "here")

    assert expected in str(caught.value)


def test_an_error_quotes_no_more_than_a_line() -> None:
    """The message stays short for a long or deeply nested value."""
    for value in ("x" * 100_000, [[[[["x" * 100_000] * 100]]]] * 100, 10**4200):
        with pytest.raises(FileFormatError) as caught:
            files.loads(Plan, changed(devices_per_host=value), "here")
        assert len(str(caught.value)) < 1000


def test_the_documents_give_the_limit_of_a_file() -> None:
    """`docs/hostile_input.md` gives the limit of documents, of the store's values and of tokenizers."""
    limits = re.findall(
        r"more than (\d+) MiB", (Path(__file__).parents[2] / "docs" / "hostile_input.md").read_text(encoding="utf-8")
    )

    assert [f"{files.MOST_BYTES >> 20}"] * 3 == limits


def test_a_file_that_is_too_large_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stops at the limit, also for a device without an end."""
    path = tmp_path / "plan.json"
    files.write(path, plan())
    monkeypatch.setattr(files, "MOST_BYTES", 1000)

    for one in (path, Path("/dev/zero")):
        with pytest.raises(FileFormatError, match="more than the limit of 1000 bytes"):
            files.read(one, Plan)
    with pytest.raises(FileFormatError, match="bytes, more than the limit of 1000"):
        files.loads(Plan, files.dumps(plan()), "here")
    assert "" == files.kind_of(path)


def test_a_nested_fact_checks_itself() -> None:
    """A placement with a rank twice is refused, and the message names its field."""
    plain = json.loads(files.dumps(plan()))
    plain["chosen"]["placement"] = [0, 0]

    with pytest.raises(FileFormatError, match="here: chosen: placement must hold every rank"):
        files.loads(Plan, json.dumps(plain), "here")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("step_time_s", -1.0, "step_time_s must be above 0, got -1.0"),
        ("step_correction", 0.0, "step_correction must be above 0, got 0.0"),
        ("bound_s", -0.5, "bound_s must be at least 0, got -0.5"),
    ],
)
def test_a_choice_that_no_prediction_makes_is_refused(name: str, value: object, expected: str) -> None:
    """An edited plan with impossible times or memory is refused."""
    plain = json.loads(files.dumps(plan()))
    plain["chosen"][name] = value

    with pytest.raises(FileFormatError, match=f"here: chosen: {re.escape(expected)}"):
        files.loads(Plan, json.dumps(plain), "here")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("fast", "here: latency_s: cannot be unpacked"),
        ("ä", "here: latency_s: cannot be unpacked"),
        (files.pack(b"12345678")[:-8], "here: latency_s: "),
        (files.pack(b"1234567"), "here: latency_s: 7 bytes are no square matrix"),
        (files.pack(b"\xff" * 8), "here: latency_s: a number is not finite"),
        ([[0.0, 1.0], 2.0], "here: latency_s[1]: expected a list, found float"),
        ([[0.0, "x"], [1.0, 0.0]], "here: latency_s[0][1]: expected float, found 'x'"),
        ([[0.0, 1.0], [True, 0.0]], "here: latency_s[1][0]: expected float, found True"),
        ([[0.0, float("inf")], [1.0, 0.0]], "here: latency_s[0][1]: expected float, found inf"),
        ([[0.0, 1.0], [1.0]], "here: latency_s[1]: 1 numbers in a matrix of 2 rows"),
        ([[0.0, 1.0]], "here: latency_s[0]: 2 numbers in a matrix of 1 rows"),
        ([[0.0, -1.0], [1.0, 0.0]], "here: links: 0 -> 1 has latency -1.0 s"),
    ],
)
def test_a_bad_matrix_is_refused(rows: object, expected: str) -> None:
    """A matrix is a square list of rows of finite numbers. The message names the bad row or number."""
    good = [[0.0, 1], [1.0, 0.0]]

    assert Links(latency_s=good, bandwidth_bytes_per_s=good) == files.from_plain(
        Links, {"latency_s": good, "bandwidth_bytes_per_s": good}, "here"
    )
    with pytest.raises(FileFormatError) as caught:
        files.from_plain(Links, {"latency_s": rows, "bandwidth_bytes_per_s": good}, "here")
    assert expected in str(caught.value)


def test_a_large_matrix_is_packed() -> None:
    """A file shows 64 rows as numbers. A larger matrix is a packed text, which keeps every digit."""
    for size in (64, 65):
        rows = np.random.default_rng(size).random((size, size)) + 0.1
        links = Links(latency_s=rows, bandwidth_bytes_per_s=rows)

        plain = json.loads(json.dumps(files.to_plain(links)))

        assert isinstance(plain["latency_s"], str) == (size > 64)
        assert links == files.from_plain(Links, plain, "here")


def test_a_matrix_is_read_where_its_type_is_an_alias_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """From numpy 2.5 on the origin of `NDArray[np.float64]` is not `np.ndarray`."""

    class NDArray:
        """An alias that is its own origin."""

    monkeypatch.setattr(files, "NDArray", NDArray)
    kind = types.GenericAlias(NDArray, (np.float64,))

    assert [[1.0]] == files.from_plain(kind, [[1.0]], "here").tolist()


def test_a_field_with_a_default_may_be_missing() -> None:
    """A file without the field is read with the default."""
    plain = files.to_plain(tiny_model())
    del plain["latent_attention"], plain["mtp_num_layers"], plain["qk_layernorm"]

    assert tiny_model() == files.from_plain(ModelSpec, plain, "here")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Reading raises FileFormatError, never OSError."""
    with pytest.raises(FileFormatError, match=r"nowhere\.json: cannot be read"):
        files.read(tmp_path / "nowhere.json", Plan)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old document stays, and no temporary file remains."""
    path = tmp_path / "plan.json"
    files.write(path, plan())
    before = path.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)

    with pytest.raises(OSError, match="No space left"):
        files.write(path, replace(plan(), num_layouts=8))
    assert (before, ["plan.json"]) == (path.read_text(), [entry.name for entry in tmp_path.iterdir()])


@pytest.mark.parametrize(
    ("umask", "shared", "mode"),
    [(0o022, True, 0o644), (0o077, True, 0o600), (0o002, True, 0o664), (0o022, False, 0o600)],
)
def test_others_read_what_is_shared(tmp_path: Path, umask: int, shared: bool, mode: int) -> None:
    """A shared file follows the umask; all other files are private."""
    path = tmp_path / "plan.json"
    before = os.umask(umask)
    try:
        files.write(path, plan(), shared=shared)
    finally:
        os.umask(before)

    assert mode == path.stat().st_mode & 0o777


def test_a_place_is_checked_before_it_is_written_to(tmp_path: Path) -> None:
    """Missing folders are made, and no file is left. A folder at the file's path is an error."""
    files.check_writable(tmp_path / "a" / "b" / "plan.json")

    assert [] == list((tmp_path / "a" / "b").iterdir())
    with pytest.raises(IsADirectoryError):
        files.check_writable(tmp_path / "a")
    with pytest.raises(OSError, match="File exists"):
        files.check_writable(Path("/dev/null/plan.json"))


def test_a_digest_follows_the_facts() -> None:
    """Equal facts have equal digests; a changed fact has another digest."""
    assert files.digest(plan(), 1) == files.digest(plan(), 1)
    assert files.digest(plan(), 1) != files.digest(plan((0, 1)), 1)


def test_the_kind_of_a_file_is_told_before_it_is_read(tmp_path: Path) -> None:
    """A file that is not a document has no kind, and reading it raises an error."""
    document, other = tmp_path / "a.json", tmp_path / "b.json"
    document.write_text('{"kind": "plan", "schema_version": 2}')
    other.write_text("[1]")

    assert ["plan", "", ""] == [files.kind_of(path) for path in (document, other, tmp_path / "none")]
