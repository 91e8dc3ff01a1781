"""Layouts of a pipeline are read as Megatron's own class reads them."""

from __future__ import annotations

import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipette_launch.errors import MegatronError
from pipette_launch.megatron import script_version
from pipette_launch.megatron.chunks import Split, read_chunks
from pipette_launch.megatron.flags import Arguments

torch = pytest.importorskip("torch", reason="needs torch")
core = pytest.importorskip("megatron.core", reason="needs megatron-core")
MODULE = Path("megatron/core/transformer/pipeline_parallel_layer_layout.py")
CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")


def source() -> tuple[Path, str]:
    """The file of Megatron's class and its release: of the checkout in MEGATRON_LM_DIR, else of the package."""
    if CHECKOUT:
        return Path(CHECKOUT) / MODULE, script_version(f"{CHECKOUT}/pretrain_gpt.py", {})
    return Path(core.__file__).parent.parent.parent / MODULE, metadata.version("megatron-core")


def load(path: Path) -> Any:
    """Megatron's class in a file."""
    spec = importlib.util.spec_from_file_location("layer_layout", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PipelineParallelLayerLayout


PATH, VERSION = source()
CORE_VERSION = core.__version__
LAYOUTS = load(PATH)


def theirs(text: str, pp: int, num_layers: int, depths: int) -> Split | None:
    """What Megatron's class makes of a layout; None where it refuses it, or the trainer refuses virtual stages."""
    try:
        found = LAYOUTS(text, pp)
        found.validate_layer_layout(num_layers=num_layers, mtp_num_layers=depths or None)
    except (AssertionError, IndexError):
        return None
    vpp = found.virtual_pipeline_model_parallel_size
    stages = [[kind.name for kind in found.layout[place % pp][place // pp]] for place in range(pp * vpp)]
    chunks = tuple(stage.count("decoder") for stage in stages)
    after = next((place for place, stage in enumerate(reversed(stages)) if "mtp" in stage), 0)
    return Split(vpp, () if len(set(chunks)) == 1 else chunks, after) if vpp == 1 or pp > 1 else None


def ours(text: str, pp: int, num_layers: int, depths: int) -> Split | None:
    """The same by our own reading."""
    words = [f"--pipeline-model-parallel-layout={text}", *(["--mtp-num-layers", str(depths)] if depths else [])]
    try:
        return read_chunks(Arguments.parse(words, VERSION), pp=pp, num_layers=num_layers)
    except MegatronError:
        return None


@st.composite
def near_legal(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A layout with a few faults at most, the pipeline's size, the layers and the depths that flags name."""
    pp, vpp, depths = (draw(st.integers(low, high)) for low, high in ((1, 4), (1, 3), (0, 2)))
    stages = ["t" * draw(st.integers(0, 3)) for _ in range(pp * vpp)]
    place = draw(st.sampled_from([-1, -1, *range(-len(stages), 0)]))
    for later in range(len(stages) + place + 1, len(stages)):
        if draw(st.integers(0, 3)):
            stages[later] = ""
    stages[place] += "m" * depths
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    num_layers = "".join(stages).count("t")
    if not draw(st.integers(0, 3)):
        fault = draw(st.sampled_from([*"EtmLx|"]))
        chosen = draw(st.integers(0, len(stages) - 1))
        stages[chosen] = draw(st.sampled_from([fault + stages[chosen], stages[chosen] + fault, stages[chosen][1:]]))
    text = re.sub(r"t{2,}", lambda run: draw(st.sampled_from([run[0], f"t*{len(run[0])}"])), "|".join(stages))
    text = re.sub(r"((?:t+\|))\1", r"(\1)*2", text) if draw(st.booleans()) else text.replace("|", "|,")
    return text, pp, num_layers + draw(st.sampled_from([0, 0, 0, 0, 1])), depths


@settings(max_examples=500)
@given(case=near_legal())
def test_layouts_are_read_as_by_megatron(case: tuple[str, int, int, int]) -> None:
    """Virtual stages, layers and the place of multi-token prediction, or a refusal."""
    assert theirs(*case) == ours(*case)


@given(
    text=st.lists(st.sampled_from([*"EtmL|,()*", "*2", "*3"]), max_size=16).map("".join),
    pp=st.integers(1, 3),
    depths=st.integers(0, 1),
)
def test_any_text_is_read_as_by_megatron(text: str, pp: int, depths: int) -> None:
    """Signs in any order are refused where Megatron refuses them."""
    num_layers = max(1, text.count("t"))
    assert theirs(text, pp, num_layers, depths) == ours(text, pp, num_layers, depths)


def test_megatrons_own_example() -> None:
    """DeepSeek-V3 on 16 stages, as Megatron's documents cut it, is legal."""
    case = ("Et*3|(tt|)*29,m|L", 16, 61, 1)

    assert theirs(*case) == ours(*case)
    assert ours(*case) is not None


@pytest.mark.parametrize(
    "text",
    [
        "E(tttttttt|)*7tttttmL",
        "E(tttt|)*15tL",
        "E(tttt|)*15tmL",
        "ELL",
        "Et(tttttttttt|)*7tttttttmmmmL",
        "Et(ttttt|)*15ttmmmmL",
        "Et*11|t*11|t*11|t*10mL",
        "Et*15|t*15|t*16|t*15L",
        "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL",
        "Et*2|(tt|)*22t|(tt|)*7mL",
        "Et*2|(tt|)*29,t|mL",
        "Et*2|(tt|)*5t|tmL",
        "Et*3|(tt|)*29,m|L",
        "Et*3|(tt|)*29m|L",
        "Et*3|(tt|)*4ttt|m|L",
        "Et*3|(tt|)*6L",
        "Et*3|(tt|)*6mL",
        "Et*3|(tt|)*6tmL",
        "Et*4|(t*4|)*14tmL",
        "Et*4|(t*7|)*5t*8|tmL",
        "Et*4|(tttt|)*14tmL",
        "Et*7|t*7mL",
        "Ett(tttt|)*18ttttmL",
        "Etttttttttttttt|tttt(tttttttttttt|)*4ttttttttttttmL",
        "Etttttttttttttt|tttttttttttttL",
        "Etttttt|(tttttttt|)*8tttt|ttttmL",
        "Etttttt|ttttmL",
        "Etttttt|tttttttttttttttttttttttt|tttttttttttttttttttttttt|ttttttttttttttttttttttttL",
        "Etttttt|tttt|(tttttttt|)*6(tttt|)*4ttttmL",
        "Ettttt|tttttt|tttttt|tttttt|tttttt|tttttt|tttttt|tttttL",
        "Ettt|(tt|)*29,m|L",
        "Ettt|t|t|tL",
        "Ett|tt|t|tmL",
        "Et|(tt|)*30L",
        "Et|(tt|)*30mL",
        "Et|(tt|)*6mL",
        "Et|m|L",
        "Et|t*4|t|tL",
        "Et|ttttttt|ttttttt|ttttttt|ttttttt|ttttttt|ttttttt|tttL",
        "Et|tt|tt|tL",
        "Et|t|(tt|)*29tL",
        "Et|t|t|tmL",
        "Et|t|t|ttL",
        "Et|t||(tttt|)*4|(tttt|)*4|(tttt|)*4|(tttt|)*4|tttt|tttt|ttttmL",
        "E|(tt|)*2,(t|)*4,mL",
        "E|(t|)*3,m|m||L",
        "E|t*3|(t|)*3tt|m|L",
        "E|t*3|(t|)*4tm|L",
        "E|t*3|(t|)*5L",
        "E|t*3|(t|)*5mL",
        "E|t*5|t*6|t,m,L",
        "E|t*6|t|L",
        "E|ttttttm|L",
        "E|t|t*2|t||(t|)*2,t*2,L",
        "E||t|L",
    ],
)
def test_layouts_of_recipes_are_read_as_by_megatron(text: str) -> None:
    """Layouts that Megatron-Bridge, Megatron-LM 0.16 to 0.20 and the MoE ModelZoo name, with each fitting pipeline."""
    stages = LAYOUTS.parse_str_to_list(text)
    names = [kind.name for stage in stages for kind in stage]
    for pp in (size for size in range(1, len(stages) + 1) if len(stages) % size == 0):
        for depths in {0, 1, names.count("mtp")}:
            case = (text, pp, names.count("decoder"), depths)
            assert theirs(*case) == ours(*case)


def built(pp: int, vpp: int, fields: dict[str, Any]) -> tuple[int, ...] | None:
    """Layers that each chunk builds, by the trainer's division and megatron-core; None where either refuses."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    virtual = vpp if vpp > 1 else None
    parallel_state.set_pipeline_model_parallel_world_size(pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    counts: list[int] = []
    try:
        config = TransformerConfig(
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.float32,
            **fields,
        )
        for chunk in range(pp * vpp):
            parallel_state.set_pipeline_model_parallel_rank(chunk % pp)
            stage = chunk // pp if virtual else None
            assert get_transformer_layer_offset(config, stage) == sum(counts)
            counts.append(get_num_layers_to_build(config, stage))
    except (AssertionError, ValueError):
        return None
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)
    # It builds fewer layers than the model has, or a negative number, where nothing checks that.
    is_whole = sum(counts) == fields["num_layers"] and min(counts) >= 0
    return tuple(counts) if is_whole else None


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=150)
@given(
    num_layers=st.integers(1, 14),
    pp=st.integers(1, 4),
    ends=st.tuples(*[st.none() | st.integers(1, 5)] * 2),
    accounts=st.tuples(st.booleans(), st.booleans()),
    virtual=st.none() | st.tuples(st.sampled_from(["stages", "layers"]), st.integers(1, 3)),
)
def test_layers_are_shared_as_by_megatron(
    num_layers: int,
    pp: int,
    ends: tuple[int | None, int | None],
    accounts: tuple[bool, bool],
    virtual: tuple[str, int] | None,
) -> None:
    """Ends of other sizes, ends that count as layers, and both ways to name virtual stages."""
    # Both ends of a single stage: Megatron subtracts both, and builds the last.
    assume(pp > 1 or None in ends)
    flags = [
        f"--decoder-{end}-pipeline-num-layers={size}" for end, size in zip(("first", "last"), ends, strict=True) if size
    ]
    ends_counted = zip(("embedding", "loss"), accounts, strict=True)
    flags += [f"--account-for-{end}-in-pipeline-split" for end, on in ends_counted if on]
    counted, vpp = num_layers + sum(accounts), 1
    is_refused = not any(ends) and not virtual and counted % pp > 0
    if virtual and virtual[0] == "stages":
        flags.append(f"--num-virtual-stages-per-pipeline-rank={virtual[1]}")
        vpp = virtual[1]
    elif virtual:
        flags.append(f"--num-layers-per-virtual-pipeline-stage={virtual[1]}")
        is_refused = any(ends) or counted % pp > 0 or counted // pp % virtual[1] > 0 or counted < pp
        vpp = 1 if is_refused else counted // pp // virtual[1]
    names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    names += ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    fields = {"num_layers": num_layers, **dict(zip(names, (*ends, *accounts), strict=True))}
    expected = None if is_refused or (vpp > 1 and pp == 1) else built(pp, vpp, fields)
    try:
        found = read_chunks(Arguments.parse(flags, CORE_VERSION), pp=pp, num_layers=num_layers)
    except MegatronError:
        assert expected is None, (flags, expected)
        return

    sizes = found.layers_per_chunk or (num_layers // (pp * found.vpp),) * (pp * found.vpp)
    assert (expected, vpp) == (sizes, found.vpp), flags
