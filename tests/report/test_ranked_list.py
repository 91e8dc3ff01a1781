"""The ranked list of a plan as a table and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from facts_for_tests import tiny_cluster
from screens import NEW, OLD, RATE, choice, plan

from pipette_launch.facts import Layout, Plan, Setting
from pipette_launch.facts.layout import Recompute
from pipette_launch.facts.plan import Ranked
from pipette_launch.report.plan import difference, figures, ranked_csv

FIRST = Layout(tp=2, pp=2, dp=2, vpp=4, micro_batch_size=4, sequence_parallel=True, use_distributed_optimizer=True)


def listed(layout: Layout, step_s: float, gib: float, **changes: object) -> Ranked:
    """A layout of the list with round figures."""
    parts_s = {"compute": 0.8 * step_s, "bubble": 0.15 * step_s, "tensor_parallel": 0.05 * step_s}
    made = Ranked(
        layout=layout,
        step_time_s=step_s,
        need_bytes=round(gib * 2**30),
        rate=RATE,
        breakdown_s=parts_s,
        new_arguments=NEW,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def ranked_plan() -> Plan:
    """A plan with two sets of degrees, and a leaner layout on the front."""
    lean = replace(FIRST, recompute=Recompute(granularity="full", method="uniform", num_layers=1))
    other = Layout(dp=8, micro_batch_size=4, use_distributed_optimizer=True)
    ranked = (listed(FIRST, 1.0, 6.0), listed(other, 1.25, 4.0))
    setting = Setting(
        script="pretrain_gpt.py",
        arguments=OLD,
        new_arguments=NEW,
        num_parameters=1,
        global_batch_size=64,
        seq_length=32,
        device_name="H100",
        device_memory_bytes=1 << 33,
        machines="not measured",
        network="",
    )
    made = plan(tiny_cluster(4, 2), choice(FIRST, 1.0), choice(Layout(dp=8), 2.0), setting=setting)
    return replace(made, ranked=ranked, front=(listed(lean, 2.0, 2.0, breakdown_s={}), *reversed(ranked)))


def test_a_layout_is_told_by_its_differences() -> None:
    """Degrees always, other words only if they differ, and `no` before words that are missing."""
    lean = replace(FIRST, vpp=1, recompute=Recompute(granularity="full", method="uniform", num_layers=1))

    assert FIRST.words() == difference(FIRST, FIRST)
    assert "tp2 pp2 dp2 recompute-full no vpp" == difference(lean, FIRST)
    assert "tp1 pp1 dp8 no vpp no seq-par" == difference(
        Layout(dp=8, micro_batch_size=4, use_distributed_optimizer=True), FIRST
    )


def test_figures_name_the_longest_part() -> None:
    """A layout without parts has none."""
    assert ("2.00 s", "4.00 GiB", "48%", "") == figures(listed(FIRST, 2.0, 4.0, breakdown_s={}))
    assert ("1.00 s", "4.00 GiB", "48%", "bubble 15%") == figures(listed(FIRST, 1.0, 4.0))


def test_csv_has_a_row_for_each_layout_with_flags() -> None:
    """The list with places, then the rest of the front; the flags of a row are those to append."""
    rows = list(csv.DictReader(io.StringIO(ranked_csv(ranked_plan()))))

    assert ["1", "2", ""] == [row["place"] for row in rows]
    assert ["6442450944", "4294967296", "2147483648"] == [row["memory_bytes"] for row in rows]
    assert "bubble" == rows[0]["lost_to"]
    assert "--pipeline-model-parallel-size 2" in rows[0]["append"]
    assert "--recompute-activations" == rows[0]["delete"]
