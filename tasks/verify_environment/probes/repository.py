"""What DVC would do with the artifacts here, asked of DVC itself."""

from pathlib import Path

from tasks.verify_environment.probes import respond


def find(folders: list[str]) -> dict:
    """`folders`: those under artifacts/ whose size matters."""
    import dvc
    from dvc.exceptions import NotDvcRepoError
    from dvc.repo import Repo

    try:
        repo = Repo()
    except NotDvcRepoError:
        return {"version": dvc.__version__}
    with repo:
        local = repo.cache.local
        return {
            "version": dvc.__version__,
            "cache": local.path,
            "link": _link_type(local, repo.root_dir),
            "cached": {folder: _is_cached(repo, Path(folder).resolve()) for folder in folders},
        }


def _link_type(local, workspace: str) -> str:
    """The first configured type that works between cache and workspace, tried on real files."""
    from dvc_objects.fs.generic import test_links
    from dvc_objects.fs.local import localfs

    return test_links(local.cache_types, local.fs, local.path, localfs, workspace)[0]


def _is_cached(repo, folder: Path) -> bool:
    """Whether DVC keeps a copy; a folder that no stage declares yet counts as kept."""
    outs = [out for stage in repo.index.stages for out in stage.outs]
    covering = [out for out in outs if folder.is_relative_to(out.fs_path) or Path(out.fs_path).is_relative_to(folder)]
    return any(out.use_cache for out in covering) if covering else True


if __name__ == "__main__":
    respond(find)
