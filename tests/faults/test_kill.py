"""SIGKILL anywhere: nothing that looks complete and is not, and the same command ends in the same bytes."""

import pytest
from tests.faults.harness import BLOCKS, finished_blocks, looks_complete

import hessquant

LOADING = [("audit", 0), ("source-read", 0.2), ("load", 0), ("source-read", 0.5), ("loaded", 0.5)]
CAPTURING = [("recorded", 0), ("collect", 0.1), ("collected", 0.7), ("dropped", 0.75)]
SOLVING = [("solve", 0.3), ("sweep", 0.6), ("solved", 1)]
STORING = [
    ("mkdir-done out.run", 0),
    ("write run.json", 0),
    ("rename run.json", 0),
    ("store", 0),
    ("write block-00001.safetensors", 0),
    ("fsync block-00003.safetensors", 0),
    ("renamed block-00001.safetensors", 0),  # between the two files of a block
    ("write block-00002.json", 0),
    ("rename block-00000.json", 0),
    ("stored", 1),
]
SHARDS = [
    ("mkdir-done out", 0),
    ("write .hessquant-run", 0),
    ("rename .hessquant-run", 0),
    ("write model-00001-of-00003.safetensors", 0.5),
    ("renamed model-00002-of-00003.safetensors", 0),
    ("write model-00003-of-00003.safetensors", 1),
    ("write tokenizer.json", 0),
    ("rename model.safetensors.index.json", 0),
]
VERIFYING = [
    ("verify", 0),
    ("written-read", 0.5),
    ("verified", 0),
    ("write hessquant-report.json", 0),
    ("renamed hessquant-report.html", 0),
]
COMPLETING = [
    ("write config.json", 0),
    ("rename config.json", 0),
    ("renamed config.json", 0),
    ("completed", 0),
]
CLEANING = [
    ("unlinked run.json", 0),
    ("unlink block-00001.json", 0),
    ("unlinked block-00002.safetensors", 0),
    ("unlink lock", 0),
    ("rmdir out.run", 0),
    ("store-exited", 0),
]


@pytest.mark.parametrize(
    ("point", "share"), LOADING + CAPTURING + SOLVING + STORING + SHARDS + VERIFYING + COMPLETING + CLEANING
)
def test_after_a_kill_the_same_command_ends_in_the_same_bytes(point, share, zygote, source, undisturbed, out):
    killed = zygote.run(source, out, fault=undisturbed.fault(point, share))
    assert killed.killed
    undisturbed.assert_whole_if_complete(out)
    complete, kept = looks_complete(out), finished_blocks(out.with_name("out.run"))
    again = zygote.run(source, out)
    # A complete output's report is that of the run that made it.
    assert again.report["resumed_blocks"] == (0 if complete else kept)
    assert again.solved_blocks == (set() if complete else set(range(kept, BLOCKS)))
    undisturbed.assert_reached_by(out)


def test_a_chain_of_kills_ends_in_the_same_bytes(zygote, source, undisturbed, out):
    chain = [
        ("write run.json", 1, 0),
        ("solve model.layers.1.self_attn.o_proj.weight", 1, 1),
        ("replayed 0", 1, 1),
        ("renamed block-00002.safetensors", 1, 2),
        ("stored-read model.layers.1.mlp.up_proj.weight.codes", 1, 2),  # as block 1 is replayed
        ("renamed model-00001-of-00003.safetensors", 1, 4),
        ("write model-00002-of-00003.safetensors", 2, 4),
        ("written-read", 20, 4),
        ("rename config.json", 1, 4),
    ]
    for point, nth, kept in chain:
        fault = {"point": point, "nth": nth, "does": "kill"}
        if kept:
            fault["kept"] = str(out.with_name("out.run") / f"block-{kept - 1:05}.json")
        assert zygote.run(source, out, fault=fault).killed, point
        assert finished_blocks(out.with_name("out.run")) == kept, point
        assert not looks_complete(out), point
    assert zygote.run(source, out).report["resumed_blocks"] == BLOCKS
    undisturbed.assert_reached_by(out)


def test_a_run_goes_on_under_settings_that_do_not_change_the_result(zygote, source, undisturbed, out):
    assert zygote.run(source, out, fault=undisturbed.fault("stored", 0.5)).killed
    kept = finished_blocks(out.with_name("out.run"))
    report = zygote.run(source, out, config={"capture": "passes", "activation_memory": 0}).report
    assert (report["resumed_blocks"], report["capture"]) == (kept, "passes")
    assert report["mapped_activation_bytes"] > 0
    undisturbed.assert_reached_by(out)


def test_activations_in_files_leave_no_file_behind_after_a_kill(zygote, source, undisturbed, out):
    fault = {"point": "allocate", "nth": 2, "does": "kill"}
    assert zygote.run(source, out, config={"activation_memory": 0}, fault=fault).killed
    assert list(out.with_name("out.run").glob(".activations-*"))
    zygote.run(source, out)
    undisturbed.assert_reached_by(out)


@pytest.mark.parametrize("unlinked", [1, 5])
def test_another_command_after_a_kill_in_the_clean_up_takes_over_no_block(unlinked, zygote, source, out):
    # The order in which a directory is listed, and so emptied, is the file system's; here run.json goes early.
    assert zygote.run(source, out, fault={"point": "unlinked", "nth": 1 + unlinked, "does": "kill"}).killed
    (out.with_name("out.run") / "run.json").unlink(missing_ok=True)
    other = zygote.run(source, out.with_name("other"), run_dir=out.with_name("out.run"), config={"bits": 8})
    assert other.report["resumed_blocks"] == 0
    assert hessquant.inspect(out.with_name("other")).faults == ()


def test_every_file_is_on_disk_before_it_has_its_name(undisturbed):
    # One thread writes while others read.
    writing = {"open", "write", "flush", "fsync", "rename", "renamed", "fsync-directory"}
    trace = [event for event in undisturbed.trace if event.split()[0] in writing]
    renames = [place for place, event in enumerate(trace) if event.startswith("rename ")]
    assert len(renames) == 1 + 2 * BLOCKS + 1 + len(undisturbed.digests) + 2
    for place in renames:
        name = trace[place].removeprefix("rename ")
        opened = max(index for index, event in enumerate(trace[:place]) if event == f"open {name}")
        steps = [event for event in trace[opened:place] if event.endswith(f" {name}")]
        assert steps[-2:] == [f"flush {name}", f"fsync {name}"]
        assert {step.split()[0] for step in steps[1:-2]} == {"write"}
        assert trace[place + 1] == f"renamed {name}"
        assert trace[place + 2].startswith("fsync-directory ")


def test_config_json_is_the_last_file_and_comes_after_verification(undisturbed):
    trace = undisturbed.trace
    named = trace.index("rename config.json")
    assert trace.index("verified") < named
    assert not [event for event in trace[named + 1 :] if event.startswith("open ")]


def test_the_undisturbed_run_is_what_this_folder_takes_it_for(undisturbed):
    assert len([name for name in undisturbed.digests if name.startswith("model-")]) == 3
    assert undisturbed.counts["collect"] == 2 * 4 * BLOCKS  # two batches, four stops a block
    assert undisturbed.counts["store"] == BLOCKS
