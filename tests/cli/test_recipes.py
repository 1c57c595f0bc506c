"""docs/scaling.md and docs/recipes: files that are whole, with commands that the command line takes."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from hessquant import cli

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, SLURM, POD = DOCS / "scaling.md", DOCS / "recipes/slurm.sh", DOCS / "recipes/pytorchjob.yaml"


def shell_commands(text):
    """Words of each command that starts Hessquant, of shell lines."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "hessquant" in words:
            yield words


def page_commands():
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [words for block in blocks for words in shell_commands(block)]


def job():
    return yaml.safe_load(POD.read_text(encoding="utf-8"))


def commands():
    replicas = job()["spec"]["pytorchReplicaSpecs"].values()
    containers = [container for each in replicas for container in each["template"]["spec"]["containers"]]
    return [
        *page_commands(),
        *shell_commands(SLURM.read_text(encoding="utf-8")),
        *(container["command"] for container in containers),
    ]


def test_every_recipe_has_its_command():
    assert len(page_commands()) == 4
    assert len(commands()) == 4 + 1 + 2


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_command_line_takes_it(words, pipeline):
    at = words.index("hessquant")
    assert words[at - 1] == "-m"
    assert cli.main(words[at + 1 :]) == 0
    assert [pipeline.asked["model"], str(pipeline.asked["out"])] == words[at + 2 : at + 4]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_torchrun_takes_it(words):
    from torch.distributed.run import parse_args

    # Numbers are for the environment to say.
    words = [re.sub(r"\$\w+", "2", word) for word in words[len(words) - words[::-1].index("torchrun") :]]
    taken = parse_args(words)
    assert (taken.module, taken.training_script) == (True, "hessquant")
    assert taken.max_restarts == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash")
def test_the_shell_takes_the_slurm_script():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)


def test_the_job_has_what_the_operator_looks_for():
    described = job()
    assert (described["apiVersion"], described["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    specs = described["spec"]["pytorchReplicaSpecs"]
    assert specs.keys() == {"Master", "Worker"}
    for replicas in specs.values():
        assert replicas["replicas"] == 1
        assert replicas["restartPolicy"] == "OnFailure"
        (container,) = replicas["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        # The operator says all else to torchrun; a process per GPU is for us to say.
        assert described["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
        volumes = {volume["name"] for volume in replicas["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
