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


_PREDICTION = "docs/prediction.md, Step time"
_MEMORY = "docs/prediction.md, Memory"
_STEP_PART = "seconds of one optimizer step, on the ranks that end last"

STEP = {
    "step time": Meaning(
        "How long one optimizer step takes.",
        unit="seconds",
        how="longest path through all passes and messages of the schedule, then what gradients, optimizer and "
        "parameters take beyond it",
        source=f"cost/step/assemble.py; {_PREDICTION}",
    ),
    "compute": Meaning(
        "In a step: the time in which stages compute. In a warm-up's report: the times of single layers.",
        unit=_STEP_PART,
        how="timed forward and backward of each layer, the embedding and the head, times micro-batches; "
        "on imagined machines FLOPs and bytes of each layer over a share of the device's peaks",
        source=f"probe/compute/layers.py, cost/compute/; {_PREDICTION}",
    ),
    "bubble": Meaning(
        "Time in which a stage waits for others to fill and drain the pipeline.",
        unit=_STEP_PART,
        how="the simulated pipeline with free messages, less what the stage is busy; (p - 1)(forward + backward) for "
        "1F1B with equal stages",
        source=f"Megatron-LM, arXiv 2104.04473, section 2.2; cost/pipeline/; {_PREDICTION}",
    ),
    "pipeline transfer": Meaning(
        "What messages between pipeline stages add to the step.",
        unit=_STEP_PART,
        how="the simulated pipeline with messages of latency + bytes / bandwidth of each link, less the one without",
        source=f"cost/step/assemble.py; {_PREDICTION}",
    ),
    "tensor parallel": Meaning(
        "Collectives between tensor-parallel ranks inside the passes.",
        unit=_STEP_PART,
        how="rings: steps x (latency + bytes of a step / bandwidth) over the links that they use, scaled to measured "
        "groups, times layers and micro-batches",
        source=f"cost/communication/exchanges.py and collectives.py; {_PREDICTION}",
    ),
    "context parallel": Meaning(
        "Exchanges of keys and values between context-parallel ranks that attention does not hide.",
        unit=_STEP_PART,
        how="ring exchanges less the attention behind which they pass",
        source=f"cost/communication/hiding.py; {_PREDICTION}",
    ),
    "expert parallel": Meaning(
        "Dispatch of tokens to their experts and back.",
        unit=_STEP_PART,
        how="all-to-all over each member's own network card; topk copies of a token (flex: one a rank or domain)",
        source=f"cost/communication/exchanges.py; {_PREDICTION}",
    ),
    "data parallel": Meaning(
        "Gradient reduction over the replicas that is not hidden behind the backward.",
        unit=_STEP_PART,
        how="ring reduction of each rank's gradient buckets once their chunk has drained; under FSDP gathers and "
        "reductions that a layer's compute does not hide",
        source=f"cost/step/assemble.py; {_PREDICTION}",
    ),
    "embedding gradients": Meaning(
        "The sum of the tied embedding's gradient over first and last stage.",
        unit=_STEP_PART,
        how="an all-reduce of the embedding's gradient between two stages",
        source=f"cost/step/assemble.py; {_PREDICTION}",
    ),
    "optimizer": Meaning(
        "In a step: updating the parameters. In memory: Adam's states and the fp32 copy of the weights.",
        unit=f"{_STEP_PART}; in memory bytes",
        how="the measured or imagined update on the largest rank; in memory 12 bytes a parameter for Adam on 16-bit "
        "weights, shared over dp x cp by the distributed optimizer",
        source="cost/layers/optimizer.py, cost/compute/; ZeRO, arXiv 1910.02054",
    ),
    "parameter gather": Meaning(
        "Collecting updated parameters from the ranks of the distributed optimizer.",
        unit=_STEP_PART,
        how="a ring all-gather of each rank's weights, less what --overlap-param-gather hides",
        source=f"cost/step/assemble.py, cost/step/first_gathers.py; {_PREDICTION}",
    ),
    "recompute": Meaning(
        "In a layout: which activations the backward computes again, full or selective. In a step: the time of that.",
        unit=_STEP_PART,
        how="the recomputed share of a layer's forward, times layers and micro-batches",
        source=f"cost/compute/; {_PREDICTION}",
    ),
    "learned correction": Meaning(
        "What outcomes of earlier jobs on machines of this make add to the step.",
        unit="seconds",
        how="one factor: the mean of log(measured / predicted) of earlier steps",
        source="cost/learned.py; docs/prediction.md, What earlier jobs teach",
    ),
    "other": Meaning(
        "Parts of the step that pipette compare has no column for.",
        unit=_STEP_PART,
        how="the step less the parts shown",
        source="report/comparison.py",
    ),
}
"""The step and its parts, by their names in plan files with spaces."""

MEMORY = {
    "memory": Meaning(
        "What a device of each stage holds at its peak, beside the limit.",
        unit="bytes, of 1,024 to the KiB",
        how="reserve x (model's own tensors + workspaces) + context + communicators",
        source=f"cost/memory/peak.py, cost/memory/overhead.py; {_MEMORY}",
    ),
    "limit": Meaning(
        "What a rank may hold.",
        unit="bytes",
        how="what is free on the fullest device before the job, less the memory margin",
        source=f"NVML, or the device's entry in docs/planning.md; {_MEMORY}",
    ),
    "memory margin": Meaning(
        "Part of the free memory that must stay free.",
        unit="part of a whole",
        how="--memory-margin, --pipette-memory-margin; 0.08 where nothing is said",
        source="defaults.py",
    ),
    "weights": Meaning(
        "The rank's parameters.",
        unit="bytes",
        how="tensor by tensor, with padding of buckets and FP8 copies",
        source=f"cost/layers/parameters.py; {_MEMORY}",
    ),
    "gradients": Meaning(
        "Buffers of the gradients.",
        unit="bytes",
        how="4 bytes a parameter, 2 where they are reduced in 16 bits",
        source=f"cost/layers/optimizer.py; {_MEMORY}",
    ),
    "activations": Meaning(
        "What autograd keeps of each layer until its backward, and what recompute brings back for a while.",
        unit="bytes",
        how="saved tensors of a layer x layers x micro-batches whose backward is to come: min(m, p - r) on stage r "
        "of 1F1B",
        source=f"Korthikanti et al., arXiv 2205.05198, section 4; cost/layers/activations.py; {_MEMORY}",
    ),
    "logits": Meaning(
        "Final norm, logits, their fp32 copy and the loss, on the last stage.",
        unit="bytes",
        how="sequence x micro-batch x padded vocabulary / tp in each format that is kept",
        source=f"cost/layers/embedding_and_head.py; {_MEMORY}",
    ),
    "buffers": Meaning(
        "What the pipeline sends and receives, gathers, and the optimizer's temporaries where they make the peak.",
        unit="bytes",
        how="counted at the fullest of four instants: loading, the loss, a layer's backward, the optimizer's step",
        source=f"cost/memory/peak.py; {_MEMORY}",
    ),
    "overhead": Meaning(
        "What is not the model's: workspaces, CUDA context, communicators, the allocator's reserve.",
        unit="bytes",
        how="measured by the warm-up, else usual figures that the notes name",
        source=f"cost/memory/overhead.py; {_MEMORY}",
    ),
    "peak": Meaning(
        "The most that a stage's device holds.",
        unit="bytes",
        how="the sum of the kinds in the same line",
        source=f"cost/memory/peak.py; {_MEMORY}",
    ),
    "layers": Meaning(
        "Transformer layers of a stage, all its chunks together.",
        unit="a count",
        how="the layout's split of the layers",
        source="facts/layout.py",
    ),
}
"""Kinds of memory, and what they are compared with."""

QUALITY = {
    "gap": Meaning(
        "At most so much faster could any other plan be, by the same cost model.",
        unit="part of the floor",
        how="step time / floor - 1; none where nothing was proven",
        source="facts/plan.py, search/bounds/",
    ),
    "floor": Meaning(
        "No legal layout that fits is faster than this in any placement, by the same cost model.",
        unit="seconds",
        how="the least lower bound of the steps of all layouts that fit",
        source="cost/columns/, search/bounds/",
    ),
    "bound": Meaning(
        "No placement of the chosen layout is faster than this, by the same cost model.",
        unit="seconds",
        how="the step with each group on the best links it could have, raised by what rings and pipelines share",
        source="search/bounds/",
    ),
    "margin": Meaning(
        "Another plan replaces the user's own only if it saves more than this part of the step.",
        unit="part of a whole",
        how="--margin, --pipette-margin",
        source="defaults.py, search/choose.py",
    ),
    "ratio": Meaning(
        "Step time beside that of the first compared plan.", "a ratio", "step / step of plan 1", "report/comparison.py"
    ),
    "error": Meaning(
        "How far a predicted step or memory is from the measured one: too long or large (+), too short or small (-).",
        unit="part of what was measured",
        how="predicted / measured - 1",
        source="facts/outcome.py, docs/report.md",
    ),
    "tokens/s": Meaning(
        "Tokens that the whole job, or each rank, trains in a second.",
        unit="tokens a second",
        how="sequences of a step x tokens of a sequence / step time",
        source="facts/plan.py",
    ),
    "tflop/s": Meaning(
        "The model's FLOPs a second on each rank; compares with Megatron's TFLOP/s/GPU.",
        unit="10^12 floating-point operations a second",
        how="Megatron's own count of the step's FLOPs / step time / ranks; recompute does not count",
        source="facts/model.py, step_flops; Megatron's num_floating_point_operations",
    ),
    "mfu": Meaning(
        "Model FLOPs utilisation: part of the device's peak that the model's FLOPs come to.",
        unit="part of the peak",
        how="FLOP/s of a rank / dense peak of the data sheet in the format of the weights",
        source="PaLM, arXiv 2204.02311, appendix B; facts/known_devices.py",
    ),
    "spread": Meaning(
        "How much repeated timings scatter.",
        unit="part of the median",
        how="median distance from the median / median",
        source="facts/measurements.py",
    ),
    "slowest slot": Meaning(
        "The device that computes a layer most slowly.",
        unit="part of the median device's speed",
        how="the same layer timed on all devices at once",
        source="probe/compute/slot_speeds.py",
    ),
    "bandwidth": Meaning(
        "Of a link or a collective: what a long message gets.",
        unit="bytes a second",
        how="slope of time over bytes of several message sizes, all links of a round at work",
        source="probe/links/meter.py, probe/links/fits.py",
    ),
    "latency": Meaning(
        "Of a link or a collective: what a message of no length takes.",
        unit="seconds",
        how="intercept of time over bytes of several message sizes",
        source="probe/links/fits.py",
    ),
}
"""How good a plan is, and how fast machines are."""

_FLAG = "the flag of that name in docs/command_line.md; facts/layout.py"
LAYOUT = {
    "tp": Meaning("Tensor-parallel degree: ranks that share each matrix.", "ranks", "part of the layout", _FLAG),
    "pp": Meaning("Pipeline-parallel degree: stages.", "stages", "part of the layout", _FLAG),
    "dp": Meaning("Data-parallel degree: replicas.", "replicas", "ranks / (tp x pp x cp)", _FLAG),
    "cp": Meaning("Context-parallel degree: ranks that share each sequence.", "ranks", "part of the layout", _FLAG),
    "ep": Meaning("Expert-parallel degree: ranks that share the experts.", "ranks", "part of the layout", _FLAG),
    "etp": Meaning("Tensor-parallel degree of experts.", "ranks", "part of the layout", _FLAG),
    "vpp": Meaning("Virtual stages (chunks) on each rank.", "chunks", "part of the layout", _FLAG),
    "mbs": Meaning("Micro-batch: sequences of one forward.", "sequences", "part of the layout", _FLAG),
    "seq-par": Meaning("--sequence-parallel: norms and residuals are split over tensor-parallel ranks, too."),
    "dist-opt": Meaning("--use-distributed-optimizer: replicas share the optimizer's states."),
    "overlap": Meaning("--overlap-grad-reduce: gradients are reduced behind the backward."),
    "uneven": Meaning("Stages have unequal numbers of layers."),
    "schedule": Meaning("The order of passes on each stage: 1f1b, interleaved-1f1b, zb-h1 ...; docs/schedules.md."),
}
"""The words of a layout's short form, `tp2 pp4 dp1 mbs2 vpp2 dist-opt`."""

MEANINGS: dict[str, Meaning] = {**SECTIONS, **WORDS, **STEP, **MEMORY, **QUALITY, **LAYOUT}
"""Every explanation by its key: lower case, words apart by spaces."""


_IN_FULL = {short: key for key, short in SHORT.items()}


def key_of(label: str) -> str:
    """Return the key of a label of a screen or a name of a file: `data_parallel`, `Step time`, `MFU`, `activ`."""
    key = " ".join(label.replace("_", " ").lower().split())
    return _IN_FULL.get(key, key)
