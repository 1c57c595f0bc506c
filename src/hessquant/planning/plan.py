"""Making the plan: a model, its tensors' headers and the settings in; everything that will happen out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from torch import Tensor

from hessquant import memory
from hessquant.config import Config
from hessquant.errors import PlanError, SourceError
from hessquant.formats import DIALECTS, OUTPUTS, READABLE
from hessquant.formats.described import description_of
from hessquant.formats.dialect import PackedWeight
from hessquant.models.context import context_of, window_length
from hessquant.models.library import uncollected
from hessquant.models.probe import Probe, probe
from hessquant.models.products import ProbedProduct
from hessquant.models.source import ModelSource
from hessquant.models.structure import block_of
from hessquant.place import device_memory
from hessquant.planning.composition import PlannedCheckpoint
from hessquant.planning.expert_load import expert_load
from hessquant.planning.job import run_cost
from hessquant.planning.patterns import weight_pattern
from hessquant.planning.servers import tensor_parallel, untried, verdicts
from hessquant.planning.serving import refuse_unserved
from hessquant.planning.settings import assign_settings, refuse_format
from hessquant.planning.size import Sizes, bits_per_weight, find_remedies, least_bytes
from hessquant.planning.targets import head_product, known_names, select_targets
from hessquant.planning.unbuilt import is_built, unbuilt_product
from hessquant.planning.untouched import is_end, left_alone, namesakes, refuse_unquantized
from hessquant.records import FLOATING, PLAIN, GridSpec, Plan, SourceForm, Target, TensorInfo, Untouched

_WAY_OUT = (
    "start from the original 16-bit model, or dequantize it first with the tool that quantized it (for FP8 weights: "
    "transformers' from_pretrained with FineGrainedFP8Config(dequantize=True), then save_pretrained)"
)


@uncollected()
def make_plan(
    source: ModelSource,
    tensors: Mapping[str, TensorInfo],
    config: Config,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    form: SourceForm = PLAIN,
    processes: int | None = None,
) -> Plan:
    """Decide everything that can be decided before a weight is read, and refuse what cannot work.

    Args:
        source: The model.
        tensors: Its checkpoint's tensors by name.
        config: The settings.
        inputs: What the model will run on, where it is more than text: the parts that see it are planned too.
        form: How the tensors are stored.
        processes: Also estimate what a run over so many takes.

    Raises:
        SourceError: If the model is quantized already, or its tensors disagree with its config.
        PatternError: If a pattern matches nothing.
        GroupSizeError: If a group size does not divide a weight's inputs.
        ServeError: If a client in `config.serve` is known not to open the result.
        PlanError: If the model or the settings cannot be planned for another reason.
    """
    if not form.title:
        _refuse_quantized(source)
    context = context_of(source.config).least
    config = replace(config, window_length=window_length(config.window_length, context))
    probed = probe(source, tensors, inputs=inputs)
    _check_stored(source, tensors, probed)
    _refuse_dropped(source, form, probed)
    chosen, reasons = select_targets(probed, tensors, config)
    group_size, settings = assign_settings(chosen, probed.blocks, known_names(probed, tensors), config)
    refuse_unquantized(tensors, reasons, probed, config)
    plan = _plan(source, probed, tensors, chosen, settings, reasons, config)
    sizes = Sizes.of(probed, plan.targets, config, source.place, form)
    estimate, machine = sizes.memory(config), memory.total_memory()
    plan = replace(
        plan,
        untouched=tuple(_told(tensor, form) for tensor in plan.untouched),
        source_form=form.title,
        dropped=form.dropped,
        group_size=group_size,
        memory_bytes=estimate,
        least_memory_bytes=least_bytes(sizes, config),
        machine_memory=machine,
        remedies=() if estimate <= machine else find_remedies(sizes, probed, plan.targets, config, machine),
        window_length=config.window_length,
        context=context,
        place=str(source.place),
        device_memory_bytes=sizes.device_memory(config),
        device_memory=device_memory(source.device),
        expert_load=expert_load(plan.targets, probed.routed, probed.blocks, config),
    )
    return plan if processes is None else replace(plan, cost=run_cost(plan, sizes, config, source.config, processes))


def plan_export(
    source: ModelSource, tensors: Mapping[str, TensorInfo], packed: Mapping[str, PackedWeight], config: Config
) -> Plan:
    """Decide how a quantized checkpoint is written in another format, and refuse what that cannot hold.

    Args:
        source: The checkpoint.
        tensors: Its tensors by name, each packed weight as one.
        packed: The quantized weights among them by name.
        config: Settings of the export; only those of the output count.

    Raises:
        SourceError: If its tensors disagree with its config.
        ServeError: If a client in `config.serve` is known not to open the result.
        PlanError: If the model cannot be planned, or the format cannot hold a weight.
    """
    probed = probe(source, tensors)
    plain = {name: info for name, info in tensors.items() if name not in packed}
    _check_stored(source, plain, probed)
    head = head_product(probed)
    unbuilt = [tensors[name] for name in packed if not is_built(name, probed)]
    products = [*probed.products, *([] if head is None else [head]), *map(unbuilt_product, unbuilt, count())]
    chosen = list({product.name: product for product in products if product.name in packed}.values())
    for name, weight in packed.items():
        shapes = [(product.rows, product.columns) for product in chosen if product.name == name]
        if shapes != [(weight.rows, weight.columns)]:
            raise SourceError(
                f"{source.name}: {name} is packed as {weight.rows} x {weight.columns}, but the model multiplies "
                + (f"it as {shapes[0][0]} x {shapes[0][1]}" if shapes else "no such weight")
            )
    settings = {name: weight.grid for name, weight in packed.items()}
    refuse_format(chosen, settings, probed.blocks, config)
    reasons = left_alone(chosen, {}, plain, probed)
    return _plan(source, probed, tensors, chosen, settings, reasons, config)


def _plan(
    source: ModelSource,
    probed: Probe,
    tensors: Mapping[str, TensorInfo],
    chosen: Sequence[ProbedProduct],
    settings: Mapping[str, GridSpec],
    reasons: Mapping[str, str],
    config: Config,
) -> Plan:
    """What follows of the weights that were chosen, their settings, and the reasons for leaving the other tensors.

    Nothing of it is about calibration: the group size is the commonest, the memory what the largest weight takes.
    """
    targets = _targets(chosen, probed, settings)
    infos = [tensors[name] for name in reasons]
    untouched = tuple(
        Untouched(info.name, info.shape, info.dtype, info.bytes, reasons[info.name], probed.parameter_name(info.name))
        for info in infos
    )
    checkpoint = PlannedCheckpoint(targets, probed.blocks, _architecture(source, probed), frozenset(reasons))
    servers = verdicts(config.format, checkpoint)
    if not probed.decodes:
        servers = tuple(map(untried, servers))
    refuse_unserved(config.serve, servers, config.format, checkpoint)
    source_bytes = sum(info.bytes for info in tensors.values())
    untouched_bytes = sum(info.bytes for info in infos)
    ends = sum(info.bytes for info in infos if is_end(info.name, probed))
    packed_bytes = sum(OUTPUTS[config.format].packed_bytes(t.rows, t.columns, t.grid) for t in targets)
    ranks, limit = tensor_parallel(targets)
    plan = Plan(
        source=source.title,
        architecture=checkpoint.architecture,
        blocks=probed.blocks,
        whole=probed.whole,
        returns_tuple=probed.returns_tuple,
        hidden_size=probed.hidden_size,
        targets=targets,
        untouched=untouched,
        unties_head=any(
            name in probed.parameters and probed.parameters[name].same_as != name for name in (t.name for t in targets)
        ),
        group_size=Counter(target.grid.group_size for target in targets).most_common(1)[0][0],
        bits_per_weight=bits_per_weight(targets),
        unquantized_share=untouched_bytes / source_bytes,
        unquantized_matrices=(untouched_bytes - ends) / (source_bytes - ends),
        source_bytes=source_bytes,
        output_bytes=untouched_bytes + packed_bytes,
        memory_bytes=max(8 * target.rows * target.columns for target in targets),
        tensor_parallel=ranks,
        tensor_parallel_limit="" if limit is None else weight_pattern(limit.name, probed.blocks),
        servers=servers,
        aliases=tuple(namesakes(chosen, tensors, probed)),
    )
    _refuse_misread(plan, config)
    return plan


def _refuse_misread(plan: Plan, config: Config) -> None:
    """Refuse a plan whose config file clients would not read as it is meant."""
    dialect = DIALECTS.get(config.format)
    if dialect is None:
        return
    description = description_of(plan)
    described = dialect.describe(description, None, dialect.variants[0], "")
    fault = dialect.read_settings(described).misread(description)
    if fault is not None:
        raise PlanError(f"the {config.format} format has no words for this plan: {fault}; leave that weight out")


def _architecture(source: ModelSource, probed: Probe) -> str:
    """The class that the config names, the one that transformers takes where it names none."""
    match source.config.architectures:
        case [str(name), *_]:
            return name
    return probed.architecture


def _targets(chosen: Sequence[ProbedProduct], probed: Probe, settings: Mapping[str, GridSpec]) -> tuple[Target, ...]:
    first: dict[tuple[int, int], str] = {}
    targets = []
    unbuilt = [product.name for product in chosen if product.parameter not in probed.parameters]
    after_head = {part: len(probed.blocks) + 1 + at for at, part in enumerate(dict.fromkeys(map(block_of, unbuilt)))}
    for product in chosen:
        parameter = probed.parameters.get(product.parameter)
        # Outside the blocks, the model class has only the head chosen, and it runs after them.
        block = after_head[block_of(product.name)] if parameter is None else parameter.block
        targets.append(
            Target(
                name=product.name,
                locations=product.locations,
                block=len(probed.blocks) if block is None else block,
                rows=product.rows,
                columns=product.columns,
                grid=settings[product.name],
                transposed=product.transposed,
                shares_input_with=first.setdefault(product.input_id, product.name),
                calls=product.calls,
                part_of=product.part_of,
                feeds_attention=product.feeds_attention,
                may_be_skipped=product.may_be_skipped,
                built=parameter is not None,
            )
        )
    return tuple(targets)


def _refuse_quantized(source: ModelSource) -> None:
    quantization = source.quantization
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        can_be_read = isinstance(method, str) and method in READABLE
        more = "; or, at a cost in quality, quantize it again with --requantize" if can_be_read else ""
        raise SourceError(
            f"{source.name} is quantized already ({method or 'unnamed method'}, says its config.json); {_WAY_OUT}{more}"
        )


def _refuse_dropped(source: ModelSource, form: SourceForm, probed: Probe) -> None:
    """Refuse to leave out what the model does need, whatever its name says."""
    for tensor in form.dropped:
        if probed.parameter_of(tensor.name) is not None or tensor.name in probed.buffers:
            raise SourceError(
                f"{source.name}: {tensor.name} is a scale of activations by its name, but the model class has it; "
                f"{_WAY_OUT}"
            )


def _told(tensor: Untouched, form: SourceForm) -> Untouched:
    """A tensor that is not quantized, with its reason saying whether it is written as it is stored."""
    if tensor.name not in form.dequantized:
        return tensor
    return replace(tensor, reason=f"{tensor.reason}, dequantized to {tensor.dtype}")


def _check_stored(source: ModelSource, tensors: Mapping[str, TensorInfo], probed: Probe) -> None:
    """Every parameter, target or not: one that is stored as integers has no meaning without its scales."""
    for name, info in tensors.items():
        parameter = probed.parameter_of(name)
        if parameter is None:
            continue
        if info.dtype not in FLOATING:
            raise SourceError(
                f"{source.name}: {name} holds {info.dtype} values in {info.file}, so it is quantized already; "
                f"{_WAY_OUT}"
            )
        # Under another name it may have another layout, too.
        if name in probed.parameters and parameter.shape != info.shape:
            raise SourceError(
                f"{source.name}: {name} is {list(info.shape)} in {info.file}, but {list(parameter.shape)} according to "
                "config.json; the two do not belong together"
            )
