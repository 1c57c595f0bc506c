"""The machine's memory, as far as plans depend on it; no test looks at the real one."""

import pytest

from hessquant import memory


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 1000 bytes, in cgroups whose limits are given by folder."""

    def make(own, limits, file="memory.max"):
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("V", (), {"total": 1000, "available": 10})())
        monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
        if own is not None:
            (tmp_path / "own").write_text(own)
        for folder, limit in limits.items():
            (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "cgroup" / folder / file).write_text(f"{limit}\n")
        return memory.total_memory()

    return make


@pytest.mark.parametrize(
    ("own", "limits", "total"),
    [
        (None, {}, 1000),
        ("0::/\n", {}, 1000),
        ("0::/\n", {"": "max"}, 1000),
        ("0::/\n", {"": 600}, 600),
        ("0::/\n", {"": 6000}, 1000),
        ("0::/user/job\n", {"user/job": "max", "user": 300}, 300),
        ("0::/user/job\n", {"user/job": 200, "user": 300}, 200),
        ("0::/of/the/host\n", {"": 400}, 400),
        ("0::/../..\n", {"": 400}, 400),
    ],
)
def test_a_limit_of_the_container_or_above_it_counts(machine, own, limits, total):
    assert machine(own, limits) == total


def test_limits_of_version_1_count_too(machine):
    own = "12:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/docker/a\n"
    limits = {"memory/docker/a": 500, "memory": 9223372036854771712}
    assert machine(own, limits, "memory.limit_in_bytes") == 500
