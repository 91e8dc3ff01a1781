"""What the headings and words of the screens mean that are no figures."""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.errors import FactError


@dataclass(frozen=True, slots=True)
class Meaning:
    """The explanation of one label or number."""

    what: str
    """A sentence."""
    unit: str = ""
    """Empty where it is no number."""
    how: str = ""
    """Formula or measurement."""
    source: str = ""
    """Paper and equation, probe, file of the product, or page of the documents."""

    def __post_init__(self) -> None:
        if self.unit and not (self.how and self.source):
            raise FactError(f"a number needs how it is got, and its source: {self.what}")


SECTIONS = {
    "job": Meaning("The script, the model's parameters, and the sequences and tokens of one optimizer step."),
    "machines": Meaning("Ranks, hosts and devices, and whether their figures were measured or imagined from --gpu."),
    "measured": Meaning("What the warm-up found on these machines: links, a layer's time, the slowest slot."),
    "health": Meaning("Devices, hosts and links that are damaged or slower than their peers (!), and notes (•)."),
    "verdict": Meaning(
        "Whether the configuration fits: every stage stays below the limit. Tight: below what is free, over the limit."
    ),
    "chosen": Meaning("The layout, schedule and order of ranks that the plan runs, with its predicted step."),
    "plans": Meaning("One line for each compared plan: step, ratio to the first, memory, gap and layout."),
    "rates": Meaning("What each compared plan comes to in tokens and FLOPs a second."),
    "parts": Meaning("The parts of each compared plan's step; pipette explain compute, bubble ... tells each."),
    "places": Meaning("How many ranks sit on another device than under the first plan."),
    "faults": Meaning("Why a compared plan cannot run."),
    "remarks": Meaning("What else there is to know of a compared plan."),
    "trials": Meaning("Step times of plans that ran for a few iterations before the training (--pipette-trials)."),
    "why": Meaning("Why this plan was chosen, what it saves, and how far it is from what can be reached at all."),
    "split": Meaning("Each stage's memory at its peak by kind; pipette explain weights, logits ... tells each."),
    "on a loss": Meaning("Plans made ahead for fewer hosts, which run at once when hosts are lost."),
    "flags": Meaning("What changes in the script's command line: added (+), deleted (-), changed (~)."),
    "dropped": Meaning("Layouts that fell out of the search, counted by reason."),
    "notes": Meaning("What was assumed, pinned, measured badly or left out."),
    "plan file": Meaning("Where the plan lies: for pipette report, pipette compare and --pipette-plan."),
    "file": Meaning("The cluster.json that is shown."),
    "links": Meaning("Bandwidth of each link between hosts, all links of a round at work, and inside hosts."),
    "groups": Meaning("Bandwidth and latency of whole collectives, as the warm-up timed them."),
    "took": Meaning(
        "How long each phase of the warm-up lasted; search is a short one, which says what else to measure.",
        unit="seconds",
        how="wall clock of the workers",
        source="probe/phases.py",
    ),
}
"""The headings of the screens, in lower case."""

WORDS = {
    "yours": Meaning("The user's own configuration: what the script's flags say, on torchrun's placement."),
    "ours": Meaning("In pipette compare: the plan that pipette-launch chooses, beside those of other planners."),
    "layout": Meaning(
        "All degrees, the micro-batch and the memory options in short; pipette explain tp ... tells each."
    ),
    "placement": Meaning("Which rank sits on which slot; torchrun's puts 0 to 7 on the first host, and so on."),
    "rank": Meaning("The number that Megatron sees (RANK); it decides what a process computes."),
    "slot": Meaning("A place for one process: host and device."),
    "stage": Meaning("What one pipeline rank holds: layers, and on the first and the last the embedding and the head."),
    "fullest": Meaning("The stage whose devices hold the most at their peak; it decides whether a plan fits."),
    "gib": Meaning("1,024 MiB = 2^30 bytes; the head of a table in it."),
    "mib": Meaning("1,024 KiB = 2^20 bytes; the head of a table in it."),
    "imagined": Meaning("Of machines: nobody measured them; their figures are those of --gpu and --fabric."),
    "plan": Meaning("Layout, schedule and placement, with what is predicted of them (plan.json)."),
    "phase": Meaning("What a job does now: warm-up, planning, trials or training; in a warm-up, which part of it."),
    "iteration": Meaning("Megatron's word for a step: one update of the weights."),
    "failures": Meaning("How often a job started its workers anew, and how many nodes it lost."),
    "data": Meaning("How old the shown figures are."),
    "stops": Meaning("In pipette doctor: what would stop a job on this machine."),
    "slows": Meaning("In pipette doctor: what would slow a job on this machine."),
    "fine": Meaning("In pipette doctor: what was looked at and is as it should be."),
    "answer": Meaning("In pipette doctor: whether a job can run here."),
}
"""Words beside figures, and the lines of `pipette watch` and `pipette doctor`."""

SHORT = {
    "weights": "weight",
    "gradients": "grad",
    "optimizer": "optim",
    "activations": "activ",
    "logits": "logits",
    "buffers": "buffer",
    "overhead": "overhd",
    "step time": "step",
}
"""What narrow tables call a key."""
