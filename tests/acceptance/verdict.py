"""Whether a client does with one checkpoint what it should."""

import json
import re
from dataclasses import asdict
from datetime import date
from pathlib import Path

import reference
from cases import Case, expected_refusal
from clients import CLIENTS, ask
from damage import with_wrong_scales
from reference import SLACK, TEXTS, Distance
from sources import NotMadeError, make

from hessquant.models.source import resolve

NOT_MADE = "not made"


def outcome(case: Case, client: str, work: Path, *, broken: bool) -> dict:
    """Open the checkpoint of a case in a client.

    Args:
        case: It is made if it is not there.
        client: Name of the client.
        work: Directory for everything made.
        broken: Open a damaged copy instead; then the client has to differ.

    Returns:
        In terms of JSON: "outcome" is agrees, differs, refused (as expected), failed, or not made; "good" whether that
        is as it should be; "mean", "nll" and "allowed" where the client computed something; "message" where not.
    """
    found = {"date": date.today().isoformat(), "good": False}
    try:
        checkpoint = make(case, work)
        truth, passage = _truth(case, work)
    except NotMadeError as error:
        return found | {"outcome": NOT_MADE, "message": str(error)}
    if broken:
        checkpoint = with_wrong_scales(checkpoint, work / "broken")
    answer = ask(client, checkpoint, passage, work / "logs" / case.name)
    found |= {"version": answer.version, "seconds": round(answer.seconds, 1)}
    if answer.values is None:
        return judged(found | {"message": answer.error}, case, client, broken=broken)
    kind = CLIENTS[client].rounding
    allowed = SLACK * truth["rounding"][truth["own"] if kind == "own" else kind]["mean"]
    distance = Distance.between(answer.values, truth["values"])
    return judged(found | {"allowed": allowed, **asdict(distance)}, case, client, broken=broken)


def judged(found: dict, case: Case, client: str, *, broken: bool) -> dict:
    """A result with its "outcome" and "good" by what is known of the client now."""
    if found.get("outcome") == NOT_MADE:
        return found
    if "mean" in found:
        # This bounds the difference of the mean as well, which is never larger.
        agrees = found["mean"] <= found["allowed"]
        return found | {"outcome": "agrees" if agrees else "differs", "good": agrees != broken}
    words = None if broken else expected_refusal(case, client)
    refused = words is not None and re.search(words, found["message"]) is not None
    return found | {"outcome": "refused" if refused else "failed", "good": refused}


def _truth(case: Case, work: Path) -> tuple[dict, Path]:
    """What a client should find, and the file with what it is asked; computed once."""
    twin = case.twin
    source = make(twin, work)
    place = work / "references"
    place.mkdir(parents=True, exist_ok=True)
    truth, passage = place / f"{twin.name}.json", place / f"{twin.name}.passage.json"
    stamp = work / "checkpoints" / f"{twin.name}.made"
    if not (truth.exists() and stamp.exists() and truth.stat().st_mtime > stamp.stat().st_mtime):
        tokenizer = resolve(str(source)).tokenizer
        tokenized = [(text, tokenizer(text)["input_ids"]) for text in TEXTS]
        texts = [ids for _, ids in tokenized]
        passage.write_text(json.dumps({"ids": texts[0], "tokenized": tokenized}))
        truth.write_text(json.dumps(reference.measure(source, texts, embed=case.encodes)))
    return json.loads(truth.read_text()), passage
