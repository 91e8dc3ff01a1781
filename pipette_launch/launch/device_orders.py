"""The check of a device order before training: NCCL may return wrong slices on permuted devices, without an error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipette_launch.facts.cluster import in_device_order, is_in_device_order, shared_order
from pipette_launch.probe.messages import START_S, wait_s

if TYPE_CHECKING:
    from pipette_launch.facts import Choice, Plan
    from pipette_launch.facts.messages import Decision, Failure

CHECKED = "all-gather and reduce-scatter of 1 to 64 MB returned every value in its place"
SEE = "see NVIDIA/nccl#1906"


def needs_check(training: Decision) -> bool:
    """Return true if the candidate permutes GPUs inside hosts and was not checked on these hosts."""
    plan, choice = training.plan, training.choice
    if plan is None or choice is None or plan.device_kind != "cuda" or choice.is_order_checked:
        return False
    return not is_in_device_order(choice.placement, plan.devices_per_host)


def patience_s(decision: Decision) -> float:
    """Return the time after which a check counts as hung: imports, a communicator for each host, then milliseconds."""
    return wait_s(sum(decision.num_slots), START_S)


def check_before(training: Decision) -> Decision:
    """Order the check of a candidate, for the nodes and devices that will train it."""
    assert training.plan is not None
    assert training.choice is not None
    place = training.plan.contenders().index(training.choice)
    return replace(training, phase="trial", checks_order=True, trial=place + 1, iterations=1)


def order_words(decision: Decision) -> str:
    """Name the order of devices that a decision gives to ranks."""
    plan, choice = decision.plan, decision.choice
    assert plan is not None
    assert choice is not None
    order_D = shared_order(choice.placement, plan.devices_per_host)
    return f"the device order {','.join(map(str, order_D))}" if order_D else "device orders that differ between hosts"


def check_words(decision: Decision) -> str:
    """Name the check on one line."""
    return f"checking NCCL with {order_words(decision)}: rank-coded all-gather and reduce-scatter"


def passed(ended: Decision) -> Plan:
    """Mark the candidate that was checked; the plan's first reason says that it was, as screens cut the later ones."""
    plan, choice = ended.plan, ended.choice
    assert plan is not None
    assert choice is not None

    def marked(one: Choice) -> Choice:
        return replace(one, is_order_checked=True) if one == choice else one

    alternatives = tuple(map(marked, plan.alternatives))
    reasons = (f"NCCL was checked with {order_words(ended)}: {CHECKED}.", *plan.reasons)
    return replace(plan, chosen=marked(plan.chosen), alternatives=alternatives, reasons=reasons)


def failed(ended: Decision, failure: Failure) -> tuple[Plan, str]:
    """Put all candidates of a plan and of its templates back into device order."""
    plan = ended.plan
    assert plan is not None
    told = f"devices stay in order inside hosts: with {order_words(ended)} {failure.cause} ({SEE})"
    back = _back_in_order(plan)
    templates = tuple(map(_back_in_order, plan.templates))
    return replace(back, templates=templates, reasons=(f"{told[0].upper()}{told[1:]}.", *plan.reasons)), told


def _back_in_order(plan: Plan) -> Plan:
    def back(one: Choice) -> Choice:
        return replace(one, placement=tuple(in_device_order(one.placement, plan.devices_per_host).tolist()))

    return replace(plan, chosen=back(plan.chosen), alternatives=tuple(map(back, plan.alternatives)))
