"""How the layers are cut into chunks: Megatron's six ways to say it, read into one, and one written back.

A chunk is one model piece of one pipeline rank; chunk c, in model order, lies on pipeline rank c % pp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from pipette_launch.errors import MegatronError
from pipette_launch.megatron.flags import Arguments, release_of

SPLIT_DESTS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Every flag that says where the layers go, besides the pipeline size."""
MOST_SHOWN = 1 << 14
"""Characters of a layout that is written out, a few for each layer."""
PATTERN_DESTS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""What names the layers of a hybrid model; from 0.17 on the first is the name of both."""
RATIO_DESTS = {"*": "hybrid_attention_ratio", "-": "hybrid_mlp_ratio"}
"""Shares of a hybrid model's layers by their letters; no release from 0.17 on has them."""
HYBRID_SPECS = ("mamba_stack_spec", "hybrid_stack_spec")
"""Megatron's own names of the layers of hybrid models, for `--spec`."""
FIRST_CUT_PATTERNS = (0, 17)
"""The first release whose patterns say where stages begin; before, stages of hybrid models are equal."""
FIRST_APART = (0, 16)
"""The first release whose multi-token prediction may lie on another stage than the head."""
_VIRTUAL_DESTS = (*SPLIT_DESTS[:3], *PATTERN_DESTS)
Chunks = tuple[int, ...]


class Split(NamedTuple):
    """Split of the model into chunks; its fields have the names that a layout gives them."""

    vpp: int = 1
    layers_per_chunk: Chunks = ()
    chunks_after_mtp: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPattern:
    """The layers of a hybrid model as its flags name them: `M-M*|M-M-/*E/*E`, stages by `|`, prediction behind `/`."""

    stages: tuple[str, ...]
    depths: tuple[str, ...]

    @property
    def layers(self) -> str:
        """One letter for each layer."""
        return "".join(self.stages)


def hybrid_pattern(arguments: Arguments) -> HybridPattern | None:
    """Return the pattern of a hybrid model; None for other models.

    Raises:
        MegatronError: the flags contradict each other, or name no layers.

    """
    given = [dest for dest in PATTERN_DESTS if arguments.get(dest)]
    if not given:
        is_old, specs = release_of(arguments.version) < FIRST_CUT_PATTERNS, {*(arguments.get("spec") or ())}
        if is_old and specs & {*HYBRID_SPECS} and arguments.get("num_layers"):
            return HybridPattern(stages=(_pattern_of_ratios(arguments),), depths=())
        if arguments.get("is_hybrid_model"):
            raise MegatronError(f"{arguments.shown('is_hybrid_model')}: needs {arguments.shown(PATTERN_DESTS[1])}")
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
        raise MegatronError(f"{shown}: needs layers, and the same ones for each depth of multi-token prediction")
    return HybridPattern(stages=tuple(layers.split("|")), depths=tuple(depths))


def _pattern_of_ratios(arguments: Arguments) -> str:
    """Spread attention and MLP evenly among Mamba layers, as shares of all (mamba_hybrid_layer_allocation.py)."""
    num_layers = arguments.size("num_layers")
    shares = {letter: float(arguments.get(dest) or 0.0) for letter, dest in RATIO_DESTS.items()}
    if num_layers > MOST_SHOWN or min(shares.values()) < 0 or sum(shares.values()) > 1:
        shown = " and ".join(arguments.shown(dest) for dest in ("num_layers", *RATIO_DESTS.values()))
        raise MegatronError(f"{shown}: shares of layers must be at least 0, and at most 1 together; change them")
    pattern = ["M"] * num_layers
    for (letter, share), first_run in zip(shares.items(), (1, 0), strict=True):
        places = [place for place, kind in enumerate(pattern) if kind == "M"]
        count = round(num_layers * share)
        # Attention stands between runs of Mamba layers, each MLP behind its run.
        run = (len(places) - count) / (count + first_run) if count else len(places) + 1
        left = run
        for place in places:
            if left < 0.5:
                pattern[place], left = letter, left + run
            else:
                left -= 1
    return "".join(pattern)


def without_stages(arguments: Arguments) -> Arguments:
    """Leave out every cut that flags name, those within a hybrid model's pattern too."""
    bare = arguments.without(*SPLIT_DESTS)
    pattern = hybrid_pattern(bare)
    if pattern is None or len(pattern.stages) == 1:
        return bare
    return _with_pattern(bare, "/".join((pattern.layers, *pattern.depths)))


def _with_pattern(arguments: Arguments, text: str) -> Arguments:
    dest = next(dest for dest in PATTERN_DESTS if arguments.get(dest))
    return arguments.with_flag(f"--{dest.replace('_', '-')}", text)


def read_chunks(arguments: Arguments, *, pp: int, num_layers: int) -> Split:
    """Read virtual stages, the layers of each chunk, and the chunk of multi-token prediction.

    Raises:
        MegatronError: the flags exclude each other or do not divide the layers.

    """
    _check_exclusive(arguments)
    pattern, after = hybrid_pattern(arguments), 0
    if pattern:
        vpp, chunks = _from_pattern(arguments, pattern, pp, num_layers)
    elif arguments.get("pipeline_model_parallel_layout") is not None:
        vpp, chunks, after = _from_layout(arguments, pp, num_layers)
    else:
        vpp = _virtual_stages(arguments, pp, num_layers)
        chunks = _from_stages(arguments, pp, num_layers, vpp)
    if vpp > 1 and pp == 1:
        raise MegatronError(
            f"{vpp} virtual stages need --pipeline-model-parallel-size above 1; remove "
            f"{' and '.join(arguments.shown(dest) for dest in _VIRTUAL_DESTS if arguments.is_given(dest))}"
        )
    return Split(vpp, () if len(set(chunks)) == 1 else chunks, after)


def write_chunks(arguments: Arguments, split: Split, *, pp: int, num_layers: int) -> Arguments:
    """Write a split as flags, and delete the flags of any other; every release from 0.14 on has these flags.

    Args:
        arguments: the user's flags.
        split: of the layers.
        pp: pipeline ranks.
        num_layers: of the model.

    """
    bare = without_stages(arguments)
    vpp, chunks, after = split
    pattern = hybrid_pattern(arguments)
    if pattern and release_of(arguments.version) >= FIRST_CUT_PATTERNS and pp > 1:
        sizes = chunks or (num_layers // (pp * vpp),) * (pp * vpp)
        ends = [*accumulate(sizes)]
        stages = [pattern.layers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return _with_pattern(bare, "/".join(("|".join(stages), *pattern.depths)))
    if not chunks:
        if vpp == 1:
            return bare
        if arguments.is_given("num_virtual_stages_per_pipeline_rank"):
            return bare.with_flag("--num-virtual-stages-per-pipeline-rank", str(vpp))
        return bare.with_flag("--num-layers-per-virtual-pipeline-stage", str(num_layers // (pp * vpp)))
    # By Megatron's rules the counts of the first and the last stage say all where those between are equal.
    if vpp == 1 and after == 0 and min(chunks) > 0 and len(set(chunks[1:-1])) <= 1:
        bare = bare.with_flag("--decoder-first-pipeline-num-layers", str(chunks[0]))
        return bare.with_flag("--decoder-last-pipeline-num-layers", str(chunks[-1]))
    stages = ["t" * layers if layers < 3 else f"t*{layers}" for layers in chunks]
    stages[-1 - after] += "m" * int(arguments.get("mtp_num_layers") or 0)
    return bare.with_flag("--pipeline-model-parallel-layout", f"E{'|'.join(stages)}L")


def nearly_even(num_layers: int, num_chunks: int) -> Chunks:
    """Share layers among chunks, at most one more in some than in others; () if all have equally many.

    The last chunk, which has the head, is the last to get one more, and the first one the last but one.
    """
    size, more = divmod(num_layers, num_chunks)
    larger = {*[*range(1, num_chunks - 1), 0][:more]}
    return tuple(size + (chunk in larger) for chunk in range(num_chunks)) if more else ()


def stated_vpp(arguments: Arguments, pp: int) -> int | None:
    """Virtual stages that flags name however the layers divide; None if that depends on the layers."""
    layout = arguments.get("pipeline_model_parallel_layout")
    if layout is not None:
        stages, rest = divmod(
            len(_written_out(layout, arguments.shown("pipeline_model_parallel_layout")).split("|")), pp
        )
        return None if rest else stages
    if arguments.get("num_layers_per_virtual_pipeline_stage") is not None:
        return None
    return arguments.size("num_virtual_stages_per_pipeline_rank")


def _check_exclusive(arguments: Arguments) -> None:
    ways = [dest for dest in SPLIT_DESTS[:3] if arguments.get(dest) is not None]
    if len(ways) > 1:
        raise MegatronError(
            f"{' and '.join(arguments.shown(dest) for dest in ways)} exclude each other; keep one of them"
        )
    ends = [dest for dest in SPLIT_DESTS[3:5] if arguments.get(dest) is not None]
    accounts = [dest for dest in SPLIT_DESTS[5:] if arguments.get(dest)]
    whole = ways if ways == ["pipeline_model_parallel_layout"] else []
    if bool(ends) + bool(accounts) + bool(whole) > 1:
        clash = " and ".join(arguments.shown(dest) for dest in (*whole, *ends, *accounts))
        raise MegatronError(f"{clash} exclude each other; keep one way to split the layers")


def _from_pattern(arguments: Arguments, pattern: HybridPattern, pp: int, num_layers: int) -> tuple[int, Chunks]:
    """Read the stages that a hybrid model's pattern names, or cut equally, but for the ends from 0.17 on."""
    stages, cuts = pattern.stages, release_of(arguments.version) >= FIRST_CUT_PATTERNS
    clash = [dest for dest in SPLIT_DESTS if arguments.get(dest)]
    if len(stages) == 1 and cuts:
        clash = [dest for dest in clash if not dest.startswith("decoder_")]
    if clash:
        shown = " and ".join(arguments.shown(dest) for dest in clash)
        raise MegatronError(f"{shown}: the pattern of a hybrid model says where stages begin; remove it")
    if len(stages) == 1:
        return 1, _from_stages(arguments, pp, num_layers, 1)
    if not cuts:
        raise MegatronError(f"{arguments.shown(PATTERN_DESTS[1])}: stages (|) can be named from 0.17 on")
    if len(stages) % pp:
        raise MegatronError(
            f"{arguments.shown(PATTERN_DESTS[0])}: {len(stages)} stages of the pattern are no multiple of "
            f"--pipeline-model-parallel-size {pp}"
        )
    return len(stages) // pp, tuple(map(len, stages))


def _from_layout(arguments: Arguments, pp: int, num_layers: int) -> Split:
    """Read `Et*3|(tt|)*2,mL` as stages "Ettt", "tt", "tt", "mL", by the rules of Megatron's own class.

    Source: PipelineParallelLayerLayout.validate_layer_layout (transformer/pipeline_parallel_layer_layout.py).
    """
    shown = arguments.shown("pipeline_model_parallel_layout")
    stages = _written_out(arguments.get("pipeline_model_parallel_layout"), shown).split("|")
    layers, depths = "".join(stages), int(arguments.get("mtp_num_layers") or 0)
    strange = set(layers) - set("EtmL")
    if strange:
        raise MegatronError(f"{shown}: {' '.join(sorted(strange))!r} is no layer; write E, t, m and L alone")
    if len(stages) % pp:
        raise MegatronError(f"{shown}: {len(stages)} stages are no multiple of --pipeline-model-parallel-size {pp}")
    if not layers.startswith("E") or not layers.endswith("L"):
        raise MegatronError(f"{shown}: needs E at the very front and L at the very end")
    if layers.count("m") != depths:
        raise MegatronError(f"{shown}: has {layers.count('m')} m, but --mtp-num-layers is {depths}; give as many")
    if layers.count("t") != num_layers or len(layers) != num_layers + depths + 2:
        found = ", ".join(f"{layers.count(letter)} {letter}" for letter in "EtL")
        raise MegatronError(f"{shown}: has {found}; needs one E, one t for each of --num-layers {num_layers}, one L")
    after = _after_prediction(stages, pp, release_of(arguments.version), shown) if depths else 0
    return Split(len(stages) // pp, tuple(stage.count("t") for stage in stages), after)


def _written_out(text: str, shown: str) -> str:
    """Write out the repetitions of a layout, once each as Megatron does; commas are cosmetic."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
        # A pattern is tried at each place, and a few characters may stand for layers without end.
        sizes = (len(match[1]) * int(match[2]) for match in re.finditer(pattern, text[:MOST_SHOWN]))
        if len(text) > MOST_SHOWN or sum(sizes) > MOST_SHOWN:
            raise MegatronError(f"{shown[:80]}: more than {MOST_SHOWN} characters when it is written out")
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text


def _after_prediction(stages: list[str], pp: int, release: tuple[int, ...], shown: str) -> int:
    """Count the stages behind the depths of multi-token prediction (m)."""
    places = [place for place, stage in enumerate(stages) if "m" in stage]
    layers = "".join(stages)
    if "t" in layers[layers.index("m") :]:
        raise MegatronError(f"{shown}: multi-token prediction (m) must stand behind all layers (t)")
    if len(places) > 1:
        raise MegatronError(f"{shown}: all depths of multi-token prediction (m) must stand in one stage")
    if places[0] < len(stages) - pp:
        raise MegatronError(f"{shown}: multi-token prediction (m) must stand in one of the last {pp} stages")
    after = len(stages) - 1 - places[0]
    # The tests of 0.14 pass a stage of its own, but its models build the depths on the last stage alone.
    if release < (0, 15):
        return 0
    if after and release < FIRST_APART:
        raise MegatronError(f"{shown}: before 0.16 multi-token prediction (m) must stand in the last stage")
    return after


def _virtual_stages(arguments: Arguments, pp: int, num_layers: int) -> int:
    per_rank = arguments.get("num_virtual_stages_per_pipeline_rank")
    if per_rank is not None:
        return arguments.size("num_virtual_stages_per_pipeline_rank")
    if arguments.get("num_layers_per_virtual_pipeline_stage") is None:
        return 1
    shown = arguments.shown("num_layers_per_virtual_pipeline_stage")
    if any(arguments.get(dest) is not None for dest in SPLIT_DESTS[3:5]):
        raise MegatronError(
            f"{shown}: with --decoder-first/last-pipeline-num-layers use --num-virtual-stages-per-pipeline-rank instead"
        )
    per_chunk = arguments.size("num_layers_per_virtual_pipeline_stage")
    counted = num_layers + sum(bool(arguments.get(dest)) for dest in SPLIT_DESTS[5:])
    if counted % pp or counted // pp % per_chunk:
        raise MegatronError(
            f"{shown}: {counted} layers on --pipeline-model-parallel-size {pp} are {counted / pp:g} a rank, "
            f"not a multiple of {per_chunk}"
        )
    return counted // pp // per_chunk


def _from_stages(arguments: Arguments, pp: int, num_layers: int, vpp: int) -> Chunks:
    """Share each pipeline rank's layers among its chunks; embedding and loss count as layers where asked."""
    ends = [(place, arguments.get(dest)) for place, dest in ((0, SPLIT_DESTS[3]), (pp - 1, SPLIT_DESTS[4]))]
    named = [(place, int(layers)) for place, layers in ends if layers is not None]
    given = dict(named)
    counted = num_layers + sum(bool(arguments.get(dest)) for dest in SPLIT_DESTS[5:])
    left, ranks = counted - sum(given.values()), pp - len(named)
    if pp == 1 and named and (ranks < 0 or left):
        shown = " and ".join(arguments.shown(dest) for dest in SPLIT_DESTS[3:5] if arguments.is_given(dest))
        raise MegatronError(f"{shown}: a pipeline of one rank has one stage with all {num_layers} layers; remove it")
    # Before 0.16 the ranks between may have no layers.
    least = 0 if release_of(arguments.version) < (0, 16) or not given else 1
    uneven = left % ranks != 0 or left < least if ranks > 0 else left != 0
    if uneven or min(given.values(), default=1) < 1:
        ends_shown = [arguments.shown(dest) for dest in SPLIT_DESTS[3:] if arguments.is_given(dest)]
        raise MegatronError(
            f"--num-layers {num_layers} does not divide over --pipeline-model-parallel-size {pp}"
            f"{' with ' + ' and '.join(ends_shown) if ends_shown else ''}: {left} layers for {ranks} ranks; "
            f"choose a pipeline size that divides them, or split them unevenly by --pipeline-model-parallel-layout"
        )
    stages = [given.get(rank, left // ranks if ranks else 0) for rank in range(pp)]
    for rank, layers in enumerate(stages):
        if layers % vpp:
            raise MegatronError(
                f"{' '.join(arguments.shown(dest) for dest in SPLIT_DESTS[:2] if arguments.is_given(dest))}: "
                f"{layers} layers of pipeline rank {rank} do not divide into {vpp} virtual stages; "
                f"use --pipeline-model-parallel-layout for uneven chunks"
            )
    chunks = [layers // vpp for layers in stages] * vpp
    chunks[0] -= bool(arguments.get(SPLIT_DESTS[5]))
    chunks[-1] -= bool(arguments.get(SPLIT_DESTS[6]))
    return tuple(chunks)
