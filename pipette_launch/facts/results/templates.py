"""Plans for other numbers of hosts, made ahead, and which of them the hosts that are there can run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipette_launch.facts.results.plan import Choice, Plan


def refit(plan: Plan, hosts: Sequence[str]) -> Plan | None:
    """Fit the quickest of a plan and its templates that the hosts that are there suffice for.

    Hosts that it names keep their places, and with them the ranks that it gives them. The place of each host that is
    not there goes to one that is left over: first to those that ran ranks before, then in torchrun's order. The others
    stand by. Of plans that are equally quick the one with the most hosts is taken. The others become its templates.

    Args:
        plan: what was run before.
        hosts: names of those that are there, in torchrun's order.

    Returns:
        None where even the smallest plan needs more hosts, or one of the hosts is unknown to the plan.

    """
    known, plans = plan.known_hosts, (plan, *plan.templates)
    fitting = [one for one in plans if len(one.hosts) <= len(hosts)]
    if not fitting or not set(hosts) <= set(known):
        return None
    taken = min(fitting, key=lambda one: (one.chosen.step_time_s, -len(one.hosts)))
    left_over = [host for host in hosts if host not in taken.hosts]
    left_over.sort(key=lambda host: host not in plan.hosts)
    stand_ins = iter(left_over)
    placed = tuple(host if host in hosts else next(stand_ins) for host in taken.hosts)
    return replace(
        taken if placed == taken.hosts else _unchecked(taken),
        hosts=placed,
        templates=by_size(one for one in plans if one is not taken),
        other_hosts=tuple(host for host in known if host not in placed),
    )


def _unchecked(plan: Plan) -> Plan:
    """Forget which device orders were checked, as the hosts are others."""
    chosen, *others = (replace(one, is_order_checked=False) for one in (plan.chosen, *plan.alternatives))
    return replace(plan, chosen=chosen, alternatives=tuple(others))


def from_candidate(plan: Plan, attempt: int) -> Plan:
    """Leave out the candidates that could not start: the first of the plan is then the one that ran.

    Args:
        plan: what was run.
        attempt: which of its candidates ran; past the last, the user's own configuration.

    """
    candidates = plan.candidates()
    if attempt == 0:
        return plan
    if attempt >= len(candidates):
        return replace(plan, chosen=plan.own, alternatives=(), keeps_own=True, num_in_line=None)
    in_line = None if plan.num_in_line is None else plan.num_in_line - attempt
    return replace(plan, chosen=candidates[attempt], alternatives=plan.alternatives[attempt:], num_in_line=in_line)


def by_size(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Make templates of plans: the most hosts first, and none with templates of its own."""
    bare = (replace(one, templates=(), other_hosts=()) for one in plans)
    return tuple(sorted(bare, key=lambda one: -len(one.hosts)))


def in_order_of(plan: Plan, hosts: Sequence[str]) -> Plan:
    """List a plan's hosts in another order; every host keeps the ranks that it has, in each candidate.

    The user's own configuration runs in torchrun's order, whatever the plan lists first.
    """
    size = plan.devices_per_host
    places = [plan.hosts.index(host) for host in hosts]

    def moved(choice: Choice) -> Choice:
        slots = (place * size + local for place in places for local in range(size))
        return replace(choice, placement=tuple(choice.placement[slot] for slot in slots))

    return replace(
        plan, hosts=tuple(hosts), chosen=moved(plan.chosen), alternatives=tuple(map(moved, plan.alternatives))
    )
