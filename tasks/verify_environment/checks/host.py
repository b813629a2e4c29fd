"""Checks of the machine around the run: prompts, disk, ports, interpreter, packages, repository."""

import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.common.check import Check, Expectation
from tasks.common.git import git
from tasks.common.params import Params
from tasks.common.server_session import ServerRecord, describe_process, port_is_free, port_owner, record_path
from tasks.verify_environment.disk import Need
from tasks.verify_environment.facts import Interpreter, Repository
from tasks.verify_environment.plan import Estimate
from tasks.verify_environment.prompt_sources import PromptSource, prompts_and_tokens

CONSTRAINTS = Path("infra/constraints-cpu.txt")


def check_prompts(params: Params, sources: list[PromptSource], unreadable: str | None = None) -> Check:
    """
    Args:
        unreadable: why prompts.folder cannot be counted.
    """
    least = params.gates.min_prompts
    want = Expectation("prompts", f"at least {least} to train on and {least} held out", "gate_prompts refuses fewer.")
    if unreadable:
        return want.error(unreadable, "Correct prompts.folder or the file.")
    train, _ = prompts_and_tokens(sources, "train", params.prompts.max_train)
    heldout, _ = prompts_and_tokens(sources, "heldout", params.prompts.max_heldout)
    found = f"{train} to train on, {heldout} held out"
    if min(train, heldout) < least:
        return want.error(found, "Add prompts; a row is held out by its field `split` or a file named heldout*.jsonl.")
    return want.ok(found)


def check_disk(needs: list[Need]) -> Check:
    """
    Args:
        needs: of every file system that the run will write to; none where the target is not known.
    """
    want = Expectation(
        "disk",
        "; ".join(f"{need.wanted / 1e9:.2f} GB for {need.what}" for need in needs) or "room for the artifacts",
        "A full disk stops the dump after hours.",
    )
    if not needs:
        return want.not_applicable("no estimate")
    found = "; ".join(f"{need.free / 1e9:.2f} GB free at {need.folder}" for need in needs)
    fix = (
        "Set dump.storage_dtype: bfloat16, fewer prompts (prompts.max_train) or shorter answers (regenerate.max_new_tokens); "
        "or `dvc cache dir` on a larger disk, `dvc config cache.type hardlink` (one copy), `dvc gc --workspace` (old runs)."
    )
    if any(need.missing > need.free for need in needs):
        return want.error(found, fix)
    if any(max(need.missing, need.missing_if_changed) > 0.9 * need.free for need in needs):
        return want.warning(found, fix)
    return want.ok(found)


def check_quota(params: Params, estimates: list[Estimate]) -> Check:
    """
    Args:
        estimates: of the stages; none where the target is not known.
    """
    quota = params.dump.max_gigabytes
    want = Expectation(
        "states quota",
        f"at most {quota:g} GB of states" if quota else "no quota of the states",
        "dump_hidden_states refuses to start beyond dump.max_gigabytes.",
    )
    sizes = [estimate.disk_bytes for estimate in estimates if estimate.stage == "dump_hidden_states"]
    if not quota or not sizes:
        return want.not_applicable("no estimate" if quota else "dump.max_gigabytes is null")
    found = f"{sizes[0] / 1e9:.2f} GB, if every answer is as long as it may become"
    if sizes[0] > quota * 1e9:
        return want.warning(
            found,
            "Set dump.storage_dtype: bfloat16 or float8, fewer prompts (prompts.max_train), shorter answers "
            "(regenerate.max_new_tokens), dump.ahead_shards (training while the dump goes on), or a larger quota.",
        )
    return want.ok(found)


def check_ports(params: Params) -> Check:
    ports = params.ports
    want = Expectation(
        "ports",
        f"{ports[0]} to {ports[-1]} free: for the server with our draft, the plain one and {len(ports) - 2} of benchmark.drafts",
        "A stale server on the port answers for the new one.",
    )
    taken = [port for port in ports if not port_is_free(port)]
    if not taken:
        return want.ok(f"all {len(ports)} free")
    owners = {port: port_owner(port) for port in taken}
    found = "; ".join(f"{port} held by {describe_process(pid)}" for port, pid in owners.items())
    if all(_is_left_over(port, pid) for port, pid in owners.items()):
        return want.warning(found, "A dead run left it; launch_server ends it before it starts its own.")
    pids = " ".join(str(pid) for pid in owners.values() if pid)
    return want.error(
        found, f"Set serve.port to another, or end the owner if it is yours{f': kill {pids}' if pids else ''}."
    )


def _is_left_over(port: int, pid: int | None) -> bool:
    """Whether a run of this checkout that is dead started the process: the next server start reaps it."""
    records = [path for kind in ("speculative", "baseline") if (path := record_path(kind, port)).exists()]
    for record in map(ServerRecord.read, records):
        if not record.owner.is_alive and any(process.pid == pid and process.is_alive for process in record.processes):
            return True
    return False


def check_interpreter(ours: Interpreter, on_path: Interpreter) -> Check:
    """
    Args:
        on_path: what `python` on PATH is.
    """
    want = Expectation("interpreter", f"`python` is {ours.prefix}", "dvc runs each stage with the `python` on PATH.")
    activate = f'export PATH="{Path(ours.executable).parent}:$PATH"'
    if on_path.error:
        return want.error(on_path.error, activate)
    if on_path.prefix != ours.prefix:
        absent = [name for name, package in on_path.packages.items() if not package.locations]
        lacks = f", without {', '.join(absent)}" if absent else ""
        return want.error(f"Python {on_path.version} of {on_path.prefix}{lacks}", activate)
    absent = [name for name, package in ours.packages.items() if not package.locations]
    if absent:
        return want.error(f"{ours.prefix} lacks {', '.join(absent)}", "Install as the README says (make demo).")
    return want.ok(f"Python {ours.version} of {ours.prefix}")


def check_packages(ours: Interpreter) -> Check:
    want = Expectation(
        "packages", "one copy of each", "Which copy a process imports then depends on how it was started."
    )
    twice = [f"{name}: {' before '.join(p.locations)}" for name, p in ours.packages.items() if len(p.locations) > 1]
    if twice:
        path = os.environ.get("PYTHONPATH")
        return want.warning("; ".join(twice), "unset PYTHONPATH" if path else "Uninstall the copy that is not wanted.")
    homes = sorted({str(Path(location).parent) for p in ours.packages.values() for location in p.locations})
    found = ", ".join(f"{name} {package.version}" for name, package in ours.packages.items() if package.locations)
    return want.ok(f"{found}, from {', '.join(homes)}")


def check_repository(repository: Repository) -> Check:
    want = Expectation(
        "repository", "git, dvc, and a DVC repository", "`dvc repro` and the flow need them; stages also run alone."
    )
    if repository.error:
        return want.warning(repository.error, "Install dvc as infra/constraints-cpu.txt pins it.")
    try:
        git("rev-parse", "--git-dir")
    except OSError:
        return want.warning("no git on PATH", "Install git.")
    except subprocess.CalledProcessError as error:
        said = next(iter(error.stderr.splitlines()), f"git ends with {error.returncode}")
        return want.warning(said, "git init && dvc init; where there is a repository, do what `git status` says.")
    if repository.cache is None:
        return want.warning(f"dvc {repository.version}, no .dvc here", "dvc init")
    return want.ok(f"git, dvc {repository.version}, cache {repository.cache} linked by {repository.link}")


def check_constraints(params: Params, path: Path = CONSTRAINTS) -> Check:
    want = Expectation(
        "constraints", f"as {path} pins them", "Only these versions were seen to work together on a CPU."
    )
    if params.target.device != "cpu" or not path.exists():
        return want.not_applicable("target.device is not cpu" if path.exists() else "no such file")
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    differing = [
        f"{name} {found or 'absent'} (pinned {pin})" for name, pin in pins if not _same(found := _version(name), pin)
    ]
    if differing:
        more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
        return want.warning(", ".join(differing[:8]) + more, f"pip install --no-deps -r {path}")
    return want.ok(f"all {len(pins)} as pinned")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _same(found: str | None, pin: str) -> bool:
    """A local label (+cpu) names a build of the same version."""
    return found is not None and found.partition("+")[0] == pin.partition("+")[0]
