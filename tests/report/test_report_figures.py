from dataclasses import replace

import pytest

from hessquant.report import figures


@pytest.fixture
def layers(run_report):
    return run_report.layers


def test_means_are_means_of_the_layers_ratios(layers):
    two = [replace(layers[0], loss=1.0, rtn_loss=2.0, output_energy=10.0, expected_loss=0.5, floor=0.4)]
    two += [replace(layers[1], loss=30.0, rtn_loss=40.0, output_energy=100.0, expected_loss=20.0, floor=4.0)]
    summed = figures.totals(two)
    assert summed.mean_relative_to_rtn == 0.625
    assert summed.mean_relative_output_error == pytest.approx(0.2)
    assert summed.mean_expected_to_rtn == 0.375
    assert summed.mean_floor_to_rtn == pytest.approx(0.15)


def test_a_layer_without_output_has_no_relative_error_and_does_not_enter_the_mean(layers):
    silent = replace(layers[0], loss=0.0, rtn_loss=0.0, output_energy=0.0)
    assert silent.relative_output_error is None
    assert figures.totals([silent]).mean_relative_output_error is None
    assert figures.totals([silent]).mean_floor_to_rtn is None
    heard = figures.totals([silent, layers[1]]).mean_relative_output_error
    assert heard == layers[1].relative_output_error


def test_notes_count_everything_less_than_asked_for(layers):
    bad = replace(
        layers[0],
        method="rtn",
        damping_used=1.0,
        fallback_rows=1,
        dead_columns=2,
        zero_groups=3,
        tiny_groups=4,
    )
    assert figures.notes(figures.totals([bad])) == (
        "1 layer rounded to nearest",
        "1 layer with raised damping",
        "1 row kept RTN",
        "2 dead columns",
        "3 zero groups",
        "4 tiny groups",
    )
    assert figures.notes(figures.totals([layers[0], layers[1]])) == ()


def test_kinds_gather_like_weights_of_all_blocks_in_order(layers):
    kinds = figures.kinds_of(layers)
    assert next(iter(kinds)) == "model.layers.*.self_attn.q_proj.weight"
    assert [len(kind.layers) for kind in kinds.values()] == [30] * 7
    assert [kind.totals for kind in kinds.values()] == [figures.totals(kind.layers) for kind in kinds.values()]
    assert [kind.label for kind in kinds.values()][-1] == "mlp.down_proj"


@pytest.mark.parametrize(
    ("kinds", "labels"),
    [
        (["a.*.q.weight", "a.*.k.weight"], ["q", "k"]),
        (["a.*.e.*.q.weight", "a.*.e.*.k.weight"], ["e.*.q", "e.*.k"]),
        (["encoder.*.q.weight", "decoder.*.q.weight"], ["encoder.*.q", "decoder.*.q"]),
        (["a.*.q.weight", "lm_head.weight"], ["a.*.q", "lm_head"]),
        ([], []),
    ],
)
def test_labels_are_short_and_still_tell_kinds_apart(kinds, labels):
    assert list(figures.kind_labels(kinds).values()) == labels


def test_worst_layers_have_the_largest_error_relative_to_their_output(layers):
    loud = replace(layers[9], output_energy=layers[9].loss / 0.9)
    found = figures.worst([*layers, loud], 5)
    assert found[0] is loud
    errors = [layer.relative_output_error for layer in found]
    assert errors == sorted(errors, reverse=True)
    assert len(found) == 5
