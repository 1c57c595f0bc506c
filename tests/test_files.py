"""Locks on files: one holder, whatever becomes of the name."""

import threading
from pathlib import Path

import pytest
from filelock import FileLock

from hessquant.files import HeldFile


def test_a_held_file_is_not_given_twice_and_goes_with_its_release(tmp_path):
    path = tmp_path / "new" / "lock"
    held = HeldFile.take(path)
    assert held is not None
    assert HeldFile.take(path) is None
    held.release(as_found=True)
    assert not path.parent.exists()
    path.parent.mkdir()
    path.touch()
    HeldFile.take(path).release(as_found=True)
    assert path.exists()
    HeldFile.take(path).release(as_found=False)
    assert not path.exists()


@pytest.mark.parametrize("taken", ["", "its name leads to another file"])
def test_a_file_whose_name_goes_while_it_is_locked_is_not_held(taken, tmp_path, monkeypatch):
    path, acquire, calls = tmp_path / "lock", FileLock.acquire, []

    def late(self, *args, **settings):
        held = acquire(self, *args, **settings)
        calls.append(self)
        if len(calls) == 1:
            path.unlink()
            if taken:
                path.touch()
        return held

    monkeypatch.setattr(FileLock, "acquire", late)
    held = HeldFile.take(path)
    assert len(calls) == 2
    assert HeldFile.take(path) is None
    held.release(as_found=False)


def test_a_system_that_removes_no_open_file_loses_it_after_the_release(tmp_path, monkeypatch):
    path, unlink, order = tmp_path / "lock", Path.unlink, []

    def refused_while_held(self, missing_ok=False):
        order.append("unlink")
        if "release" not in order:
            raise PermissionError(13, "in use", str(self))
        unlink(self, missing_ok)

    release = FileLock.release
    held = HeldFile.take(path)
    monkeypatch.setattr(Path, "unlink", refused_while_held)
    monkeypatch.setattr(FileLock, "release", lambda self, *args: (release(self, *args), order.append("release")))
    held.release(as_found=False)
    assert order == ["unlink", "release", "unlink"]
    assert not path.exists()


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    path, mkdir, calls = tmp_path / "folder" / "lock", Path.mkdir, []

    def overtaken(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 1:  # as pathlib ends when the folder goes between its two looks
            raise FileExistsError(17, "File exists", str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", overtaken)
    held = HeldFile.take(path)
    assert held is not None
    held.release(as_found=False)
    assert not path.parent.exists()


@pytest.mark.parametrize("make", [lambda folder: folder.touch(), lambda folder: folder.symlink_to("nowhere")])
def test_what_is_no_folder_is_an_error_and_not_another_process(tmp_path, make):
    make(tmp_path / "folder")
    with pytest.raises(OSError, match="folder"):
        HeldFile.take(tmp_path / "folder" / "lock")


def test_many_that_come_and_go_are_never_two_at_once(tmp_path):
    path, inside, most, taken = tmp_path / "folder" / "lock", [], [], []

    def come_and_go():
        for _ in range(150):
            held = HeldFile.take(path)
            if held is None:
                continue
            inside.append(1)
            most.append(len(inside))
            taken.append(1)
            inside.pop()
            held.release(as_found=False)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert taken
