"""Make `docs/server-rules.md` of the table that `plan` judges by: `python docs/make_server_rules.py`."""

from collections.abc import Iterable
from pathlib import Path

from hessquant.formats.fused import FUSED
from hessquant.planning.server_rules import RULES, Rule

PAGE = Path(__file__).with_name("server-rules.md")

_COLUMNS = (
    "client", "`--serve`", "symmetric", "asymmetric", "group sizes", "outputs", "inputs", "fuses", "may differ",
    "activations", "known by",
)  # fmt: skip

_HEAD = """# What each client takes

Made by `docs/make_server_rules.py` of the table in `src/hessquant/planning/server_rules.py`; change that, not this.
`plan` judges every weight by it, and `--serve CLIENT` makes the verdict binding ([cli.md](cli.md)).

- **bits**: of weights with one fixed zero (symmetric), and of weights with a zero per group (asymmetric).
- **group sizes**: -1 = one group per row. **outputs, inputs**: what they must be a multiple of, on each
  tensor-parallel rank.
- **may differ**: settings that may differ from weight to weight; what is not named was never tried. Clients that
  *fuse* make one matrix of some weights (below); these must have the same settings.
- **known by**: *measured* = run here, with the architectures that the source names (SmolLM2-135M is a
  `LlamaForCausalLM`); of any other, the plan says "shapes fit; this architecture was not run". *documented* = read in
  the document or source file that is named.
- Experts of one layer are one to vLLM and SGLang: all of their matrices must be alike.
- **layers to draft from**: those that predict several tokens at once (`mtp.*`, or layers behind the model's last). A
  model class of transformers leaves them out, so they stay in 16 bit unless `--include` names them, and the config
  lists each that stays as ignored. How a server then builds them counts only where it drafts; without drafting every
  server skips them.
"""

_NAMES = """## Names

Tensors keep the names that the source's have; an expert's matrix that the source keeps with others in one tensor is
written as `experts.N.gate_proj`, `up_proj` or `down_proj`. What `quantization_config` says is matched like this:

| client | entry | matched with |
|---|---|---|
| vLLM 0.32 | `dynamic` | `re.match` with vLLM's module name, the fused one; never renamed (gptq_utils.py) |
| vLLM 0.32 | `modules_in_block_to_quantize` | anywhere in vLLM's name, after its own renaming; absent: by the tensors (auto_gptq.py) |
| vLLM 0.32 | `ignore`, `targets` | equal, after its renaming, or `re:` by `re.match`, not renamed; fused, then parts (compressed_tensors/utils.py) |
| SGLang 0.5.23 | `dynamic` | as vLLM; not for experts (gptq.py) |
| SGLang 0.5.23 | `ignore`, `targets` | equal or a dotted end, or `re:` by `re.match`; a fused module by its own name only |
| transformers 5.24 | `modules_in_block_to_quantize` | the end of the name in its model; `dynamic` is not read (optimum 2.3, gptq/quantizer.py) |
| transformers 5.24 | `ignore`, `targets` | equal, or `re:` by `re.match`, in its model (compressed-tensors 0.20, utils/match.py) |
| GPTQModel 7.7 | `dynamic` | the start of the name in transformers' model, before fusing (quantization/config.py) |

So entries are expressions that match every name that a module has, fused names included, and no other module's. Where
readers begin names with other words (`model.language_model.`, `language_model.model.`, ...; their `hf_to_vllm_mapper`),
an expression takes any of these. The plan, and the verification after writing, read the config by these rules, and every
module must be what its tensors are.
"""  # noqa: E501


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "## Fused sets\n", _fused_table(), _NAMES]
    for name in dict.fromkeys(rule.format for rule in RULES):
        rules = [rule for rule in RULES if rule.format == name]
        parts += [f"## {name}\n", _table(rule for rule in rules if rule.reads), "\n".join(map(_remarks, rules)) + "\n"]
    return "\n".join(parts)


def _fused_table() -> str:
    """What servers make one matrix of."""
    lines = ["| one matrix | of | in | for | read in |", "|---|---|---|---|---|"]
    for fused in FUSED:
        classes = f"{fused.architecture}..." if fused.architecture else "all"
        kept = " (nowhere apart: a plan in which they differ is refused)" if fused.everywhere else ""
        parts = ", ".join(f"`{part}`" for part in fused.parts)
        lines.append(f"| `{fused.name}` | {parts}{kept} | {', '.join(fused.clients)} | {classes} | {fused.source} |")
    return "\n".join(lines) + "\n"


def _table(rules: Iterable[Rule]) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    for rule in rules:
        may = ", ".join(setting for setting, part in rule.mixed.items() if part.opens == "yes")
        cells = (
            rule.client.server,
            f"`{rule.client.name}`",
            _listed(rule.symmetric),
            _listed(rule.asymmetric),
            _groups(rule),
            str(rule.row_multiple),
            str(rule.column_multiple),
            "yes" if rule.fuses else "no",
            may.replace("_", " ") or "-",
            rule.dtypes,
            rule.evidence.basis,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _remarks(rule: Rule) -> str:
    """All that has no column: notes, what lies beyond the rule, settings that must not differ, and the sources."""
    said = [f"does not read it: {rule.note}" if not rule.reads else rule.note, rule.asymmetric_note]
    if rule.beyond:
        said.append(f"outside of this: not known ({rule.beyond})")
    if rule.fits == "unknown":
        said.append("within this: not known either")
    said += [
        f"{setting.replace('_', ' ')} must not differ ({part.evidence.source})"
        for setting, part in rule.mixed.items()
        if part.opens == "no"
    ]
    if rule.head is not None:
        verdict = "takes a quantized head" if rule.head.opens == "yes" else f"no quantized head: {rule.head.why}"
        said.append(f"{verdict} ({rule.head.evidence.source})")
    said += _of_modules(rule)
    sources = dict.fromkeys(
        [rule.evidence.source, *(part.evidence.source for part in rule.mixed.values() if part.opens == "yes")]
    )
    said.append(f"source: {'; '.join(sources)}")
    return f"- {rule.client.server}: {'. '.join(_sentence(part) for part in said if part)}."


def _of_modules(rule: Rule) -> list[str]:
    """What it makes of experts, of layers to draft from, and of modules that it never builds quantized."""
    said = []
    if rule.experts is not None:
        said.append(f"experts: {rule.experts.why or 'taken'} ({rule.experts.evidence.source})")
    if rule.experts_whole:
        said.append(
            "opens experts where those of all layers are quantized, symmetric, and one by one in the source too"
        )
    if rule.experts_as_most:
        said.append("takes all experts for quantized as most weights are, whatever the config says")
    if rule.stacked_experts:
        said.append(f"reads experts of {', '.join(rule.stacked_experts)} in one tensor only")
    for entry in rule.drafts:
        how = "as the config says" if entry.follows else "quantized, whatever the config says"
        if entry.follows is None:
            how = "skipped"
        said.append(f"layers to draft from, of {', '.join(entry.classes) or 'all others'}: {how} ({entry.source})")
    if rule.only:
        said.append(f"reads this format of {', '.join(rule.only)} only")
    if rule.unquantized:
        said.append(f"builds without quantization: {', '.join(f'`{module.pattern}`' for module in rule.unquantized)}")
    return said


def _groups(rule: Rule) -> str:
    if rule.group_sizes is not None:
        return _listed(rule.group_sizes)
    return "any" if rule.group_multiple == 1 else f"-1, multiples of {rule.group_multiple}"


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "-"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
