"""Meaning, unit, calculation and source of every word and number on the screens.

`pipette explain` prints this table, and `scripts/glossary.py` makes docs/glossary.md from the same table.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipette_launch.errors import FactError


@dataclass(frozen=True, slots=True)
class Meaning:
    """Explanation of one word or number on the screens."""

    what: str
    """Meaning of the word in one sentence."""
    unit: str = ""
    """Unit of the number. Empty for a word without a number."""
    how: str = ""
    """Formula or measurement that gives the number."""
    source: str = ""
    """Paper, flag, or page of the documentation."""

    def __post_init__(self) -> None:
        if self.unit and not (self.how and self.source):
            raise FactError(f"a number needs how and source: {self.what}")


LAYOUT = {
    "tp": Meaning(
        "Tensor parallelism: ranks that share the weights of each layer.", source="--tensor-model-parallel-size"
    ),
    "pp": Meaning(
        "Pipeline parallelism: stages into which the layers are divided.", source="--pipeline-model-parallel-size"
    ),
    "dp": Meaning(
        "Data parallelism: replicas of the model, each with its share of the batch.",
        source="ranks / (tp x pp x cp)",
    ),
    "cp": Meaning("Context parallelism: ranks that share each sequence.", source="--context-parallel-size"),
    "ep": Meaning(
        "Expert parallelism: ranks that share the experts of each layer.", source="--expert-model-parallel-size"
    ),
    "etp": Meaning(
        "Tensor parallelism inside each expert; shown if it differs from tp.", source="--expert-tensor-parallel-size"
    ),
    "vpp": Meaning(
        "Virtual stages: chunks of layers on each pipeline rank; shown if above 1.",
        source="--num-virtual-stages-per-pipeline-rank",
    ),
    "mbs": Meaning("Micro-batch size: sequences in one pass.", source="--micro-batch-size"),
    "seq-par": Meaning(
        "Sequence parallelism: tensor-parallel ranks also share norms and dropout.", source="--sequence-parallel"
    ),
    "dist-opt": Meaning(
        "Distributed optimizer: data-parallel ranks share the optimizer states.", source="--use-distributed-optimizer"
    ),
    "overlap": Meaning(
        "Overlap of gradient reduction and backward: gradients are reduced while the backward still computes.",
        source="--overlap-grad-reduce",
    ),
    "recompute": Meaning(
        "In a layout, the activations that the backward computes again: full or selective. In a step, the time of this "
        "computation.",
        "seconds of one optimizer step, on the ranks that end last",
        "the recomputed share of a layer's forward, times layers and micro-batches",
        "--recompute-granularity; docs/prediction.md, Step time",
    ),
    "uneven": Meaning(
        "Stages have different numbers of layers.",
        source="--pipeline-model-parallel-layout, --decoder-first-pipeline-num-layers",
    ),
    "schedule": Meaning(
        "Order of forward and backward passes on each stage: 1f1b, interleaved-1f1b, zb-h1 and others.",
        source="docs/schedules.md",
    ),
}
"""Words in the short form of a layout, such as `tp2 pp4 dp1 mbs2 vpp2 dist-opt`."""

WORDS = {
    "host": Meaning("One machine of the job. torchrun calls it a node."),
    "device": Meaning("One GPU, or one process's share of a host's processors."),
    "slot": Meaning("A place for one process: a host and a local device."),
    "rank": Meaning(
        "The number that Megatron gives a process (RANK). The rank decides which part of the model a process computes."
    ),
    "layout": Meaning(
        "All parallel degrees, the micro-batch size and the memory options. The placement is not part of the layout."
    ),
    "placement": Meaning("The slot of each rank. torchrun always puts the first ranks on the first host."),
    "plan": Meaning("Layout, schedule, placement and predictions, stored in plan.json."),
    "yours": Meaning("Your own configuration: the flags of your script, on torchrun's placement."),
    "ours": Meaning("The plan of pipette-launch, beside plans of other planners."),
    "iteration": Meaning("Megatron's word for a step: one update of the weights with one global batch."),
    "micro-batch": Meaning(
        "Sequences that pass through the model together. A step sums the gradients of several micro-batches."
    ),
    "pass": Meaning("The forward or the backward of one micro-batch through one stage."),
    "stage": Meaning("The layers of one pipeline rank. First and last stage also hold embedding and head."),
    "fullest": Meaning("The stage with the highest memory peak. A plan fits if the fullest stage fits."),
    "replica": Meaning("All ranks that together hold the model once."),
    "warm-up": Meaning("The measurement of the machines before the first plan, stored in cluster.json."),
    "trial": Meaning("A few real iterations of a plan before the training (--pipette-trials)."),
    "fallback plan": Meaning(
        "A plan made in advance for fewer hosts. The fallback plan starts at once after a host is lost."
    ),
    "agent": Meaning("The process of pipette-launch on each host. The agent starts and watches the workers."),
    "worker": Meaning("One process of your script. Each slot has one worker."),
    "fabric": Meaning(
        "The network between hosts, measured or described in a file.", source="docs/planning.md, Fabrics"
    ),
    "tier": Meaning("One level of the network: leaf switch, pod or core."),
    "island": Meaning("Hosts with faster links to each other than to other hosts."),
    "imagined": Meaning("Machines that were not measured. Figures of imagined machines come from --gpu and --fabric."),
    "regret": Meaning("How much slower the chosen plan ran than the best plan that was really run."),
    "gib": Meaning("Binary unit of memory: 1,024 MiB = 2^30 bytes."),
    "mib": Meaning("Binary unit of memory: 1,024 KiB = 2^20 bytes."),
    "phase": Meaning("The present activity of a job: warm-up, planning, trials or training."),
    "failures": Meaning("Number of restarts of the workers, and number of lost nodes."),
    "data": Meaning("In pipette watch: age of the figures on the screen."),
    "stops": Meaning("In pipette doctor: problems that prevent a job on this machine."),
    "slows": Meaning("In pipette doctor: problems that make a job slower on this machine."),
    "fine": Meaning("In pipette doctor: checks without a problem."),
    "answer": Meaning("In pipette doctor: whether a job can run here."),
}
"""Terms, and the lines of `pipette watch` and `pipette doctor`."""

SECTIONS = {
    "job": Meaning("The script, the number of parameters, and the sequences and tokens of one step."),
    "machines": Meaning("Ranks, hosts and devices. States whether the machines were measured or imagined (--gpu)."),
    "measured": Meaning("Results of the warm-up: links, the time of a layer, the slowest slot."),
    "health": Meaning("Devices, hosts and links that are damaged or slower than their peers (!), and notes (•)."),
    "verdict": Meaning(
        "States whether each stage stays below the memory limit. Tight: above the limit, but within free memory."
    ),
    "chosen": Meaning("Layout, schedule and rank order of the plan, with its predicted step time."),
    "plans": Meaning("One line for each compared plan: step time, ratio to the first plan, memory, gap and layout."),
    "rates": Meaning("Tokens and FLOPs per second of each compared plan."),
    "parts": Meaning("Parts of each plan's step time. pipette explain bubble, and so on, explains each part."),
    "places": Meaning("Number of ranks that sit on another device than under the first plan."),
    "faults": Meaning("Reasons why a compared plan cannot run."),
    "remarks": Meaning("Further notes on a compared plan."),
    "trials": Meaning("Step times of plans that ran for a few iterations before the training (--pipette-trials)."),
    "why": Meaning("Reason for the choice, the time saved, and the distance from the proven floor."),
    "split": Meaning("Peak memory of each stage by kind. pipette explain weights, and so on, explains each kind."),
    "on a loss": Meaning("Fallback plans for fewer hosts, which start at once when hosts are lost."),
    "flags": Meaning("Changes of the script's command line: added (+), deleted (-), changed (~)."),
    "dropped": Meaning("Number of layouts that the search rejected, by reason."),
    "notes": Meaning("Assumptions, pinned options, poor measurements and omissions."),
    "plan file": Meaning("Path of the plan, for pipette report, pipette compare and --pipette-plan."),
    "file": Meaning("Path of the cluster.json on the screen."),
    "links": Meaning("Bandwidth of each link between hosts, with all links of a round in use, and inside hosts."),
    "groups": Meaning("Bandwidth and latency of whole collectives, as measured by the warm-up."),
    "took": Meaning(
        "Duration of each phase of the warm-up. In the phase search, a short search selects further measurements.",
        "seconds",
        "wall clock of the workers",
        "docs/files.md, cluster.json",
    ),
}
"""Headings of the screens, in lower case."""

_TIME = "seconds of one optimizer step, on the ranks that end last"
_TIME_PAGE = "docs/prediction.md, Step time"


def _time(what: str, how: str, source: str = _TIME_PAGE) -> Meaning:
    return Meaning(what, _TIME, how, source)


STEP = {
    "step time": Meaning(
        "Duration of one optimizer step.",
        "seconds",
        "longest path through all passes and messages of the schedule, then the part of gradient reduction, optimizer "
        "and parameter gather that is not hidden",
        _TIME_PAGE,
    ),
    "compute": _time(
        "In a step, the time in which stages compute. In a warm-up's report, the times of single layers.",
        "measured forward and backward of each layer, the embedding and the head, times micro-batches; on imagined "
        "machines FLOPs and bytes of each layer divided by a share of the device's peak rates",
    ),
    "bubble": _time(
        "Time in which a stage waits while the pipeline fills and drains.",
        "the simulated pipeline with free messages, minus the busy time of the stage; (p - 1)(forward + backward) for "
        "1F1B with equal stages",
        f"Megatron-LM, arXiv 2104.04473, section 2.2; {_TIME_PAGE}",
    ),
    "pipeline transfer": _time(
        "Time that messages between pipeline stages add to the step.",
        "the simulated pipeline with messages of latency + bytes / bandwidth, minus the pipeline with free messages",
    ),
    "tensor parallel": _time(
        "Collectives of tensor-parallel ranks inside the passes.",
        "rings of steps x (latency + bytes of a step / bandwidth), scaled to the measured groups, times layers and "
        "micro-batches",
    ),
    "context parallel": _time(
        "Exchange of keys and values between context-parallel ranks, except the part hidden behind attention.",
        "ring exchanges minus the attention that runs at the same time",
    ),
    "expert parallel": _time(
        "Messages that send tokens to their experts and back.",
        "all-to-all with topk copies of each token (flex: one copy for each rank or domain), over the network card of "
        "each rank",
    ),
    "data parallel": _time(
        "Gradient reduction over the replicas, except the part hidden behind the backward.",
        "ring reduction of each gradient bucket after its chunk has drained; under FSDP the gathers and reductions "
        "that a layer's compute does not hide",
    ),
    "embedding gradients": _time(
        "Sum of the tied embedding's gradient over first and last stage.",
        "an all-reduce of the embedding's gradient between two stages",
    ),
    "optimizer": Meaning(
        "In a step, the update of the parameters. In memory, Adam's states and the fp32 copy of the weights.",
        f"{_TIME}; in memory bytes",
        "the measured or imagined update on the largest rank; in memory 12 bytes per parameter for Adam on 16-bit "
        "weights, divided by dp x cp under the distributed optimizer",
        f"ZeRO, arXiv 1910.02054; {_TIME_PAGE}",
    ),
    "parameter gather": _time(
        "Collecting the updated parameters from the ranks of the distributed optimizer.",
        "a ring all-gather of each rank's weights, minus the part that --overlap-param-gather hides",
    ),
    "learned correction": Meaning(
        "Correction of the step time by the outcomes of earlier jobs on similar machines.",
        "seconds",
        "fitted to the logarithm of measured over predicted steps",
        "docs/prediction.md, What earlier jobs teach",
    ),
    "other": _time("Parts of the step without a column in pipette compare.", "the step minus the parts shown"),
}
"""The step time and its parts. Plan files use the same names with underscores."""

_MEMORY_PAGE = "docs/prediction.md, Memory"


def _bytes(what: str, how: str, source: str = _MEMORY_PAGE) -> Meaning:
    return Meaning(what, "bytes", how, source)


MEMORY = {
    "memory": Meaning(
        "Peak memory of a device of each stage, beside the limit.",
        "bytes; 1 KiB is 1,024 bytes",
        "reserve x (the model's own tensors + workspaces) + context + communicators",
        _MEMORY_PAGE,
    ),
    "limit": _bytes(
        "Memory that a rank may use.",
        "free memory of the fullest device before the job (reported by NVML, or in the device's entry), minus the "
        "memory margin",
    ),
    "memory margin": Meaning(
        "Share of the free memory that must stay free.",
        "share",
        "--memory-margin, --pipette-memory-margin; 0.08 by default",
        "docs/command_line.md",
    ),
    "weights": _bytes("Parameters of the rank.", "each tensor, with the padding of buckets and FP8 copies"),
    "gradients": _bytes("Buffers for gradients.", "4 bytes per parameter, or 2 if they are reduced in 16 bits"),
    "activations": _bytes(
        "Tensors that autograd keeps until the backward of a layer, and tensors that recompute restores for a while.",
        "saved tensors of a layer x layers x micro-batches in flight: min(m, p - r) on stage r of 1F1B",
        f"Korthikanti et al., arXiv 2205.05198, section 4; {_MEMORY_PAGE}",
    ),
    "logits": _bytes(
        "Final norm, logits, the fp32 copy of the logits, and the loss, on the last stage.",
        "sequence x micro-batch x padded vocabulary / tp, in each format that is kept",
    ),
    "buffers": _bytes(
        "Tensors of pipeline messages and gathers, and temporary tensors of the optimizer if they make the peak.",
        "counted at the fullest of four moments: loading, loss, a layer's backward, the optimizer step",
    ),
    "overhead": _bytes(
        "Memory outside the model: workspaces, CUDA context, communicators, the allocator's reserve.",
        "measured by the warm-up; otherwise usual figures, which the notes name",
    ),
    "peak": _bytes("Highest memory use of a stage's device.", "sum of the kinds in the line"),
    "layers": Meaning(
        "Transformer layers of a stage, in all its chunks.", "layers", "the layout's split of the layers", _MEMORY_PAGE
    ),
}
"""Kinds of memory, and the memory limit."""

QUALITY = {
    "gap": Meaning(
        "Upper limit of the speed-up that any other plan could give, by the same cost model.",
        "share of the floor",
        "step time / floor - 1; empty if nothing was proven",
        "docs/planning.md",
    ),
    "floor": Meaning(
        "Proven lower bound: no legal layout that fits is faster, in any placement, by the same cost model.",
        "seconds",
        "the least lower bound over all layouts that fit",
        "docs/planning.md",
    ),
    "bound": Meaning(
        "Proven lower bound of the chosen layout over all placements, by the same cost model.",
        "seconds",
        "the step with each group on the best links it could have, corrected for links that rings and pipelines share",
        "docs/planning.md",
    ),
    "margin": Meaning(
        "Share of the step that another plan must save to replace your own configuration.",
        "share",
        "--margin, --pipette-margin; 0.02 by default",
        "docs/command_line.md",
    ),
    "ratio": Meaning(
        "Step time relative to the first compared plan.", "ratio", "step / step of plan 1", "docs/comparison.md"
    ),
    "error": Meaning(
        "Relative error of a predicted step time or memory: positive if the prediction was too high.",
        "share of the measured value",
        "predicted / measured - 1",
        "docs/report.md",
    ),
    "tokens/s": Meaning(
        "Tokens per second, of the whole job or of each rank.",
        "tokens per second",
        "sequences of a step x tokens of a sequence / step time",
        _TIME_PAGE,
    ),
    "tflop/s": Meaning(
        "FLOPs of the model per second on each rank. Megatron's log calls it TFLOP/s/GPU.",
        "10^12 floating-point operations per second",
        "Megatron's count of the step's FLOPs / step time / ranks; recompute does not count",
        "Megatron's num_floating_point_operations",
    ),
    "mfu": Meaning(
        "Model FLOPs utilisation: FLOPs of the model relative to the device's peak.",
        "share of the peak",
        "FLOP/s of a rank / dense peak of the data sheet in the format of the weights",
        "PaLM, arXiv 2204.02311, appendix B",
    ),
    "spread": Meaning(
        "Scatter of repeated measurements.",
        "share of the median",
        "median distance from the median / median",
        "docs/files.md, cluster.json",
    ),
    "slowest slot": Meaning(
        "The device that computes a layer most slowly.",
        "share of the median device's speed",
        "the same layer measured on all devices at once",
        "docs/files.md, cluster.json",
    ),
    "bandwidth": Meaning(
        "Bytes per second of a long message over a link, or of a collective.",
        "bytes per second",
        "slope of time over bytes, from several message sizes, with all links of a round in use",
        "docs/files.md, cluster.json",
    ),
    "latency": Meaning(
        "Time of an empty message over a link, or of an empty collective.",
        "seconds",
        "intercept of time over bytes, from several message sizes",
        "docs/files.md, cluster.json",
    ),
}
"""Quality of a plan, and speed of machines."""

GROUPS: dict[str, dict[str, Meaning]] = {
    "Words": WORDS,
    "Short form of a layout": LAYOUT,
    "Step time": STEP,
    "Memory": MEMORY,
    "Quality and speed": QUALITY,
    "Headings of the screens": SECTIONS,
}
"""Parts of the glossary by title, in the order of docs/glossary.md."""

MEANINGS: dict[str, Meaning] = {key: meaning for group in GROUPS.values() for key, meaning in group.items()}
"""All entries by key. Keys are in lower case and have spaces between words."""

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
"""Shorter heads of columns for narrow screens."""
_IN_FULL = {short: key for key, short in SHORT.items()}


def key_of(label: str) -> str:
    """Return the key of a label on a screen or in a file: `data_parallel`, `Step time`, `MFU`, `activ`."""
    key = " ".join(label.replace("_", " ").lower().split())
    return _IN_FULL.get(key, key)
