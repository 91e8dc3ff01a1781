"""The split of the layers into chunks: read from Megatron's six kinds of flags for the split, and written as flags.

A chunk is one model piece of one pipeline rank: chunk c, in model order, lies on pipeline rank c % pp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.flags import Arguments, release_of

LAYERS_PER_CHUNK, VPP = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
STAGES = "pipeline_model_parallel_layout"
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Flags with which the embedding or the loss counts as one more layer in the split."""
SPLIT_DESTS = (LAYERS_PER_CHUNK, VPP, STAGES, *ENDS, *ACCOUNTS)
"""Destinations of all flags that set the split of the layers, except the number of pipeline ranks."""
MOST_SHOWN = 1 << 14
"""Largest number of characters of `--pipeline-model-parallel-layout` after repetitions are written out."""
PATTERN_DESTS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Flags that name the layers of a hybrid model. `hybrid_layer_pattern` is the new name from 0.17 on."""
RATIO_DESTS = {"*": "hybrid_attention_ratio", "-": "hybrid_mlp_ratio"}
"""Flags until Megatron 0.16 for the share of attention or MLP layers in a hybrid model, by letter of the layer."""
HYBRID_SPECS = ("mamba_stack_spec", "hybrid_stack_spec")
"""Megatron's own values of `--spec` for hybrid models."""
FIRST_CUT_PATTERNS = (0, 17)
"""First release whose patterns name the stages.

In earlier releases, all stages of a hybrid model have the same number of layers.
"""
Chunks = tuple[int, ...]


class Split(NamedTuple):
    """Split of the model into chunks, with the field names of a layout."""

    vpp: int = 1
    layers_per_chunk: Chunks = ()
    chunks_after_mtp: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPattern:
    """Layers by letters: the pattern `M-M*|M-M-/*E/*E` has two stages and two depths of multi-token prediction."""

    stages: tuple[str, ...]
    depths: tuple[str, ...]

    @property
    def layers(self) -> str:
        """Letters of all layers of the model, without the bounds of stages."""
        return "".join(self.stages)

    @property
    def letters(self) -> set[str]:
        """Kinds of layers by letter, also those in multi-token prediction."""
        return set().union(*self.stages, *self.depths)


def hybrid_pattern(arguments: Arguments) -> HybridPattern | None:
    """Return the layer pattern of a hybrid model. Return None for models that are not hybrid."""
    given = [dest for dest in PATTERN_DESTS if arguments.get(dest)]
    if not given:
        is_old, specs = release_of(arguments.version) < FIRST_CUT_PATTERNS, {*(arguments.get("spec") or ())}
        if is_old and specs & {*HYBRID_SPECS} and arguments.get("num_layers"):
            return HybridPattern(stages=(_pattern_of_ratios(arguments),), depths=())
        if arguments.get("is_hybrid_model"):
            raise arguments.refusal(f"needs {arguments.shown(PATTERN_DESTS[1])}", "is_hybrid_model")
        return None
    shown = arguments.shown(given[0])
    if len(given) > 1:
        raise MegatronError(f"{shown} and {arguments.shown(given[1])} exclude each other; keep the first")
    text: str = arguments.get(given[0])
    if len(text) > MOST_SHOWN:
        raise MegatronError(f"{shown[:80]}: more than {MOST_SHOWN} characters")
    layers, *depths = text.split("/")
    older = arguments.get("mtp_hybrid_override_pattern")
    if older and not depths:
        depths = [older] * int(arguments.get("mtp_num_layers") or 0)
    if not layers.replace("|", "") or len(set(depths)) > 1:
        raise MegatronError(f"{shown}: needs layers, and the same layers in each depth of multi-token prediction")
    mixed = any("*" in one and {"D", "+"} & {*one} for one in (layers, *depths))
    if mixed and release_of(arguments.version) >= (0, 18):
        raise MegatronError(f"{shown}: Megatron refuses attention (*) beside latent or sparse attention (+, D)")
    return HybridPattern(stages=tuple(layers.split("|")), depths=tuple(depths))


def _pattern_of_ratios(arguments: Arguments) -> str:
    """Spread attention and MLP layers evenly among Mamba layers (mamba_hybrid_layer_allocation.py)."""
    num_layers = arguments.size("num_layers")
    shares = {letter: float(arguments.get(dest) or 0.0) for letter, dest in RATIO_DESTS.items()}
    if num_layers > MOST_SHOWN or min(shares.values()) < 0 or sum(shares.values()) > 1:
        reason = "shares of layers must be at least 0, and together at most 1; change them"
        raise arguments.refusal(reason, "num_layers", *RATIO_DESTS.values())
    pattern = ["M"] * num_layers
    for (letter, share), first_run in zip(shares.items(), (1, 0), strict=True):
        places = [place for place, kind in enumerate(pattern) if kind == "M"]
        count = round(num_layers * share)
        # An attention layer comes between two runs of Mamba layers, and an MLP layer after each run of Mamba layers.
        run = (len(places) - count) / (count + first_run) if count else len(places) + 1
        left = run
        for place in places:
            if left < 0.5:
                pattern[place], left = letter, left + run
            else:
                left -= 1
    return "".join(pattern)


def read_chunks(arguments: Arguments, *, pp: int, num_layers: int) -> Split:
    """Read the split of the layers.

    Raise MegatronError if two flags exclude each other, or cannot divide the layers.
    """
    ways = [dest for dest in SPLIT_DESTS[:3] if arguments.get(dest) is not None]
    if len(ways) > 1:
        raise MegatronError(f"{' and '.join(map(arguments.shown, ways))} exclude each other; keep one of them")
    ends = [dest for dest in ENDS if arguments.get(dest) is not None]
    accounts = [dest for dest in ACCOUNTS if arguments.get(dest)]
    whole = ways if ways == [STAGES] else []
    if bool(ends) + bool(accounts) + bool(whole) > 1:
        clash = " and ".join(map(arguments.shown, (*whole, *ends, *accounts)))
        raise MegatronError(f"{clash} exclude each other; keep one way to split the layers")
    pattern, after = hybrid_pattern(arguments), 0
    if pattern:
        vpp, chunks = _from_pattern(arguments, pattern, pp, num_layers)
    elif whole:
        vpp, chunks, after = _from_stages(arguments, pp, num_layers)
    else:
        vpp = _virtual_stages(arguments, pp, num_layers)
        chunks = _from_counts(arguments, pp, num_layers, vpp)
    if vpp > 1 and pp == 1:
        shown = arguments.shown_given(*SPLIT_DESTS[:3], *PATTERN_DESTS)
        raise MegatronError(f"{vpp} virtual stages need --pipeline-model-parallel-size above 1; remove {shown}")
    return Split(vpp, () if len(set(chunks)) == 1 else chunks, after)


def write_chunks(arguments: Arguments, split: Split, *, pp: int, num_layers: int) -> Arguments:
    """Write a split as flags that every release has, and delete all other flags for the split."""
    bare = arguments.without(*SPLIT_DESTS)
    pattern = hybrid_pattern(bare)
    if pattern and len(pattern.stages) > 1:
        bare = _with_pattern(bare, "/".join((pattern.layers, *pattern.depths)))
    vpp, chunks, after = split
    pattern = hybrid_pattern(arguments)
    if pattern and release_of(arguments.version) >= FIRST_CUT_PATTERNS and pp > 1:
        sizes = chunks or (num_layers // (pp * vpp),) * (pp * vpp)
        stages = [pattern.layers[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return _with_pattern(bare, "/".join(("|".join(stages), *pattern.depths)))
    if not chunks:
        if vpp == 1:
            return bare
        if arguments.is_given(VPP):
            return bare.with_value(VPP, vpp)
        return bare.with_value(LAYERS_PER_CHUNK, num_layers // (pp * vpp))
    # If all middle stages are equal, the numbers of layers of the first and the last stage define the split.
    if vpp == 1 and after == 0 and min(chunks) > 0 and len(set(chunks[1:-1])) <= 1:
        return bare.with_value(ENDS[0], chunks[0]).with_value(ENDS[1], chunks[-1])
    stages = ["t" * layers if layers < 3 else f"t*{layers}" for layers in chunks]
    stages[-1 - after] += "m" * int(arguments.get("mtp_num_layers") or 0)
    return bare.with_value(STAGES, f"E{'|'.join(stages)}L")


def _with_pattern(arguments: Arguments, text: str) -> Arguments:
    return arguments.with_value(next(dest for dest in PATTERN_DESTS if arguments.get(dest)), text)


def nearly_even(num_layers: int, num_chunks: int) -> Chunks:
    """Divide layers among chunks so that chunk sizes differ by at most 1. Return () if all sizes are equal.

    Additional layers go to middle chunks, then to the first chunk, but not to the last chunk, which has the head.
    """
    size, more = divmod(num_layers, num_chunks)
    larger = {*[*range(1, num_chunks - 1), 0][:more]}
    return tuple(size + (chunk in larger) for chunk in range(num_chunks)) if more else ()


def stated_vpp(arguments: Arguments, pp: int) -> int | None:
    """Return the number of virtual stages if a flag states it.

    Return None if the number follows from the number of layers.
    """
    if arguments.get(STAGES) is not None:
        stages, rest = divmod(_written_out(arguments).count("|") + 1, pp)
        return None if rest else stages
    return None if arguments.get(LAYERS_PER_CHUNK) is not None else arguments.size(VPP)


def _from_pattern(arguments: Arguments, pattern: HybridPattern, pp: int, num_layers: int) -> tuple[int, Chunks]:
    """Read the stages of a hybrid model's pattern.

    A pattern without stages is split equally, except for stages whose size a flag sets.
    """
    stages, cuts = pattern.stages, release_of(arguments.version) >= FIRST_CUT_PATTERNS
    may_stay = ENDS if len(stages) == 1 and cuts else ()
    clash = [dest for dest in SPLIT_DESTS if arguments.get(dest) and dest not in may_stay]
    if clash:
        raise arguments.refusal("the pattern of a hybrid model says where stages begin; remove it", *clash)
    if len(stages) == 1:
        return 1, _from_counts(arguments, pp, num_layers, 1)
    if not cuts:
        raise arguments.refusal("stages (|) can be named from 0.17 on", PATTERN_DESTS[1])
    if len(stages) % pp:
        reason = f"{len(stages)} stages of the pattern are not a multiple of --pipeline-model-parallel-size {pp}"
        raise arguments.refusal(reason, PATTERN_DESTS[0])
    return len(stages) // pp, tuple(map(len, stages))


def _from_stages(arguments: Arguments, pp: int, num_layers: int) -> Split:
    """Read `Et*3|(tt|)*2,mL` as stages "Ettt", "tt", "tt", "mL", by the rules of Megatron's own class.

    Source: PipelineParallelLayerLayout.validate_layer_layout (transformer/pipeline_parallel_layer_layout.py).
    """
    stages = _written_out(arguments).split("|")
    layers, depths = "".join(stages), int(arguments.get("mtp_num_layers") or 0)
    found = ", ".join(f"{layers.count(letter)} {letter}" for letter in "EtL")
    strange = sorted(set(layers) - set("EtmL"))
    for is_wrong, reason in (
        (strange, f"{' '.join(strange)!r} names no layer; write only E, t, m and L"),
        (len(stages) % pp, f"{len(stages)} stages are not a multiple of --pipeline-model-parallel-size {pp}"),
        (not layers.startswith("E") or not layers.endswith("L"), "needs E at the very front and L at the very end"),
        (layers.count("m") != depths, f"has {layers.count('m')} m, but --mtp-num-layers is {depths}"),
        (
            layers.count("t") != num_layers or len(layers) != num_layers + depths + 2,
            f"has {found}; needs one E, one t for each of --num-layers {num_layers}, one L",
        ),
    ):
        if is_wrong:
            raise arguments.refusal(reason, STAGES)
    after = _chunks_after_prediction(arguments, stages, pp) if depths else 0
    return Split(len(stages) // pp, tuple(stage.count("t") for stage in stages), after)


def _written_out(arguments: Arguments) -> str:
    """Write out the repetitions of `--pipeline-model-parallel-layout` as Megatron does, and remove commas."""
    text: str = arguments.get(STAGES).replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
        # A few characters may describe billions of layers, so compute the length of the result first.
        sizes = (len(match[1]) * int(match[2]) for match in re.finditer(pattern, text[:MOST_SHOWN]))
        if len(text) > MOST_SHOWN or sum(sizes) > MOST_SHOWN:
            raise MegatronError(f"{arguments.shown(STAGES)[:80]}: more than {MOST_SHOWN} characters when written out")
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text


def _chunks_after_prediction(arguments: Arguments, stages: list[str], pp: int) -> int:
    """Count the chunks after the chunk with multi-token prediction (m)."""
    places = [place for place, stage in enumerate(stages) if "m" in stage]
    layers = "".join(stages)
    after = len(stages) - 1 - places[0]
    for is_wrong, reason in (
        ("t" in layers[layers.index("m") :], "multi-token prediction (m) must stand behind all layers (t)"),
        (len(places) > 1, "all depths of multi-token prediction (m) must stand in one stage"),
        (after >= pp, f"multi-token prediction (m) must stand in one of the last {pp} stages"),
    ):
        if is_wrong:
            raise arguments.refusal(reason, STAGES)
    return after


def _virtual_stages(arguments: Arguments, pp: int, num_layers: int) -> int:
    if arguments.get(VPP) is not None or arguments.get(LAYERS_PER_CHUNK) is None:
        return arguments.size(VPP)
    if any(arguments.get(dest) is not None for dest in ENDS):
        reason = "with --decoder-first/last-pipeline-num-layers use --num-virtual-stages-per-pipeline-rank instead"
        raise arguments.refusal(reason, LAYERS_PER_CHUNK)
    per_chunk = arguments.size(LAYERS_PER_CHUNK)
    counted = num_layers + sum(bool(arguments.get(dest)) for dest in ACCOUNTS)
    if counted % pp or counted // pp % per_chunk:
        reason = (
            f"{counted} layers on --pipeline-model-parallel-size {pp} are {counted / pp:g} per rank, "
            f"not a multiple of {per_chunk}"
        )
        raise arguments.refusal(reason, LAYERS_PER_CHUNK)
    return counted // pp // per_chunk


def _from_counts(arguments: Arguments, pp: int, num_layers: int, vpp: int) -> Chunks:
    """Divide the layers equally over all stages without a stated size.

    Embedding and loss count as layers if a flag says so.
    """
    ends = [(place, arguments.get(dest)) for place, dest in zip((0, pp - 1), ENDS, strict=True)]
    named = [(place, int(layers)) for place, layers in ends if layers is not None]
    given = dict(named)
    counted = num_layers + sum(bool(arguments.get(dest)) for dest in ACCOUNTS)
    left, ranks = counted - sum(given.values()), pp - len(named)
    if pp == 1 and named and (ranks < 0 or left):
        shown = arguments.shown_given(*ENDS)
        raise MegatronError(f"{shown}: a pipeline of one rank has one stage with all {num_layers} layers; remove it")
    least = 1 if given else 0
    uneven = left % ranks != 0 or left < least if ranks > 0 else left != 0
    if uneven or min(given.values(), default=1) < 1:
        shown = arguments.shown_given(*ENDS, *ACCOUNTS)
        raise MegatronError(
            f"--num-layers {num_layers} does not divide over --pipeline-model-parallel-size {pp}"
            f"{f' with {shown}' if shown else ''}: {left} layers for {ranks} ranks; "
            f"choose a pipeline size that divides them, or split them unevenly by --pipeline-model-parallel-layout"
        )
    stages = [given.get(rank, left // ranks if ranks else 0) for rank in range(pp)]
    for rank, layers in enumerate(stages):
        if layers % vpp:
            raise MegatronError(
                f"{arguments.shown_given(LAYERS_PER_CHUNK, VPP)}: {layers} layers of pipeline rank {rank} do not "
                f"divide into {vpp} virtual stages; use --pipeline-model-parallel-layout for uneven chunks"
            )
    chunks = [layers // vpp for layers in stages] * vpp
    chunks[0] -= bool(arguments.get(ACCOUNTS[0]))
    chunks[-1] -= bool(arguments.get(ACCOUNTS[1]))
    return tuple(chunks)
