"""The form of one row of the table of what clients take (`planning.server_rules`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Basis = Literal["measured", "documented", "not run"]
Setting = Literal["bits", "group_size", "symmetric"]


class Client(NamedTuple):
    """A program that opens checkpoints; where its devices differ, one on each.

    Attributes:
        name: As `--serve` takes it: `vllm-cpu`, `llama.cpp`.
        server: Name, version and device for people.
    """

    name: str
    server: str


@dataclass(frozen=True)
class Evidence:
    """How something is known: whether it was run, and where or in which document.

    Attributes:
        basis: Whether it was run, read, or neither.
        source: Where.
        architectures: What was run; "measured" holds for these alone.
    """

    basis: Basis
    source: str
    architectures: tuple[str, ...] = ()

    def covers(self, architecture: str) -> bool:
        """Whether it is about a class of models; "" = whichever it was found with."""
        return self.basis != "measured" or architecture in ("", *self.architectures)


@dataclass(frozen=True)
class Part:
    """Whether a client opens checkpoints of one kind; `why` says why not.

    Such a kind has a quantized head, quantized experts, or a setting that differs from weight to weight.
    """

    opens: Literal["yes", "no", "unknown"]
    evidence: Evidence
    why: str = ""


@dataclass(frozen=True)
class Unquantized:
    """Modules that a client builds without quantization, so that it cannot load them quantized.

    Attributes:
        pattern: Of weight names, as `--include` takes it.
        source: Where that was read.
        but: Beginnings of the names of classes that it quantizes them in.
    """

    pattern: str
    source: str
    but: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drafts:
    """How a client builds layers that predict several tokens at once, from which it drafts.

    A model class of transformers leaves them out, so they stay in 16 bit unless they are included by name; what stays
    is listed as ignored by the config.

    Attributes:
        follows: Whether it builds each as the config says; otherwise it takes all for quantized as most weights are.
            None where it builds none, and skips them in the files.
        source: Where that was read.
        classes: Beginnings of the names of classes that this holds for; empty = all that no other entry names.
    """

    follows: bool | None
    source: str
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """What one client takes of one format.

    Attributes:
        client: Who takes it.
        format: On-disk format, as `--format` takes it.
        evidence: How the rule is known.
        symmetric: Bits that it takes with a fixed zero.
        asymmetric: Bits that it takes with a zero per group; if both are empty, it does not read the format.
        group_sizes: Group sizes that it takes; None = any.
        group_multiple: What a group size other than -1 must be a multiple of.
        row_multiple: What a weight's outputs must be a multiple of, on each tensor-parallel rank.
        column_multiple: What its inputs must be a multiple of, likewise.
        fuses: Name, in the table of fused sets, of the client that makes one matrix of several weights, and so refuses
            different settings there; empty = it fuses none.
        splits: Whether it can divide a quantized weight among devices.
        mixed: What is known of settings that differ from weight to weight; what is not named was never tried.
        head: What is known of quantized heads; None = nothing.
        experts: What is known of quantized experts; None = nothing.
        experts_as_most: Whether it takes experts for quantized as most weights are, whatever the config says.
        experts_whole: Whether it opens experts only where those of all layers are quantized, symmetric, and one by one
            in the source too.
        stacked_experts: Beginnings of classes whose experts it reads in no other form than all in one tensor.
        unquantized: Modules that it builds without quantization.
        drafts: What it makes of layers to draft from; nothing = not known.
        only: Beginnings of the classes that it reads the format for; empty = all.
        dtypes: Activations that it computes with.
        note: Said where the checkpoint fits, or why it does not read the format.
        asymmetric_note: Said besides where a weight is asymmetric.
        beyond: If not empty, a weight outside the rule is not refused for certain; this says why.
        fits: The verdict where everything fits.
    """

    client: Client
    format: str
    evidence: Evidence
    symmetric: frozenset[int] = frozenset()
    asymmetric: frozenset[int] = frozenset()
    group_sizes: frozenset[int] | None = None
    group_multiple: int = 1
    row_multiple: int = 1
    column_multiple: int = 1
    fuses: str = ""
    splits: bool = False
    mixed: Mapping[Setting, Part] = field(default_factory=dict)
    head: Part | None = None
    experts: Part | None = None
    experts_as_most: bool = False
    experts_whole: bool = False
    stacked_experts: tuple[str, ...] = ()
    unquantized: tuple[Unquantized, ...] = ()
    drafts: tuple[Drafts, ...] = ()
    only: tuple[str, ...] = ()
    dtypes: str = ""
    note: str = ""
    asymmetric_note: str = ""
    beyond: str = ""
    fits: Literal["yes", "unknown"] = "yes"

    def drafts_of(self, architecture: str) -> Drafts | None:
        """What it makes of layers to draft from in models of a class; None = not known."""
        named = [entry for entry in self.drafts if architecture.startswith(entry.classes)]
        return next(iter([*named, *(entry for entry in self.drafts if not entry.classes)]), None)

    @property
    def reads(self) -> bool:
        """Whether it reads the format at all."""
        return bool(self.symmetric | self.asymmetric)
