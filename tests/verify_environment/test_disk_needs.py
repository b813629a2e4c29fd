"""How much disk a run needs, with the copies that DVC really keeps."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.common.hidden_states import HIDDEN_STATES
from tasks.common.params import Params
from tasks.verify_environment.checks.host import check_disk, check_quota
from tasks.verify_environment.disk import Need, disk_needs
from tasks.verify_environment.facts import Repository
from tasks.verify_environment.plan import Estimate
from tasks.verify_environment.probes.repository import find

GB = 10**9
COPYING = Repository(version="3", cache=".", link="copy")


def states(size: int) -> Estimate:
    return Estimate("dump_hidden_states", 0, 0.0, size, 0, "")


def store(folder: Path, size: int, done: bool) -> None:
    for split in ("train", "heldout"):
        (folder / split).mkdir(parents=True)
        if done:
            (folder / split / "manifest.json").touch()
    with open(folder / "train" / "shard-00000.safetensors", "wb") as shard:
        shard.truncate(size)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("link", "copies"), [("copy", 2), ("symlink", 2), ("hardlink", 1), ("reflink", 1)])
def test_dvc_keeps_a_second_copy_unless_it_links(link, copies):
    [need] = disk_needs([states(5 * GB)], COPYING.model_copy(update={"link": link}))
    assert need.wanted == need.missing == copies * 5 * GB


def test_an_output_that_dvc_does_not_cache_is_there_once():
    uncached = COPYING.model_copy(update={"cached": {str(HIDDEN_STATES): False}})
    assert disk_needs([states(5 * GB)], uncached)[0].wanted == 5 * GB


def test_without_a_repository_the_need_is_that_of_a_copying_one():
    assert disk_needs([states(5 * GB)], Repository())[0].wanted == 10 * GB


def test_a_cache_on_another_file_system_is_a_need_of_its_own():
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == Path.cwd().stat().st_dev:
        pytest.skip("no second file system here")
    workspace, cache = disk_needs([states(5 * GB)], COPYING.model_copy(update={"cache": str(other / "dvc" / "cache")}))
    assert (workspace.wanted, cache.wanted) == (5 * GB, 5 * GB)
    assert cache.folder == str(other)
    assert cache.free == shutil.disk_usage(other).free


def test_states_of_an_interrupted_dump_count_once():
    store(HIDDEN_STATES, 2 * GB, done=False)
    assert disk_needs([states(5 * GB)], COPYING)[0].missing == 3 * GB + 5 * GB


def test_a_finished_dump_needs_no_more_disk_unless_parameters_change():
    store(HIDDEN_STATES, 5 * GB, done=True)
    [need] = disk_needs([states(5 * GB)], COPYING)
    assert (need.missing, need.missing_if_changed) == (0, 5 * GB)


def verdict(free: int, missing: int, changed: int = 0) -> str:
    return check_disk([Need("artifacts", "artifacts, twice", free, missing, missing, max(missing, changed))]).verdict


def test_more_than_what_is_free_is_an_error_and_nearly_all_of_it_a_warning():
    assert verdict(free=100, missing=80) == "ok"
    assert verdict(free=100, missing=95) == "warning"
    assert verdict(free=100, missing=101) == "error"


def test_what_only_a_changed_run_would_need_is_a_warning():
    assert verdict(free=100, missing=0, changed=200) == "warning"


def test_no_estimate_gives_no_verdict():
    assert check_disk([]).verdict == "not applicable"


def dvc(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *words], check=True, capture_output=True)


def test_dvc_is_asked_how_it_links_here_and_what_it_caches():
    dvc("init", "--no-scm")
    Path("dvc.yaml").write_text(
        "stages:\n  dump_hidden_states:\n    cmd: 'true'\n    outs: [{artifacts/hidden_states: {cache: false}}, artifacts/x]\n"
    )
    folders = ["artifacts/hidden_states", "artifacts/x", "artifacts/target"]
    facts = Repository.model_validate(find(folders))
    assert facts.cached == {"artifacts/hidden_states": False, "artifacts/x": True, "artifacts/target": True}
    assert Path(facts.cache).is_relative_to(Path.cwd() / ".dvc")
    assert facts.link in ("reflink", "copy")
    dvc("config", "cache.type", "hardlink,symlink")
    assert Repository.model_validate(find([])).link == "hardlink"


def test_no_repository_is_a_fact_not_a_failure():
    facts = Repository.model_validate(find([]))
    assert facts.cache is None
    assert facts.version


@pytest.mark.parametrize(("quota", "verdict"), [(None, "not applicable"), (5.1, "ok"), (4.9, "warning")])
def test_the_quota_of_the_states_is_checked_before_the_start(quota, verdict):
    check = check_quota(Params.model_validate({"dump": {"max_gigabytes": quota}}), [states(5 * GB)])
    assert check.verdict == verdict
